"""The exchange of buckets beside a backward pass: order of streams, on stand-ins for them."""

import contextlib

import numpy as np
import pytest
from delays import HOLD
from streams import Streams, Unordered

from gpuattn import to_cpu
from gpuattn.autodiff import side_stream
from gpuattn.data.batching import LanguageModelLoader
from gpuattn.models import GPT2, GPT2Config
from gpuattn.optim import AdamW
from gpuattn.parallel import lane as lane_module
from gpuattn.parallel.communicator import Single
from gpuattn.parallel.exchange import Exchange
from gpuattn.parallel.lane import Lane
from gpuattn.runtime import TrainingStep, Workspace, buckets

BUCKETS = 4


class Array:
    def __init__(self, place):
        self.data, self.ptr, self.nbytes = self, place, 1


@pytest.fixture
def cuda(monkeypatch):
    streams = Streams()
    for module in (lane_module, side_stream):
        monkeypatch.setattr(module, "import_cupy", lambda: streams)
    monkeypatch.setattr(side_stream, "on_gpu", lambda array: True)
    monkeypatch.setattr(side_stream, "_streams", {})
    monkeypatch.setattr(
        lane_module, "record_in_graph", lambda event, stream: event.record_in_graph(stream)
    )
    return streams


def backward(cuda, lane=None):
    """A backward pass: of each bucket a gradient on each stream, and one that is deferred.

    Those of bucket i are "i main", "i side" and "i deferred".
    """
    launched = lambda problems: [cuda.touch(f"{i} deferred") for (i,) in problems]  # noqa: E731
    with side_stream.enabled(None):
        for i in range(BUCKETS):
            cuda.touch(f"{i} main")
            targets = Array(f"{i} side"), Array(f"{i} deferred")
            with side_stream.on_side_stream([], [targets[0]]):
                cuda.touch(f"{i} side")
            side_stream.defer(launched, (i,), [], [targets[1]])
            if lane:
                lane.mark(i, side_stream.pending(targets))


def exchange(cuda, lane, marked=True):
    with lane.exchanging(waits=not marked):
        for i in range(BUCKETS):
            if marked:
                lane.wait(i)
            for where in ("main", "side", "deferred"):
                cuda.touch(f"{i} {where}", "exchange")


def update(cuda):
    for i in range(BUCKETS):
        for where in ("main", "side", "deferred"):
            cuda.touch(f"{i} {where}", "update")


@pytest.mark.parametrize("marked", [True, False])
def test_updates_op_by_op_and_as_graphs_are_ordered(cuda, marked):
    lane, graph = Lane(BUCKETS), None
    assert lane.stream.priority < 0
    for turn in range(5):
        if turn == 2:  # from here on as a graph
            cuda.main.begin_capture()
            backward(cuda, lane)
            graph = cuda.main.end_capture()
            assert not any(s.capturing for s, _ in graph.operations)
        if graph:
            graph.launch(cuda.main)
        else:
            backward(cuda, lane)
        exchange(cuda, lane, marked)
        update(cuda)


def test_an_exchange_that_does_not_wait_is_noticed(cuda):
    lane = Lane(BUCKETS)
    backward(cuda, lane)
    with pytest.raises(Unordered, match="exchange"), lane.exchanging(waits=False):
        cuda.touch("0 main", "exchange")
    backward(cuda, lane)
    with lane.stream:
        lane.wait(BUCKETS - 1)
        for i in range(BUCKETS):
            cuda.touch(f"{i} side", "exchange")
    with pytest.raises(Unordered, match="update"):  # the current stream has not waited
        update(cuda)


def test_side_work_that_no_event_tells_of_is_noticed(cuda):
    lane = Lane(BUCKETS)
    with side_stream.enabled(None):
        with side_stream.on_side_stream([], [Array("a")]):
            cuda.touch("a")
        lane.mark(0, [])
        with lane.stream:
            lane.wait(0)
            with pytest.raises(Unordered):
                cuda.touch("a")


def test_neither_the_pass_nor_its_side_stream_waits_for_marks_or_each_other(cuda):
    """The current stream still does not wait for weight gradients before the end of the pass."""
    lane = Lane(3)
    with side_stream.enabled(None):
        for i in range(2):
            cuda.touch(f"{i} main")
            with side_stream.on_side_stream([], [Array(f"{i} side")]):
                cuda.touch(f"{i} side")
            lane.mark(i, side_stream.pending([Array(f"{i} side")]))
        assert cuda.last["0 side"] not in cuda.main.seen
    assert cuda.last["1 side"] in cuda.main.seen
    with lane.stream:
        lane.wait(0)
        cuda.touch("0 side"), cuda.touch("0 main")
        with pytest.raises(Unordered):
            cuda.touch("1 main")


