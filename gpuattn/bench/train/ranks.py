"""Training steps on several GPUs, a rank for each, beside the step of one and PyTorch's.

Weak scaling: each rank has the batch of the case. It is the same one on all of them, so that losses
are those of one GPU; dropout is numbered by rank. What is timed is what ranks of a run do for an
update (``parallel.reducer``), also what they agree on over the host. A sample is that of the rank
which took longest. Each peer takes turns with gpuattn's step, and then gives its memory back.
Before they are timed, the ways to exchange gradients must leave parameters of the same bits on all
ranks, whether they overlap with the backward pass or not: by gradients that have the same bits each
time, which those that are timed need not have.
"""

import collections
import contextlib
import gc
import hashlib
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from gpuattn.arrays import to_cpu
from gpuattn.bench import results, timing
from gpuattn.bench.cases import Cell
from gpuattn.bench.comparison import medians
from gpuattn.bench.peers import timing as peers
from gpuattn.bench.peers.train_ranks import Parallel, take_card
from gpuattn.bench.train.cases import Step
from gpuattn.bench.train.measure import Ours, Updates, check_losses, losses_of
from gpuattn.errors import UnsupportedError
from gpuattn.parallel.communicator import Communicator
from gpuattn.parallel.exchange import Exchange
from gpuattn.parallel.reducer import Reducer

WAYS = {  # name: (whether ranks share the update, whether the exchange overlaps)
    "node": (True, True), "node, after": (True, False),
    "none": (False, True), "none, after": (False, False),
}  # fmt: skip
BEST = "node"  # as gpuattn train runs
TURNS, SECONDS, LEAST, MOST = 5, 1.0, 20, 200  # of each: turns, seconds of one, samples in it
CHECKED = 3  # updates whose bits are compared: op by op, captured and replayed
WARM_UPS = 12  # DDP wants 11 before a capture
PEERS = ("torch-ddp", "torch-ddp-static", "torch-ddp-graph", "torch-zero", "torch-fsdp")


class RankUpdates(Updates):
    """Updates of this rank together with the others. ``way``: of WAYS."""

    def __init__(self, case: Step, xp: ModuleType, ranks: Communicator, way: str) -> None:
        shares, overlaps = WAYS[way]
        ours = Ours(case, xp, ranks.size, ranks.rank if shares else None)
        self.exchange = Exchange(ours.optimizer, ranks, overlap=overlaps)
        super().__init__(
            ours, exchange=self.exchange, ranks=ranks.size, notify=lambda sentence: None
        )
        self._reducer = Reducer(self.step, ranks, ranks.size)

    def __call__(self) -> None:
        step = self.step
        step.begin(self.ours.case.learning_rate)
        self._reducer.compute([(step.draws, (self.ours.batch,))])
        step.apply()
        step.draws += 1

    def digest(self) -> str:
        """Return what tells the bits of the parameters after CHECKED deterministic updates from
        others. Undoes all updates before, and forgets graphs. Synchronizes."""
        self._take_gradients(deterministic=True)
        self.restart()
        for _ in range(CHECKED):
            self()
        found = hashlib.sha256(to_cpu(self.ours.workspace.params).tobytes()).hexdigest()
        self._take_gradients(deterministic=False)
        return found

    def _take_gradients(self, deterministic):
        for _, module in self.ours.model.modules():
            module.deterministic = deterministic
        self.step.rebatch(self.step.tokens)  # graphs repeat the kernels that were chosen before


