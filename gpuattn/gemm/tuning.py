"""Autotuning: times the algorithms that cuBLASLt proposes for a product and takes the fastest.

The choice is kept on disk beside the kernels, for this GPU and this version of the library: a
process that tunes again, for example to resume a training run, takes the same algorithms.
"""

import contextlib
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import numpy as np

from gpuattn.cuda import disk_cache
from gpuattn.gemm import cublaslt
from gpuattn.gemm.cublaslt import Candidate, MatmulPlan
from gpuattn.modes import without_plans

Result = TypeVar("Result")
Table = dict[str, Candidate]  # by kind of product
CANDIDATES = 8  # with workspace, and as many without
SAMPLES = 7  # of each candidate, in turns
MOST_OF_FIRST = 0.97  # of the time of the heuristic's choice: a smaller gain may be noise
FLUSH_BYTES = 128 << 20  # written before every sample: more than the L2 cache holds


def tune(call: Callable[[], Result]) -> Result:
    """Return ``call()``; the matrix products in it use their fastest algorithm from now on.

    So do all of this process's cuBLASLt products of the same shapes, layouts and dtypes. New kinds
    are timed, in some milliseconds each, which synchronizes: tune before capturing a graph.
    Another algorithm adds in another order, so last bits may change.
    """
    tuner = _Tuner()
    token = cublaslt.tuner.set(tuner)
    try:
        with without_plans():
            return call()
    finally:
        cublaslt.tuner.reset(token)
        tuner.keep()


class _Tuner:
    def __init__(self) -> None:
        self.tables: dict[int, Table] = {}  # by device
        self.paths: dict[int, Path] = {}  # of the tables that have grown

    def __call__(self, plan: MatmulPlan, cupy: ModuleType, *arrays: Any) -> None:
        """Let ``plan`` use its fastest algorithm; ``arrays``: of the product to be computed."""
        if plan.tuned:
            return
        table = self.tables.get(plan.device)
        if table is None:
            table = self.tables[plan.device] = _read(_path(plan))
        if plan.kind not in table:
            stream = cupy.cuda.get_current_stream()
            if stream.ptr and stream.is_capturing():
                return
            table[plan.kind] = _fastest(plan, cupy, *arrays)
            self.paths[plan.device] = _path(plan)
        plan.take(table[plan.kind])
        plan.tuned = True

    def keep(self) -> None:
        for device, path in self.paths.items():
            _write(path, self.tables[device])


def _fastest(
    plan: MatmulPlan, cupy: ModuleType, a: Any, b: Any, out: Any, vector: Any, aux: Any
) -> Candidate:
    """Return the heuristic's first candidate, or the fastest one if it is clearly faster."""
    candidates = _candidates(plan)
    before = out.copy() if plan.accumulate else None
    scratch = cupy.empty(FLUSH_BYTES, np.int8)
    pairs: dict[Candidate, list] = {candidate: [] for candidate in candidates}
    for turn in range(SAMPLES):
        for candidate in candidates if turn % 2 else reversed(candidates):
            plan.take(candidate)
            begin, end = cupy.cuda.Event(), cupy.cuda.Event()
            scratch.fill(0)
            begin.record()
            ran = plan.run(cupy, a, b, out, vector, aux)
            end.record()
            if ran:
                pairs[candidate].append((begin, end))
    end.synchronize()
    if before is not None:
        out[...] = before
    times = {
        candidate: statistics.median(cupy.cuda.get_elapsed_time(*pair) for pair in of_one)
        for candidate, of_one in pairs.items()
        if of_one
    }
    first = candidates[0]
    best = min(times, key=times.__getitem__, default=first)
    return best if times.get(best, 0) < MOST_OF_FIRST * times.get(first, math.inf) else first


def _candidates(plan: MatmulPlan) -> list[Candidate]:
    """Return what the heuristic proposes with workspace and without.

    Before a product whose tiles are numbered in workspace the library clears that number, a node of
    its own in a graph. The proposals without workspace are often faster; some are among the others.
    """
    found = plan.candidates(plan.alignment, CANDIDATES)
    with contextlib.suppress(plan.lt.cuBLASLtError):
        found += plan.candidates(plan.alignment, CANDIDATES, workspace_bytes=0)
    return list(dict.fromkeys(found))


# ---- on disk -------------------------------------------------------------------------------------


def _path(plan: MatmulPlan) -> Path:
    return disk_cache.json_path("products", plan.device, plan.lt.get_version())


def _read(path: Path) -> Table:
    try:
        stored = disk_cache.read_json(path).items()
        return {kind: (bytes.fromhex(code), size) for kind, (code, size) in stored}
    except ValueError:
        return {}


def _write(path: Path, table: Table) -> None:
    """Store a table, with what other processes have stored since it was read."""
    table = table | _read(path)
    disk_cache.write_json(
        path, {kind: (code.hex(), n) for kind, (code, n) in sorted(table.items())}
    )
