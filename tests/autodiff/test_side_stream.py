"""Parameter gradients on the side stream: order of launches and waits, equal bits."""

import contextlib

import numpy as np
import pytest

from gpuattn.arrays import to_cpu
from gpuattn.autodiff import side_stream
from gpuattn.data.batching import PackedLoader
from gpuattn.models import GPT2, GPT2Config, TranslationConfig, TranslationModel
from gpuattn.modes import without_plans
from gpuattn.ops.linear import gradients as linear_gradients
from gpuattn.runtime.device import batch_to
from gpuattn.runtime.workspace import Workspace


class Cupy:
    """A fake of CuPy that logs the calls of its streams and events."""

    def __init__(self):
        self.cuda = self.runtime = self
        self.log, self.names = [], iter(["main", "side"])
        self.main = self.Stream()

    def Stream(self, **_):
        stream = _Stream()
        stream.log, stream.ptr = self.log, next(self.names)
        return stream

    def Event(self, **_):
        event = _Event()
        event.cuda = self
        return event

    def get_current_stream(self):
        return self.main

    def getDevice(self):
        return 0


class _Stream:
    def wait_event(self, event):
        self.log.append((self.ptr, "waits for", event.name))

    def record(self, event):
        event.record(self)
        return event

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


class _Event:
    def record(self, stream):
        self.name = f"{stream.ptr} {sum(1 for entry in stream.log if entry[1] == 'is at')}"
        stream.log.append((stream.ptr, "is at", self.name))


class Array:
    def __init__(self, ptr, nbytes=0):
        self.data, self.ptr, self.nbytes = self, ptr, nbytes


@pytest.fixture
def log(monkeypatch):
    cupy = Cupy()
    monkeypatch.setattr(side_stream, "import_cupy", lambda: cupy)
    monkeypatch.setattr(side_stream, "on_gpu", lambda array: True)
    monkeypatch.setattr(side_stream, "_streams", {})
    return cupy.log


def waits(log):
    return [(who, event) for who, what, event in log if what == "waits for"]


def test_the_end_of_the_block_joins_all_work(log):
    with side_stream.enabled(Array(0)):
        for ptr in (1, 2):
            with side_stream.on_side_stream([Array(9)], [Array(ptr)]) as apart:
                assert apart
        assert waits(log) == [("side", "main 0"), ("side", "main 2")]
    assert waits(log)[2:] == [("main", "side 3")]


def test_the_current_stream_joins_the_oldest_of_many_blocks(log):
    with side_stream.enabled(Array(0)):
        for ptr in range(side_stream.MAX_UNJOINED + 2):
            with side_stream.on_side_stream([], [Array(ptr)]):
                pass
    assert [event for who, event in waits(log) if who == "main"] == [
        "side 1", "side 3", f"side {2 * side_stream.MAX_UNJOINED + 3}",
    ]  # fmt: skip


def test_wait_for_joins_the_work_that_writes_a_target(log):
    with side_stream.enabled(Array(0)):
        for ptr in (1, 2, 3):
            with side_stream.on_side_stream([], [Array(ptr)]):
                pass
        side_stream.wait_for(Array(7))
        assert len(waits(log)) == 3
        side_stream.wait_for(Array(2))
        assert waits(log)[3:] == [("main", "side 3")]
    assert waits(log)[4:] == [("main", "side 5")]


def test_new_arrays_and_disabled_blocks_stay_on_the_current_stream(log):
    with side_stream.on_side_stream([], [Array(1)]) as apart:
        assert not apart
    side_stream.wait_for(Array(1))
    with side_stream.enabled(Array(0)), side_stream.on_side_stream([], [Array(1), None]):
        pass
    assert not log


def test_deferred_launches_run_together(log):
    """At the end of the block, when ``wait_for`` needs a target, and at the limit of kept bytes."""
    runs, half = [], side_stream.MAX_DEFERRED_BYTES // 2
    assert not side_stream.defer(runs.append, 0, [], [Array(0)])
    with side_stream.enabled(Array(0)):
        for n in (1, 2):
            assert side_stream.defer(runs.append, n, [], [Array(n), Array(10 * n)])
        side_stream.wait_for(Array(3))
        assert not runs
        side_stream.wait_for(Array(20))
        assert runs == [[1, 2]]
        for n in (3, 4, 5):
            side_stream.defer(runs.append, n, [Array(9, half)], [Array(n)])
        assert runs == [[1, 2], [3, 4]]
    assert runs == [[1, 2], [3, 4], [5]]
    with contextlib.suppress(ZeroDivisionError), side_stream.enabled(Array(0)):
        side_stream.defer(runs.append, 6, [], [Array(6)])
        raise ZeroDivisionError
    assert len(runs) == 3


@pytest.mark.parametrize("kind", ["translation", "tied", "gpt2"])
def test_the_same_bits_as_on_one_stream(gpu, kind, monkeypatch, delayed):
    rng, steps = np.random.default_rng(0), []
    if kind == "gpt2":
        model = GPT2(GPT2Config(100, d_model=64, heads=2, layers=3, block=48, dropout=0.1))
        tokens = gpu.asarray(rng.integers(0, 100, (40, 49), np.int32))
        steps = [lambda: model.loss(tokens[:, :-1], tokens[:, 1:])]
    else:
        sizes = {"d_model": 64, "heads": 2, "layers": (2, 3), "ffn": 128, "dropout": 0.1}
        model = TranslationModel(TranslationConfig(90, tied=kind == "tied", **sizes))
        pairs = [(rng.integers(4, 90, n).tolist(),) * 2 for n in rng.integers(2, 30, 80)]
        batches = [batch_to(batch, gpu) for batch in PackedLoader(pairs, 500, seed=0).epoch(0)]
        steps = [lambda batch=batch: model.loss(batch) for batch in batches]
    workspace = Workspace(model, "cuda", "bfloat16", "float32")

    def gradients():
        workspace.begin()
        for step in steps:
            workspace.backward(step())
        workspace.finish()
        return to_cpu(workspace.grads).copy()

    stream = gpu.cuda.Stream(non_blocking=True)
    gpu.cuda.Device().synchronize()
    # by default matmuls on the side stream are planned for half of the GPU
    monkeypatch.setattr(linear_gradients, "SIDE_SHARE", 1)
    with stream:
        beside = [gradients() for _ in range(4)]  # a signature's third gradient is by its program
        with without_plans():
            beside.append(gradients())
        monkeypatch.setattr(side_stream, "enabled", lambda like: contextlib.nullcontext())
        alone = gradients()
    assert np.abs(alone).sum() > 0
    for found in beside:
        np.testing.assert_array_equal(found, alone)
