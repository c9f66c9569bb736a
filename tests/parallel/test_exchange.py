"""Ranks that hold parts of masters, moments and averages, and updates of which some rank fails."""

import dataclasses
import time

import numpy as np
import pytest
from ranks import Ranks, command_by, train_by
from stopping import assert_same_bits, assert_same_metrics

from gpuattn.errors import ConfigError
from gpuattn.parallel.communicator import Single
from gpuattn.runs.config import TrainConfig, to_toml
from gpuattn.runs.metrics import MetricsLog
from gpuattn.runtime import checkpoint
from gpuattn.runtime.precision import PRECISIONS
from gpuattn.train.session import train
from gpuattn.train.sharding import share_parameters

TOPOLOGY = """
    near = {near}
    ranks.local_rank, ranks.local_size = ranks.rank % near, near
"""  # so many ranks on a host


@pytest.fixture
def config(reversed_text):
    return TrainConfig(
        **reversed_text, vocab_size=400, max_len=40,
        dim=16, heads=2, layers=(1, 1), ffn=16, dropout=0.3, batch=60, lr=1e-2, warmup=4,
        length="6u", eval_every="3u", score_pairs=3, ema=0.9, accumulate=2, replicas=4, clip=0.0,
        threads=1,
    )  # fmt: skip


def state(folder):
    return checkpoint.load(folder, "state")[0]


SMALL = """
    import gpuattn.runtime.buckets
    gpuattn.runtime.buckets.BUCKET = 3000
"""  # elements


def test_parts_and_buckets_give_the_bits_of_whole_buffers(config, tmp_path):
    """Without clipping, which takes the norm in another order."""
    for shard, lines in (("none", "pass"), ("node", SMALL)):
        train_by(2, (config, tmp_path / shard, None), shard=shard, lines=lines, spawned=True)
    assert_same_bits(tmp_path / "none", tmp_path / "node")
    assert_same_metrics(tmp_path / "none", tmp_path / "node")


DROPS = """
import sys
import numpy as np
from gpuattn import Tensor, nn
from gpuattn.optim import SGD
from gpuattn.parallel.exchange import Exchange
from gpuattn.parallel.world import connected
from gpuattn.runtime import TrainingStep, Workspace, buckets
from dataclasses import dataclass

buckets.BUCKET, shard = 300, sys.argv[1] == "node"


class Model(nn.Module):
    def __init__(self):
        rng = np.random.default_rng(0)
        self.table = Tensor(rng.standard_normal((64, 16), dtype=np.float32), requires_grad=True)
        self.frozen = Tensor(np.ones((16, 16), np.float32))
        self.layers = [nn.Linear(16, 16, rng=rng) for _ in range(5)]

    def loss(self, x, kept):
        h = x @ self.table
        for i in kept:
            h = h + 0.1 * self.layers[i](h @ self.frozen)
        return (h @ self.table.T).mean()


@dataclass
class Batch:
    x: np.ndarray
    kept: tuple
    target_tokens: int = 8
    limits: tuple = ()


def batch(rank, update, part):
    rng = np.random.default_rng((rank, update, part))
    kept = rng.permutation(5)[: rng.integers(0, 6)]  # other layers, in another order
    return Batch(rng.standard_normal((8, 64), dtype=np.float32), tuple(kept.tolist()))


class Noting:
    def __init__(self, ranks):
        self.ranks, self.calls = ranks, []

    def __getattr__(self, name):
        def noted(*args):
            self.calls.append((name, [getattr(x, "size", x) for x in args]))
            return found(*args)

        found = getattr(self.ranks, name)
        return noted if name in ("all_reduce", "reduce_scatter", "all_gather") else found


def step_of(ranks):
    model = Model()
    part = ranks.rank if shard and ranks else None
    w = Workspace(model, parts=ranks.size if ranks else 1, part=part, moments=SGD.moments)
    optimizer = SGD(w, lr=0.1)
    exchange = Exchange(optimizer, ranks) if ranks else None
    loss = lambda given, dloss: model.loss(given.x, given.kept)
    return w, TrainingStep(model, optimizer, loss, tokens=16, exchange=exchange)


with connected() as world:
    ranks = Noting(world)
    w, step = step_of(ranks)
    assert len(w.buckets) > 3
    alone, one = step_of(None)
    for update in range(6):
        parts = 1 + update % 2
        step.begin(0.1)
        for part in range(parts):
            step.add(batch(world.rank, update, part), 0, last=part == parts - 1)
        step.put(8 * parts * world.size)
        step.apply()
        one(*(batch(r, update, p) for r in range(world.size) for p in range(parts)),
            learning_rate=0.1)
        np.testing.assert_allclose(w.params[: alone.size], alone.params, rtol=2e-5, atol=2e-6)
        found = world.gather((ranks.calls, w.params.tobytes()))
        assert all(other == found[0] for other in found)
    each = len(w.buckets)
    names = [name for name, _ in ranks.calls]
    assert names == (["reduce_scatter"] * each + ["all_gather"] * (1 + each) if shard else
                     ["all_reduce"] * each) * 6
"""


