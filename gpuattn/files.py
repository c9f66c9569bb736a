"""Small files that are written whole or not at all, with errors that name them."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from gpuattn.errors import CheckpointError
from gpuattn.typing import StrPath


def write_text(path: StrPath, text: str) -> None:
    """Write a small file at once: another process sees the old text or the new, never a part.

    Raises CheckpointError when the disk refuses.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.tmp")  # one that a kill left is written over
    with writing(path):
        try:
            with temporary.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise


@contextlib.contextmanager
def writing(path: StrPath) -> Iterator[None]:
    """Say of a disk that refuses which file it was, and what to do."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"cannot write {path}: {error.strerror or error}. Free some space, or choose another "
            "--out; what was saved before is intact"
        ) from error
