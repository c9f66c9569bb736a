"""Ranks that fail end all, with one message; wrong use is refused by one rank; signals save."""

import re
import signal

import pytest
from rank_drill import drill
from ranks import FAULT, command_by
from stopping import assert_same_bits

from gpuattn.runs.config import TrainConfig, to_toml
from gpuattn.runtime import checkpoint
from gpuattn.train.session import train

FAULTS = {  # what happens: (exit codes, what the message says)
    "raise ValueError('made for a test')": ({1}, "after update 3: made for a test"),
    "sys.exit(5)": ({5}, "after update 3: has exited with code 5"),
    "os._exit(5)": ({1, 5, 9}, "after update 3, has ended without a word"),
    "os.kill(os.getpid(), 9)": ({1, 9, 137}, "after update 3, has ended without a word"),
    "os.kill(os.getpid(), signal.SIGSTOP)": ({1}, "after update 3, has given no sign of life"),
}
FULL = "resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))"  # as a full disk


@pytest.fixture
def config(reversed_text, tmp_path):
    config = TrainConfig(
        **reversed_text, vocab_size=400, max_len=40, dim=16, heads=2, layers=(1, 1), ffn=16,
        batch=60, lr=1e-2, warmup=4, length="8u", eval_every="2u", score_pairs=0, replicas=4,
        deterministic=True, ema=0.0,
    )  # fmt: skip
    (tmp_path / "options.toml").write_text(to_toml(config))
    return config


def arguments(folder, *more, out="run"):
    options = ("--config", folder / "options.toml", "--out", folder / out, "--device", "numpy")
    return "train", *options, *more


def assert_ends(config, folder, count, rank, fault, spawned=False, told=None):
    """A fault on a rank after update 3 ends all ranks; the same command goes on. ``told``: as
    FAULTS have it."""
    code, said, errors = command_by(
        count, *arguments(folder),
        lines=FAULT.format(rank=rank, update=3, fault=fault), spawned=spawned,
    )  # fmt: skip
    codes, sentence = told or FAULTS[fault]
    assert code in codes, said
    assert len(errors) == 1 and f"rank {rank} of {count}, on " in errors[0], said
    assert sentence in errors[0] and "the same command goes on" in errors[0]
    assert checkpoint.load(folder / "run", "state")[1]["update"] == 2
    train(config, folder / "whole", device="numpy")
    train(config, folder / "run", device="numpy")
    assert_same_bits(folder / "whole", folder / "run")


@pytest.mark.parametrize("spawned", [False, True])
def test_a_rank_that_raises_ends_all(config, tmp_path, spawned):
    assert_ends(config, tmp_path, 2, 1, "raise ValueError('made for a test')", spawned)


def test_a_spawned_rank_that_is_killed_ends_all(config, tmp_path):
    assert_ends(config, tmp_path, 2, 1, "os.kill(os.getpid(), 9)", spawned=True)


@pytest.mark.parametrize("spawned", [False, True])
def test_a_disk_that_is_full_ends_all(config, tmp_path, spawned):
    told = {1}, "00000001.json, is intact. Free some space, or choose another --out. What was"
    assert_ends(config, tmp_path, 2, 0, FULL, spawned, told)


@pytest.mark.exhaustive
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("fault", FAULTS)
def test_any_fault_of_any_rank_ends_all(config, tmp_path, fault, rank):
    assert_ends(config, tmp_path, 4, rank, fault)


@pytest.mark.exhaustive
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("fault", FAULTS)
def test_any_fault_of_any_spawned_rank_ends_all(config, tmp_path, fault, rank):
    assert_ends(config, tmp_path, 4, rank, fault, spawned=True)


@pytest.mark.exhaustive
@pytest.mark.parametrize("spawned", [False, True])
def test_kills_of_random_ranks_at_random_moments_lose_nothing(tmp_path, spawned):
    drill(tmp_path, kills=3, spawned=spawned)


