"""Scratch memory: which launches share it, and when it is zeroed."""

import threading
from types import SimpleNamespace

import pytest
from in_threads import in_threads

from gpuattn.cuda import scratch


class Fake:
    """CuPy with one device: ``zeroed`` are the (address, bytes, stream) of memsets."""

    def __init__(self):
        self.device, self.stream, self.capturing, self.zeroed, self.allocated = 0, 1, False, [], 0
        stream = SimpleNamespace(ptr=99, synchronize=lambda: self.zeroed.append("synchronized"))
        self.cuda = SimpleNamespace(
            runtime=SimpleNamespace(
                getDevice=lambda: self.device,
                memsetAsync=lambda at, value, size, on: self.zeroed.append((at, size, on)),
            ),
            Memory=self.memory,
            memory=SimpleNamespace(Memory=self.memory),
            Stream=lambda non_blocking: stream,
            get_current_stream=lambda: SimpleNamespace(
                ptr=self.stream, is_capturing=lambda: self.capturing
            ),
        )

    def memory(self, size):
        self.allocated += 1
        return SimpleNamespace(ptr=self.allocated << 32, size=size)


@pytest.fixture
def cupy(monkeypatch):
    fake = Fake()
    monkeypatch.setattr(scratch, "import_cupy", lambda: fake)
    for name in ("_counters", "_chunks", "_workspaces"):
        monkeypatch.setattr(scratch, name, {})
    monkeypatch.setattr(scratch, "_chunks_in_use", [])
    return fake


def in_a_thread(call):
    found = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


def test_counters_are_shared_by_launches_of_a_thread_on_a_stream(cupy):
    first = scratch.counters()
    assert scratch.counters() == first
    assert in_a_thread(scratch.counters) != first
    cupy.stream = 2
    assert scratch.counters() != first
    cupy.device = 1
    assert scratch.counters() != first
    cupy.stream, cupy.device = 1, 0
    assert scratch.counters() == first
    size = 4 * scratch.CHUNK
    assert cupy.zeroed == [(1 << 32, size, 99), "synchronized", (2 << 32, size, 99), "synchronized"]


def test_a_larger_counter_array_replaces_a_smaller_one(cupy):
    few, many = scratch.counters(3), scratch.counters(5)
    assert many >= few + 4 * 3
    assert scratch.counters(2) == scratch.counters(5) == many
    assert scratch.counters(scratch.CHUNK + 1) == 2 << 32
    assert cupy.zeroed[-2:] == [(2 << 32, 4 * scratch.CHUNK + 4, 99), "synchronized"]


def test_captured_launches_have_counters_of_their_own(cupy):
    eager = scratch.counters(2)
    cupy.capturing = True
    taken = {int(eager), *(int(scratch.counters(2)) for _ in range(4))}
    cupy.capturing = False
    assert len(taken) == 5 and scratch.counters(2) == eager
    assert all(b - a >= 8 for a, b in zip(sorted(taken), sorted(taken)[1:], strict=False))


def test_the_default_stream_is_not_asked_whether_it_is_captured(cupy):
    cupy.stream, cupy.capturing = 0, True  # CuPy raises an error for it
    assert scratch.counters() == scratch.counters()


def test_a_workspace_belongs_to_one_user_on_one_stream(cupy):
    first = scratch.workspace("a", 100, 0, 1)
    assert scratch.workspace("a", 100, 0, 1) == first
    assert in_a_thread(lambda: scratch.workspace("a", 100, 0, 1)) == first
    others = [scratch.workspace("b", 9, 0, 1), scratch.workspace("a", 100, 0, 2)]
    assert len({first, *others, scratch.workspace("a", 100, 1, 1)}) == 4
    assert not cupy.zeroed


def test_a_zeroed_workspace_is_zeroed_once_before_it_is_used(cupy):
    """On a stream of its own: that of the launch may be captured."""
    places = {scratch.workspace("a", 100, 0, 77, zeroed=True) for _ in range(3)}
    assert cupy.zeroed == [(places.pop(), 100, 99), "synchronized"] and not places


def test_concurrent_threads_get_one_workspace(cupy, monkeypatch):
    allocate = cupy.memory
    cupy.cuda.memory.Memory = lambda size: (threading.Event().wait(0.02), allocate(size))[1]
    found = []

    def work(_):
        found.append(scratch.workspace("a", 100, 0, 1))

    in_threads(work, range(4))
    assert len(found) == 4 and len(set(found)) == 1 and cupy.allocated == 1
