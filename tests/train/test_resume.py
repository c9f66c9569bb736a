"""Going on: the same bits as without a stop, after a signal and after kill -9 during a save."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from stopping import After, assert_same_bits

from gpuattn.errors import ConfigError, DataError
from gpuattn.train import checkpoint
from gpuattn.train.config import TrainConfig
from gpuattn.train.run import RunFolder
from gpuattn.train.session import train

ROOT = Path(__file__).parents[2]


@pytest.fixture
def config(tmp_path):
    rng = np.random.default_rng(1)
    lines = [" ".join(rng.choice(list("abcdefgh"), rng.integers(1, 9))) for _ in range(80)]
    (tmp_path / "src").write_text("".join(f"{line}\n" for line in lines))
    (tmp_path / "tgt").write_text("".join(f"{line[::-1]}\n" for line in lines))
    return TrainConfig(
        source=str(tmp_path / "src"), target=str(tmp_path / "tgt"), vocab_size=400, max_len=40,
        dim=16, heads=2, layers=(1, 1), ffn=16, dropout=0.3, batch=120, lr=1e-2, warmup=4,
        length="4e", eval_every="1e", score_pairs=3, ema=0.9, accumulate=2, average=2, beam=2,
    )  # fmt: skip


@pytest.mark.parametrize("change", [
    {}, {"length": "11u", "schedule": "cosine", "eval_every": "3u"},
    {"ema": 0.0, "accumulate": 1, "optimizer": "lion"}, {"batching": "padded"},
], ids=["epochs", "updates", "plain", "padded"])  # fmt: skip
def test_stopped_at_any_update_a_run_goes_on_bit_for_bit(config, tmp_path, change):
    config = dataclasses.replace(config, **change)
    whole = train(config, tmp_path / "whole", device="numpy")
    stopped, stops = False, 0
    for calls in (1, 2, 5, 3, 9, 10_000):  # calls of stop: after updates and within evaluations
        stopped = train(config, tmp_path / "parts", device="numpy", stop=After(calls))
        stops += not stopped.finished
        if stopped.finished:
            break
    assert stops >= 3 and stopped.finished
    assert stopped.update == whole.update
    assert_same_bits(tmp_path / "whole", tmp_path / "parts")
    rows = [RunFolder(tmp_path / name).metrics.read("valid") for name in ("whole", "parts")]
    losses = [{row["update"]: row["loss"] for row in each} for each in rows]
    assert losses[0] == losses[1]


def test_evaluations_by_the_clock_leave_training_alone(config, tmp_path):
    config = dataclasses.replace(config, eval_every="auto", average=0)
    train(config, tmp_path / "whole", device="numpy")
    for calls in (5, 3, 10_000):
        outcome = train(config, tmp_path / "parts", device="numpy", stop=After(calls))
    assert outcome.finished
    assert_same_bits(tmp_path / "whole", tmp_path / "parts", ("state", "last"))


def test_a_built_in_task_goes_on_into_later_epochs(tmp_path, monkeypatch):
    monkeypatch.setattr("gpuattn.train.corpus.TASK_PAIRS", 60)
    config = TrainConfig(
        task="reverse", vocab_size=384, max_len=64, dim=16, heads=2, layers=(1, 1), ffn=16,
        batch=400, warmup=2, length="3e", eval_every="5u", score_pairs=0,
    )  # fmt: skip
    train(config, tmp_path / "whole", device="numpy")
    for calls in (3, 4, 1000):
        outcome = train(config, tmp_path / "parts", device="numpy", stop=After(calls))
    assert outcome.finished
    assert_same_bits(tmp_path / "whole", tmp_path / "parts")


def test_a_longer_run_equals_one_that_was_long_from_the_start(config, tmp_path):
    growing = {"schedule": "invsqrt", "warmup": 2}  # it does not look at the end
    short = dataclasses.replace(config, length="5u", average=0, eval_every="5u", **growing)
    long = dataclasses.replace(short, length="10u")
    train(short, tmp_path / "a", device="numpy")
    assert train(long, tmp_path / "a", device="numpy").update == 10
    train(long, tmp_path / "b", device="numpy")
    assert_same_bits(tmp_path / "a", tmp_path / "b")
    with pytest.raises(ConfigError, match="--for was 10u, now 5u"):
        train(short, tmp_path / "a", device="numpy")


def test_other_text_is_noticed(config, tmp_path):
    train(config, tmp_path / "run", device="numpy", stop=After(2))
    lines = (tmp_path / "src").read_text().splitlines()
    (tmp_path / "src").write_text("\n".join(["h g f", *lines[1:]]) + "\n")
    with pytest.raises(DataError, match="not the one that .* began with"):
        train(config, tmp_path / "run", device="numpy")


def test_a_damaged_last_state_falls_back_to_the_one_before(config, tmp_path):
    train(config, tmp_path / "whole", device="numpy")
    for _ in range(2):
        train(config, tmp_path / "run", device="numpy", stop=After(4))
    newest = checkpoint.generations(tmp_path / "run", "state")[0].with_suffix(".safetensors")
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data)
    with pytest.warns(UserWarning, match="is damaged.*is used instead"):
        assert train(config, tmp_path / "run", device="numpy").finished
    assert_same_bits(tmp_path / "whole", tmp_path / "run")


# ---- as a process ----


def start(config, out, tmp_path, **environment):
    """Start ``gpuattn train`` with these options in a process of its own."""
    from gpuattn.train.config import to_toml

    (tmp_path / "options.toml").write_text(to_toml(config))
    command = [sys.executable, "-m", "gpuattn", "train", "--config", tmp_path / "options.toml",
               "--out", out, "--device", "numpy"]  # fmt: skip
    return subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment,
    )  # fmt: skip


def wait_for_state(out, process, generation=1):
    """Wait until the run has saved its state so many times."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        found = checkpoint.generations(out, "state")
        if found and int(found[0].stem.rsplit("-", 1)[1]) >= generation:
            return
        time.sleep(0.005)
    raise AssertionError(f"no state {generation}: {process.communicate()[1]}")


