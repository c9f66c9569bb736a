"""A cost model of data-parallel training: the step of one GPU and the times of the wire, as
measured, give the step of any number of GPUs.

Weak scaling: each GPU has the batch that it had alone, so that the efficiency is the step of one
over the step of all. No rank is slower than another: what is measured may be worse for stragglers.
Each step is predicted twice: with all gradients summed after the backward pass, and overlapped, in
buckets that are full at even distances in it. Then the last bucket stays exposed, and others where
the wire is behind; meanwhile products are slower by the share SLOWED, as traffic takes a part of
the multiprocessors. A tied table of embeddings, which is final last, exposes more than an even
share.
An all-reduce of several hosts is taken to pass pieces on while others still come, so that the
slower of links and ports counts; what --shard node does is three collectives, one after the other.

A ring of n has n - 1 hops for reduce-scatter and all-gather, twice as many for all-reduce, and
carries (n - 1) / n of the bytes in each direction. Across hosts an all-reduce may go by trees, of
log2(hosts) hops each way; reduce-scatter and all-gather have rings alone.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from gpuattn.errors import ConfigError
from gpuattn.runtime.buckets import BUCKET

MIB = 1 << 20
# Microseconds of a collective in a CUDA graph's stream by the bytes of the whole buffer, measured
# between two H200s (NVLink, 18 links) with NCCL 2.28.9, without NVLink multicast.
MEASURED = {
    "all_reduce": ((1, 14.2), (4, 32.6), (16, 74.0), (32, 135.0), (64, 245.0), (256, 883.0)),
    "reduce_scatter": ((1, 10.9), (4, 23.2), (16, 50.0), (32, 92.0), (64, 165.0), (256, 581.0)),
    "all_gather": ((1, 10.9), (4, 26.5), (16, 54.0), (32, 90.0), (64, 157.0), (256, 543.0)),
}
MEASURED_RANKS = 2
HOP = 3.4  # us of one hop more inside a host, a constant of NCCL's tuner: not measured here
PORT_HOP = 14.0  # us of a hop across hosts, likewise
PORT = 46.0  # GB/s of a port of 400 Gbit/s, one for each GPU, as NCCL's users report
PORT_BASE = 8.4  # us of a collective across hosts before its hops, a constant of NCCL's tuner
PASS_BYTES = 30  # of a parameter in an update by AdamW: gradient, master, two moments, copy
PASS_TBS = 4.0  # at which an H200 makes that pass
BACKWARD = 2 / 3  # of the step without the optimizer's pass
SLOWED = 0.1  # of products beside traffic: 1,238 us became 1,365 us on an H200
STRATEGIES = {
    "all-reduce": "all ranks sum all gradients (--shard none)",
    "node": "the ranks of a host share the update, and sum across hosts (--shard node)",
    "flat": "all ranks share the update: not in gpuattn, for comparison",
}


class Job(NamedTuple):
    """What is trained. ``parameters``: a count. ``step``: ms of a whole update on one GPU, of which
    ``update`` ms are the optimizer's pass. ``itemsize``: bytes of a gradient, and of a parameter
    of the model."""

    parameters: float
    step: float
    update: float
    itemsize: int = 2

    @property
    def size(self) -> float:
        """Bytes of all gradients."""
        return self.parameters * self.itemsize


class Machine(NamedTuple):
    """``each``: GPUs of a host. ``port``: GB/s between hosts, of each GPU. ``wire``: {collective:
    ((MiB, us), ...)} between ``ranks`` GPUs of a host, sizes ascending."""

    each: int = 8
    port: float = PORT
    wire: Mapping[str, Sequence[tuple[float, float]]] = MEASURED
    ranks: int = MEASURED_RANKS


class Prediction(NamedTuple):
    """``step``: ms of an update on ``world`` GPUs; ``wire``: ms of it that they exchange;
    ``efficiency``: of weak scaling; ``state``: bytes of a parameter that a rank holds.
    ``overlapped``, ``overlapped_efficiency``: of a step whose sums run beside the backward pass."""

    world: int
    strategy: str
    step: float
    wire: float
    efficiency: float
    state: float
    overlapped: float
    overlapped_efficiency: float


def update_ms(parameters: float) -> float:
    """Return the ms of AdamW's pass over so many parameters on an H200."""
    return PASS_BYTES * parameters / PASS_TBS / 1e9


def inside(machine: Machine, name: str, size: float, ranks: int) -> float:
    """Return the us of a collective over ``size`` bytes between so many GPUs of a host.

    Between sizes that were measured the time is interpolated; beyond the largest the rate stays.
    """
    if ranks == 1:
        return 0.0
    rows, mib = machine.wire[name], size / MIB
    base = rows[0][1]
    if mib <= rows[0][0]:
        us = base
    else:
        us = rows[-1][1] * mib / rows[-1][0]
        for (a, x), (b, y) in zip(rows, rows[1:], strict=False):
            if a <= mib <= b:
                us = x + (y - x) * (mib - a) / (b - a)
    part = ((ranks - 1) / ranks) / ((machine.ranks - 1) / machine.ranks)
    hops = (ranks - machine.ranks) * (2 if name == "all_reduce" else 1)
    latency = min(us, base)
    return latency + max(0.0, us - latency) * part + HOP * hops


