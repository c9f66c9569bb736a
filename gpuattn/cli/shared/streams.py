"""Opens what commands read and write: files, and standard streams, which may be closed."""

import contextlib
import errno
import io
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

STANDARD = "-"  # as the name of a file: the standard stream


class Closed(io.TextIOBase):
    """Stands in for a standard stream that is closed; using it raises an OSError that names it."""

    encoding = "utf-8"

    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def buffer(self) -> Any:
        raise OSError(errno.EBADF, f"standard {self._name} is closed")

    def read(self, *_: Any) -> Any:
        return self.buffer

    def write(self, text: str) -> Any:
        return self.buffer


def replace_closed() -> None:
    """Replace closed standard streams, so that using them raises an OSError that names them and no
    file that is opened later gets their descriptors. Text for a closed standard error is dropped.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, this one
    sys.stdin = sys.stdin or Closed("input")
    sys.stdout = sys.stdout or Closed("output")
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115 open until the end


@contextlib.contextmanager
def reading(path: str) -> Iterator[Any]:
    """Open a file to read bytes; ``-`` is standard input."""
    if path == STANDARD:
        yield sys.stdin.buffer
        return
    with open(path, "rb") as file:
        yield file


@contextlib.contextmanager
def writing(path: str) -> Iterator[Any]:
    """Open a file to write bytes; ``-`` is standard output.

    The file is replaced when the block ends; an error in the block leaves the old one. Anything but
    a regular file, such as a pipe, is written directly. Raises OSError that names ``path``.
    """
    if path == STANDARD:
        yield sys.stdout.buffer
        return
    target = Path(os.path.realpath(path))
    regular = target.is_file() or not target.exists()
    written = target.with_name(f".{target.name}.tmp") if regular else target
    try:
        with written.open("wb") as file:
            yield file
        if regular:
            if target.exists():
                shutil.copymode(target, written)
            written.replace(target)
    except BaseException as error:
        if regular:
            written.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename in (None, str(written)):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