def test_what_was_deferred_for_other_buckets_alone_stays_deferred(cuda):
    done = []
    with side_stream.enabled(None):
        side_stream.defer(lambda problems: done.extend(problems), (1,), [], [Array("one")])
        assert side_stream.pending([Array("other")]) == [] and not done
        side_stream.pending([Array("one")])
        assert done == [(1,)]
    assert side_stream.pending([Array("one")]) == []


def test_the_seconds_of_joins_are_read_when_they_are_there(cuda):
    lane = Lane(1)
    for _ in range(3):
        with lane.exchanging(waits=True):
            pass
    pairs = list(lane._joins)
    assert lane.seconds() == 0
    for i, (before, after) in enumerate(pairs):
        before.time, after.time = 10.0 * i, 10.0 * i + 0.25 * (i + 1)
    pairs[0][1].done = pairs[2][1].done = True
    assert lane.seconds() == 0.25
    pairs[1][1].done = True
    with lane.exchanging(waits=True):
        assert not lane._joins
    assert len(lane._joins) == 1
    assert lane.seconds() == lane.seconds() == 1.5


def test_on_numpy_nothing_is_marked():
    with contextlib.ExitStack() as stack:
        stack.enter_context(side_stream.enabled(np.zeros(1)))
        assert side_stream.pending([np.zeros(1)]) == []


# ---- on a GPU -----------------------------------------------------------------------------------


def test_a_mark_in_a_graph_is_waited_for_after_each_launch(gpu):
    """Each launch writes 1, 2, 3, ... to both arrays, late; a wait that is missing reads old ones,
    or zero."""
    hold = gpu.RawKernel(HOLD, "hold")
    hold.compile()
    wait = lambda: hold((1,), (1,), (np.int64(2_000_000),))  # noqa: E731
    stream, seen = gpu.cuda.Stream(non_blocking=True), []
    with stream:
        lane = Lane(2)
        first, second = gpu.zeros(1000, np.int32), gpu.zeros(1000, np.int32)
        first += 1
        first -= 1
        stream.synchronize()
        stream.begin_capture()
        for i, x in enumerate((first, second)):
            wait()
            x += 1
            lane.mark(i, [])
        graph = stream.end_capture()
        for _ in range(20):
            graph.launch(stream)
            with lane.exchanging(waits=False):
                for i, x in enumerate((first, second)):
                    lane.wait(i)
                    seen.append(x.copy())
        stream.synchronize()
    for turn in range(20):
        for x in seen[2 * turn : 2 * turn + 2]:
            assert x.tolist() == [turn + 1] * 1000
    assert 0 < lane.seconds() < 1


class Doubling(Single):
    """Two ranks of which this is one, and the other has the same gradients."""

    def all_reduce(self, array, ordered=False):
        array *= 2

    def reduce_scatter(self, whole, piece, ordered=False):
        piece[...] = 2 * whole


@pytest.mark.parametrize("shares", [False, True])
def test_overlap_and_graphs_do_not_change_bits(gpu, delayed, monkeypatch, shares):
    monkeypatch.setattr(buckets, "BUCKET", 20_000)
    sizes = GPT2Config(vocab=128, d_model=128, heads=2, layers=3, block=64)
    loader, found = LanguageModelLoader(np.arange(20_000) % 97, block=64, batch=8, seed=0), {}
    for overlap in (True, False):
        for graphs in (True, False):
            model = GPT2(sizes, seed=0)
            w = Workspace(model, "cuda", "bfloat16", part=0 if shares else None)
            optimizer = AdamW(w, weight_decay=0.01, max_norm=1.0)
            exchange = Exchange(optimizer, Doubling(), overlap=overlap)
            assert len(w.buckets) > 4

            def loss(batch, dloss, model=model):
                return model.loss(batch.tokens, batch.labels, dloss, order=batch.order)

            step = TrainingStep(
                model, optimizer, loss, tokens=2 * 8 * 64, graphs=graphs, exchange=exchange,
                tuned=False,
            )  # fmt: skip
            for batch, _ in zip(loader.epoch(0), range(6), strict=False):
                step(batch, learning_rate=0.01)
            assert step.mean_loss() < 4.8
            found[overlap, graphs] = to_cpu(w.params).tobytes()
            assert exchange.waited() >= 0
    assert len(set(found.values())) == 1
