"""Copies at both ends of a CUDA graph, emulated: every byte, and none beside it."""

from types import SimpleNamespace
from unittest import mock

import emulator
import numpy as np
import pytest

from gpuattn.runtime import graph_arrays
from gpuattn.runtime.graph_arrays import CHUNK, MOST, SLOTS, Ring

pytestmark = pytest.mark.usefixtures("host_compiler")


def cupy():
    """Return what a Ring takes of CuPy, in host memory."""
    made = emulator.as_array
    runtime = SimpleNamespace(getDevice=lambda: 0)
    event = SimpleNamespace(record=lambda stream: None, synchronize=lambda: None)
    return SimpleNamespace(
        zeros=lambda *args: made(np.zeros(*args)), asarray=made,
        cuda=SimpleNamespace(runtime=runtime, Event=lambda **_: event),
    )  # fmt: skip


class Memory:
    """Bytes at any address modulo 16, between bytes that must stay. ``array``: of these bytes."""

    def __init__(self, rng, size, shift):
        self.room = rng.integers(0, 256, size + 96, np.uint8)
        first = -self.room.ctypes.data % 16 + 16 + shift
        self.array = emulator.as_array(self.room[first : first + size])
        self.beside = np.ones(len(self.room), bool)
        self.beside[first : first + size] = False
        self.before = self.room[self.beside].copy()

    def check(self, values):
        np.testing.assert_array_equal(self.array, values)
        np.testing.assert_array_equal(self.room[self.beside], self.before)


@pytest.fixture
def emulated():
    machine = emulator.Machine(3, multiprocessors=2)
    names = {
        "kernel": machine.kernel,
        "gpu": lambda _: machine.gpu,
        "empty_pinned": lambda shape, dtype: np.zeros(shape, dtype),
    }
    with mock.patch.multiple(graph_arrays, **names):
        yield


def replay(ring, copies, arrays):
    """Do what a call does, and then its graph."""
    at = ring.sent % SLOTS * ring.words
    for i, x in enumerate(arrays):
        ring.slots[at + i] = x.ctypes.data
    ring.sent += 1
    for name, *launch in copies:
        graph_arrays.kernel(graph_arrays.FILE, name)(*launch)


def captured(ring, own_inputs, own_outputs):
    """Return the launches of a graph that copies and does no more."""
    launches: list = []
    noted = lambda file, name: lambda *args: launches.append((name, *args))  # noqa: E731
    with mock.patch.object(graph_arrays, "kernel", noted):
        if own_inputs:
            ring.copy_in(own_inputs)
        ring.copy_out(own_outputs)
    ring.open()
    return launches


SIZES = (1, 15, 16, 17, 4096, 4099, 3 * CHUNK + 8, 12 * CHUNK)


@pytest.mark.parametrize("shift", [(0, 0), (0, 4), (8, 2), (1, 0), (3, 3)])
def test_sizes_and_addresses(emulated, rng, shift):
    own = [Memory(rng, size, shift[0]) for size in SIZES]
    ring = Ring(cupy(), None)
    outs = [Memory(rng, size, 0) for size in SIZES[::-1]]
    launches = captured(ring, [m.array for m in own], [m.array for m in outs])
    assert ring.words == 2 * len(SIZES)
    for _ in range(3):
        given = [Memory(rng, size, shift[1]) for size in SIZES]
        results = [Memory(rng, size, shift[0] ^ shift[1]) for size in SIZES[::-1]]
        before = [m.array.copy() for m in given]
        replay(ring, launches, [m.array for m in (*given, *results)])
        for mine, other, values in zip(own, given, before, strict=True):
            mine.check(values)
            other.check(values)
        for mine, other in zip(results, outs, strict=True):
            mine.check(other.array)
            other.check(other.array)


def test_slots_in_turns(emulated, rng):
    own, out = Memory(rng, 4, 0), Memory(rng, 4, 0)
    ring = Ring(cupy(), None)
    launches = captured(ring, [own.array], [out.array])
    state = ring.state.view(np.uint32)
    state[0] = ring.sent = SLOTS - 3
    for i in range(SLOTS - 3, SLOTS + 2):
        given, result = np.frombuffer(np.uint32(i).tobytes(), np.uint8).copy(), Memory(rng, 4, 0)
        replay(ring, launches, [given, result.array])
        own.check(given)
        result.check(out.array)
        assert state[0] == i + 1 and list(ring.given) == [
            given.ctypes.data,
            result.array.ctypes.data,
        ]
    state[0] = 2**32 - 1  # the count wraps around; its last number takes the last slot
    ring.sent = SLOTS - 1
    replay(ring, launches, [given, result.array])
    assert state[0] == 0


@pytest.mark.parametrize("inputs, outputs", [(2, 0), (0, 2), (MOST + 3, 2 * MOST), (MOST, 1)])
def test_many_arrays_and_none(emulated, rng, inputs, outputs):
    own, outs = ([Memory(rng, 5 + i, i % 3) for i in range(n)] for n in (inputs, outputs))
    ring = Ring(cupy(), None)
    launches = captured(ring, [m.array for m in own], [m.array for m in outs])
    for i in range(2):
        given = [Memory(rng, 5 + i, 0) for i in range(inputs)]
        results = [Memory(rng, 5 + i, 1) for i in range(outputs)]
        replay(ring, launches, [m.array for m in (*given, *results)])
        for mine, other in zip([*own, *results], [*given, *outs], strict=True):
            mine.check(other.array)
        assert ring.state.view(np.uint32)[0] == i + 1
