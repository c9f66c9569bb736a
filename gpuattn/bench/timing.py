"""Times: wall clock on NumPy, CUDA events on a GPU; medians of many."""

import statistics
import time

from gpuattn.arrays import import_cupy

SAMPLES = 20


def time_call(call, on_gpu):
    """Return at least 20 sample times of ``call()`` in microseconds, after a warm-up."""
    call()
    return _time_gpu(call) if on_gpu else _time_cpu(call)


def _time_cpu(call):
    begin = time.perf_counter()
    call()
    inner = max(1, int(0.002 / max(time.perf_counter() - begin, 1e-7)))
    samples = []
    for _ in range(SAMPLES):
        begin = time.perf_counter()
        for _ in range(inner):
            call()
        samples.append((time.perf_counter() - begin) / inner * 1e6)
    return samples


def _time_gpu(call):
    cupy = import_cupy()
    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    inner, samples = 10, []
    for _ in range(SAMPLES):
        begin.record()
        for _ in range(inner):
            call()
        end.record()
        end.synchronize()
        samples.append(cupy.cuda.get_elapsed_time(begin, end) / inner * 1e3)
    return samples


def median(samples):
    return statistics.median(samples)


def ceilings(xp):
    """Return measured ceilings: copy in TB/s (read + written), matrix product in TFLOP/s."""
    on_gpu = xp.__name__ == "cupy"
    n = 1 << (28 if on_gpu else 24)
    source, target = xp.ones(n, "float32"), xp.empty(n, "float32")
    copy = median(time_call(lambda: xp.copyto(target, source), on_gpu))
    size = 8192 if on_gpu else 1024
    a = xp.asarray(xp.random.default_rng(0).standard_normal((size, size), dtype="float32"))
    if on_gpu:
        import ml_dtypes

        a = a.astype(ml_dtypes.bfloat16)
    product = median(time_call(lambda: a @ a, on_gpu))
    return {"copy_tbs": 8 * n / copy / 1e6, "matmul_tflops": 2 * size**3 / product / 1e6}
