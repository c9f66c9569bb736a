"""Timing: wall clock on NumPy, CUDA events on a GPU, where graphs exclude the host."""

import ctypes
import statistics
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from gpuattn.arrays import BFLOAT16, import_cupy
from gpuattn.cuda import ceilings as reach
from gpuattn.modes import without_plans

SAMPLES = 20
TURNS = 4  # of each launch in ``alternate``, half of them in reverse order
LEAST, MOST = SAMPLES // TURNS, 12  # samples of a turn
TURN = 0.03  # seconds of a turn, within these bounds
CALLS_TURN = 0.4  # seconds of a turn of ``alternate_calls``, at most LEAST samples
WARM_UPS = 2  # launches before the samples of a turn; fewer if one takes as long as a turn
REST, LONGEST_REST = 2, 0.1  # before a turn, in its length; seconds: long work lowers the clock


def time_call(call: Callable[[], Any], on_gpu: bool) -> list[float]:
    """Return SAMPLES times of ``call()`` in microseconds, after a warm-up."""
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


class Graph:
    """Calls captured one after the other as a CUDA graph on the current stream; calling replays it.

    ``results``: what each captured call returned, in memory that every replay overwrites.
    ``peak_bytes``: the device memory that they allocated, without their inputs.
    """

    is_captured = True

    def __init__(self, calls: Sequence[Callable[[], Any]]) -> None:
        cupy = import_cupy()
        self.stream, self.calls = cupy.cuda.get_current_stream(), calls
        self.pool = cupy.cuda.MemoryPool()  # the graph's memory
        with cupy.cuda.using_allocator(self.pool.malloc), without_plans():  # as runtime.graphs
            for call in calls:
                call()  # compiles, and leaves its blocks in the pool
            self.peak_bytes = self.pool.total_bytes()
            self.stream.begin_capture()
            try:
                self.results = [call() for call in calls]
            finally:
                self.graph = self.stream.end_capture()

    def __call__(self) -> None:
        self.graph.launch(self.stream)


def captured() -> int | None:
    """Return how many kernels, copies and fills the current stream has captured so far.

    None if it does not capture, or the driver lacks the function.
    """
    stream = ctypes.c_void_p(import_cupy().cuda.get_current_stream().ptr)
    status, graph, count = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_size_t()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        about = ctypes.byref(status), None, ctypes.byref(graph), None, None
        failed = driver.cuStreamGetCaptureInfo_v2(stream, *about)
        failed = failed or not graph or driver.cuGraphGetNodes(graph, None, ctypes.byref(count))
    except (OSError, AttributeError):
        return None
    return None if failed else count.value


def alternate(launches: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
    """Return ``{name: microseconds}`` for ``{name: launch}``, every launch on the current stream.

    Each has TURNS turns, in alternating order, each after a rest. A turn has fewer samples the
    longer a launch takes.
    """
    names = list(launches)
    times: dict[str, list[float]] = {name: [] for name in names}
    lengths = {name: sample(launches[name], 1)[0] / 1e6 for name in names}
    for turn in range(TURNS):
        for name in names if turn % 2 == 0 else reversed(names):
            launch, seconds = launches[name], lengths[name]
            count = min(max(int(TURN / seconds), LEAST), MOST)
            time.sleep(min(REST * count * seconds, LONGEST_REST))
            for _ in range(min(int(TURN / seconds), WARM_UPS)):
                launch()
            times[name] += sample(launch, count)
    return times


def alternate_calls(calls: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
    """Return ``{name: microseconds}`` by the clock, for calls that end with results on the host.

    Turns and rests as in ``alternate``; at least 2 * TURNS samples of each.
    """
    names = list(calls)
    times: dict[str, list[float]] = {name: [] for name in names}
    lengths = {name: _clocked(calls[name]) / 1e6 for name in names}
    for turn in range(TURNS):
        for name in names if turn % 2 == 0 else reversed(names):
            count = min(max(int(CALLS_TURN / lengths[name]), 2), LEAST)
            time.sleep(min(REST * count * lengths[name], LONGEST_REST))
            times[name] += [_clocked(calls[name]) for _ in range(count)]
    return times


def _clocked(call):
    """Return the microseconds of a call, by the clock."""
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e6


def sample(launch: Callable[[], Any], count: int) -> list[float]:
    """Return the microseconds of ``count`` launches, one after the other. Synchronizes."""
    cupy = import_cupy()
    pairs = [(cupy.cuda.Event(), cupy.cuda.Event()) for _ in range(count)]
    for begin, end in pairs:
        begin.record()
        launch()
        end.record()
    end.synchronize()
    return [cupy.cuda.get_elapsed_time(*pair) * 1e3 for pair in pairs]


def median(samples: Sequence[float]) -> float:
    """Return the median."""
    return statistics.median(samples)


def ceilings(xp: ModuleType) -> dict[str, float]:
    """Return measured ceilings: copy in TB/s (read + written), matrix product in TFLOP/s."""
    on_gpu = xp.__name__ == "cupy"
    problems = reach.problems(xp, BFLOAT16 if on_gpu else np.float32)
    calls = {name: call for name, (call, _) in problems.items()}
    if on_gpu:
        for call in calls.values():
            call()  # compiles
        times = alternate(calls)
    else:
        times = {name: time_call(call, False) for name, call in calls.items()}
    return reach.rates(problems, {name: median(samples) for name, samples in times.items()})