def across(machine: Machine, size: float, hosts: int, together: int = 1) -> float:
    """Return the us of an all-reduce of ``size`` bytes between hosts, by trees.

    ``together``: GPUs of a host whose ports share the bytes.
    """
    if hosts == 1:
        return 0.0
    hops = 2 * math.ceil(math.log2(hosts))
    return PORT_BASE + PORT_HOP * hops + 2 * size / together / machine.port / 1e3


def _ring(machine, size, hosts, ranks):
    """Return the us of a reduce-scatter or all-gather of all GPUs of several hosts."""
    world = hosts * ranks
    ports = size * (world - 1) / world / (machine.port * ranks) / 1e3  # a ring through each port
    links = inside(machine, "reduce_scatter", size, ranks) * (world - 1) / world
    if ranks > 1:
        links *= ranks / (ranks - 1)
    return PORT_BASE + PORT_HOP * (hosts - 1) + HOP * (world - hosts) + max(ports, links)


def _sums(machine, strategy, size, hosts, each):
    """Return the us in which ranks sum gradients of ``size`` bytes: all, or their parts."""
    if strategy == "all-reduce":
        if hosts == 1:
            return inside(machine, "all_reduce", size, each)
        # hosts pass on what the ring inside one has summed, chunk by chunk
        wire = max(across(machine, size, hosts, each), inside(machine, "all_reduce", size, each))
        return wire + inside(machine, "all_reduce", 1, each)
    if hosts == 1 or strategy == "node":
        scatter = inside(machine, "reduce_scatter", size, each)
        return scatter + across(machine, size / each, hosts)
    return _ring(machine, size, hosts, each)


def _gathers(machine, strategy, size, hosts, each):
    """Return the us in which ranks give each other their parts of the parameters."""
    if strategy == "all-reduce":
        return 0.0
    if hosts == 1 or strategy == "node":
        return inside(machine, "all_gather", size, each)
    return _ring(machine, size, hosts, each)


def _exposed(job, bucket, count):
    """Return the ms that ``count`` buckets of ``bucket`` ms each add to a backward pass."""
    backward = BACKWARD * (job.step - job.update)
    ends = 0.0
    for i in range(1, count + 1):
        ends = max(ends, backward * i / count) + bucket
    exposed = ends - backward
    return exposed + SLOWED * (bucket * count - exposed)


def predict(job: Job, machine: Machine, world: int, strategy: str) -> Prediction:
    """Return the Prediction for so many GPUs. Raises ConfigError for a part of a last host."""
    each = min(machine.each, world)
    if world % each:
        raise ConfigError(f"{world} GPUs on hosts of {each}; accepted: a multiple of {each}")
    hosts, size = world // each, job.size
    place = hosts, each
    parts = 1
    if strategy != "all-reduce":
        parts = each if strategy == "node" or hosts == 1 else world
    gather = _gathers(machine, strategy, size, *place) / 1e3
    ms = _sums(machine, strategy, size, *place) / 1e3
    alone = job.step - job.update + job.update / parts + gather
    count = max(1, round(job.parameters / BUCKET))
    bucket = _sums(machine, strategy, size / count, *place) / 1e3
    overlapped = alone + _exposed(job, bucket, count)
    masters = 4 if job.itemsize == 2 or parts > 1 else 0
    pieces = job.itemsize if parts > 1 else 0  # of gradients, side by side
    state = 2 * job.itemsize + (masters + 8 + pieces) / parts
    return Prediction(
        world, strategy, alone + ms, gather + ms, job.step / (alone + ms), state, overlapped,
        job.step / overlapped,
    )  # fmt: skip


def worlds(most: int, each: int) -> Iterator[int]:
    """Yield the powers of two below ``each``, then 1, 2, 4, ... hosts of it, all up to ``most``."""
    world = 1
    while world < each and world <= most:
        yield world
        world *= 2
    world = each
    while world <= most:
        yield world
        world *= 2


def table(job: Job, machine: Machine, most: int) -> list[Prediction]:
    """Return the Predictions of all strategies for the worlds up to ``most``."""
    return [
        predict(job, machine, world, strategy)
        for world in worlds(most, machine.each)
        for strategy in STRATEGIES
    ]


def breaks(rows: Sequence[Prediction], least: float) -> int | None:
    """Return the first world where no strategy of gpuattn reaches the efficiency ``least``, as it
    runs: overlapped."""
    best: dict[int, float] = {}
    for row in rows:
        if row.strategy != "flat":
            best[row.world] = max(row.overlapped_efficiency, best.get(row.world, 0.0))
    return next((world for world, reached in best.items() if reached < least), None)
