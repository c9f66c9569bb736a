"""Checkpoint files that survive a kill, a full disk and a flipped bit: safetensors and manifests.

(``gpuattn.checkpoint``, which recomputes activations in the backward pass, is something else.)

A generation is ``NAME-00000012.safetensors`` and its manifest ``NAME-00000012.json``. Both are
written under a temporary name, flushed to the disk and renamed, the manifest last: a file with a
manifest is complete. The last two good generations are kept. Nothing is ever unpickled.

A kill between the two renames leaves tensors without a manifest beside older generations; those
are used, and the next save removes the rest. If no generation has a manifest, the manifests were
lost, and ``save`` removes nothing.
"""

import contextlib
import hashlib
import json
import os
import re
import shlex
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from gpuattn.arrays import to_cpu
from gpuattn.errors import CheckpointError, problem
from gpuattn.tensor_file import (
    FORMAT,
    check,
    check_finite,
    decode,
    pieces,
    read,
    read_header,
)

KEPT = 2
FILE = re.compile(r"([A-Za-z0-9_]+)-(\d{8})\.safetensors")
_verified: set[tuple] = set()  # (path, size, mtime) of files whose hash this process has checked


# ---- writing ------------------------------------------------------------------------------------


def save(
    folder: str | Path, name: str, tensors: dict[str, Any], metadata: dict[str, Any] | None = None
) -> Path:
    """Write a new generation of the checkpoint ``name`` and return the path of its tensors.

    ``tensors``: {name: NumPy or CuPy array}. ``metadata``: JSON-able values saved with them.
    When the new generation is on the disk, older ones are removed except the last good one.
    Raises CheckpointError, and leaves the folder as it was, when a tensor holds inf or NaN, when
    the disk is full or read-only, and when all older generations have lost their manifests.
    """
    folder = Path(folder)
    if not generations(folder, name) and _numbers(folder, name) - {1}:
        lost = describe_unlisted(folder, unlisted(folder, name))
        raise CheckpointError(f"cannot save {name} in {folder}: {lost}")
    host = {key: to_cpu(array) for key, array in tensors.items()}
    check_finite(host, f"save: {name}", ". Start again with a smaller --lr")
    data = pieces(host, metadata)
    path = _path(folder, name, max([0, *_numbers(folder, name)]) + 1, "safetensors")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove(folder.glob(f".{name}-*.tmp"))
        _write(path, data)
        _write(path.with_suffix(".json"), [_manifest(path, data)])
    except OSError as error:
        _remove([path.with_suffix(".json"), path])
        older = generations(folder, name)
        left = f"the one saved before, {older[0].name}, is intact" if older else "there is none yet"
        size, reason = sum(map(len, data)), error.strerror or error
        raise CheckpointError(
            f"cannot save {name} in {folder} ({size:,} bytes): {reason}; {left}. Free "
            "some space, or choose another --out."
        ) from error
    _verified.add(_identity(path))
    _prune(folder, name)
    return path


def adopt(path: Path) -> None:
    """Write the manifest of a checkpoint's safetensors file that has lost it.

    Raises CheckpointError for a damaged file or one with inf or NaN, as ``read`` does.
    """
    read(path)
    _write(path.with_suffix(".json"), [_manifest(path, [path.read_bytes()])])


def _manifest(path, data):
    """Return the bytes of the manifest for a file of these pieces."""
    digest, size = hashlib.sha256(), sum(map(len, data))
    for piece in data:
        digest.update(piece)
    manifest = {"format": FORMAT, "file": path.name, "bytes": size, "sha256": digest.hexdigest()}
    return json.dumps(manifest, indent=1).encode()


