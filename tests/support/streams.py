"""CUDA streams, events and graphs that know what has happened before what, for tests without a GPU.

Nothing is computed: ``touch`` notes that the current stream uses some memory, and raises where that
is not ordered with what others have done there. A capture notes what its streams do, and each
``launch`` of the graph does it, with events recorded anew for those who wait after it.
"""

import itertools
from types import SimpleNamespace


class Unordered(AssertionError):
    pass


class Streams:
    """Stands in for CuPy with the streams of one GPU. ``main``: the first one that is current."""

    def __init__(self):
        self.numbers, self.current, self.last = itertools.count(), [], {}
        self.log, self.capture = [], None
        owner = self

        class Stream(_Stream):
            def __init__(self, non_blocking=True, priority=0):
                super().__init__(owner, priority)

        class Event(_Event):
            def __init__(self, disable_timing=False):
                super().__init__(owner)

        self.Stream, self.Event = Stream, Event
        self.cuda = SimpleNamespace(
            Stream=Stream, Event=Event, get_current_stream=lambda: self.current[-1],
            get_elapsed_time=lambda a, b: 1000 * (b.time - a.time),
            runtime=SimpleNamespace(getDevice=lambda: 0),
        )  # fmt: skip
        self.main = Stream()
        self.current.append(self.main)

    def touch(self, place, what=""):
        """The current stream writes to ``place``, any hashable, after all that did so before."""
        self.do(self.current[-1], lambda stream: self._touch(stream, place, what))

    def _touch(self, stream, place, what):
        number = next(self.numbers)
        before = self.last.get(place)
        if before is not None and before not in stream.seen:
            raise Unordered(f"{what or place}: a stream does not wait for what was there before")
        stream.seen.add(number)
        self.last[place] = number
        self.log.append((stream, place))

    def do(self, stream, operation):
        """Run ``operation(stream)`` now, or note it in the capture that the stream is part of."""
        if stream.capturing:
            self.capture.append((stream, operation))
        else:
            operation(stream)


class _Stream:
    def __init__(self, owner, priority):
        self.owner, self.priority, self.seen, self.capturing = owner, priority, set(), False
        self.ptr = self

    def __enter__(self):
        self.owner.current.append(self)
        return self

    def __exit__(self, *error):
        self.owner.current.pop()

    def is_capturing(self):
        return self.capturing

    def wait_event(self, event):
        if event.captured:
            self.capturing = True  # joins that capture
        else:
            assert not self.capturing, "a captured stream waits for an event outside of its graph"
        self.owner.do(self, lambda stream: stream.seen.update(event.seen))

    def record(self, event=None):
        event = event or self.owner.Event()
        event.record(self)
        return event

    def begin_capture(self):
        self.capturing, self.owner.capture = True, []

    def end_capture(self):
        operations = self.owner.capture
        for stream, _ in operations:
            stream.capturing = False
        self.capturing, self.owner.capture = False, None
        return Graph(self, operations)


class _Event:
    def __init__(self, owner):
        self.owner, self.seen, self.captured, self.ptr = owner, set(), False, self
        self.done, self.time = False, 0.0

    def record(self, stream=None):
        stream = stream or self.owner.current[-1]
        self.captured = stream.capturing
        self.owner.do(stream, self._at)

    def record_in_graph(self, stream):
        """As ``parallel.lane.record_in_graph``."""
        assert stream.capturing
        self.owner.do(stream, self._at)

    def _at(self, stream):
        stream.seen.add(next(self.owner.numbers))
        self.seen = set(stream.seen)


class Graph:
    def __init__(self, stream, operations):
        self.stream, self.operations = stream, operations

    def launch(self, stream):
        """Run as branches of a graph: only edges order them, besides what was there before."""
        for other in {other for other, _ in self.operations}:
            if other is not stream:
                other.seen |= stream.seen
        for other, operation in self.operations:
            operation(other)
        for other, _ in self.operations:
            assert other.seen <= stream.seen, "a stream of the capture is not joined at its end"
