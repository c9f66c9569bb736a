"""Faults during training: one message with the remedy, the exit code, the remaining files."""

import errno
import io
import os
from pathlib import Path

import pytest

from gpuattn.runs.folder import RunFolder
from gpuattn.runtime import checkpoint
from gpuattn.runtime.feed import HostFeed

from .conftest import TINY


@pytest.fixture
def command(corpus, tmp_path):
    """A run of a hundred updates, evaluated every twenty."""
    return ["train", corpus / "src", corpus / "tgt", *TINY, "--score-pairs", "0",
            "--for", "100u", "--out", tmp_path / "run"]  # fmt: skip


def only_error(result, code=1):
    """Check that a failed command printed one error; return it."""
    errors = [line for line in result.stderr.splitlines() if "error:" in line]
    assert result.exit_code == code and len(errors) == 1, result.stderr
    return errors[0]


def refusing(monkeypatch, number, *modes, after=0, name=""):
    """Make opening files of the run fail with an errno after ``after`` successful calls."""
    inner, calls = io.open, iter(range(1_000_000))

    def opened(file, mode="r", *rest, **options):
        wanted = isinstance(file, str | Path) and name in str(file) and mode in modes
        if wanted and next(calls) >= after:
            raise OSError(number, os.strerror(number), str(file))
        return inner(file, mode, *rest, **options)

    monkeypatch.setattr("builtins.open", opened)
    monkeypatch.setattr("io.open", opened)


def test_ten_invalid_updates_in_a_row(call, command, tmp_path, monkeypatch):
    load = HostFeed.load

    def spoiled(self, batch, **numbers):
        if numbers.get("draw", 0) >= 30:
            numbers["weight"] = float("nan")
        load(self, batch, **numbers)

    with monkeypatch.context() as patch:
        patch.setattr(HostFeed, "load", spoiled)
        error = only_error(call(*command))
    assert "10 updates in a row had gradients with inf or NaN" in error
    assert "a smaller --lr" in error and error.endswith("All is saved as it was then")
    assert checkpoint.load(tmp_path / "run", "state")[1]["update"] == 40
    assert call(*command).exit_code == 0


def test_too_large_a_learning_rate_is_one_error(call, command, tmp_path):
    result = call(*command, "--lr", "1e9")
    error = only_error(result)
    assert "Start again with a smaller --lr than 1e+09, or a longer --warmup. All is" in error
    assert "gpuattn: warning" not in result.stderr


def test_a_model_larger_than_memory(call, command, tmp_path):
    error = only_error(call(*command, "--dim", "1000000"))
    assert "a model larger than memory" in error and "GB. Try a smaller --dim or" in error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("number, reason", [
    (errno.ENOSPC, "No space left on device"), (errno.EROFS, "Read-only file system"),
])  # fmt: skip
def test_a_disk_that_refuses_the_metrics(call, command, tmp_path, monkeypatch, number, reason):
    with monkeypatch.context() as patch:
        refusing(patch, number, "a", after=3, name="metrics.jsonl")
        error = only_error(call(*command))
    assert f"cannot write {tmp_path / 'run/metrics.jsonl'}: {reason}. Free some space" in error
    assert call(*command).exit_code == 0
    updates = [row["update"] for row in RunFolder(tmp_path / "run").metrics.read("valid")]
    assert updates == [20, 40, 60, 80, 100]


def test_a_read_only_folder(call, command, tmp_path, monkeypatch):
    begun = [*command[:-4], "--schedule", "constant", "--out", tmp_path / "run", "--for"]
    assert call(*begun, "2u").exit_code == 0
    with monkeypatch.context() as patch:
        refusing(patch, errno.EROFS, "a", "w", "wb")
        new = only_error(call(*command[:-1], tmp_path / "new"))
        old = only_error(call(*begun, "4u"))
    assert call(*begun, "4u").exit_code == 0
    assert f"cannot write {tmp_path / 'run/config.toml'}: Read-only file system" in old
    assert f"cannot write to {tmp_path / 'new'}: Read-only file system. Choose another" in new


def test_a_folder_that_cannot_be_made(call, command, tmp_path):
    (tmp_path / "file").write_text("")
    error = only_error(call(*command[:-1], tmp_path / "file" / "run"))
    assert f"cannot write to {tmp_path / 'file' / 'run'}: Not a directory" in error


@pytest.mark.parametrize("spoil", [
    lambda path: path.write_bytes(b"no model"), lambda path: path.write_bytes(b"{half"),
    lambda path: path.unlink(), lambda path: (path.unlink(), path.mkdir()),
], ids=["other bytes", "a half", "missing", "a folder"])  # fmt: skip
def test_a_tokenizer_that_cannot_be_read(call, command, tmp_path, spoil):
    assert call(*command[:-4], "--for", "1u", "--out", tmp_path / "run").exit_code == 0
    path = tmp_path / "run" / "tokenizer.model"
    spoil(path)
    for arguments in (["info"], ["translate"], ["train"]):
        given = [tmp_path / "run"] if arguments != ["train"] else [
            *command[1:-4], "--for", "1u", "--out", tmp_path / "run"
        ]  # fmt: skip
        error = only_error(call(*arguments, *given))
        assert f"{path} cannot be used: " in error