def _write(path, data):
    """Write a file of pieces atomically: it has all its bytes, or does not exist."""
    temporary = path.with_name(f".{path.stem}-{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            for piece in data:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        _remove([temporary])
        raise
    _sync_folder(path.parent)


def _sync_folder(folder):
    if os.name == "nt":  # Windows cannot open folders, and its renames are durable
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _prune(folder, name):
    """Remove all but the last good generations, manifests first; ignore errors."""
    good = []
    for manifest in generations(folder, name):
        if len(good) < KEPT and _is_good(manifest):
            good.append(manifest.stem)
    for number in _numbers(folder, name):
        path = _path(folder, name, number, "json")
        if path.stem not in good:
            _remove([path, path.with_suffix(".safetensors")])


def _is_good(manifest):
    with contextlib.suppress(CheckpointError, OSError):
        path = manifest.with_suffix(".safetensors")
        if _identity(path) not in _verified:
            _verified_bytes(manifest)
        return True
    return False


def _remove(paths):
    for path in paths:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


# ---- reading ------------------------------------------------------------------------------------


def generations(folder: str | Path, name: str) -> list[Path]:
    """Return the manifests of ``name`` in ``folder``, newest first, without reading them."""
    paths = (_path(Path(folder), name, n, "json") for n in _numbers(folder, name))
    return sorted((path for path in paths if path.exists()), reverse=True)


def exists(folder: str | Path, name: str) -> bool:
    """Return whether there is a generation of ``name``, with or without a manifest."""
    return bool(_numbers(folder, name))


def unlisted(folder: str | Path, name: str | None = None) -> list[Path]:
    """Return the checkpoint files, of one name or of all, without a manifest, newest first."""
    found = []
    for path in sorted(Path(folder).glob("*.safetensors"), reverse=True):
        match = FILE.fullmatch(path.name)
        if match and name in (None, match[1]) and not path.with_suffix(".json").exists():
            found.append(path)
    return found


def describe_unlisted(folder: str | Path, files: list[Path]) -> str:
    """Return a sentence on files without manifests, and what to do."""
    names = ", ".join(path.name for path in files)
    return (
        f"no manifest (.json) is left beside {names}, and nothing is written over them. Copy the "
        f"manifests back, or write new ones: gpuattn recover {shlex.quote(str(folder))}"
    )


def load(
    folder: str | Path, name: str, expected: dict[str, Any] | None = None
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return (tensors, metadata) of the newest good generation of ``name``, as NumPy arrays.

    ``expected``: {name: anything with ``shape`` and ``dtype``}; the tensors must be exactly these.
    Size and SHA-256 are checked first, then names, shapes, dtypes, and that all numbers are finite.
    A generation that fails is skipped with a warning. Raises CheckpointError with the fault of each
    when none is good, or when there is none. If no generation has a manifest, the newest intact
    file is used, with a warning.
    """
    listed: list[Path] | None = None
    faults: list[str] = []
    while listed != (now := generations(folder, name)):  # repeat if a run saved meanwhile
        listed, faults = now, []
        for manifest in listed or unlisted(folder, name):
            try:
                tensors, metadata = _load_one(manifest, expected)
            except CheckpointError as error:
                faults.append(str(error))
                continue
            if faults:
                warnings.warn(f"{'; '.join(faults)}; {manifest.stem} is used instead", stacklevel=2)
            return tensors, metadata
    if faults:
        raise CheckpointError(f"no checkpoint {name} in {folder} can be used: {'; '.join(faults)}")
    raise CheckpointError(f"there is no checkpoint {name} in {folder}")


def _load_one(path, expected):
    """Return (tensors, metadata) by a manifest, or of a safetensors file without one."""
    if path.suffix == ".json":
        tensors, metadata = decode(_verified_bytes(path), path.stem)
        check(tensors, expected, path.stem)
        return tensors, metadata
    found = read(path, expected)
    warnings.warn(
        f"{path.name} has no manifest, so its SHA-256 cannot be checked; write one: gpuattn "
        f"recover {shlex.quote(str(path.parent))}",
        stacklevel=3,
    )
    return found


def shapes(folder: str | Path, name: str) -> dict[str, tuple[int, ...]] | None:
    """Return {name: shape} of the newest generation of ``name`` from its header, unverified.

    None if the header cannot be read.
    """
    found = _header(folder, name)
    return found and found[0]


def notes(folder: str | Path, name: str) -> dict[str, Any] | None:
    """Return the metadata of the newest generation of ``name`` from its header, or None."""
    found = _header(folder, name)
    return found and found[1]


def _header(folder, name):
    """Return ({name: shape}, metadata) of the newest generation, unverified, or None."""
    for path in (generations(folder, name) or unlisted(folder, name))[:1]:
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
            return read_header(path.with_suffix(".safetensors"))
    return None


def fault(folder: str | Path, name: str) -> str:
    """Return what is wrong with the newest generation of ``name``, or "". Checks only its size."""
    for manifest in generations(folder, name)[:1]:
        try:
            _sized(manifest)
        except CheckpointError as error:
            return str(error)
    return ""


def _verified_bytes(manifest):
    """Return the bytes of a manifest's file. Raises CheckpointError for another SHA-256."""
    path, content = _sized(manifest)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error.strerror}") from error
    if hashlib.sha256(data).hexdigest() != content.get("sha256"):
        raise CheckpointError(f"{path.name} is damaged: its SHA-256 is not the one in its manifest")
    _verified.add(_identity(path))
    return data


def _sized(manifest):
    """Return (path of the tensors, content of the manifest), with the size checked."""
    path = manifest.with_suffix(".safetensors")
    try:
        content = json.loads(manifest.read_bytes())
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError(f"its format is not {FORMAT}")
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{manifest.name} cannot be read: {error}") from error
    if content.get("file") != path.name:  # never opened: the name in it could be any path
        got = repr(content.get("file"))
        raise CheckpointError(problem("load", f"the file in {manifest.name}", got, path.name))
    try:
        size = path.stat().st_size
        if size != content.get("bytes"):
            raise CheckpointError(f"{path.name} has {size} bytes, want {content.get('bytes')}")
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error.strerror}") from error
    return path, content


# ---- names of files -----------------------------------------------------------------------------


def _checked(name):
    if not re.fullmatch(r"[A-Za-z0-9_]+", name):
        raise ValueError(problem("checkpoint", "name", repr(name), "letters, digits and _"))
    return name


def _path(folder, name, number, kind):
    return folder / f"{_checked(name)}-{number:08d}.{kind}"


def _numbers(folder, name):
    pattern = re.compile(rf"{_checked(name)}-(\d{{8}})\.(?:json|safetensors)")
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return {int(m[1]) for m in map(pattern.fullmatch, os.listdir(folder)) if m}
    return set()


def _identity(path):
    status = path.stat()
    return str(path), status.st_size, status.st_mtime_ns
