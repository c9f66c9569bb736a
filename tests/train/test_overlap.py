"""Buckets of gradients between ranks of a run: on a fake GPU, whose other rank says the same."""

import dataclasses

import pytest
from fake_runs import training_on

from gpuattn.parallel import lane
from gpuattn.parallel.communicator import Single
from gpuattn.runs.config import TrainConfig
from gpuattn.runtime import buckets
from gpuattn.tasks.registry import task_of
from gpuattn.train.progress import Listener
from gpuattn.train.sharding import Sharing
from gpuattn.train.trainer import Trainer


class Two(Single):
    """Two ranks of which this is the first. ``calls``: (name, elements) so far."""

    size = local_size = 2

    def __init__(self):
        self.calls = []

    def gather(self, value):
        return [value, value]

    def all_reduce(self, array, ordered=False):
        self.calls.append(("all_reduce", array.size))

    def reduce_scatter(self, whole, piece, ordered=False):
        self.calls.append(("reduce_scatter", whole.size))
        assert whole.size == 2 * piece.size

    def all_gather(self, piece, whole):
        if whole.size > 2:  # else of norms
            self.calls.append(("all_gather", whole.size))


class Heard(Listener):
    def __init__(self):
        self.waiting = []

    def progress(self, progress):
        self.waiting.append(progress.waiting)


@pytest.fixture
def config(tmp_path, rng):
    (tmp_path / "text").write_text("".join(rng.choice(list("abcdefgh \n"), 9000)))
    return TrainConfig(
        model="gpt2", lm=str(tmp_path / "text"), tokenizer="chars", block=64, dropout=0.1,
        batch=256, dim=64, heads=2, layers=2, length="3u", eval_every="3u", replicas=2,
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # of numbers that were never computed
@pytest.mark.parametrize("shares, accumulate", [(False, 1), (True, 2)])
def test_buckets_of_captured_updates(config, monkeypatch, shares, accumulate):
    monkeypatch.setattr(buckets, "BUCKET", 20_000)
    recorded, ranks, heard = [], Two(), Heard()
    monkeypatch.setattr(lane, "record_in_graph", lambda event, stream: recorded.append(event))
    config = dataclasses.replace(config, accumulate=accumulate)
    with training_on("9.0"):
        sharing = Sharing(0, 2, ranks, None) if shares else None
        trainer = Trainer(
            task_of(config)(config), "cuda", heard, communicator=ranks, sharing=sharing
        )
        row = {"loss": 0.0, "score": 0.0}
        trainer.begin()
        ranks.calls.clear()
        assert trainer.run(lambda: False, lambda: row, lambda row: None)
        w = trainer.workspace
        sizes = [bucket.stop - bucket.start for bucket in w.buckets]
        sums = [("reduce_scatter" if shares else "all_reduce", size) for size in sizes]
        assert len(sums) >= 4 and sum(sizes) == w.size
        called = [call for call in ranks.calls if call[0] != "all_gather"]
        assert called == sums * 3  # op by op, captured and replayed
        last = "last gradients" if accumulate == 1 else "last more gradients"
        graphs = {name for name, _ in trainer.step.calls.graphs}
        assert graphs == {last, "update", *["gradients"] * (accumulate - 1)}
        assert all(graph is not None for graph in trainer.step.calls.graphs.values())
        assert recorded == trainer.exchange._lane._marks  # once, in order
        assert heard.waiting and all(share > 0 for share in heard.waiting)


@pytest.mark.filterwarnings("ignore")
def test_an_ordered_sum_marks_nothing(config, monkeypatch):
    """The launches of weight gradients, and so the bits, are those of one process."""
    config, ranks = dataclasses.replace(config, deterministic=True), Two()
    with training_on("9.0"):
        trainer = Trainer(task_of(config)(config), "cuda", Listener(), communicator=ranks)
        monkeypatch.setattr(lane.Lane, "mark", None)
        row = {"loss": 0.0, "score": 0.0}
        assert trainer.exchange.full is None
        assert trainer.run(lambda: False, lambda: row, lambda row: None)
        assert {name for name, _ in trainer.step.calls.graphs} == {"gradients", "update"}
        assert [name for name, _ in ranks.calls].count("all_reduce") == 3


@pytest.mark.filterwarnings("ignore")
def test_one_process_exchanges_nothing(config):
    with training_on("9.0"):
        trainer = Trainer(task_of(config)(config), "cuda", Listener())
        row = {"loss": 0.0, "score": 0.0}
        assert trainer.run(lambda: False, lambda: row, lambda row: None)
        assert trainer.exchange is None
        names = {name for name, _ in trainer.step.calls.graphs}
        assert names == {"gradients", "more gradients", "update"}