@pytest.mark.parametrize("shard", ["none", "node"])
@pytest.mark.parametrize("count, spawned", [(2, False), (3, True)])
def test_ranks_that_leave_out_other_layers_make_the_same_calls(shard, count, spawned):
    """With a tied table, frozen weights, and two batches in every other update."""
    code, said = Ranks(count, DROPS, shard, spawned=spawned).end()
    assert code == 0, said


@pytest.mark.exhaustive
@pytest.mark.parametrize("near", [1, 2, 4])
def test_parts_inside_hosts_are_summed_across_them(config, tmp_path, near):
    config = dataclasses.replace(config, clip=1.0, optimizer="sgd", lr=0.1)
    train(config, tmp_path / "one", device="numpy")
    lines = TOPOLOGY.format(near=near)
    if near == 1:
        with pytest.raises(AssertionError, match="each host has one rank"):
            train_by(4, (config, tmp_path / "parts", None), shard="node", lines=lines)
        return
    train_by(4, (config, tmp_path / "parts", None), shard="node", lines=lines)
    one, parts = state(tmp_path / "one"), state(tmp_path / "parts")
    for name in set(one) - {"optimizer_state"}:
        assert np.abs(one[name] - parts[name]).max() <= 2e-6 * max(1, np.abs(one[name]).max()), name


@pytest.mark.exhaustive
def test_any_number_of_parts_continues_any_checkpoint(config, tmp_path):
    config = dataclasses.replace(config, length="16u", optimizer="sgd", lr=0.1, clip=1.0)
    train(config, tmp_path / "whole", device="numpy")
    for count, shard in ((4, "node"), (2, "none"), (2, "node"), (1, "auto"), (4, "node")):
        last = (count, shard) == (4, "node") and (tmp_path / "parts").exists()
        train_by(count, (config, tmp_path / "parts", None if last else 3), shard=shard)
    one, parts = state(tmp_path / "whole"), state(tmp_path / "parts")
    for name in set(one) - {"optimizer_state"}:
        assert np.abs(one[name] - parts[name]).max() <= 2e-6 * max(1, np.abs(one[name]).max()), name


def test_a_rank_holds_its_part_alone(config, tmp_path):
    lines = """
    from gpuattn.train.trainer import Trainer
    inner = Trainer._update
    def update(trainer):
        inner(trainer)
        w, average = trainer.workspace, trainer.average.average
        sizes = {x.size for x in (w.masters, w.exp_avg, w.exp_avg_sq, average)}
        assert sizes == {w.size // 3} and w.params.size == w.grads.size == w.size
        assert w.size % (3 * 128) == 0 and w.initial is None
    Trainer._update = update
    """
    config = dataclasses.replace(config, replicas=3, length="2u", warmup=1)
    train_by(3, (config, tmp_path / "run", None), shard="node", lines=lines, spawned=True)
    whole = state(tmp_path / "run")
    train(config, tmp_path / "one", device="numpy")
    for name, a in state(tmp_path / "one").items():
        assert whole[name].shape == a.shape and whole[name].dtype == a.dtype


class Ranked(Single):
    """Of several ranks, ``near`` on a host."""

    def __init__(self, size, near):
        self.size, self.local_size = size, near

    def gather(self, value):
        return [(i % self.local_size, self.local_size) if isinstance(value, tuple) else value
                for i in range(self.size)]  # fmt: skip


