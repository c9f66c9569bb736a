"""What a device reaches in practice, in large matrix products and copies: measured, not looked up.

A GPU's figures are kept on disk beside the kernels, so that only the first run on it measures them.
"""

import contextlib
import json
import re
import statistics
import time

import numpy as np

from gpuattn.arrays import import_cupy
from gpuattn.cuda.kernels import cache_folder
from gpuattn.files import write_text

SIZES = {"cupy": (1 << 28, 8192), "numpy": (1 << 24, 1024)}  # elements copied, sides of matrices
SAMPLES, TURNS, REST = 20, 4, 0.1  # of each; seconds before a turn


def problems(xp, dtype):
    """Return {name: (call, amount)}: a "copy" of float32 and the bytes that it reads and writes, a
    "product" of two square matrices in ``dtype`` and its FLOPs."""
    count, side = SIZES[xp.__name__]
    source, target = xp.ones(count, np.float32), xp.empty(count, np.float32)
    rng = xp.random.default_rng(0)
    a, b = (rng.standard_normal((side, side), np.float32).astype(dtype) for _ in range(2))
    return {
        "copy": (lambda: xp.copyto(target, source), 8 * count),
        # by cuBLAS: 780 TFLOP/s on an H200, where cuBLASLt's first choice reached 644
        "product": (lambda: a @ b, 2 * side**3),
    }


def rates(problems, us):
    """Return the ceilings that the microseconds of the problems mean: TB/s and TFLOP/s."""
    found = {name: amount / us[name] / 1e6 for name, (_, amount) in problems.items()}
    return {"copy_tbs": found["copy"], "matmul_tflops": found["product"]}


def ceilings(xp, dtype):
    """Return ``rates`` of this device for products in ``dtype``; a GPU's from disk if known.

    None where a GPU has no room to measure: matrices and copies take 2.5 GiB.
    """
    if xp is np:
        chosen = problems(np, dtype)
        return rates(chosen, {name: _on_cpu(call) for name, (call, _) in chosen.items()})
    path, dtype = _path(xp), np.dtype(dtype)
    known = _read(path)
    if dtype.name not in known:
        pool = xp.cuda.MemoryPool()  # given back as a whole
        try:
            with xp.cuda.using_allocator(pool.malloc):
                chosen = problems(xp, dtype)
                us = {name: _on_gpu(call) for name, (call, _) in chosen.items()}
        except xp.cuda.memory.OutOfMemoryError:
            return None
        known = _read(path) | {dtype.name: rates(chosen, us)}
        with contextlib.suppress(OSError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_text(path, json.dumps(known))
    return known[dtype.name]


def _on_cpu(call):
    """Return the least microseconds of a call: other programs only ever add some."""
    times = []
    for _ in range(SAMPLES):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return min(times) * 1e6


def _on_gpu(call):
    """Return the median microseconds of a call, in short turns: long work lowers the clock."""
    cuda, times = import_cupy().cuda, []
    call()  # sets up what it needs
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


def _path(cupy):
    runtime = cupy.cuda.runtime
    name = runtime.getDeviceProperties(runtime.getDevice())["name"].decode()
    name = re.sub(r"\W+", "-", name)
    return cache_folder() / f"ceilings-{name}.json"


def _read(path):
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
