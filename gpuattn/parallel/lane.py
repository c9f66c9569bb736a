"""A stream on which a GPU exchanges gradients while a backward pass computes others."""

import contextlib
import ctypes
import functools
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from gpuattn.arrays import import_cupy

PRIORITY = -5  # CUDA takes the nearest that there is: else blocks of products would come first
EXTERNAL = 1  # CU_EVENT_RECORD_EXTERNAL


class Lane:
    """The stream of the exchange, and marks in a backward pass that it waits for.

    ``count``: of the marks. One that is set while a stream is captured becomes part of the graph:
    each launch records it anew, for the waits that are queued after that launch.
    """

    def __init__(self, count: int) -> None:
        cuda = self._cuda = import_cupy().cuda
        self.stream = cuda.Stream(non_blocking=True, priority=PRIORITY)
        self._marking = cuda.Stream(non_blocking=True)
        self._marks = [cuda.Event(disable_timing=True) for _ in range(count)]
        self._joins: deque[tuple[Any, Any]] = deque()  # events before and after each wait
        self._seconds = 0.0

    def mark(self, i: int, events: Sequence[Any]) -> None:
        """Set a mark that is reached when the current stream, as of now, and ``events`` are.

        Neither waits for the other. The current stream waits for the last of the marks.
        """
        current = self._cuda.get_current_stream()
        for event in (self._event_on(current), *events):
            self._marking.wait_event(event)
        if current.is_capturing():
            record_in_graph(self._marks[i], self._marking)
        else:
            self._marks[i].record(self._marking)
        if i == len(self._marks) - 1:  # a capture ends with all its streams joined
            current.wait_event(self._event_on(self._marking))

    @contextlib.contextmanager
    def exchanging(self, waits: bool) -> Iterator[None]:
        """Make the stream current in a block, then let the one that is current now wait for it.

        ``waits``: whether the stream waits for the one that is current now.
        """
        current = self._cuda.get_current_stream()
        self.seconds()  # drops the events of waits that are over
        if waits:
            self.stream.wait_event(self._event_on(current))
        with self.stream:
            yield
        before, after = self._cuda.Event(), self._cuda.Event()
        before.record(current)
        current.wait_event(self._event_on(self.stream))
        after.record(current)
        self._joins.append((before, after))

    def wait(self, i: int) -> None:
        """Let the stream wait for a mark as it was set last."""
        self.stream.wait_event(self._marks[i])

    def seconds(self) -> float:
        """Return how long streams have waited in ``exchanging``, so far as it is known by now."""
        while self._joins and self._joins[0][1].done:
            pair = self._joins.popleft()
            self._seconds += self._cuda.get_elapsed_time(*pair) / 1e3
        return self._seconds

    def _event_on(self, stream):
        return stream.record(self._cuda.Event(disable_timing=True))


def record_in_graph(event: Any, stream: Any) -> None:
    """Record an event on a stream that is captured, so that others can wait for it outside."""
    status = _record()(event.ptr, stream.ptr, EXTERNAL)
    if status:
        raise RuntimeError(f"cuEventRecordWithFlags: error {status} of the CUDA driver")


@functools.cache
def _record():
    record = ctypes.CDLL("libcuda.so.1").cuEventRecordWithFlags
    record.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint
    return record