def measure(
    cell: Cell, xp: ModuleType, ranks: Communicator, ceilings: dict[str, float],
    with_peers: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Return the row of results of a Cell on all ranks, the same on each: see ``results.py``.

    Raises AssertionError, on all ranks, if losses do not fall or bits differ that must not.
    """
    gc.collect()  # a workspace and its exchange know each other: those of the cell before go now
    if xp is np:
        return _measured(cell, xp, ranks, ceilings, ())
    stream = xp.cuda.Stream(non_blocking=True)
    if with_peers:
        take_card(ranks)
    beside = peers.on_stream(stream) if with_peers else contextlib.nullcontext()
    try:
        with stream, beside:
            return _measured(cell, xp, ranks, ceilings, PEERS if with_peers else ())
    finally:
        if with_peers:
            peers.release()


def _measured(cell, xp, ranks, ceilings, names):
    launches: dict[str, Callable] = {"alone": Updates(Ours(cell.case, xp))}
    launches |= {way: RankUpdates(cell.case, xp, ranks, way) for way in WAYS}
    losses, digests, missing = {}, {}, {}
    for name, updates in launches.items():
        ranks.note()
        if name != "alone":
            digests[name] = ranks.gather(updates.digest())
        for _ in range(3):  # graphs are captured the second time
            updates()
        losses["eager" if name == "alone" else name] = losses_of(updates, updates)
    _agree(ranks, losses, digests)
    times: dict[str, list[float]] = collections.defaultdict(list)
    waited: dict[str, float] = collections.defaultdict(float)
    _alternate(launches, ranks, xp, times, waited)
    alone, best = launches.pop("alone"), launches.pop(BEST)
    launches.clear()  # a peer may need the memory of the others
    del updates
    gc.collect()
    for name in names:
        ranks.note()
        launch, why = _peer(name, cell.case, ranks, alone.ours, losses)
        if launch is None:
            missing[name] = why
        else:
            _alternate({BEST: best, name: launch}, ranks, xp, times, waited)
            del launch
        gc.collect()
        peers.release()
    waits = {way: waited[way] / (sum(times[way]) / 1e6) for way in WAYS}
    return _row(cell, ranks, times, waits, losses, missing, ceilings)


def _agree(ranks, losses, digests):
    """Raise AssertionError on all ranks where losses or bits are wrong on one."""
    why = ""
    try:
        for name in WAYS:
            check_losses(name, losses)
            if len(set(digests[name])) > 1:
                raise AssertionError(f"{name}: the parameters of ranks differ after updates")
        for way in ("node", "none"):
            if digests[way] != digests[f"{way}, after"]:
                raise AssertionError(f"{way}: overlap changes the bits of parameters")
    except AssertionError as error:
        why = str(error)
    every = [text for text in ranks.gather(why) if text]
    if every:
        raise AssertionError(every[0])


def _peer(name, case, ranks, ours, losses):
    """Return (launch of a peer's step or None, why there is none), the same on all ranks."""
    launch, why = None, ""
    try:
        peer = Parallel(name, case, ours, ranks)
        launch = peer.launch(WARM_UPS)
        check_losses(name, losses | {name: losses_of(peer, launch)})
    except (UnsupportedError, AssertionError) as error:
        why = str(error)
    except Exception as error:  # noqa: BLE001 a peer that fails is no failure of this command
        why = f"{type(error).__name__}: {error}"
    every = [text for text in ranks.gather(why) if text]
    return (None, every[0]) if every else (launch, "")


def _alternate(launches, ranks, xp, times, waited):
    """Time launches in turns.

    Adds the microseconds of the slowest rank to ``times`` by name, and to ``waited`` the seconds
    that ranks wait for sums, on average.
    """
    lengths = {}
    for name, launch in launches.items():
        lengths[name] = max(ranks.gather(_sample(launch, 2, xp)[-1])) / 1e6
    for turn in range(TURNS):
        for name in [*launches][:: 1 if turn % 2 == 0 else -1]:
            ranks.note()
            launch, count = launches[name], int(SECONDS / lengths[name])
            count = min(max(count, LEAST // TURNS), MOST // TURNS)
            ranks.barrier()
            launch()
            exchange = getattr(launch, "exchange", None)
            before = exchange.waited() if exchange else 0.0
            own = _sample(launch, count, xp)
            waits = exchange.waited() - before if exchange else 0.0
            every = ranks.gather((own, waits))
            times[name] += [max(some) for some in zip(*(own for own, _ in every), strict=True)]
            waited[name] += sum(waits for _, waits in every) / len(every)


def _sample(launch, count, xp):
    """Return the microseconds of ``count`` launches, one after the other. Synchronizes."""
    if xp is not np:
        return timing.sample(launch, count)
    found = []
    for _ in range(count):
        begin = time.perf_counter()
        launch()
        found.append((time.perf_counter() - begin) * 1e6)
    return found


def _row(cell, ranks, times, waits, losses, missing, ceilings):
    us, samples = medians(times)
    alone, alone_samples = us.pop("alone"), samples.pop("alone")
    row = {
        "op": cell.op, "case": cell.case.as_dict(), "direction": cell.direction, "impl": "graph",
        "us": us[BEST], "samples_us": samples[BEST], "ranks": ranks.size,
        "alone_us": alone, "alone_samples_us": alone_samples,
        "efficiency": alone / us[BEST], "wait_share": waits[BEST],
        "ways": {
            way: {"us": us[way], "samples_us": samples[way], "efficiency": alone / us[way],
                  "wait_share": waits[way]}
            for way in WAYS
        },
        "peers": {name: t for name, t in us.items() if name not in WAYS},
        "peer_samples_us": {name: t for name, t in samples.items() if name not in WAYS},
        "peers_missing": missing, "losses": losses,
    }  # fmt: skip
    row = results.rated(row, ceilings)  # rates of one GPU
    return row | {"tokens_per_s": ranks.size * cell.case.tokens / row["us"] * 1e6}
