"""Saves beside training: the files of a synchronous save, one at a time, errors at an update."""

import contextlib
import dataclasses
import errno
import itertools
import os
import shutil
import threading
import time

import numpy as np
import pytest
from checks import sampled
from kill_drill import new_config
from stopping import After, assert_same_bits, assert_same_metrics

from gpuattn.errors import CheckpointError
from gpuattn.runs.metrics import MetricsLog
from gpuattn.runtime import checkpoint, precision
from gpuattn.runtime.precision import PRECISIONS
from gpuattn.tasks.translation import TranslationTask
from gpuattn.train import meter, saving, trainer
from gpuattn.train.progress import Listener
from gpuattn.train.saving import Saves
from gpuattn.train.session import Session, train
from gpuattn.train.state import tensors_of
from gpuattn.train.trainer import Trainer


@pytest.fixture
def config(tmp_path):
    config = new_config(tmp_path, "numpy", kills=0)
    return dataclasses.replace(config, length="8u", threads=1)


class Clock:
    """A clock that depends on nothing but the calls of one thread."""

    def __init__(self):
        self.perf_counter = itertools.count().__next__


def at_once(session, row):
    """Save with the arrays of the run themselves, before training goes on."""
    at, own = session.trainer.at, session.trainer
    with own.average.applied() if own.average else contextlib.nullcontext():
        weights = {name: array.copy() for name, array in own.workspace.weights().items()}
    if row is not None and at.best is row:
        checkpoint.save(session.folder.path, "best", weights, row)
    checkpoint.save(session.folder.path, "last", weights, row or {"update": at.update})
    if row is not None and session.config.average:
        session.folder.save_snapshot(at.update, weights, session.config.average)
    checkpoint.save(session.folder.path, "state", tensors_of(own.step), dataclasses.asdict(at))


@pytest.mark.parametrize("name, change", sampled([
    ("fp32", {"ema": 0.0, "optimizer": "lion"}), ("pure-bf16", {}), ("fp32", {}),
], 2))  # fmt: skip
def test_files_have_the_bytes_of_a_synchronous_save(config, tmp_path, monkeypatch, name, change):
    monkeypatch.setattr(precision, "choose", lambda *_: PRECISIONS[name])
    config, files = dataclasses.replace(config, **change), []
    for place in ("beside", "at_once"):
        for module in (trainer, meter):  # the seconds of a run are in its files
            monkeypatch.setattr(module, "time", Clock())
        for stop in (After(5), After(100)):
            train(config, tmp_path / place, device="numpy", stop=stop)
        found = sorted((tmp_path / place).rglob("*-0*"))
        files.append({path.relative_to(tmp_path / place): path.read_bytes() for path in found})
        monkeypatch.setattr(Session, "_save", at_once)
    assert files[0].keys() == files[1].keys() and len(files[0]) == 16
    assert [path for path in files[0] if files[0][path] != files[1][path]] == []


def watched(monkeypatch, called):
    """Call ``called(name of a file)`` in the thread before each file of checkpoints is written."""

    def write(path, data, inner=checkpoint._write):
        called(path.name)
        inner(path, data)

    monkeypatch.setattr(checkpoint, "_write", write)


def test_the_state_is_written_last_and_one_save_at_a_time(config, tmp_path, monkeypatch):
    names, busy, beside = [], threading.Lock(), []

    def called(name):
        assert threading.current_thread().name == "gpuattn-save"
        assert busy.acquire(blocking=False), "two threads write"
        names.append(name.split("-")[0] + name[-5:])
        time.sleep(0.01)
        busy.release()

    def update(own, inner=Trainer._update):
        inner(own)
        beside.append(own.saves.writing)

    watched(monkeypatch, called)
    monkeypatch.setattr(Trainer, "_update", update)
    config = dataclasses.replace(config, average=1, length="4u")
    train(config, tmp_path / "run", device="numpy")
    rest = ["last", "update_00000002", "state"]
    first = [name + kind for name in ["best", *rest] for kind in ("nsors", ".json")]
    assert names[: len(first)] == first
    assert [name[:5] for name in names[-2:]] == ["state"] * 2
    assert True in beside, "no update ran beside a save"


@pytest.mark.parametrize("file", sampled(["state", "best", "last", "update_"], 2))
def test_an_error_is_raised_at_the_next_update(config, tmp_path, monkeypatch, file):
    failing = []

    def called(name):
        if name.startswith(file):
            failing.append(name)
        if len(failing) > 2:  # in the second save: the files of the first are there
            raise OSError(errno.ENOSPC, "No space left on device")

    def update(own, inner=Trainer._update):
        while own.saves.writing:
            time.sleep(0.001)
        inner(own)

    watched(monkeypatch, called)
    monkeypatch.setattr(Trainer, "_update", update)
    config = dataclasses.replace(config, lr=1e-3)  # each evaluation is the best one
    with pytest.raises(
        CheckpointError, match=f"cannot save {file}.*: No space left on device; the"
    ):
        train(config, tmp_path / "run", device="numpy")
    assert len(failing) == 3
    assert not list((tmp_path / "run").rglob(".*"))  # no half file, and no lock
    assert [row["update"] for row in MetricsLog(tmp_path / "run/metrics.jsonl").read("valid")] == [
        2, 4,
    ]  # fmt: skip
    assert checkpoint.load(tmp_path / "run", "state")[1]["update"] == 2
    monkeypatch.undo()
    assert train(config, tmp_path / "run", device="numpy").finished


