"""Closed standard streams, and files that are written atomically."""

import os
import subprocess
import sys

import pytest

from gpuattn.cli.shared.streams import writing

from .conftest import ROOT


@pytest.mark.parametrize("command, number, said", [
    ("translate", 0, "gpuattn: error: standard input is closed\n"),
    ("info", 1, "gpuattn: error: standard output is closed\n"), ("info", 2, ""),
])  # fmt: skip
def test_a_closed_standard_stream_is_reported(trained, command, number, said):
    run = subprocess.run(
        [sys.executable, "-m", "gpuattn", command, str(trained)], cwd=ROOT, text=True,
        stdin=subprocess.DEVNULL, capture_output=True, preexec_fn=lambda: os.close(number),
    )  # fmt: skip
    assert run.stderr == said and run.returncode == (1 if said else 0)
    assert bool(run.stdout) == (number == 2)


def test_a_file_is_replaced_when_the_new_one_is_complete(tmp_path):
    path = tmp_path / "out.txt"
    path.write_text("old")
    path.chmod(0o640)
    with writing(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_text() == "old"
    assert path.read_text() == "new" and path.stat().st_mode & 0o777 == 0o640
    with pytest.raises(KeyboardInterrupt), writing(path) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert path.read_text() == "new" and os.listdir(tmp_path) == ["out.txt"]


def test_a_link_stays_a_link_and_a_device_a_device(tmp_path):
    (tmp_path / "link").symlink_to("file")
    with writing(tmp_path / "link") as file:
        file.write(b"text")
    assert (tmp_path / "file").read_text() == "text" and (tmp_path / "link").is_symlink()
    with writing(os.devnull) as file:
        file.write(b"text")
    assert not os.path.isfile(os.devnull)


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="none/out.txt"), writing(tmp_path / "none/out.txt"):
        pass
    with pytest.raises(IsADirectoryError), writing(tmp_path):
        pass
    with pytest.raises(OSError, match="out.txt") as caught, writing(tmp_path / "out.txt"):
        raise OSError(28, "No space left on device")
    assert caught.value.errno == 28 and os.listdir(tmp_path) == []
