"""Runs that are extended: they follow the schedule of the new length from their last update."""

import dataclasses

import pytest
from kill_drill import new_config
from stopping import After, assert_same_bits, assert_same_metrics

from gpuattn.errors import ConfigError
from gpuattn.optim import Schedule
from gpuattn.runs.folder import RunFolder, summary
from gpuattn.train.progress import Listener
from gpuattn.train.session import train
from gpuattn.train.trainer import Trainer


class Heard(Listener):
    def __init__(self):
        self.said = []

    def say(self, topic, text):
        self.said.append((topic, text))


@pytest.fixture
def config(tmp_path):
    return dataclasses.replace(new_config(tmp_path, "numpy", kills=0), average=0, schedule="linear")


def changed(config, length):
    return dataclasses.replace(config, length=length)


@pytest.fixture
def rates(monkeypatch):
    """Record the learning rate of every update."""
    found, inner = {}, Schedule.__call__

    def noted(schedule, update, progress=None):
        found[update] = inner(schedule, update, progress)
        return found[update]

    monkeypatch.setattr(Schedule, "__call__", noted)
    return found


def test_later_updates_follow_the_schedule_of_the_new_length(config, tmp_path, rates):
    train(changed(config, "8u"), tmp_path / "run", device="numpy")
    report = Heard()
    train(changed(config, "12u"), tmp_path / "run", device="numpy", listener=report)
    short, long = (Schedule("linear", config.lr, config.warmup, total) for total in (8, 12))
    assert [rates[n] for n in range(8)] == [short(n) for n in range(8)]
    assert [rates[n] for n in range(8, 12)] == [long(n) for n in range(8, 12)]
    planned = "the learning rate goes on along the linear schedule of 12 updates"
    assert ("run", f"--for was 8u, now 12u: {planned}") in report.said
    assert summary(tmp_path / "run")["state"] == "finished"
    assert RunFolder(tmp_path / "run").config() == changed(config, "12u")


def test_an_extended_run_resumes_bit_for_bit(config, tmp_path):
    for name, stops in (("whole", [99]), ("parts", [3, 2, 99])):
        train(changed(config, "6u"), tmp_path / name, device="numpy")
        for calls in stops:
            outcome = train(changed(config, "12u"), tmp_path / name, device="numpy",
                            stop=After(calls))  # fmt: skip
        assert outcome.finished and outcome.update == 12
    assert_same_bits(tmp_path / "whole", tmp_path / "parts")
    assert_same_metrics(tmp_path / "whole", tmp_path / "parts")


def test_a_run_may_be_extended_before_its_end_and_never_shortened(config, tmp_path):
    train(changed(config, "8u"), tmp_path / "run", device="numpy", stop=After(2))
    for length in ("4u", "7u", "9e", "900s"):
        with pytest.raises(ConfigError, match=rf"--for was 8u, now {length} \(it may grow, in"):
            train(changed(config, length), tmp_path / "run", device="numpy")
    assert train(changed(config, "10u"), tmp_path / "run", device="numpy").update == 10


def test_epochs(config, tmp_path):
    config = dataclasses.replace(config, eval_every="1e", accumulate=1)
    first = train(changed(config, "1e"), tmp_path / "run", device="numpy")
    assert train(changed(config, "3e"), tmp_path / "run", device="numpy").update > first.update


def test_seconds(config, tmp_path, monkeypatch):
    """With a fake clock, each update takes one second."""
    clock = iter(range(1_000_000))
    monkeypatch.setattr("gpuattn.train.trainer.time.perf_counter", lambda: next(clock) / 2)
    config = dataclasses.replace(config, eval_every="4s", warmup=0.1)
    first = train(changed(config, "8s"), tmp_path / "run", device="numpy")
    assert first.finished
    second = train(changed(config, "20s"), tmp_path / "run", device="numpy")
    assert second.finished and second.update > first.update


def test_exhausted_patience_also_ends_an_extended_run(config, tmp_path, monkeypatch):
    config, losses = dataclasses.replace(config, patience=2), iter([4, 3, 2, 1, 5, 6])
    monkeypatch.setattr(Trainer, "valid_loss", lambda self: float(next(losses)))
    for length, update in (("8u", 8), ("20u", 12), ("40u", 12)):
        outcome = train(changed(config, length), tmp_path / "run", device="numpy")
        assert outcome.finished and outcome.update == update


def test_other_options_are_refused_with_the_remedy(config, tmp_path):
    train(config, tmp_path / "run", device="numpy", stop=After(2))
    with pytest.raises(ConfigError) as error:
        train(dataclasses.replace(config, lr=0.5), tmp_path / "run", device="numpy")
    assert "--lr was 0.01, now 0.5" in str(error.value)
    assert f"(and --init-from {tmp_path / 'run'} to begin with its weights)" in str(error.value)
