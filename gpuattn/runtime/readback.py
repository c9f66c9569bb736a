"""Asynchronous device-to-host copies: of a few numbers, and of all the state of a run."""

import contextlib
import sys
from typing import Any

import numpy as np

from gpuattn.arrays import NothingComputed, empty_pinned, get_xp, import_cupy, rehearsing


class Reading:
    """Copies of arrays to the host, in the order of the current stream, without synchronizing.

    ``arrays``: NumPy or CuPy arrays; later writes to them do not change the copies.
    """

    def __init__(self, *arrays: Any) -> None:
        if get_xp(*arrays) is np:
            self._host, self._event = [array.copy() for array in arrays], None
            return
        if rehearsing.get():
            raise NothingComputed
        self._host = [empty_pinned(array.shape, array.dtype) for array in arrays]
        for array, host in zip(arrays, self._host, strict=True):
            array.get(out=host, blocking=False)
        self._event = import_cupy().cuda.get_current_stream().record()

    def __del__(self, ending=sys.is_finalizing):
        # CuPy gives pinned memory to others at once, also while something is copied into it
        if getattr(self, "_event", None) is not None and not ending():
            with contextlib.suppress(Exception):
                self._event.synchronize()

    def ready(self) -> bool:
        """Return whether the copies are complete, so that ``values`` does not wait."""
        return self._event is None or self._event.done

    def values(self) -> list[np.ndarray]:
        """Return the copies as NumPy arrays; waits until they are complete."""
        if self._event is not None:
            self._event.synchronize()
        return self._host


class HostCopy:
    """A copy of arrays in host memory, made again and again in the same buffers.

    On a GPU a stream of its own makes it, in pinned memory, beside what the current stream does.
    Whoever changes the arrays calls ``hold`` first: the current stream then waits for the copy.
    So a copy of the parameters and moments has the time of the next gradients, which change none
    of them. (A copy on the device before would be over sooner, but would need as much GPU memory
    again as all it copies, which a larger model or batch then lacks.) On NumPy ``begin`` copies at
    once.
    """

    def __init__(self) -> None:
        self._host: dict[str, np.ndarray] = {}
        self._stream = self._event = None

    def prepare(self, arrays: dict[str, Any]) -> None:
        """Make the buffers for {name: C-contiguous array}; pinning them takes time, too."""
        if get_xp(*arrays.values()) is np:
            self._host = {name: array.copy() for name, array in arrays.items()}  # no page missing
        else:
            self._host = {name: _pinned(array) for name, array in arrays.items()}
            self._stream = import_cupy().cuda.Stream(non_blocking=True)

    def begin(self, arrays: dict[str, Any]) -> None:
        """Copy the arrays as the current stream leaves them, over the copy before."""
        if not self._host:
            self.prepare(arrays)
        if self._stream is None:
            for name, array in arrays.items():
                np.copyto(self._host[name], array)
            return
        self._stream.wait_event(import_cupy().cuda.get_current_stream().record())
        with self._stream:
            for name, array in arrays.items():
                array.get(out=self._host[name], blocking=False)
        self._event = self._stream.record()

    def hold(self) -> None:
        """Let the current stream wait until the arrays are copied, without synchronizing."""
        if self._event is not None:
            import_cupy().cuda.get_current_stream().wait_event(self._event)

    def values(self) -> dict[str, np.ndarray]:
        """Return {name: NumPy array}, the buffers, once the arrays are copied; from any thread.

        Also while steps are captured: CuPy captures relaxed, which lets other threads synchronize.
        """
        if self._event is not None:
            self._event.synchronize()
        return self._host


def _pinned(array):
    """Return a pinned buffer for an array. CuPy's pool would keep its memory at the end."""
    cuda = import_cupy().cuda
    memory = cuda.PinnedMemoryPointer(cuda.PinnedMemory(array.nbytes), 0)
    return np.ndarray(array.shape, array.dtype, memory)