def test_what_needs_whole_buffers_is_not_shared(config):
    def shared(asked, device="cuda", near=2, precision="bf16", **changes):
        changed = dataclasses.replace(config, **changes)
        return share_parameters(asked, changed, PRECISIONS[precision], device, Ranked(4, near))

    assert shared("auto")[:2] == (0, 2) and shared("auto").across is not None
    assert shared("auto", near=4).across is None
    assert shared("none") is None and shared("auto", device="numpy") is None
    for given, reason in (
        ({"optimizer": "lamb"}, "lamb .* needs whole tensors"),
        ({"precision": "pure-bf16"}, "pure-bf16 rounds at random"),
        ({"deterministic": True}, "--deterministic takes the norm"),
        ({"average": 2}, "--average evaluates means"),
        ({"near": 1}, "each host has one rank"),
    ):
        assert shared("auto", **given) is None
        with pytest.raises(ConfigError, match=f"--shard node: .*{reason}.* Try --shard auto"):
            shared("node", **given)


SHORT = """
    from gpuattn.runtime.training_step import TrainingStep
    inner, added = TrainingStep.add, []
    def add(step, batch, draw, **last):
        added.append(batch)
        if ranks.rank == 1 and len(added) in (6, 7):
            raise MemoryError("made for a test")
        inner(step, batch, draw, **last)
    TrainingStep.add = add
"""


def test_memory_that_is_used_up_on_one_rank_cuts_the_batches_of_all(config, tmp_path):
    config = dataclasses.replace(config, batch=200, replicas=2, ema=0.0, length="8u")
    train_by(2, (config, tmp_path / "run", None), lines=SHORT, spawned=True)
    _, at = checkpoint.load(tmp_path / "run", "state")
    assert at["update"] == 8 and at["parts"] == 4
    rows = MetricsLog(tmp_path / "run" / "metrics.jsonl").read("valid")
    assert rows and all(np.isfinite(row["loss"]) for row in rows)


def test_memory_that_no_batch_fits_ends_all_with_one_message(config, tmp_path):
    (tmp_path / "options.toml").write_text(to_toml(config))
    lines = """
from gpuattn.runtime.training_step import TrainingStep
def add(step, batch, draw, **last):
    raise MemoryError("made for a test")
TrainingStep.add = add
"""
    command = ("train", "--config", tmp_path / "options.toml", "--out", tmp_path / "run")
    code, said, errors = command_by(2, *command, "--device", "numpy", lines=lines, spawned=True)
    assert (
        code == 1 and len(errors) == 1 and "memory is used up (on rank 0: made for" in errors[0]
    ), said


HANG = """
import time
from gpuattn.train.trainer import Trainer
inner = Trainer._update
def update(trainer):
    if trainer.at.update == {update} and trainer.communicator.rank == 1:
        time.sleep(60)
    inner(trainer)
Trainer._update = update
"""


@pytest.mark.parametrize("update, said", [(3, "got on for 1 s"), (0, "its first update for 6 s")])
def test_ranks_that_do_not_get_on_end_and_tell_where_they_are(config, tmp_path, update, said):
    (tmp_path / "options.toml").write_text(to_toml(config))
    command = ("train", "--config", tmp_path / "options.toml", "--out", tmp_path / "run",
               "--device", "numpy", "--timeout", "1")  # fmt: skip
    code, printed, errors = command_by(2, *command, lines=HANG.format(update=update), spawned=True)
    assert code == 1 and len(errors) == 1, printed
    assert "no rank has" in errors[0] and said in errors[0]
    assert printed.count("most recent call first") >= 2 and "in update" in printed


SPAWNED = """
import os, signal, sys, time
from gpuattn.parallel.world import connected
with connected() as ranks:
    ranks.barrier()
    {line}
    ranks.barrier()
"""


@pytest.mark.parametrize("line, code", [
    ("pass", {0}), ("sys.exit(3 * ranks.rank)", {3, 6}), ("os._exit(7 * (ranks.rank == 1))", {7}),
    ("ranks.rank or os.kill(os.getppid(), 15) or time.sleep(9)", {143}),
])  # fmt: skip
def test_the_exit_code_of_spawned_ranks(line, code):
    found, said = Ranks(3, SPAWNED.format(line=line), spawned=True).end()
    assert found in code, said


def test_spawned_ranks_end_with_the_process_that_started_them():
    running = Ranks(2, SPAWNED.format(line="os.write(1, b'here\\n'); time.sleep(60)"), spawned=True)
    assert running.process.stdout.readline() == "here\n"
    running.process.kill()
    running.process.wait()
    deadline = time.monotonic() + 20
    while running.processes() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not running.processes()
    running.end()
