"""Steps of a run as CUDA graphs: what the host would launch one by one is launched at once.

A graph repeats the very launches of a step, with the same pointers, so that what differs between
steps must be read from the device (``runtime.feed``), and results are the same bits.
"""

import contextlib
import sys

from gpuattn.arrays import import_cupy
from gpuattn.gemm.matmul import capture_refusal
from gpuattn.gemm.tuning import tune
from gpuattn.runtime.device import is_out_of_memory


class Calls:
    """Runs steps one launch after the other.

    ``first(step)``: calls one of a new shape; ``tune`` finds the algorithms of its products, which
    may be others in another process.
    """

    def __init__(self, first=tune):
        self.first, self.known = first, set()

    def __call__(self, name, shape, step):
        """Run ``step()``, which is the same function of device memory for a name and a shape."""
        if (name, shape) in self.known:
            return step()
        self.known.add((name, shape))
        return self.first(step)


class Replays:
    """Captures each step the second time that it is asked for a shape, and replays it from then on.

    ``say(sentence)`` is told why, should a step not be captured; it is then called as it is. The
    first time it is too, by ``first`` as in ``Calls``: kernels get compiled and algorithms chosen
    then. What steps allocate is shared by all graphs, as they run one after the other on the stream
    that is current now; it is theirs until the Replays go. A capture for which memory is short
    raises what the allocation did.
    """

    def __init__(self, say, first=tune):
        cupy = import_cupy()
        self.graphs, self.first, self._say = {}, first, say
        self.held = []  # (address, bytes) of the pool's memory
        self.stream = cupy.cuda.get_current_stream()
        self.pool = cupy.cuda.MemoryPool(_allocator(self.held))
        self._refused = capture_refusal()
        if self._refused:
            say(f"no CUDA graphs, steps are slower: {self._refused}. Run: gpuattn doctor")

    def held_bytes(self):
        """Return what the graphs take."""
        return sum(size for _, size in self.held)

    def __del__(self, ending=sys.is_finalizing):
        if ending():  # the driver may be gone
            return
        self.graphs.clear()
        for pointer, _ in self.held:
            import_cupy().cuda.runtime.free(pointer)

    def __call__(self, name, shape, step):
        """Run ``step()``, which is the same function of device memory for a name and a shape."""
        if self._refused:
            return step()
        key = name, shape
        if key not in self.graphs:
            self.graphs[key] = None
            return self.first(step)
        if self.graphs[key] is None and not self._capture(key, step):
            return step()
        self.graphs[key].launch(self.stream)

    def _capture(self, key, step):
        cupy = import_cupy()
        cupy.get_default_memory_pool().free_all_blocks()
        with cupy.cuda.using_allocator(self.pool.malloc):
            try:
                self.stream.begin_capture()
                step()
                self.graphs[key] = self.stream.end_capture()
                return True
            except Exception as error:  # noqa: BLE001 whatever it is, it can be done without
                self._end_failed()
                if is_out_of_memory(error):
                    raise
                self._refused = f"{type(error).__name__}: {error}"
                self._say(f"no CUDA graphs, steps are slower: {self._refused}")
        return False

    def _end_failed(self):
        if self.stream.is_capturing():
            # it is invalid, and says so; the stream is free again
            with contextlib.suppress(import_cupy().cuda.runtime.CUDARuntimeError):
                self.stream.end_capture()


def _allocator(held):
    """Return what a pool allocates by, which notes (address, bytes) in ``held``.

    The memory is nobody's but theirs who free it: before CuPy's pool says that memory is used up,
    it gives back all that no array has, and a graph may still use it; and a pool that goes while an
    array is alive gives nothing back.
    """
    cupy = import_cupy()

    def allocate(size):
        pointer, device = cupy.cuda.runtime.malloc(size), cupy.cuda.runtime.getDevice()
        held.append((pointer, size))
        return cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(pointer, size, None, device), 0)

    return allocate
