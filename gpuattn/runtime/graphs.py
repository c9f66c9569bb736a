"""Steps as CUDA graphs: the kernels of a step are launched at once instead of one by one.

A graph repeats the launches of a step with the same pointers. What differs between steps must
therefore be in device memory (``runtime.feed``), and the results are the same bits.
"""

import contextlib
import sys
import warnings
from collections.abc import Callable, Hashable
from typing import Any

from gpuattn.arrays import import_cupy, rehearsing
from gpuattn.gemm.matmul import capture_refusal
from gpuattn.gemm.tuning import tune
from gpuattn.modes import without_plans
from gpuattn.runtime.device import is_out_of_memory

PER_THREAD_STREAM = 2  # the address that the default streams of all threads share
DEFAULT_STREAMS = 0, 1, PER_THREAD_STREAM  # addresses: CuPy's null stream, CUDA's legacy one


def warn(sentence: str) -> None:
    """Warn that steps run op by op, for callers without a listener of their own."""
    warnings.warn(sentence, stacklevel=2)


class Calls:
    """Runs steps op by op.

    ``first(step)``: calls a step of a new shape. ``tune`` chooses the algorithms of its matrix
    products by timing them, so another process may choose others.
    """

    def __init__(self, first: Callable[[Callable], Any] = tune) -> None:
        self.first = first
        self.known: set[tuple] = set()

    def __call__(
        self, name: str, shape: Hashable, step: Callable[[], Any], together: bool = False
    ) -> None:
        """Run ``step()``, which must be the same function of device memory for a name and shape."""
        if (name, shape) in self.known:
            return step()
        self.known.add((name, shape))
        return self.first(step)


class Graphs:
    """Captures what a stream launches as CUDA graphs, which share one pool of memory.

    They must run one after the other. The memory is freed with this object.
    """

    def __init__(self) -> None:
        self.held: list[tuple[int, int]] = []  # (address, bytes) of the pool's memory
        self.pool = import_cupy().cuda.MemoryPool(_allocator(self.held))

    def capture(self, stream: Any, step: Callable[[], Any]) -> tuple[Any, Any]:
        """Return (graph of what ``step()`` launches on ``stream``, what it returns).

        ``stream``: the current one, not a default one. Raises what the step or the end of its
        capture raises; the stream does not capture then.
        """
        cupy = import_cupy()
        cupy.get_default_memory_pool().free_all_blocks()
        # a planned call of small arrays launches no kernel before the one before it has ended
        with cupy.cuda.using_allocator(self.pool.malloc), without_plans():
            try:
                stream.begin_capture()
                result = step()
                return stream.end_capture(), result
            except BaseException:
                if stream.is_capturing():
                    # raises, as the capture is invalid, and ends it
                    with contextlib.suppress(cupy.cuda.runtime.CUDARuntimeError):
                        stream.end_capture()
                raise

    def __del__(self, ending=sys.is_finalizing):
        if not ending():  # then the driver may be unloaded
            for pointer, _ in self.held:
                import_cupy().cuda.runtime.free(pointer)


class Replays:
    """Captures a step at its second call for a shape, and replays it from then on.

    The first call is ``first(step)`` as in ``Calls``: it compiles kernels and chooses algorithms.
    ``notify(sentence)``: called with the reason if a step cannot be captured; steps then run op by
    op. Graphs run one after the other on the stream that is current now, so they share one memory
    pool, which is freed with the Replays. If that is a default stream, which cannot be captured,
    another stream captures. A capture that runs out of memory raises the error of the allocation.
    Inside ``kernels.compiling_only`` a step of each shape is called once, which does not count.
    ``agree(ok)``: returns whether ``ok`` is true on all ranks. A step that they run ``together`` is
    a graph on all of them or on none.
    """

    def __init__(
        self, notify: Callable[[str], None], first: Callable[[Callable], Any] = tune,
        agree: Callable[[bool], bool] | None = None,
    ) -> None:  # fmt: skip
        cupy = import_cupy()
        self.first, self._notify, self._agree = first, notify, agree
        self.graphs: dict[tuple, Any] = {}  # (name, shape) -> graph, None before its capture
        self.recorder = Graphs()
        self.stream = self._capturing = cupy.cuda.get_current_stream()
        if self.stream.ptr in DEFAULT_STREAMS:
            self._capturing = cupy.cuda.Stream(non_blocking=True)
        self._rehearsed: set[tuple] = set()
        self._refused = capture_refusal()
        if self._refused:
            notify(f"no CUDA graphs, steps are slower: {self._refused}. Run: gpuattn doctor")

    def held_bytes(self) -> int:
        """Return the bytes of device memory that the graphs hold."""
        return sum(size for _, size in self.recorder.held)

    def __call__(
        self, name: str, shape: Hashable, step: Callable[[], Any], together: bool = False
    ) -> None:
        """Run ``step()``, which must be the same function of device memory for a name and shape.

        ``together``: whether all ranks call it, and nothing may differ in how they do.
        """
        key = name, shape
        if rehearsing.get():
            if key not in self._rehearsed:
                self._rehearsed.add(key)
                step()
            return None
        if self._refused and not together:
            return step()
        if key not in self.graphs:
            self.graphs[key] = None
            return self.first(step)
        if self.graphs[key] is None and not self._is_captured(key, step, together):
            return step()
        self.graphs[key].launch(self.stream)

    def forget(self, which: Callable[[str, Any], bool]) -> None:
        """Drop the graphs of which ``which(name, shape)`` is true."""
        for key in [key for key in self.graphs if which(*key)]:
            del self.graphs[key]

    def _is_captured(self, key, step, together):
        agree = self._agree if together else None
        if agree is not None and not agree(not self._refused):
            return False  # NCCL may wait for the other ranks during a capture: all capture, or none
        captured = not self._refused and self._capture(key, step)
        if agree is not None and not agree(captured):
            self.graphs[key] = None
            return False
        return captured

    def _capture(self, key, step):
        try:
            with self._capturing:
                self.graphs[key], _ = self.recorder.capture(self._capturing, step)
            return True
        except Exception as error:  # noqa: BLE001 steps can run without a graph
            if is_out_of_memory(error):
                raise
            self._refused = f"{type(error).__name__}: {error}"
            self._notify(f"no CUDA graphs, steps are slower: {self._refused}")
        return False


def _allocator(held):
    """Return an allocator for a memory pool, which appends (address, bytes) to ``held``.

    The Graphs own this memory; CuPy's pool must not release it. Before a pool raises out of
    memory it frees every block without an array, and a graph may still use that block; a pool that
    is deleted while one of its arrays lives frees nothing.
    """
    cupy = import_cupy()

    def allocate(size):
        pointer, device = cupy.cuda.runtime.malloc(size), cupy.cuda.runtime.getDevice()
        held.append((pointer, size))
        return cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(pointer, size, None, device), 0)

    return allocate
