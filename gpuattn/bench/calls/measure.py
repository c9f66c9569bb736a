"""Calls one by one, as a user makes them: the time of the host, and the time until results."""

import contextlib
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from gpuattn import rng
from gpuattn.bench import results
from gpuattn.bench.calls import captured, first, loops, ops
from gpuattn.bench.calls.cases import CUPY, FIRST, HOST, LAYER, Called
from gpuattn.bench.cases import Cell
from gpuattn.bench.comparison import medians
from gpuattn.bench.correctness import TOLERANCE, compare
from gpuattn.bench.peers import timing as peers
from gpuattn.bench.peers.calls import Eager
from gpuattn.impls import prepare
from gpuattn.typing import Array

OURS, BARE = "ours", "bare"
WARM_UPS = 3
TURNS, SAMPLES = 4, 6  # turns of each in alternating order, samples of a turn
IN_A_ROW = 32  # calls of a sample of the host: the queue of a GPU takes about 1,000 launches
SAMPLE, MOST = 0.002, 100  # seconds of another sample, about; calls, at most


def measure(
    cell: Cell, xp: ModuleType, ceilings: dict[str, float], impl: str | None = None,
    with_peers: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Return the row of results of a Cell; ``results.py`` describes its fields.

    Raises UnsupportedError if nothing accepts the arguments, AssertionError for a wrong result.
    """
    names = cell.peers if with_peers else ()
    if xp is np:
        found = _measured(cell, xp, names, lambda: None)
    else:
        stream = xp.cuda.Stream(non_blocking=True)
        try:
            with stream, peers.on_stream(stream) if names else contextlib.nullcontext():
                found = _measured(cell, xp, names, stream.synchronize)
        finally:
            peers.release()
            xp.get_default_memory_pool().free_all_blocks()
    us, samples = medians(found.times)
    row = {
        "op": cell.op, "case": cell.case.as_dict(), "direction": cell.direction,
        "impl": found.impl, "us": us.pop(OURS), "samples_us": samples.pop(OURS),
    }  # fmt: skip
    if BARE in us:
        row |= {"bare_us": us.pop(BARE), "bare_samples_us": samples.pop(BARE)}
    row |= {"peers": us, "peer_samples_us": samples, "peers_missing": found.missing}
    return results.rated(row, ceilings)


class Times(NamedTuple):
    """``impl``: what ran. ``times``, ``missing``: {name: microseconds, or why there are none}."""

    impl: str
    times: dict[str, list[float]]
    missing: dict[str, str]


def _measured(cell, xp, names, wait):
    case = cell.case
    if case.timed in FIRST:
        return Times(_chosen(case, ops.draw(case, xp)), *first.times(case, xp, names))
    if cell.direction == "step":
        impl, in_a_row = "eager", 1  # launches of an update: hundreds
        calls, missing = loops.updates(case, xp, names)
    elif case.op == LAYER:
        in_a_row, (impl, calls, missing) = IN_A_ROW, captured.calls(case, xp, names)
    else:
        inputs, in_a_row = ops.draw(case, xp), IN_A_ROW
        impl = _chosen(case, inputs)
        calls, missing = right_calls(case, xp, inputs, cell.direction != "forward", names)
    return Times(impl, alternate(calls, wait, in_a_row if case.timed == HOST else None), missing)


def _chosen(case, inputs):
    """Return the name of the implementation of the forward."""
    spec = ops.CALLS[case.op]
    if not spec.chooses:
        return "tape"
    return prepare(spec.op, *inputs, **spec.settings).choose().name


# ---- the calls ----------------------------------------------------------------------------------


def right_calls(
    case: Called, xp: ModuleType, inputs: Sequence[Array], both: bool, names: Sequence[str]
) -> tuple[dict[str, Callable], dict[str, str]]:
    """Return ({name: call}, {name: why there is none}) of ours and of peers, with right results.

    On NumPy BARE is the expression alone. ``both``: forward and backward. Raises AssertionError for
    a wrong result of ours.
    """
    own, state = ops.ours(case, inputs, both), rng.remember()
    wanted = own.results()
    if ops.CALLS[case.op].chooses:
        reference = ops.ours(case, inputs, both, impl="reference")
        with rng.replay(state):
            right = reference.results()
        _compare(case, wanted, right, 1, f"{case.op} {case}, result")
    calls, missing = {OURS: own.run}, dict[str, str]()
    for name in [BARE] if xp is np and not both else names:
        with peers.noting(missing, name):
            with peers.reasons():
                if name in (BARE, CUPY):
                    peer = ops.plain(case, inputs, xp)
                else:
                    peer = Eager(case, inputs, both, own.gradient)
                found = peer.results()
            if not ops.CALLS[case.op].random:
                _compare(case, found, wanted, 2, "differs from ours in result")
            calls[name] = peer.run
    return calls, missing


def _compare(case, found, wanted, times, what):
    """Raise AssertionError unless float arrays are alike: ties of indices may be in any order."""
    for i, (got, want) in enumerate(zip(found, wanted, strict=True)):
        if got is not None and want is not None and ops.is_float(want):
            tolerance = times * TOLERANCE[case.dtype]
            compare(got.astype("f4"), want.astype("f4"), tolerance, f"{what} {i}")


# ---- their times --------------------------------------------------------------------------------


def alternate(
    calls: dict[str, Callable[[], Any]], wait: Callable[[], Any], in_a_row: int | None
) -> dict[str, list[float]]:
    """Return ``{name: microseconds}`` by the clock: TURNS * SAMPLES means of some calls.

    ``wait()`` returns when the results of all calls are there. ``in_a_row``: how many calls are
    made before it, of which only the calls are timed; None: it follows each call, and is timed.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    counts = {name: in_a_row or _count(call, wait) for name, call in calls.items()}
    for turn in range(TURNS):
        for name in calls if turn % 2 == 0 else reversed(calls):
            for _ in range(WARM_UPS):
                calls[name]()
            wait()
            sample = _sample_of_results if in_a_row is None else _sample_of_calls
            times[name] += [sample(calls[name], wait, counts[name]) for _ in range(SAMPLES)]
    return times


def _count(call, wait):
    """Return how many calls make a sample of results."""
    call()
    wait()
    return min(max(1, int(SAMPLE * 1e6 / _sample_of_results(call, wait, 1))), MOST)


def _sample_of_results(call, wait, count):
    begin = time.perf_counter()
    for _ in range(count):
        call()
        wait()
    return (time.perf_counter() - begin) / count * 1e6


def _sample_of_calls(call, wait, count):
    begin = time.perf_counter()
    for _ in range(count):
        call()
    spent = time.perf_counter() - begin
    wait()
    return spent / count * 1e6
