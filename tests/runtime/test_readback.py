"""Copies to the host beside the current stream; here on a fake of CuPy that runs as late as it may.

A stream of the fake does nothing before an event in it is waited for, so an order that is not
asked for is never there by chance.
"""

import sys
from operator import call

import numpy as np
import pytest

from gpuattn.runtime.graphs import Calls
from gpuattn.runtime.readback import HostCopy


class Event:
    def __init__(self, stream):
        self.stream, self.place = stream, len(stream.queue)

    def synchronize(self):
        while self.stream.done < self.place:
            self.stream.done += 1
            self.stream.queue[self.stream.done - 1]()


class FakeCupy:
    """Streams, events, pinned memory and arrays, as ``HostCopy`` uses them."""

    def __init__(self):
        self.cuda, self.stack = self, []

        class Stream:
            def __init__(stream, non_blocking=True):
                stream.queue, stream.done = [], 0

            def __enter__(stream):
                self.stack.append(stream)

            def __exit__(stream, *_):
                self.stack.pop()

            def record(stream):
                return Event(stream)

            def wait_event(stream, event):
                stream.queue.append(event.synchronize)

        class ndarray:  # noqa: N801 CuPy's name
            def __init__(array, values):
                array.values, array.shape = values, values.shape
                array.dtype, array.nbytes = values.dtype, values.nbytes

            def get(array, out, blocking):
                assert not blocking and out.dtype == array.dtype
                self.stack[-1].queue.append(lambda: np.copyto(out, array.values))

        self.Stream, self.ndarray, self.PinnedMemory = Stream, ndarray, bytearray
        self.stack.append(Stream())

    def get_current_stream(self):
        return self.stack[-1]

    def PinnedMemoryPointer(self, memory, offset):  # noqa: N802 CuPy's name
        return memory


@pytest.mark.parametrize("held", [True, False])
def test_on_a_gpu_what_changes_the_arrays_waits_for_the_copy(monkeypatch, held):
    cupy = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    main, copy, values = cupy.stack[0], HostCopy(), np.zeros((2, 3), "f")
    for update in (1, 3):
        main.queue.append(lambda: values.fill(update))  # noqa: B023 run in this turn
        copy.begin({"w": cupy.ndarray(values)})
        main.queue.append(lambda: None)  # gradients
        assert main.done < len(main.queue) - 1, "nothing synchronizes"
        if held:
            copy.hold()
        main.queue.append(lambda: values.fill(update + 1))  # noqa: B023 run in this turn
        main.record().synchronize()
        assert (copy.values()["w"] == update + (not held)).all()


def test_on_a_gpu_only_the_updates_before_a_copy_are_waited_for(monkeypatch):
    cupy = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    main, copy, done = cupy.stack[0], HostCopy(), []
    copy.prepare({"w": cupy.ndarray(np.ones(3))})
    main.queue.append(lambda: done.append("update"))
    copy.begin({"w": cupy.ndarray(np.ones(3))})
    main.queue.append(lambda: done.append("gradients"))
    assert (copy.values()["w"] == 1).all() and done == ["update"]


def test_a_copy_keeps_its_values_and_its_memory(xp):
    array, copy = xp.arange(5), HostCopy()
    copy.begin({"w": array})
    first = copy.values()["w"]
    copy.hold()
    array += 1
    assert first.tolist() == [0, 1, 2, 3, 4]
    copy.begin({"w": array})
    assert copy.values()["w"] is first and first.tolist() == [1, 2, 3, 4, 5]


def test_a_copy_is_ordered_with_the_stream(gpu, delayed):
    stream, steps, copy = gpu.cuda.Stream(non_blocking=True), Calls(call), HostCopy()
    with stream:
        x = gpu.zeros(1000, np.float32)
        for turn in range(20):
            steps("write", None, lambda: x.fill(turn))  # noqa: B023 called at once
            copy.begin({"x": x})
            copy.hold()
            steps("write", None, lambda: x.fill(-1))
            assert (copy.values()["x"] == turn).all()