def test_a_kill_beside_an_update_loses_nothing(config, tmp_path, monkeypatch):
    """A copy of the folder before a rename is what a kill leaves; the drill has real ones."""
    run, updates, copies = tmp_path / "run", [], []

    def replace(*names, inner=os.replace):
        saved = len(checkpoint.generations(run, "state"))
        if threading.current_thread().name == "gpuattn-save" and saved == 1:
            while updates[-1] < 5:  # this save began after update 4
                time.sleep(0.001)
            copies.append(tmp_path / f"killed at file {len(copies)}")
            shutil.copytree(run, copies[-1])
        inner(*names)

    def update(own, inner=Trainer._update):
        inner(own)
        updates.append(own.at.update)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_update", update)
        patch.setattr(os, "replace", replace)
        config = dataclasses.replace(config, length="6u", lr=1e-3)  # each evaluation is the best
        train(config, run, device="numpy")
    assert len(copies) == 8
    for copy in copies[1::3]:  # at the manifest of best, at the snapshot, at the manifest of state
        assert checkpoint.load(copy, "state")[1]["update"] == 2
        assert any(copy.rglob(".*.tmp"))
        assert train(config, copy, device="numpy").finished
        assert_same_bits(run, copy)
        assert_same_metrics(run, copy)
        assert not any(copy.rglob(".*.tmp"))


def test_a_stop_waits_for_the_thread(config, tmp_path, monkeypatch):
    opened, updates = threading.Event(), []
    watched(monkeypatch, lambda name: opened.wait(60))

    def update(own, inner=Trainer._update):
        inner(own)
        updates.append(own.saves.writing)

    def stop():
        if len(updates) == 3:
            threading.Timer(0.05, opened.set).start()
        return len(updates) == 3

    def add(log, event, inner=MetricsLog.add, **values):
        saved = checkpoint.generations(log.path.parent, "state")
        if event == "stop":
            assert len(saved) == 2 and (log.path.parent / ".lock").exists()
        inner(log, event, **values)

    monkeypatch.setattr(MetricsLog, "add", add)
    monkeypatch.setattr(Trainer, "_update", update)
    found = train(config, tmp_path / "run", device="numpy", stop=stop)
    assert not found.finished and updates == [False, False, True]
    assert checkpoint.load(tmp_path / "run", "state")[1]["update"] == found.update
    assert not (tmp_path / "run/.lock").exists()


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("fails", [False, True])
def test_an_error_of_training_waits_for_the_thread_too(config, tmp_path, monkeypatch, fails):
    opened = threading.Event()

    def called(name):
        opened.wait(60)
        if fails:
            raise OSError(errno.EIO, "Input/output error")

    def stop():
        if run.exists() and MetricsLog(run / "metrics.jsonl").read("valid"):
            threading.Timer(0.05, opened.set).start()
            raise Interrupted
        return False

    run = tmp_path / "run"
    watched(monkeypatch, called)
    warned = pytest.warns(UserWarning, match="cannot save best in .*: Input/output")
    with warned if fails else contextlib.nullcontext(), pytest.raises(Interrupted):
        train(config, run, device="numpy", stop=stop)
    assert opened.is_set() and not (run / ".lock").exists()
    assert len(checkpoint.generations(run, "state")) == (not fails)


def test_parameters_change_after_the_copy_gradients_do_not_wait(config, monkeypatch):
    own, order = Trainer(TranslationTask(config), "numpy", Listener()), []
    for owner, name in ((own.step, "add"), (own.saves, "hold"), (own.step, "apply")):
        monkeypatch.setattr(owner, name, lambda *_, name=name, **__: order.append(name))
    own._update()
    assert order == ["add"] * config.accumulate + ["hold", "apply"]


def test_an_interrupt_while_waiting_is_raised_after_the_save():
    class Slow:
        def __init__(self):
            self.left = 3

        def join(self):
            self.left -= 1
            if self.left:
                raise KeyboardInterrupt

    saves = Saves()
    saves._thread = slow = Slow()
    with pytest.raises(KeyboardInterrupt):
        saves.wait()
    assert slow.left == 0
    saves.wait()


def test_copies_are_freed_and_errors_are_raised_once():
    with Saves() as saves:
        for word in ("one", "two"):
            saves.begin({"w": np.ones(3)}, lambda arrays, word=word: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                saves.wait()
            saves.check()
        assert saves._copy.values()
    assert not saves._copy.values() and not saves.writing


def test_too_little_memory_is_an_error_of_saving_not_of_a_batch(monkeypatch):
    """A batch would be cut for a MemoryError."""

    def short(arrays):
        raise MemoryError("12 GB")

    saves = Saves()
    saves.begin({"w": np.ones(3)}, short)
    with pytest.raises(CheckpointError, match=r"cannot save: .* \(12 GB\); what was saved before"):
        saves.wait()
    monkeypatch.setattr(saving.HostCopy, "prepare", lambda *_: short(None))
    with pytest.raises(CheckpointError, match="choose a smaller --dim"):
        Saves().prepare({"w": np.ones(3)})


def test_speeds_beside_a_save_do_not_choose_threads(config, tmp_path, monkeypatch):
    observed, alone = [], []
    monkeypatch.setattr(trainer, "REPORT_UPDATES", 1)

    class Threads(trainer.BlasThreads):
        def next(self, update, alone):
            self.alone = alone
            super().next(update)

        def observe(self, rate):
            observed.append(self.alone)

    def slowly(name):
        alone.append(name)
        time.sleep(0.01)

    watched(monkeypatch, slowly)
    monkeypatch.setattr(trainer, "BlasThreads", Threads)
    train(dataclasses.replace(config, average=0), tmp_path / "run", device="numpy")
    assert observed[:2] == [True, True] and all(observed) and len(observed) < 8 and alone
