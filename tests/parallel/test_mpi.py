"""The Communicator of MPI, and runs on several ranks: equal to those of one process."""

import dataclasses

import numpy as np
import pytest
from ranks import Ranks, train_by
from stopping import assert_same_bits, assert_same_metrics

from gpuattn.ops.update.gradient_statistics import read_state
from gpuattn.runs.config import TrainConfig
from gpuattn.runs.metrics import MetricsLog
from gpuattn.runtime import checkpoint
from gpuattn.train.session import train

CALLS = """
import numpy as np
from gpuattn.parallel.agreement import is_silent, together
from gpuattn.parallel.world import connected

with connected() as ranks:
    rank, size = ranks.rank, ranks.size
    assert ranks.gather((rank, "x")) == [(i, "x") for i in range(size)]
    for count in (0, 1, 2, 1000, 100_003):
        for dtype in ("float32", "float64"):
            every = np.random.default_rng(count).standard_normal((size, count)).astype(dtype)
            array = every[rank].copy()
            ranks.all_reduce(array)
            np.testing.assert_allclose(array, every.sum(0), rtol=1e-5, atol=1e-5)
            assert len(set(ranks.gather(array.tobytes()))) == 1
    tree = np.float32([1, 2**25, -(2**25)][rank:][:1])
    ranks.all_reduce(tree)
    assert tree == 0, "(1 + 2^25) is rounded before the third is added"
    whole = np.zeros(2 * size)
    ranks.all_gather(np.full(2, rank, float), whole)
    assert whole.tolist() == [i for i in range(size) for _ in "xx"]
    array = np.full(5, rank)
    ranks.broadcast(array)
    assert not array.any()
    ranks.barrier()
    assert ranks.waited > 0 and ranks.local_size == size
    every = np.random.default_rng(1).standard_normal((size, 4 * size)).astype("float32")
    whole = every[rank].copy()
    mine = whole.reshape(size, -1)[rank]
    ranks.reduce_scatter(whole, mine)
    ranks.all_gather(mine, whole)
    np.testing.assert_allclose(whole, every.sum(0), rtol=1e-5, atol=1e-5)
    part = ranks.split(rank % 2)
    assert (part.rank, part.size) == (rank // 2, (size + 1 - rank % 2) // 2)
    alone = np.float32([rank])
    part.all_reduce(alone)
    assert alone == sum(range(rank % 2, size, 2))

    def work():
        if rank == 1:
            raise ValueError("of rank 1")

    try:
        together(ranks, work)
    except (ValueError, SystemExit) as error:
        assert isinstance(error, ValueError) == (rank == 1) and is_silent(error) == (rank != 1)
    else:
        raise AssertionError
"""


@pytest.fixture
def config(reversed_text):
    return TrainConfig(
        **reversed_text, vocab_size=400, max_len=40,
        dim=16, heads=2, layers=(1, 1), ffn=16, dropout=0.3, batch=60, lr=1e-2, warmup=4,
        length="20u", eval_every="10u", score_pairs=3, ema=0.9, accumulate=2, replicas=4,
        deterministic=True,
    )  # fmt: skip


@pytest.mark.parametrize("spawned", [False, True])
def test_all_calls_of_the_communicator(spawned):
    code, said = Ranks(3, CALLS, spawned=spawned).end()
    assert code == 0, said


