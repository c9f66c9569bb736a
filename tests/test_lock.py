"""Only one process at a time writes to a run's folder; reading is never locked."""

import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys

import pytest
from kill_drill import new_config
from stopping import ROOT, After

from gpuattn import lock
from gpuattn.errors import CheckpointError, ConfigError
from gpuattn.lock import LOCK, locked
from gpuattn.report.page import write_page
from gpuattn.runs.averaging import average_runs
from gpuattn.runs.folder import RunFolder, summary
from gpuattn.runs.loading import load_run
from gpuattn.train.session import train

HOLDER = """
import sys
from pathlib import Path
from gpuattn.lock import locked
with locked(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def config(tmp_path):
    return new_config(tmp_path, "numpy", kills=0)


@pytest.fixture
def holder(tmp_path):
    """A process that holds the lock of ``run``."""
    command = [sys.executable, "-c", HOLDER, tmp_path / "run"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, **pipes) as process:
        assert process.stdout.readline() == b"locked\n"
        yield process
        process.kill()


def test_the_second_of_two_is_refused_and_the_first_named(tmp_path):
    one, other = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "run")
    with one.lock():
        with pytest.raises(ConfigError) as error, other.lock():
            pass
        owner = f"process {os.getpid()} on {socket.gethostname()} writes to it since 20"
        assert f"{one.path} is in use: {owner}" in str(error.value)
        assert "Wait until it ends, stop it, or choose another --out" in str(error.value)
        (one.path / "metrics.jsonl").write_text("")
    assert [path.name for path in one.path.iterdir()] == ["metrics.jsonl"]
    with locked(one.path):
        pass


def test_another_process_is_named_and_its_lock_ends_with_kill_9(tmp_path, holder):
    run = RunFolder(tmp_path / "run")
    with pytest.raises(ConfigError, match=f"process {holder.pid} on "), run.lock():
        pass
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert json.loads((run.path / LOCK).read_text())["pid"] == holder.pid
    with run.lock():
        assert json.loads((run.path / LOCK).read_text())["pid"] == os.getpid()
    assert not (run.path / LOCK).exists()


def test_a_run_in_use_is_neither_trained_nor_deleted_nor_averaged_into(config, tmp_path):
    folder = RunFolder(tmp_path / "run")
    train(config, folder.path, device="numpy", stop=After(9))
    with folder.lock():
        before = {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()}
        for overwrite in (False, True):
            with pytest.raises(ConfigError, match="is in use"):
                train(config, folder.path, device="numpy", overwrite=overwrite)
        with pytest.raises(ConfigError, match="is in use"):
            average_runs([folder.path], folder.path)
        assert before == {
            path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()
        }
        # reading goes on
        assert summary(folder.path)["state"] == "stopped"
        assert load_run(folder.path, device="numpy").translate(["a b"])
        assert average_runs([folder.path], tmp_path / "mean")
        write_page(folder.path)
    assert train(config, folder.path, device="numpy", overwrite=True).finished
    assert not list(tmp_path.rglob(LOCK))


def test_a_folder_with_only_a_lock_is_a_new_run(config, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOCK).write_text('{"pid": 1}')
    assert train(config, tmp_path / "run", device="numpy", stop=After(1)).update == 1


def test_folders_made_for_the_lock_are_removed(tmp_path):
    (tmp_path / "own").mkdir()
    for folder in ("own", "own/runs/new"):
        with locked(tmp_path / folder):
            assert (tmp_path / folder / LOCK).exists()
    assert list(tmp_path.rglob("*")) == [tmp_path / "own"]


@pytest.mark.skipif(os.name == "nt", reason="Windows removes no open file")
def test_a_lock_on_a_removed_file_does_not_count(tmp_path, monkeypatch):
    inner, removed = lock._lock, []

    def after_the_owner_left(handle, folder):
        if not removed:
            removed.append((folder / LOCK).unlink())
        inner(handle, folder)

    monkeypatch.setattr(lock, "_lock", after_the_owner_left)
    with locked(tmp_path / "run"):
        monkeypatch.undo()
        with pytest.raises(ConfigError, match="is in use"), locked(tmp_path / "run"):
            pass


@pytest.mark.skipif(os.name == "nt", reason="has no flock")
def test_a_file_system_without_locks_gives_a_warning(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(lock.fcntl, "flock", refuse)
    said = pytest.warns(UserWarning, match=r"run cannot be locked \(No locks available\)")
    with said, locked(tmp_path / "run"):
        pass


def test_an_unreadable_owner_is_reported_as_another_process(tmp_path):
    with locked(tmp_path):
        for text in ("", "[]", "\0", '{"pid": 3}'):
            (tmp_path / LOCK).write_text(text)
            refused = pytest.raises(ConfigError, match="in use: another process writes to it")
            with refused, locked(tmp_path):
                pass


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    said = f"cannot write to {tmp_path / 'file/run'}: Not a directory. Choose another --out"
    with pytest.raises(CheckpointError, match=re.escape(said)), locked(tmp_path / "file/run"):
        pass
