"""Updates as CUDA graphs: equal bits with and without; op by op where capture fails."""

import contextlib
import dataclasses
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from delays import HOLD

from gpuattn.arrays import to_cpu
from gpuattn.data.fixed_shape import fixed_shape
from gpuattn.data.preparing.plan import Plan
from gpuattn.data.preparing.prepare import prepare
from gpuattn.data.preparing.sources import find_sources
from gpuattn.runs.config import TrainConfig
from gpuattn.runtime import graphs as graph
from gpuattn.runtime.feed import NUMBERS, DeviceFeed
from gpuattn.runtime.graphs import Replays
from gpuattn.tasks.registry import task_of
from gpuattn.train.progress import Listener
from gpuattn.train.state import tensors_of
from gpuattn.train.trainer import Trainer


class Heard(Listener):
    def __init__(self):
        self.said = []

    def say(self, topic, text):
        self.said.append((topic, text))


@pytest.fixture
def config(tmp_path):
    rng, words = np.random.default_rng(0), ["red", "green", "old", "new", "cat", "bird", "house"]
    lines = [" ".join(rng.choice(words, rng.integers(1, 9))) for _ in range(80)]
    source, target = (str(tmp_path / name) for name in ("src", "tgt"))
    (tmp_path / "src").write_text("\n".join(lines) + "\n")
    (tmp_path / "tgt").write_text("\n".join(line.upper() for line in lines) + "\n")
    return TrainConfig(
        source=source, target=target, vocab_size=400, max_len=40, dim=64, heads=2, layers=(1, 1),
        ffn=64, dropout=0.1, batch=256, lr=1e-2, warmup=4, length="25u", score_pairs=0,
    )  # fmt: skip


def trained(config, graphs):
    """Return (trainer, messages) after a run with one evaluation."""
    heard = Heard()
    trainer = Trainer(task_of(config)(config), "cuda", heard, graphs=graphs)
    assert trainer.run(lambda: False, lambda: {"loss": 0.0, "score": 0.0}, lambda row: None)
    return trainer, heard.said


@pytest.mark.parametrize(
    "changes",
    [{}, {"precision": "fp16", "accumulate": 2}, {"precision": "pure-bf16", "optimizer": "lion"},
     {"batching": "padded"}],
    ids=["bf16", "fp16 in two batches", "no masters", "padded"],
)  # fmt: skip
def test_graphs_give_the_same_bits(gpu, config, changes, delayed):
    config = dataclasses.replace(config, **changes)
    (replayed, said), (plain, _) = (trained(config, graphs) for graphs in (True, False))
    graphs = replayed.step.calls.graphs
    assert not said and {name for name, _ in graphs} >= {"gradients", "update"}
    assert all(graph is not None for (name, _), graph in graphs.items() if name == "update")
    states, others = tensors_of(replayed.step), tensors_of(plain.step)
    for name, array in states.items():
        np.testing.assert_array_equal(to_cpu(array), to_cpu(others[name]), err_msg=name)
    assert replayed.at.tokens == plain.at.tokens


def test_a_language_model_has_one_shape_and_the_same_bits(gpu, tmp_path, delayed):
    rng = np.random.default_rng(0)
    (tmp_path / "text").write_text("".join(rng.choice(list("abcdefgh \n"), 3000)))
    config = TrainConfig(
        model="gpt2", lm=str(tmp_path / "text"), tokenizer="chars", dim=64, heads=2, layers=2,
        block=32, dropout=0.1, batch=512, lr=1e-2, warmup=4, length="25u",
    )  # fmt: skip
    (replayed, said), (plain, _) = (trained(config, graphs) for graphs in (True, False))
    assert not said and len(replayed.step.calls.graphs) == 2
    assert all(graph is not None for graph in replayed.step.calls.graphs.values())
    last, there = replayed.corpus.loader(0).crops(24), replayed.step.feed.batch
    for name in ("tokens", "labels"):
        np.testing.assert_array_equal(to_cpu(getattr(there, name)), getattr(last, name))
    np.testing.assert_array_equal(to_cpu(there.order.order), last.order.order)
    states, others = tensors_of(replayed.step), tensors_of(plain.step)
    for name, array in states.items():
        np.testing.assert_array_equal(to_cpu(array), to_cpu(others[name]), err_msg=name)


def test_documents_have_few_shapes_and_the_same_bits(gpu, tmp_path, delayed):
    rng = np.random.default_rng(0)
    rows = ("".join(rng.choice(list("abcdefgh"), n)) for n in rng.integers(1, 60, 200))
    (tmp_path / "text.jsonl").write_text("".join(f'"{row}"\n' for row in rows))
    sources = tuple(find_sources([tmp_path / "text.jsonl"]))
    prepare(Plan(sources=sources, tokenizer="chars", documents=True), tmp_path / "store")
    config = TrainConfig(
        model="gpt2", lm=str(tmp_path / "store"), documents=True, dim=64, heads=2, layers=2,
        block=32, dropout=0.1, batch=512, lr=1e-2, warmup=4, length="25u",
    )  # fmt: skip
    (replayed, said), (plain, _) = (trained(config, graphs) for graphs in (True, False))
    assert not said and len(replayed.step.calls.graphs) == 2
    states, others = tensors_of(replayed.step), tensors_of(plain.step)
    for name, array in states.items():
        np.testing.assert_array_equal(to_cpu(array), to_cpu(others[name]), err_msg=name)


