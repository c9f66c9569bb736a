"""What the CUDA graphs of a captured function share on a GPU, and what they read there."""

import contextlib
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from gpuattn.arrays import DEVICE_TO_DEVICE
from gpuattn.autodiff import tape
from gpuattn.errors import UnsupportedError
from gpuattn.runtime.graphs import PER_THREAD_STREAM, Graphs
from gpuattn.typing import Array

_pinned = threading.Lock()  # CuPy has one allocator of pinned memory for all threads


class GraphStream:
    """What the graphs of a function share on a GPU: they run one after the other, by ``done``.

    ``stream``: the one that captures. ``last``: what identifies the stream of the last replay,
    which ``kept`` keeps, as a new stream could get its handle.
    """

    def __init__(self, cupy: Any) -> None:
        self.cupy = cupy
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.done = cupy.cuda.Event(disable_timing=True)
        self.last: Any = None
        self.kept: Any = None
        self.graphs = Graphs()

    def wait(self, stream: Any) -> None:
        """Let ``stream`` wait for the replay before, which may be on another one."""
        here = stream.ptr
        if here == PER_THREAD_STREAM:
            here = here, threading.get_ident()
        if here != self.last:
            stream.wait_event(self.done)
            self.last, self.kept = here, stream

    def copy_inputs(
        self, inputs: Sequence[tuple[int, Array, int, int]], leaves: Sequence, stream: Any
    ) -> None:
        """Copy leaves to arrays of a graph that does not do so itself.

        ``inputs``: (place, array, its address, bytes or 0 where a copy has to go by strides).
        """
        for place, static, address, size in inputs:
            x = tape.raw(leaves[place])
            if size:
                self._copy(address, x.data.ptr, size, stream)
            else:
                static[...] = x

    def copy_outputs(
        self, outputs: Sequence[tuple[int, Array, int]], outs: list, stream: Any
    ) -> None:
        """Put copies of a graph's arrays into ``outs``: (place there, array, bytes or 0)."""
        for place, static, size in outputs:
            if size:
                outs[place] = out = self.cupy.ndarray(static.shape, static.dtype)
                self._copy(out.data.ptr, static.data.ptr, size, stream)
            else:
                outs[place] = static.copy(order="K")

    def _copy(self, to, source, size, stream):
        self.cupy.cuda.runtime.memcpyAsync(to, source, size, DEVICE_TO_DEVICE, stream.ptr)

    @contextlib.contextmanager
    def ordered(self) -> Iterator[None]:
        """Make ``stream`` current in a block, in order with the current one and with replays."""
        outside = self.cupy.cuda.get_current_stream()
        self.wait(outside)
        self.stream.wait_event(outside.record())
        try:
            with self.stream:
                yield
        finally:
            outside.wait_event(self.stream.record())
            self.done.record(outside)

    def __del__(self, ending=sys.is_finalizing):
        if not ending():  # a later stream may get the handle of this one, and with it its memory
            with contextlib.suppress(Exception):
                self.done.synchronize()


class DeviceStep:
    """The ``step`` of a RandomState on the device, where a graph reads it."""

    def __init__(self, cupy: Any, state: Any) -> None:
        self.state = state
        self.written: int | None = None
        self.there = cupy.full(1, 0, np.uint32)

    @contextlib.contextmanager
    def on_device(self) -> Iterator[None]:
        """Let the state have its step on the device in a block."""
        step, self.state.step = self.state.step, self.there
        try:
            yield
        finally:
            self.state.step = step

    def follow(self) -> None:
        """Write the number of now, where it may have changed."""
        step = self.state.step
        if not isinstance(step, int):
            self.there[...], self.written = step, None
        elif step != self.written:
            self.there.fill(step)
            self.written = step


@contextlib.contextmanager
def without_host_copies(cupy: Any) -> Iterator[None]:
    """Raise UnsupportedError where a capture in the block would copy from host to device.

    CuPy copies from a buffer that it reuses, so a replay would copy anything.
    """
    pool = cupy.get_default_pinned_memory_pool()

    def allocate(size):
        stream = cupy.cuda.get_current_stream()
        if stream.ptr and stream.is_capturing():
            raise UnsupportedError(
                "it copies values from the host to the GPU, which a graph would not repeat; "
                "make such arrays outside, or pass them as arguments"
            )
        return pool.malloc(size)

    with _pinned:
        cupy.cuda.set_pinned_memory_allocator(allocate)
        try:
            yield
        finally:
            cupy.cuda.set_pinned_memory_allocator(pool.malloc)
