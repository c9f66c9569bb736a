"""Files that later processes read instead of compiling or measuring again.

Files are written under a temporary name and renamed, so that no process sees half a file. A disk
that is full or not writable is no error: nothing is kept then.
"""

import contextlib
import hashlib
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

from gpuattn.arrays import import_cupy

DIGEST_BYTES = 32  # of SHA-256


def folder() -> Path:
    """Return the folder of the cache: GPUATTN_CACHE_DIR, or one in the user's cache folder.

    For a user without a home it is a path where nothing can be written.
    """
    base = os.environ.get("GPUATTN_CACHE_DIR")
    if base:
        return Path(base)
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        cache = Path(os.devnull)
    return cache / "gpuattn" / "kernels"


def read_bytes(path: Path) -> bytes | None:
    """Return what ``write_bytes`` wrote, or None: there is no such file, or it is damaged."""
    try:
        stored = path.read_bytes()
    except OSError:
        return None
    data, digest = stored[:-DIGEST_BYTES], stored[-DIGEST_BYTES:]
    return data if hashlib.sha256(data).digest() == digest else None


def write_bytes(path: Path, data: bytes) -> None:
    """Write ``data``, followed by its checksum."""
    _write(path, data + hashlib.sha256(data).digest())


def read_json(path: Path) -> dict[str, Any]:
    """Return the dict that ``write_json`` wrote, or {}: there is no such file, or it is damaged."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def write_json(path: Path, table: dict[str, Any]) -> None:
    """Write a dict as text, without a checksum: a part of it does not parse."""
    _write(path, json.dumps(table).encode())


def json_path(kind: str, device: int, version: int | None = None) -> Path:
    """Return the path of the measurements of a ``kind``, by the GPU's name and a version."""
    name = import_cupy().cuda.runtime.getDeviceProperties(device)["name"].decode()
    parts = [kind, re.sub(r"\W+", "-", name), *([] if version is None else [str(version)])]
    return folder() / f"{'-'.join(parts)}.json"


def _write(path: Path, data: bytes) -> None:
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.replace(temporary, path)
        except OSError:
            os.unlink(temporary)
