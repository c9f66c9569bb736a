"""Measured rates of a device in large matrix products and copies, as ceilings for other work.

A GPU's rates are kept on disk beside the kernels, so that only the first run on it measures them.
"""

import statistics
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from gpuattn.arrays import import_cupy
from gpuattn.cuda import disk_cache

Problems = dict[str, tuple[Callable[[], Any], int]]
SIZES = {"cupy": (1 << 28, 8192), "numpy": (1 << 24, 1024)}  # elements copied, sides of matrices
SAMPLES = 20  # of a problem, on a GPU in TURNS after a REST of so many seconds each
TURNS, REST = 4, 0.1


def problems(xp: ModuleType, dtype: Any) -> Problems:
    """Return {name: (call, amount)}.

    "copy": of float32, with the bytes that it reads and writes. "product": of two square matrices
    in ``dtype``, with its FLOPs.
    """
    count, side = SIZES[xp.__name__]
    source, target = xp.ones(count, np.float32), xp.empty(count, np.float32)
    rng = xp.random.default_rng(0)
    a, b = (rng.standard_normal((side, side), np.float32).astype(dtype) for _ in range(2))
    return {
        "copy": (lambda: xp.copyto(target, source), 8 * count),
        # by cuBLAS: 780 TFLOP/s on an H200, where cuBLASLt's first choice reached 644
        "product": (lambda: a @ b, 2 * side**3),
    }


def rates(problems: Problems, us: dict[str, float]) -> dict[str, float]:
    """Return {"copy_tbs": TB/s, "matmul_tflops": TFLOP/s} from the microseconds of problems."""
    found = {name: amount / us[name] / 1e6 for name, (_, amount) in problems.items()}
    return {"copy_tbs": found["copy"], "matmul_tflops": found["product"]}


def ceilings(xp: ModuleType, dtype: Any) -> dict[str, float] | None:
    """Return ``rates`` of this device for products in ``dtype``; a GPU's from disk if known.

    None where a GPU has too little memory left to measure: matrices and copies take 2.5 GiB.
    """
    if xp is np:
        chosen = problems(np, dtype)
        return rates(chosen, {name: _on_cpu(call) for name, (call, _) in chosen.items()})
    known = known_ceilings(xp, dtype)
    if known is None:
        pool = xp.cuda.MemoryPool()  # of its own, so that all of it is freed after this
        try:
            with xp.cuda.using_allocator(pool.malloc):
                chosen = problems(xp, dtype)
                us = {name: _on_gpu(call) for name, (call, _) in chosen.items()}
        except xp.cuda.memory.OutOfMemoryError:
            return None
        path, known = _path(xp), rates(chosen, us)
        table = disk_cache.read_json(path) | {np.dtype(dtype).name: known}
        disk_cache.write_json(path, table)
    return known


def known_ceilings(xp: ModuleType, dtype: Any) -> dict[str, float] | None:
    """Return what ``ceilings`` has measured on this GPU before, None if it has not."""
    return disk_cache.read_json(_path(xp)).get(np.dtype(dtype).name)


def _path(xp):
    return disk_cache.json_path("ceilings", xp.cuda.runtime.getDevice())


def _on_cpu(call: Callable[[], Any]) -> float:
    """Return the least microseconds of a call: other programs can only add to them."""
    times = []
    for _ in range(SAMPLES):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return min(times) * 1e6


def _on_gpu(call: Callable[[], Any]) -> float:
    """Return the median microseconds of a call, in short turns: long work lowers the clock."""
    cuda, times = import_cupy().cuda, []
    call()  # the first call sets up the library
    for _ in range(TURNS):
        time.sleep(REST)
        call()
        events = [cuda.Event() for _ in range(SAMPLES // TURNS + 1)]
        events[0].record()
        for event in events[1:]:
            call()
            event.record()
        event.synchronize()
        pairs = zip(events, events[1:], strict=False)
        times += [cuda.get_elapsed_time(*pair) * 1e3 for pair in pairs]
    return statistics.median(times)
