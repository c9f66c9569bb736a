"""Gradients of parameters, computed on a second stream or deferred and launched together.

Nothing reads them before the backward pass ends, and their matmuls seldom fill a GPU. On a side
stream they share it with the kernels that follow on the current one; in a CUDA graph they are a
branch. Or they are deferred until there are enough of them to fill the GPU in one launch.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from gpuattn.arrays import import_cupy, on_gpu, recorders
from gpuattn.autodiff.hooks import is_hooked
from gpuattn.typing import Array

MAX_UNJOINED = 4  # blocks of work the current stream has not waited for: they keep arrays alive
MAX_DEFERRED_BYTES = 640 << 20  # of arrays that deferred launches keep alive
_side: contextvars.ContextVar[Any] = contextvars.ContextVar("gpuattn_side_stream", default=None)
_streams: dict[tuple[int, int], Any] = {}  # (device, current stream) -> its side stream


class _SideStream:
    """A side stream, and the work on it: [(event after it, arrays read, addresses written)].

    ``deferred``: [(launch, arguments)]; ``deferred_targets``: the addresses they write.
    """

    def __init__(self, cupy):
        self.cupy, self.current = cupy, cupy.cuda.get_current_stream()
        key = cupy.cuda.runtime.getDevice(), self.current.ptr
        if key not in _streams:
            _streams[key] = cupy.cuda.Stream(non_blocking=True)
        self.stream, self.running = _streams[key], []
        self.here = cupy.cuda.Event(disable_timing=True)  # on the current stream
        self.deferred, self.deferred_targets, self.deferred_bytes = [], set(), 0

    @contextlib.contextmanager
    def work(self, reads, writes):
        recorder = recorders.get()
        self.begin()
        if recorder is not None:
            recorder.went_beside(current)
        with self.stream:
            yield True
        if recorder is not None:
            recorder.came_back(writes)
        self.end(reads, {x.data.ptr for x in writes})

    def begin(self):
        """Begin a block of work; return the address of the side stream."""
        if len(self.running) == MAX_UNJOINED:
            self.join(1)
        self.here.record(self.current)
        self.stream.wait_event(self.here)
        return self.stream.ptr

    def end(self, reads, addresses):
        """End a block of work, which reads memory that ``reads`` keep alive and writes to these
        addresses; return that of the current stream."""
        event = self.stream.record(self.cupy.cuda.Event(disable_timing=True))
        self.running.append((event, reads, addresses))
        return self.current.ptr

    def defer(self, launch, arguments, size, addresses):
        if self.deferred_bytes + size > MAX_DEFERRED_BYTES:
            self.launch_deferred()
        self.deferred.append((launch, arguments))
        self.deferred_targets.update(addresses)
        self.deferred_bytes += size

    def launch_deferred(self):
        """Launch what was deferred, on the current stream."""
        together = {}
        for launch, arguments in self.deferred:
            together.setdefault(launch, []).append(arguments)
        self.deferred, self.deferred_targets, self.deferred_bytes = [], set(), 0
        token = recorders.set(None)  # it is no part of the call that needs it now
        try:
            for launch, arguments in together.items():
                launch(arguments)
        finally:
            recorders.reset(token)

    def join(self, count):
        """Make the current stream wait for the first ``count`` blocks of work."""
        if count:
            self.current.wait_event(self.running[count - 1][0])
            del self.running[:count]


@contextlib.contextmanager
def enabled(like: Any) -> Iterator[None]:
    """Let work in a block go to the side stream or be deferred, if ``like`` is on a GPU.

    The end of the block launches and joins everything. Disabled while a hook observes ops: each is
    then timed by itself.
    """
    if is_hooked() or not on_gpu(like):
        yield
        return
    side = _SideStream(import_cupy())
    token = _side.set(side)
    try:
        yield
        side.launch_deferred()
    finally:
        _side.reset(token)
        side.join(len(side.running))


def current() -> _SideStream | None:
    """Return what an ``enabled`` block around this keeps, or None."""
    return _side.get()


def on_side_stream(
    reads: Sequence[Array], writes: Sequence[Array | None]
) -> contextlib.AbstractContextManager[bool]:
    """Return a context whose launches may go to the side stream; it yields whether they do.

    ``reads``: arrays that nothing writes to any more. ``writes``: the targets of all results; where
    one is None, a new array that the current stream reads next, launches stay on that stream.
    """
    side = _side.get()
    if side is None or any(target is None for target in writes):
        return contextlib.nullcontext(False)
    return side.work(reads, writes)


def defer(
    launch: Callable[[list], None],
    arguments: tuple,
    reads: Sequence[Array],
    targets: Sequence[Array],
) -> bool:
    """Defer ``launch([arguments])`` to a common ``launch([arguments, ...])``; return whether.

    ``reads``: as in ``on_side_stream``. ``targets``: the arrays it writes.
    """
    side = _side.get()
    if side is None:
        return False
    size = sum(x.nbytes for x in reads)
    side.defer(launch, arguments, size, [target.data.ptr for target in targets])
    if (recorder := recorders.get()) is not None:
        recorder.deferred(current, (launch, size), arguments, targets)
    return True


def wait_for(target: Array) -> None:
    """Make the current stream wait for pending writes to ``target``, deferred ones included."""
    side = _side.get()
    if side is not None:
        if target.data.ptr in side.deferred_targets:
            side.launch_deferred()
        here = (i for i, (*_, to) in enumerate(side.running) if target.data.ptr in to)
        side.join(max(here, default=-1) + 1)


def pending(targets: Iterable[Array]) -> list[Any]:
    """Return events after which the side stream has written all of ``targets`` that it will.

    The current stream waits for nothing; what was deferred for them is launched on it.
    """
    side = _side.get()
    if side is None:
        return []
    if not side.deferred_targets.isdisjoint(target.data.ptr for target in targets):
        side.launch_deferred()
    return [event for event, *_ in side.running[-1:]]


def wait_for_all() -> None:
    """Make the current stream wait for all pending work: the memory it read can be reused."""
    side = _side.get()
    if side is not None:
        side.launch_deferred()
        side.join(len(side.running))