@pytest.mark.exhaustive
@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_rank_saves_and_stops_all(config, tmp_path, rank):
    fault = "os.kill(os.getpid(), signal.SIGTERM)"
    code, said, errors = command_by(
        2, *arguments(tmp_path), lines=FAULT.format(rank=rank, update=4, fault=fault)
    )
    assert code == 128 + signal.SIGTERM and not errors, said
    assert said.count("stopped  after update 5; all is saved. Go on: gpuattn train") == 1
    train(config, tmp_path / "whole", device="numpy")
    train(config, tmp_path / "run", device="numpy")
    assert_same_bits(tmp_path / "whole", tmp_path / "run")


def test_a_rank_of_another_version_is_refused_by_name(config, tmp_path):
    lines = """
import gpuattn.train.follower as follower
from gpuattn.parallel.world import discover
if discover().rank:
    follower.installed_version = lambda: "0.0.9"
"""
    code, said, errors = command_by(2, *arguments(tmp_path), lines=lines)
    assert code == 2 and len(errors) == 1, said
    assert "rank 1, on " in errors[0]
    assert "another version of gpuattn than rank 0" in errors[0] and ": 0.0.9, and " in errors[0]
    assert not (tmp_path / "run").exists()


def test_srun_without_pmi_is_refused_by_rank_0(config, tmp_path, monkeypatch):
    """Each task is then a world of one for MPI, and Slurm's variables say otherwise."""
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    for rank in ("0", "1"):
        own = {"SLURM_PROCID": rank, "SLURM_LOCALID": rank}
        for name, value in (step | own).items():
            monkeypatch.setenv(name, value)
        code, said, errors = command_by(1, *arguments(tmp_path), mpi=False)
        assert code == 2 and len(errors) == (rank == "0"), said
        assert not errors or "srun started 2 ranks, but mpi4py sees 1" in errors[0]
        assert not (tmp_path / "run").exists()


def test_other_options_on_a_rank_are_refused_by_name(config, tmp_path):
    each = [arguments(tmp_path), arguments(tmp_path, "--lr", "0.02")]
    code, said, errors = command_by(2, lines="", each=each)
    assert code == 2 and len(errors) == 1, said
    assert "rank 1, on " in errors[0] and "has another --lr than rank 0" in errors[0]
    assert not (tmp_path / "run").exists()


@pytest.mark.exhaustive
def test_other_data_and_other_faults_before_training_are_told_once(config, tmp_path):
    (tmp_path / "other").write_text((tmp_path / "src").read_text().replace("a", "b"))
    other = tmp_path / "other.toml"
    text = (tmp_path / "options.toml").read_text()
    cases = [
        (text.replace(str(tmp_path / "src"), str(tmp_path / "other")), 2, "another content of"),
        (
            text.replace(str(tmp_path / "src"), str(tmp_path / "none")),
            1,
            "rank 1, on .*cannot read",
        ),
        (f"{text}\nbogus = 1", 2, "rank 1, on .*unknown key 'bogus'"),
    ]
    for wrong, expected, sentence in cases:
        other.write_text(wrong)
        each = [arguments(tmp_path), arguments(tmp_path, "--config", other)]
        code, said, errors = command_by(2, each=each)
        assert code == expected and len(errors) == 1 and re.search(sentence, errors[0]), said
        assert not (tmp_path / "run").exists()
    for wrong, sentence in (("--bogus", "No such option"), ("--replicas=3", "cannot share 3")):
        code, said, errors = command_by(2, *arguments(tmp_path, wrong))
        assert code == 2 and len(errors) == 1 and sentence in errors[0], said
        assert not (tmp_path / "run").exists()


@pytest.mark.exhaustive
def test_a_run_of_a_given_time_ends_by_the_clock_of_rank_0(config, tmp_path):
    more = ("--for", "3s", "--eval-every", "1s")
    code, said, errors = command_by(2, *arguments(tmp_path, *more))
    assert code == 0 and not errors, said
    assert checkpoint.load(tmp_path / "run", "state")[1]["finished"] == "3 s"
