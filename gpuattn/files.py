"""Atomic writes of files, with errors that name the file."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from gpuattn.errors import CheckpointError
from gpuattn.typing import StrPath


def write_text(path: StrPath, text: str) -> None:
    """Write a small file as ``write_bytes`` does, in UTF-8."""
    write_bytes(path, text.encode())


def write_bytes(path: StrPath, data: bytes) -> None:
    """Write a file atomically: other processes see the old content or the new one.

    Raises CheckpointError when writing fails.
    """
    with writing(path):
        replace(Path(path), data)


def replace(path: Path, data: bytes) -> None:
    """Write a file as ``write_bytes`` does. Raises OSError when writing fails."""
    temporary = path.with_name(f".{path.name}.tmp")  # of a killed process: overwritten
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


@contextlib.contextmanager
def writing(path: StrPath) -> Iterator[None]:
    """Return a context that turns OSError into a CheckpointError with the path and advice."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"cannot write {path}: {error.strerror or error}. Free some space, or choose another "
            "place; what was saved before is intact"
        ) from error
