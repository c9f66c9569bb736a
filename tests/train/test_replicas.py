"""Runs of several replicas in one process; tests/parallel has them on several ranks."""

import dataclasses

import numpy as np
import pytest
from stopping import After, assert_same_bits, assert_same_metrics

from gpuattn.data.batching import of_rank
from gpuattn.errors import ConfigError
from gpuattn.runs.config import TrainConfig
from gpuattn.runtime import checkpoint
from gpuattn.tasks.registry import task_of
from gpuattn.train.session import train


@pytest.fixture
def config(reversed_text):
    return TrainConfig(
        **reversed_text, vocab_size=400, max_len=40,
        dim=16, heads=2, layers=(1, 1), ffn=16, dropout=0.3, batch=60, lr=1e-2, warmup=4,
        length="3e", eval_every="1e", score_pairs=3, ema=0.9, accumulate=2, replicas=4,
    )  # fmt: skip


def parameters(run):
    tensors = checkpoint.load(run, "state")[0]
    return np.concatenate([a.ravel() for n, a in tensors.items() if ":" not in n and a.ndim > 1])


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_run_of_replicas_resumes_bit_for_bit(config, tmp_path, deterministic):
    config = dataclasses.replace(config, deterministic=deterministic)
    train(config, tmp_path / "whole", device="numpy")
    for calls in (1, 2, 3, 10_000):
        outcome = train(config, tmp_path / "parts", device="numpy", stop=After(calls))
    assert outcome.finished
    assert_same_bits(tmp_path / "whole", tmp_path / "parts")
    assert_same_metrics(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize("data", ["lm", "classify"])
def test_lines_of_text_are_dealt_out_to_replicas(tmp_path, data):
    lines = [f"{'one two three'[: n % 9 + 3]} {n}" for n in range(60)]
    text = "".join(f"{line}\t{'ab'[n % 2]}\n" for n, line in enumerate(lines))
    (tmp_path / "text").write_text(text if data == "classify" else text.replace("\t", " "))
    config = TrainConfig(
        model="bert", **{data: str(tmp_path / "text")}, vocab_size=300, block=32, dim=16, heads=2,
        layers=(1, 1), batch=64, lr=1e-3, warmup=1, length="2e", eval_every="1e", replicas=2,
    )  # fmt: skip
    train(config, tmp_path / "whole", device="numpy")
    for calls in (1, 2, 10_000):
        outcome = train(config, tmp_path / "parts", device="numpy", stop=After(calls))
    assert outcome.finished
    assert_same_bits(tmp_path / "whole", tmp_path / "parts")
    loader = task_of(config)(config).corpus.loader(1)
    batches = [list(of_rank(loader, replica).epoch(1)) for replica in range(2)]
    count = [sum(len(batch.cu_seqlens) - 1 for batch in own) for own in batches]
    assert len(batches[0]) == len(batches[1]) == loader.batches(1)
    assert min(count) > 0 and sum(count) == loader.packing.count


def test_the_order_of_sums_is_all_that_deterministic_changes(config, tmp_path):
    config = dataclasses.replace(config, length="20u", optimizer="sgd", lr=0.1)
    train(config, tmp_path / "in_turn", device="numpy")
    train(dataclasses.replace(config, deterministic=True), tmp_path / "tree", device="numpy")
    a, b = parameters(tmp_path / "in_turn"), parameters(tmp_path / "tree")
    assert np.abs(a - b).max() < 1e-6 * np.abs(a).max()
    assert (a != b).any()


def test_an_update_takes_a_batch_of_each_replica_and_an_epoch_each_pair_once(config, tmp_path):
    updates = {}
    for replicas in (1, 4):
        options = {"replicas": replicas, "accumulate": 1, "length": "1e"}
        run = tmp_path / str(replicas)
        train(dataclasses.replace(config, **options), run, device="numpy")
        at = checkpoint.load(run, "state")[1]
        updates[replicas] = at["update"], at["tokens"]
    assert 3 * updates[4][0] <= updates[1][0] <= 4 * updates[4][0]
    assert updates[4][1] == updates[1][1]


def test_replicas_cannot_change_in_a_run(config, tmp_path):
    train(config, tmp_path / "run", device="numpy", stop=After(1))
    with pytest.raises(ConfigError, match="--replicas was 4, now 2"):
        train(dataclasses.replace(config, replicas=2), tmp_path / "run", device="numpy")
