"""Ranks deal evaluations out among them: the same results, by any number of ranks."""

import dataclasses

import numpy as np
import pytest
from ranks import Ranks, train_by
from stopping import assert_same_bits, assert_same_metrics

from gpuattn.errors import ConfigError
from gpuattn.parallel.dealing import Dealing
from gpuattn.runs.config import TrainConfig
from gpuattn.train.session import train

SIZES = {"dim": 16, "heads": 2, "layers": (1, 1), "length": "4u", "eval_every": "2u", "warmup": 2,
         "replicas": 4, "deterministic": True, "ema": 0.0, "dropout": 0.1}  # fmt: skip
CALLS = """
from gpuattn.errors import ConfigError
from gpuattn.parallel.agreement import is_silent
from gpuattn.parallel.dealing import Dealing
from gpuattn.parallel.world import connected
with connected() as ranks:
    rank, deal = ranks.rank, Dealing(ranks)
    assert deal.each(range(5), lambda i: (i, rank)) == [(i, i % 3) for i in range(5)]
    assert deal.each(iter("a"), str.upper) == ["A"] and deal.each([], str) == []
    lines, seen = ["a", "ccc", "", "bb"], []
    of = lambda chosen: [seen.append(i) or (lines[i], rank) for i in chosen]
    assert deal.lines(lines, of) == [("a", 2), ("ccc", 0), ("", 0), ("bb", 1)]
    assert seen == [[1, 2], [3], [0]][rank] and not deal.stopped
    order = []
    deal.read(lambda: order.append(ranks.rank))
    assert order == [rank]
    def fails(i):
        raise ValueError("made for a test")
    for wrong, error in (
        (lambda: deal.each(range(rank + 1), str), ConfigError),
        (lambda: deal.each([0], fails), SystemExit if rank else ValueError),
        (lambda: deal.lines(["a"], fails), SystemExit if rank else ValueError),
    ):
        try:
            wrong()
        except error as raised:
            assert is_silent(raised) == (rank > 0), raised
        else:
            raise AssertionError
    stopping = Dealing(ranks, lambda: rank == 1)
    stopping.each(range(9), lambda i: seen.append(i))
    assert stopping.stopped and len(seen) == [5, 2, 4][rank]
"""


def test_ranks_share_pieces_and_lines():
    code, said = Ranks(3, CALLS).end()
    assert code == 0, said


def test_one_process_does_all_by_itself():
    deal = Dealing()
    assert deal.each(iter("ab"), str.upper) == ["A", "B"] and not deal.stopped
    assert deal.lines(["a", "bbb"], list) == [0, 1]
    assert deal.read(lambda: 3) == 3
    with pytest.raises(ConfigError, match="as it is"):  # not ``silent``
        deal.read(lambda: (_ for _ in ()).throw(ConfigError("as it is")))
    seen = []
    deal = Dealing(stop=lambda: len(seen) == 2)
    deal.each(range(9), seen.append)
    assert seen == [0, 1] and deal.stopped


@pytest.fixture
def configs(tmp_path):
    """A TrainConfig of every task but translation, each with some batches held out."""
    rng = np.random.default_rng(0)
    words = ["red car", "old dog", "new hat", "a"]
    lines = [f"the {' '.join(rng.choice(words, rng.integers(1, 4)))}" for _ in range(300)]
    (tmp_path / "text").write_text("\n".join(lines) + "\n")
    kinds = ("red" if "red" in line else "none" for line in lines)
    pairs = zip(lines, kinds, strict=True)
    (tmp_path / "train.tsv").write_text("".join(f"{line}\t{kind}\n" for line, kind in pairs))
    images, labels = rng.integers(0, 256, (90, 6, 6, 1), np.uint8), np.arange(90) % 3
    np.savez(tmp_path / "train.npz", images=images, labels=labels)
    text = {"lm": str(tmp_path / "text"), "tokenizer": "chars", "block": 32, "batch": 128}
    bert = {"model": "bert", "tokenizer": "chars", "block": 40, "batch": 160}
    return {
        "language": TrainConfig(**SIZES, **text | {"model": "gpt2"}),
        "masked": TrainConfig(**SIZES, **bert, lm=str(tmp_path / "text")),
        "labels": TrainConfig(**SIZES, **bert, classify=str(tmp_path / "train.tsv"), average=2),
        "images": TrainConfig(
            **SIZES, model="vit", images=str(tmp_path / "train.npz"), image_size=6, patch=3,
            channels=1, batch=2,
        ),
    }  # fmt: skip


def assert_any_world_is_the_same(configs, folder, counts):
    for name, config in configs.items():
        train(config, folder / name, device="numpy")
    for count in counts:
        train_by(count, *((c, folder / f"{name}-{count}", None) for name, c in configs.items()))
        for name in configs:
            other = folder / f"{name}-{count}"
            assert_same_bits(folder / name, other)
            assert_same_metrics(folder / name, other)
            written = [
                {path.name: path.read_text() for path in (run / "valid").iterdir()}
                for run in (folder / name, other)
            ]
            assert written[0] == written[1] and len(written[0]) == 2


def test_two_ranks_evaluate_all_tasks_as_one_process_does(configs, tmp_path):
    assert_any_world_is_the_same(configs, tmp_path, [2])


@pytest.mark.exhaustive
def test_four_ranks_evaluate_all_tasks_as_one_process_does(configs, tmp_path):
    more = {name: dataclasses.replace(config, ema=0.9) for name, config in configs.items()}
    assert_any_world_is_the_same(more, tmp_path, [4])
