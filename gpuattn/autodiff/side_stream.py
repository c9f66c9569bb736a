"""Gradients of parameters, computed beside the chain of gradients that leads on.

Nothing waits for them before the backward pass ends, and their products seldom fill a GPU: on a
second stream they share it with what comes next. In a CUDA graph they are a branch. Or they are put
off until there are so many that together they do.
"""

import contextlib
import contextvars

from gpuattn.arrays import import_cupy, on_gpu
from gpuattn.autodiff.hooks import is_watched

AHEAD = 4  # blocks at most that the current stream has not waited for: they keep their arrays alive
MOST_BYTES = 640 << 20  # at most that what is put off keeps alive
_helper = contextvars.ContextVar("gpuattn_aside", default=None)
_streams = {}  # (device, current stream) -> the second one


class _Helper:
    """A second stream, and what runs on it: [(event behind it, arrays read, places written)].

    ``later``: what is put off, [(its launch, its arguments)], and the ``places`` that it writes.
    """

    def __init__(self, cupy):
        self.cupy, self.current = cupy, cupy.cuda.get_current_stream()
        key = cupy.cuda.runtime.getDevice(), self.current.ptr
        if key not in _streams:
            _streams[key] = cupy.cuda.Stream(non_blocking=True)
        self.stream, self.running = _streams[key], []
        self.later, self.places, self.bytes = [], set(), 0

    @contextlib.contextmanager
    def work(self, reads, writes):
        if len(self.running) == AHEAD:
            self.wait(1)
        self.stream.wait_event(self._now(self.current))
        with self.stream:
            yield True
        self.running.append((self._now(self.stream), reads, {x.data.ptr for x in writes}))

    def _now(self, stream):
        event = self.cupy.cuda.Event(disable_timing=True)
        event.record(stream)
        return event

    def put_off(self, launch, arguments, reads, place):
        size = sum(x.nbytes for x in reads)
        if self.bytes + size > MOST_BYTES:
            self.catch_up()
        self.later.append((launch, arguments))
        self.places.add(place.data.ptr)
        self.bytes += size

    def catch_up(self):
        """Launch what was put off, on the current stream."""
        together = {}
        for launch, arguments in self.later:
            together.setdefault(launch, []).append(arguments)
        self.later, self.places, self.bytes = [], set(), 0
        for launch, arguments in together.items():
            launch(arguments)

    def wait(self, count):
        """Let the current stream wait for the first so many blocks."""
        if count:
            self.current.wait_event(self.running[count - 1][0])
            del self.running[:count]


@contextlib.contextmanager
def allowed(like):
    """Let blocks inside run ``beside`` others or ``later`` if ``like`` is on a GPU, until the end.

    Not where ops are watched: what is timed by itself runs by itself.
    """
    if is_watched() or not on_gpu(like):
        yield
        return
    helper = _Helper(import_cupy())
    token = _helper.set(helper)
    try:
        yield
        helper.catch_up()
    finally:
        _helper.reset(token)
        helper.wait(len(helper.running))


def beside(reads, writes):
    """Return a context in which launches may run beside what the current stream gets next.

    It gives whether they do. ``reads``: arrays that nobody may write to any more. ``writes``: all
    places of results; where one is None, a new array that others read at once, the launches stay
    where they are.
    """
    helper = _helper.get()
    if helper is None or any(place is None for place in writes):
        return contextlib.nullcontext(False)
    return helper.work(reads, writes)


def later(launch, arguments, reads, place):
    """Put ``launch([arguments])`` off, to be one of ``launch([arguments, ...])``; return whether.

    ``reads``, ``place``: as in ``beside``.
    """
    helper = _helper.get()
    if helper is None:
        return False
    helper.put_off(launch, arguments, reads, place)
    return True


def settle(place):
    """Let what comes next find in ``place`` what was written to it aside, or will be."""
    helper = _helper.get()
    if helper is not None:
        if place.data.ptr in helper.places:
            helper.catch_up()
        here = (i for i, (*_, to) in enumerate(helper.running) if place.data.ptr in to)
        helper.wait(max(here, default=-1) + 1)


def settle_all():
    """Let what comes next wait for all that runs aside or will: what that read is free again."""
    helper = _helper.get()
    if helper is not None:
        helper.catch_up()
        helper.wait(len(helper.running))
