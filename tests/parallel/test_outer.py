"""Replicas that update alone and step together each H updates."""

import numpy as np
import pytest
from fake_nccl import Meeting, Threads
from in_threads import in_threads
from ranks import command_by, train_by
from stopping import assert_same_bits, assert_same_metrics

import gpuattn
from gpuattn.errors import ConfigError
from gpuattn.nn.module import Module
from gpuattn.optim import AdamW
from gpuattn.parallel.communicator import Part
from gpuattn.parallel.outer import MOMENTUM, RATE, Outer
from gpuattn.runs.config import TrainConfig, to_toml
from gpuattn.runs.metrics import MetricsLog
from gpuattn.runtime import checkpoint
from gpuattn.train.session import train


@pytest.fixture
def config(reversed_text):
    return TrainConfig(
        **reversed_text, vocab_size=400, max_len=40, dim=16, heads=2, layers=(1, 1), ffn=16,
        dropout=0.3, batch=60, lr=1e-2, warmup=4, length="14u", eval_every="4u", score_pairs=3,
        ema=0.0, replicas=2, outer_every=3, threads=1,
    )  # fmt: skip


def model():
    class Line(Module):
        def __init__(self):
            self.weight = gpuattn.nn.Linear(20, 10)

    return Line()


def test_a_step_is_one_of_nesterov_by_the_mean_change():
    meeting, found = Meeting(2), [None, None]

    def work(rank):
        control = Threads(meeting, rank, 2)
        control.all_reduce = Part(control, 0).all_reduce
        optimizer = AdamW(model())
        masters = optimizer.workspace.masters
        start = np.random.default_rng(0).standard_normal(masters.size).astype(np.float32)
        masters[...] = start
        outer = Outer(optimizer, control, 3, ordered=True)
        outer.begin(0)
        noise = np.random.default_rng(1 + rank)
        changes, seen = [], []
        for update in (3, 6):
            changes.append(noise.standard_normal(masters.size).astype(np.float32) / 10)
            masters += changes[-1]
            outer.step(update)
            outer.step(update)  # once only
            seen.append(masters.copy())
        found[rank] = start, changes, seen

    in_threads(work, (0, 1))
    (start, one, seen), (_, two, same) = found
    theta, velocity = start.astype(np.float64), np.zeros(start.size)
    for i in range(2):
        assert seen[i].tobytes() == same[i].tobytes()
        gradient = -(one[i].astype(np.float64) + two[i]) / 2
        velocity = MOMENTUM * velocity + gradient
        theta -= RATE * (gradient + MOMENTUM * velocity)
        np.testing.assert_allclose(seen[i], theta, atol=1e-5)


EQUAL = """
    from gpuattn.train.trainer import Trainer
    inner, equal = Trainer._update, []
    def update(trainer):
        inner(trainer)
        bits = ranks.gather(trainer.workspace.masters.tobytes())
        assert (bits[0] == bits[1]) == (trainer.at.update % 3 == 0)
    Trainer._update = update
"""


def test_replicas_are_equal_after_each_third_update_and_not_between(config, tmp_path):
    train_by(2, (config, tmp_path / "run", None), lines=EQUAL, spawned=True)
    tensors, at = checkpoint.load(tmp_path / "run", "state")
    assert at["update"] == 14 and {"outer_velocity", "rank1:exp_avg"} <= set(tensors)
    assert np.abs(tensors["rank1:exp_avg"]).max() > 0
    rows = MetricsLog(tmp_path / "run" / "metrics.jsonl").read("valid")
    assert [row["update"] for row in rows] == [6, 12, 14]  # due after 4, and equal


def test_a_run_that_is_stopped_goes_on_bit_for_bit(config, tmp_path):
    train_by(2, (config, tmp_path / "whole", None), spawned=True)
    for calls in (4, 3, None):
        train_by(2, (config, tmp_path / "parts", calls), spawned=True)
        assert checkpoint.load(tmp_path / "parts", "state")[1]["update"] in (6, 9, 14)
    assert_same_bits(tmp_path / "whole", tmp_path / "parts")
    assert_same_metrics(tmp_path / "whole", tmp_path / "parts")


def test_what_cannot_step_together_is_refused(config, tmp_path):
    with pytest.raises(ConfigError, match="--outer-every 3 with 2 replicas and 1 rank; accepted"):
        train(config, tmp_path / "run", device="numpy")
    with pytest.raises(ConfigError, match="ema is 0.9; accepted: 0 with outer-every"):
        TrainConfig(**vars(config) | {"ema": 0.9})
    (tmp_path / "options.toml").write_text(to_toml(config))
    command = ("train", "--config", tmp_path / "options.toml", "--out", tmp_path / "run")
    code, said, errors = command_by(
        2, *command, "--device", "numpy", "--shard", "node", lines="", spawned=True
    )
    assert code == 2 and len(errors) == 1 and "lets each rank have parameters of its own" in said
    assert not (tmp_path / "run").exists()
