"""Planned backward passes beside a second stream: the same launches, events and waits, in order."""

import struct
import sys
from collections import Counter

import fake_launches
import fake_runs
import numpy as np
import pytest
from arena import Arena

from gpuattn import arrays, modes
from gpuattn.autodiff import plans, side_stream
from gpuattn.cuda.program import Program
from gpuattn.models import GPT2, GPT2Config
from gpuattn.nn.dropout import random_states
from gpuattn.ops.linear import weight_gradients
from gpuattn.runtime.workspace import Workspace

MAIN = 16  # the address of the stream that is current


class Places(Arena):
    """Knows which array an address is of. ``beside``: arrays made while a side stream was current,
    whose memory CuPy's pool gives to nothing on another stream."""

    def __init__(self):
        super().__init__(fake_runs.Array, 1 << 29)
        self.starts, self.beside = [], set()

    def empty(self, xp, shape, dtype):
        if sys.modules["cupy"].cuda.get_current_stream().ptr != MAIN:
            self.beside.add(len(self.starts))
        self.starts.append(self.first + self.at)
        return super().empty(xp, shape, dtype)

    def find(self, word):
        """Return (which array, offset) of an address, or None."""
        if not self.first <= word < self.first + self.at:
            return None
        i = int(np.searchsorted(self.starts, word, "right")) - 1
        return i, word - self.starts[i]


class Log(list):
    """What happens, with arrays numbered in the order in which launches first take them."""

    def __init__(self, arena):
        super().__init__()
        self.arena, self.names, self.taken = arena, {}, set()

    def words(self, values):
        """Note that a launch takes addresses among ``values``; return these with names."""
        found = []
        for value in values:
            place = self.arena.find(value)
            if place is not None:
                self.taken.add(place[0])
                place = self.names.setdefault(place[0], len(self.names)), place[1]
            found.append(place)
        return found


class Streams:
    """Streams and events that write to ``log``."""

    def __init__(self, cupy, log):
        self.log, self.made, owner = log, [], self

        class Stream(fake_runs.Stream):
            def __init__(self, non_blocking=True, priority=0):
                self.ptr = MAIN * (len(owner.made) + 1)
                owner.made.append(self)

            def __enter__(self):
                owner.current.append(self)
                return self

            def __exit__(self, *error):
                owner.current.pop()

            def wait_event(self, event):
                owner.log.append((self.ptr, "waits for", event.at))

        class Event(fake_runs.Event):
            def record(self, stream):
                self.at = stream.ptr, len(owner.log)
                owner.log.append((stream.ptr, "is at", self.at))

        cupy.cuda.Stream, cupy.cuda.Event = Stream, Event
        self.current = [Stream()]
        cupy.cuda.get_current_stream = lambda: self.current[-1]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_same_launches_on_the_same_streams(dropout, monkeypatch):
    arena, log, counts = Places(), Log(None), Counter()
    log.arena = arena
    inner = plans.gradients

    def gradients(plan, saved, grads, into, key, fold, run):
        found = plans._gradient_signature(plan, saved, grads, into, fold)
        known = None if found is None else plan.gradients.get(found[0])
        counts[type(known) is Program] += 1
        counts["fold"] += type(known) is Program and fold is not None
        return inner(plan, saved, grads, into, key, fold, run)

    end = side_stream._SideStream.end

    def checked_end(side, reads, addresses):
        """What launches on the side stream take is kept alive, or is there anyway."""
        places = [arena.find(getattr(x, "data", x).ptr) for x in reads if x is not None]
        assert log.taken - arena.beside <= {place[0] for place in places if place}
        log.append((MAIN, "writes to", sorted(addresses)))
        return end(side, reads, addresses)

    defer = side_stream._SideStream.defer

    def noted_defer(side, launch, arguments, *given):
        log.append((MAIN, "defers", given))
        return defer(side, launch, arguments, *given)

    begin = side_stream._SideStream.begin

    def noted_begin(side):
        log.taken.clear()
        return begin(side)

    monkeypatch.setattr(weight_gradients, "MIN_STEPS", 1)
    monkeypatch.setattr(side_stream, "_streams", {})
    monkeypatch.setattr(side_stream._SideStream, "begin", noted_begin)
    monkeypatch.setattr(side_stream._SideStream, "end", checked_end)
    monkeypatch.setattr(side_stream._SideStream, "defer", noted_defer)
    monkeypatch.setattr(plans, "gradients", gradients)
    with fake_runs.training_on("9.0") as run:
        cupy = sys.modules["cupy"]
        Streams(cupy, log)

        def launched(launch):
            words = [
                log.words(struct.unpack_from(f"{len(x) // 8}Q", x))
                for x in run.launches.parameters.pop()
            ]
            log.append((launch, run.launches.streams.pop(), words))

        def multiplied(*values):
            log.append(("product", values[-1], log.words(map(int, values[:-3]))))

        run.launches.append, run.products.matmul = launched, multiplied
        config = GPT2Config(200, d_model=384, heads=6, layers=2, block=64, dropout=dropout)
        model = GPT2(config)
        workspace = Workspace(model, "cuda", "bfloat16")
        tokens = cupy.asarray(np.arange(16 * 65, dtype=np.int32).reshape(16, 65) % 200)
        for random in random_states(model):
            random.step = cupy.asarray(np.zeros(1, np.uint32))
        monkeypatch.setattr(arrays, "allocate", arena.empty)
        turns = []
        for turn in range(5):
            del log[:]
            log.names.clear()
            counts.clear()
            workspace.begin()
            loss = model.loss(tokens[:, :-1].copy(), tokens[:, 1:].copy())
            if turn:
                workspace.backward(loss)
            else:
                with modes.without_plans():
                    workspace.backward(loss)
            turns.append(list(log))
        assert counts[True] > counts[False] and counts["fold"]
        where = Counter(entry[1] for entry in turns[0])
        assert len(where) == 6 and min(where.values()) > 4, "two streams, waits, deferred work"
        names = {entry[0].name for entry in turns[0] if isinstance(entry[0], fake_launches.Launch)}
        assert "weight_gradients" in names, "launches that were deferred"
        for entries in turns[1:]:
            assert entries == turns[0]