def test_a_step_that_cannot_be_captured_runs_op_by_op(gpu):
    heard, x = [], gpu.zeros(4)
    gpu.cuda.Device().synchronize()
    with gpu.cuda.Stream(non_blocking=True):
        steps = Replays(heard.append)

        def step():
            x[...] += 1
            float(x[0])  # synchronizes, which is not allowed during capture

        for _ in range(5):
            steps("waits", None, step)
        assert (to_cpu(x) == 5).all() and len(heard) == 1 and "no CUDA graphs" in heard[0]


def test_steps_on_the_default_stream_are_captured_while_others_use_it(gpu):
    heard, x, others = [], gpu.zeros(4), []

    def step():
        x[...] += 1
        thread = threading.Thread(target=lambda: others.append(float((gpu.ones(3) * 2).sum())))
        thread.start()
        thread.join()

    with gpu.cuda.Stream.null:
        steps = Replays(heard.append)
        for _ in range(5):
            steps("adds", None, step)
        x *= 2
        steps("adds", None, step)
    assert not heard and all(graph is not None for graph in steps.graphs.values())
    assert (to_cpu(x) == 11).all() and others == [6, 6]  # called op by op, then captured


class OldDriver(contextlib.nullcontext):
    """A fake of the parts of CuPy that ``Replays`` uses, with a driver that cannot capture."""

    def __init__(self):
        super().__init__()
        self.ptr = 3
        self.cuda, self.runtime = self, SimpleNamespace(CUDARuntimeError=RuntimeError)
        self.get_current_stream = self.get_default_memory_pool = lambda: self
        self.MemoryPool = lambda allocator: self
        self.using_allocator = contextlib.nullcontext
        self.malloc = self.free_all_blocks = lambda: None

    def begin_capture(self):
        raise RuntimeError("cudaErrorNotSupported: operation not supported")

    def is_capturing(self):
        return False


@pytest.mark.parametrize("refusal, reason", [
    ("No module named 'nvmath'", "No module named 'nvmath'. Run: gpuattn doctor"),
    (None, "RuntimeError: cudaErrorNotSupported: operation not supported"),
], ids=["no nvmath", "old driver"])  # fmt: skip
def test_without_graphs_steps_run_and_the_reason_is_reported_once(monkeypatch, refusal, reason):
    monkeypatch.setattr(graph, "import_cupy", OldDriver)
    monkeypatch.setattr(graph, "capture_refusal", lambda: refusal)
    heard, calls = [], []
    steps = Replays(heard.append)
    for shape in (1, 2, 1, 2, 1):
        steps("step", shape, lambda: calls.append(shape))  # noqa: B023 called at once
    assert len(calls) == 5
    assert heard == [f"no CUDA graphs, steps are slower: {reason}"]


@pytest.mark.timing
def test_a_replayed_update_does_not_synchronize(gpu, config):
    """Launch twenty updates, two at a time after a kernel that delays the GPU. If an update
    synchronized, that kernel would be finished after both launches."""
    config = dataclasses.replace(config, length="1000u", precision="fp16", accumulate=2)
    trainer = Trainer(task_of(config)(config), "cuda", Heard())
    batches, hold = trainer._batches.next(trainer.at), gpu.RawKernel(HOLD, "hold")
    trainer._batches.next = lambda at: batches  # so that no new shape occurs
    trainer._reported = 0.0
    with trainer.computing():
        stream = trainer.step.stream
        for _ in range(8):
            trainer._update()
            trainer._note()
            trainer._tell(wait=True)
        assert len(trainer.step.calls.graphs) == 3 and all(trainer.step.calls.graphs.values())
        for _ in range(10):
            stream.synchronize()
            trainer._tell(wait=True)
            hold((1,), (1,), (np.int64(20_000_000),))
            held = stream.record()
            trainer._update()
            trainer._note()
            trainer._update()
            assert not held.done
    assert trainer.optimizer.state.step == 28


def test_batches_arrive_complete_and_in_order(gpu, config, delayed):
    task = task_of(config)(config)
    batches = [batch for epoch in range(4) for batch in task.corpus.loader(0).epoch(epoch)]
    with gpu.cuda.Stream(non_blocking=True):
        feed, sums = DeviceFeed(task.fixed_shape), []
        for draw, batch in enumerate(batches):
            numbers = dict.fromkeys(NUMBERS, 0) | {"draw": draw, "weight": 1 / (1 + draw)}
            feed.load(batch, **numbers)
            there, n = feed.batch, feed.numbers
            sums.append([there.source.copy(), there.target_order.order.copy(), n.draw.copy(),
                         n.weight.copy(), there.cu_target.copy()])  # fmt: skip
        for draw, (batch, got) in enumerate(zip(batches, sums, strict=True)):
            fixed = fixed_shape(batch, config.batch, config.max_len + 1)
            want = [fixed.source, fixed.target_order.order, np.uint32(draw),
                    np.float32(1 / (1 + draw)), fixed.cu_target]  # fmt: skip
            for a, b in zip(got, want, strict=True):
                np.testing.assert_array_equal(to_cpu(a), b)
