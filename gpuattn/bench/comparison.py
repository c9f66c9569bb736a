"""Our ops beside their peers: on a GPU all as CUDA graphs, alternating, in one process.

A result is compared with the reference (a peer's with ours) before it is timed.
"""

import contextlib
import functools
import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from gpuattn.bench import attention, results, timing
from gpuattn.bench.cases import Cell
from gpuattn.bench.correctness import TOLERANCE, compare
from gpuattn.bench.fused import cases as fused_cases
from gpuattn.bench.fused import measure as fused
from gpuattn.bench.peers import attention as attention_peers
from gpuattn.bench.peers import fused as fused_peers
from gpuattn.bench.peers import timing as peers

INPUT_BYTES = 100e6  # of all sets of inputs, at least: more than the L2 cache holds
GRAPH_CALLS = 24  # of a short kernel in a graph, at most: launching the graph takes microseconds
GRAPH_BYTES = 1e9  # moved by all calls of a graph, about, unless GRAPH_CALLS are fewer
DECIMALS = 3  # of a sample in microseconds
KINDS = {  # op -> (ours, a peer's call); unless it is a fused op
    "flash_attention": (attention.Ours, attention_peers.Call),
    "decode_attention": (attention.OursDecoding, attention_peers.Call),
}


def measure(
    cell: Cell, xp: ModuleType, ceilings: dict[str, float], impl: str | None = None,
    with_peers: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Return the row of results of a Cell; ``results.py`` describes its fields.

    Raises UnsupportedError if no implementation accepts, AssertionError for a wrong result.
    """
    impl = impl or cell.impl
    if xp is np:
        chosen, samples = _measure_here(cell, impl)
        return _row(cell, chosen, {"ours": samples}, {}, ceilings)
    try:
        stream, names = xp.cuda.Stream(non_blocking=True), cell.peers if with_peers else ()
        with stream, peers.on_stream(stream) if names else contextlib.nullcontext():
            chosen, graphs, missing = _graphs(cell, xp, impl, names)
            times = timing.alternate(graphs)
            for name, graph in graphs.items():
                times[name] = [us / len(graph.calls) for us in times[name]]
            row = _row(cell, chosen, times, missing, ceilings)
            if outside := [name for name, graph in graphs.items() if not graph.is_captured]:
                row["outside_graphs"] = outside
            if cell.op == "flash_attention" and cell.direction == "forward+backward":
                row["peak_bytes"] = {name: graph.peak_bytes for name, graph in graphs.items()}
                for name, reason in missing.items():
                    if reason.startswith("OutOfMemoryError"):
                        row["peers"][name] = results.OUT_OF_MEMORY
            del graphs, graph
        return row
    finally:
        peers.release()
        xp.get_default_memory_pool().free_all_blocks()


def _kinds(cell):
    return KINDS.get(cell.op, (fused.Ours, fused_peers.Call))


def _measure_here(cell, impl):
    """Return (implementation, samples in microseconds) on NumPy."""
    ours = _kinds(cell)[0](cell.case, cell.direction, np, impl)
    inputs, dout = ours.draw(0)
    chosen = ours.choose(inputs)
    call = ours.call(chosen, inputs, dout)
    ours.check(call(), inputs, dout)
    return chosen.name, timing.time_call(call, False)


def _graphs(cell, xp, impl, names):
    """Return (implementation, {name: Graph}, {name: why there is none}); results are checked."""
    case = cell.case
    chosen, ours, wanted, sets = _capture(cell, xp, impl)
    graphs, missing = {"ours": ours}, {}
    if case.plain():
        _, graphs["plain"], *_ = _capture(cell._replace(case=case.plain()), xp, impl)
    for name in names:
        with peers.noting(missing, name):
            make = functools.partial(_kinds(cell)[1], name, case, cell.direction)
            graph = peers.capture(name, make, sets)
            if not case.dropout:  # random bits differ
                _check_peer(graph.first_results(), wanted, case)
            graphs[name] = graph
    return chosen, graphs, missing


def _check_peer(theirs, ours, case):
    for i, (their, our) in enumerate(zip(theirs, ours, strict=False)):
        tolerance = 2 * TOLERANCE[case.dtype]
        compare(their.astype("f4"), our.astype("f4"), tolerance, f"differs from ours in result {i}")


def _capture(cell, xp, impl):
    """Return (implementation, its Graph on several sets of inputs, its first results, the sets)."""
    ours = _kinds(cell)[0](cell.case, cell.direction, xp, impl)
    sets = _sets(ours, cell)
    chosen = ours.choose(sets[0][0])
    graph = timing.Graph([ours.call(chosen, *arrays) for arrays in sets])
    if ours.edits:
        ours.restart(sets)
    graph()
    first = graph.results[0]
    ours.check(first, *sets[0])
    if ours.edits:
        first = [x.copy() for x in first]
        ours.restart(sets)
    return chosen.name, graph, first, sets


def _sets(ours, cell):
    """Return the sets of inputs of a graph's calls; those of short kernels are repeated."""
    sets = [ours.draw(seed) for seed in range(math.ceil(INPUT_BYTES / cell.case.set_bytes()))]
    if cell.op not in fused_cases.AXES or ours.edits:  # an edited input can be used once
        return sets
    times = math.ceil(GRAPH_BYTES / (len(sets) * cell.case.bytes(cell.direction)))
    return sets * min(times, max(1, GRAPH_CALLS // len(sets)))


def _row(cell, impl, times, missing, ceilings):
    us, samples = medians(times)
    row = {
        "op": cell.op, "case": cell.case.as_dict(), "direction": cell.direction, "impl": impl,
        "us": us.pop("ours"), "samples_us": samples.pop("ours"),
    }  # fmt: skip
    if cell.impl:
        row["asked"] = cell.impl
    if "plain" in us:
        row |= {"plain_us": us.pop("plain"), "plain_samples_us": samples.pop("plain")}
    row |= {"peers": us, "peer_samples_us": samples, "peers_missing": missing}
    return results.rated(row, ceilings)


def medians(
    times: dict[str, Sequence[float]],
) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Return {name: median} and {name: samples}, rounded, of {name: microseconds}."""
    samples = {name: [round(us, DECIMALS) for us in values] for name, values in times.items()}
    return {name: timing.median(values) for name, values in samples.items()}, samples
