"""Signals: a run saves and prints how to continue; a second signal ends it at once."""

import dataclasses
import os
import signal
import subprocess
import sys

import pytest
from kill_drill import new_config
from stopping import ROOT, Training, assert_same_bits, assert_same_metrics

from gpuattn.arrays import rehearsing
from gpuattn.runtime import checkpoint
from gpuattn.train.session import train
from gpuattn.train.stopping import StopOnSignal

EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
PLACES = {  # the function that a run calls when the signal arrives
    "computing a step": ("gpuattn.runtime.training_step.TrainingStep", "_gradients"),
    "evaluating": ("gpuattn.tasks.translation.TranslationTask", "answers"),
    "saving": ("gpuattn.runtime.checkpoint", "save"),
}
INTERRUPT = """
import os, pkgutil, signal
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the default, also if the tests run under nohup
owner = pkgutil.resolve_name({owner!r})
inner = getattr(owner, {name!r})
def interrupted(*args, **kwargs):
    setattr(owner, {name!r}, inner)
    for number in {signals}:
        os.kill(os.getpid(), number)
    return inner(*args, **kwargs)
setattr(owner, {name!r}, interrupted)
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of an uninterrupted run, and its config."""
    folder = tmp_path_factory.mktemp("whole")
    config = new_config(folder, "numpy", kills=0)
    config = dataclasses.replace(config, eval_every="10u", score_pairs=3)
    train(config, folder / "run", device="numpy")
    return folder / "run", config


def assert_goes_on(run, whole):
    """A stopped run, continued, has the bits and metrics of the uninterrupted one."""
    assert train(whole[1], run, device="numpy").finished
    assert_same_bits(whole[0], run)
    assert_same_metrics(whole[0], run)


def interrupted(config, out, place, *signals):
    """Return (exit code, standard error) of a run that gets signals at a place."""
    owner, name = PLACES[place]
    lines = INTERRUPT.format(owner=owner, name=name, signals=[int(number) for number in signals])
    training = Training(config, out, lines=lines)
    training.begin()
    return training.end()


@pytest.mark.parametrize("place, number", [
    ("computing a step", signal.SIGINT), ("evaluating", signal.SIGTERM), ("saving", signal.SIGINT),
    ("computing a step", signal.SIGHUP),
])  # fmt: skip
def test_a_signal_saves_and_names_the_command_to_resume(whole, tmp_path, place, number):
    code, said = interrupted(whole[1], tmp_path / "run", place, number)
    assert code == EXIT_CODES[number], said
    assert "Traceback" not in said
    last = said.strip().splitlines()[-1]
    assert last.startswith("stopped") and "Go on: gpuattn train --config" in last
    update = checkpoint.load(tmp_path / "run", "state")[1]["update"]
    assert 0 < update < whole[1].length.amount and f"after update {update:,};" in last
    assert_goes_on(tmp_path / "run", whole)


def test_a_signal_while_reading_blocks_ends_the_run_at_once(whole, tmp_path):
    os.mkfifo(tmp_path / "source")  # opening it waits for a writer
    config = dataclasses.replace(whole[1], source=str(tmp_path / "source"))
    training = Training(config, tmp_path / "run")
    training.begin()
    assert training.process.stderr.readline().startswith("device")
    code, said = training.end_by(signal.SIGTERM)
    assert code == EXIT_CODES[signal.SIGTERM], said
    assert said.startswith("stopped  before training began. Go on: gpuattn train --config")
    assert len(said.splitlines()) == 1 and not (tmp_path / "run").exists()


def test_a_second_signal_ends_at_once_with_intact_checkpoints(whole, tmp_path):
    signals = signal.SIGINT, signal.SIGTERM
    code, said = interrupted(whole[1], tmp_path / "run", "saving", *signals)
    assert code == EXIT_CODES[signal.SIGTERM]
    assert "once more ends at once, unsaved" in said and "all is saved" not in said
    assert_goes_on(tmp_path / "run", whole)


def test_a_second_signal_does_not_wait():
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


def test_a_run_under_nohup_ignores_sighup():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with StopOnSignal() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_during_a_print_is_recorded():
    def print_again():
        raise RuntimeError("reentrant call inside <_io.BufferedWriter name='<stderr>'>")

    with StopOnSignal(print_again) as stop:
        signal.raise_signal(signal.SIGTERM)
        assert stop() and stop.exit_code == 143


def test_on_a_gpu_a_signal_during_capture_saves_too(gpu, tmp_path, monkeypatch):
    from gpuattn.runtime import TrainingStep

    config, inner, calls = new_config(tmp_path, "numpy", kills=0), TrainingStep._apply, []
    # deterministic: other processes that tune products at the same time change nothing
    config = dataclasses.replace(config, eval_every="10u", deterministic=True)

    def interrupted(step):
        calls.extend([] if rehearsing.get() else [step])
        if len(calls) == 2 and not rehearsing.get():  # the first runs op by op
            assert step.calls.stream.is_capturing()
            signal.raise_signal(signal.SIGTERM)
        inner(step)

    monkeypatch.setattr(TrainingStep, "_apply", interrupted)
    with StopOnSignal() as stop:
        assert train(config, tmp_path / "run", device="cuda", stop=stop).update == 2
    assert stop.exit_code == 143
    assert train(config, tmp_path / "run", device="cuda").finished
    train(config, tmp_path / "whole", device="cuda")
    assert_same_bits(tmp_path / "whole", tmp_path / "run")