def test_four_ranks_give_the_bits_of_one_process(config, tmp_path, monkeypatch):
    monkeypatch.setattr("gpuattn.train.trainer.REPORT_SECONDS", 1e9)  # rows at evaluations only
    train(config, tmp_path / "one", device="numpy")
    lines = "import gpuattn.train.trainer; gpuattn.train.trainer.REPORT_SECONDS = 1e9"
    train_by(4, (config, tmp_path / "four", None), lines=lines)
    assert_same_bits(tmp_path / "one", tmp_path / "four")
    assert_same_metrics(tmp_path / "one", tmp_path / "four")
    rows = [MetricsLog(tmp_path / name / "metrics.jsonl").read("train") for name in ("one", "four")]
    assert [row["update"] for row in rows[0]] == [row["update"] for row in rows[1]] == [10, 20]
    for one, four in zip(*rows, strict=True):
        assert four["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert 0 <= four["waiting"] < 1 and 0 <= four["slowest"] < 4
    spent = [checkpoint.load(tmp_path / name, "state")[1]["spent"] for name in ("one", "four")]
    for name in ("tokens", "flops"):
        assert spent[0][name] == pytest.approx(spent[1][name])


CHANGES = {
    "bucketed": {"batching": "bucketed", "accumulate": 1},
    "epochs": {"length": "3e", "eval_every": "1e", "average": 2},
    "lion": {"optimizer": "lion", "lr": 1e-3, "ema": 0.0, "clip": 0.1},
    "eight": {"replicas": 8, "accumulate": 1, "batch": 50},
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CHANGES)
def test_all_numbers_of_ranks_give_the_same_bits(config, tmp_path, name):
    config = dataclasses.replace(config, **CHANGES[name])
    train(config, tmp_path / "1", device="numpy")
    for count in (2, 4):
        train_by(count, (config, tmp_path / str(count), None))
        assert_same_bits(tmp_path / "1", tmp_path / str(count))
        assert_same_metrics(tmp_path / "1", tmp_path / str(count))


@pytest.mark.exhaustive
def test_a_language_model_gives_the_same_bits(tmp_path):
    rng = np.random.default_rng(0)
    (tmp_path / "text").write_text("".join(rng.choice(list("abcde \n"), 4000)))
    config = TrainConfig(
        model="gpt2", lm=str(tmp_path / "text"), tokenizer="chars", dim=16, heads=2,
        layers=(1, 1), block=16, batch=64, dropout=0.2, warmup=2, length="20u", eval_every="10u",
        replicas=4, deterministic=True,
    )  # fmt: skip
    train(config, tmp_path / "1", device="numpy")
    train_by(2, (config, tmp_path / "2", None))
    assert_same_bits(tmp_path / "1", tmp_path / "2")
    assert_same_metrics(tmp_path / "1", tmp_path / "2")  # ranks deal out the validation batches


@pytest.mark.exhaustive
def test_in_turn_the_ranks_differ_from_one_process_by_rounding_only(config, tmp_path):
    config = dataclasses.replace(config, deterministic=False, optimizer="sgd", lr=0.1, threads=1)
    train(config, tmp_path / "1", device="numpy")
    for count in (2, 4):
        train_by(count, (config, tmp_path / str(count), None))
        one, other = (checkpoint.load(tmp_path / name, "state")[0] for name in ("1", str(count)))
        for name, a in one.items():
            if name != "optimizer_state":
                assert np.abs(a - other[name]).max() <= 2e-6 * max(1, np.abs(a).max()), name


@pytest.mark.exhaustive
def test_any_number_of_ranks_continues_any_checkpoint(config, tmp_path):
    config = dataclasses.replace(config, length="9e", accumulate=1)
    train(config, tmp_path / "whole", device="numpy")
    run = tmp_path / "parts"
    updates = []
    for count in (4, 2, 1, 4, 2):
        last = len(updates) == 4
        train_by(count, (config, run, None if last else 3))
        updates.append(checkpoint.load(run, "state")[1]["update"])
    assert sorted(set(updates)) == updates
    assert_same_bits(tmp_path / "whole", run)
    assert_same_metrics(tmp_path / "whole", run)


@pytest.mark.exhaustive
def test_what_is_frozen_and_given_weights_come_from_rank_0(config, tmp_path):
    train(dataclasses.replace(config, length="4u"), tmp_path / "begin", device="numpy")
    config = dataclasses.replace(
        config, init_from=str(tmp_path / "begin"), freeze="encoder", length="6u"
    )
    train(config, tmp_path / "1", device="numpy")
    train_by(2, (config, tmp_path / "2", None))
    assert_same_bits(tmp_path / "1", tmp_path / "2")


@pytest.mark.exhaustive
def test_nan_on_one_rank_skips_the_update_on_all(config, tmp_path):
    lines = """
    from gpuattn.runtime.training_step import TrainingStep
    take, taken = TrainingStep.take, []
    def poisoned(step):
        grads = take(step)
        taken.append(step)
        if ranks.rank == 1 and len(taken) == 5:
            grads[3] = np.nan
        return grads
    TrainingStep.take = poisoned
    """
    train_by(4, (config, tmp_path / "run", None), lines=lines)
    state = checkpoint.load(tmp_path / "run", "state")[0]["optimizer_state"]
    assert read_state(state)["skipped"] == 1 and read_state(state)["step"] == 19
