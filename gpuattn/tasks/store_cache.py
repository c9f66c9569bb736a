"""What runs made of their data by themselves: where it lies, and how much is kept.

It is a folder of tokens for a text, and a file for the images of a folder. Together they take
``MOST`` bytes at most, the newest one apart; those used longest ago are deleted. A run that reads
one meanwhile keeps its memory maps, and makes it again when it is resumed.
"""

import contextlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from gpuattn.cuda import disk_cache
from gpuattn.data.store import HEAD
from gpuattn.errors import CheckpointError, ConfigError
from gpuattn.lock import locked

MOST = 50_000_000_000  # bytes
DELETED = ".deleted-"  # begins the name of what is being removed
ABANDONED = 3600.0  # seconds without a write, after which nobody decodes images into a file


class Cached(NamedTuple):
    """Tokens or images: ``size`` in bytes; ``used``: when it was written or last learnt from,
    seconds since 1970."""

    path: Path
    size: int
    used: float


def folder() -> Path:
    """Return where the stores lie: below GPUATTN_CACHE_DIR, or in the user's cache folder."""
    cache = disk_cache.folder()
    return (cache if os.environ.get("GPUATTN_CACHE_DIR") else cache.parent) / "stores"


def image_folder() -> Path:
    """Return where the files of images lie: beside the stores."""
    return folder().with_name("images")


def cached() -> list[Cached]:
    """Return the stores and the files of images, whole or not, that used longest ago first."""
    found = []
    for path in (*folder().glob("[!.]*"), *image_folder().glob("[!.]*")):
        with contextlib.suppress(OSError):  # another process deletes it
            inside = list(path.rglob("*")) if path.is_dir() else [path]
            files = [file.stat() for file in inside]
            used = max(file.st_mtime for file in (path.stat(), *files))
            found.append(Cached(path, sum(file.st_size for file in files), used))
    return sorted(found, key=lambda one: one.used)


def mark_used(path: Path) -> None:
    """Note that a store, or a file of images, is used now."""
    with contextlib.suppress(OSError):  # a cache that cannot be written to keeps all
        os.utime(path / HEAD if path.is_dir() else path)


def prune(kept: Path, say: Callable[[str], None]) -> None:
    """Delete what was used longest ago until the cache holds ``MOST`` bytes.

    Neither ``kept`` nor what is being written is deleted. ``say``: is told what was.
    """
    every = cached()
    total = left = sum(one.size for one in every)
    count = 0
    for one in every:
        if left > MOST and one.path != kept and _deleted(one.path):
            left, count = left - one.size, count + 1
    if count:
        say(
            f"{folder().parent} held {total / 1e9:.3g} GB of tokens and images, {MOST / 1e9:.3g} "
            f"GB are kept: deleted {count} used longest ago, {(total - left) / 1e9:.3g} GB"
        )
    for part in image_folder().glob(".*.tmp"):  # of a killed process
        with contextlib.suppress(OSError):
            if time.time() - part.stat().st_mtime > ABANDONED:
                part.unlink()


def _deleted(path):
    """Delete a store or a file of images; return whether that was possible."""
    gone = path.with_name(f"{DELETED}{path.name}")
    try:
        with locked(path) if path.is_dir() else contextlib.nullcontext():
            path.rename(gone)  # at once: no half of it can be taken for a whole
    except (OSError, ConfigError, CheckpointError):
        return False
    for one in path.parent.glob(f"{DELETED}*"):  # of killed processes too
        if one.is_dir():
            shutil.rmtree(one, ignore_errors=True)
        else:
            one.unlink(missing_ok=True)
    return True