def test_kill_9_during_saves_loses_nothing(config, tmp_path):
    config = dataclasses.replace(
        config, length="60u", eval_every="1u", score_pairs=0, average=0, accumulate=1
    )
    train(config, tmp_path / "whole", device="numpy")
    rng = np.random.default_rng(0)
    out, saved = tmp_path / "killed", 0
    for _ in range(4):
        process = start(config, out, tmp_path)
        wait_for_state(out, process, saved + 3)
        time.sleep(float(rng.uniform(0, 0.05)))  # an update and its saves take about this long
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        found = checkpoint.generations(out, "state")[0]
        saved = int(found.stem.rsplit("-", 1)[1])
    assert 0 < checkpoint.load(out, "state")[1]["update"] < 60
    assert train(config, out, device="numpy").finished
    assert_same_bits(tmp_path / "whole", out)
    assert not list(out.glob(".*.tmp"))


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_says_how_to_go_on(config, tmp_path, number, code):
    config = dataclasses.replace(config, length="100ku", eval_every="20u", accumulate=1, average=0)
    process = start(config, tmp_path / "run", tmp_path)
    wait_for_state(tmp_path / "run", process)
    process.send_signal(number)
    talk = process.communicate(timeout=30)[1]
    assert process.returncode == code
    assert "Traceback" not in talk
    last = talk.strip().splitlines()[-1]
    assert "Go on: gpuattn train --config" in last
    update = checkpoint.load(tmp_path / "run", "state")[1]["update"]
    assert f"after update {update:,};" in last


def test_a_second_signal_ends_at_once():
    code = (
        "import os, signal, time\n"
        "from gpuattn.train.stopping import StopOnSignal\n"
        "tell = lambda word: lambda: print(word, flush=True)\n"
        "with StopOnSignal(tell('saving'), tell('leaving')) as stop:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    assert stop() and stop.exit_code == 130\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    time.sleep(60)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=30, stdout=-1)
    assert run.returncode == 143
    assert run.stdout.split() == [b"saving", b"leaving"]
