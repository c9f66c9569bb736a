"""Checkpoints that survive a kill, a full disk and a flipped bit: safetensors and a manifest.

A generation is ``NAME-00000012.safetensors`` and ``NAME-00000012.json``. Both are written under
another name, flushed to the disk and renamed, the manifest last: where it stands, its file is
complete. The last two good generations are kept. Nothing is ever unpickled.

A kill between the two renames leaves tensors without a manifest, beside the generations before;
these are used, and the next save removes what was left. Where no generation has its manifest they
were lost, and ``save`` refuses to remove anything.
"""

import contextlib
import hashlib
import json
import os
import re
import shlex
import warnings
from pathlib import Path

import numpy as np

from gpuattn.arrays import BFLOAT16, is_floating, to_cpu
from gpuattn.errors import CheckpointError, problem

FORMAT = "gpuattn/1"
KEPT = 2
FILE = re.compile(r"([A-Za-z0-9_]+)-(\d{8})\.safetensors")
DTYPES = {
    "F32": np.dtype("float32"),
    "F16": np.dtype("float16"),
    "BF16": BFLOAT16,
    "F64": np.dtype("float64"),
    "I64": np.dtype("int64"),
    "I32": np.dtype("int32"),
    "U64": np.dtype("uint64"),
    "U32": np.dtype("uint32"),
    "U8": np.dtype("uint8"),
    "BOOL": np.dtype("bool"),
}
_verified = set()  # (path, size, mtime) of files whose hash this process has seen to be right


# ---- writing ------------------------------------------------------------------------------------


def save(folder, name, tensors, metadata=None):
    """Write a new generation of the checkpoint ``name`` and return the path of its tensors.

    ``tensors``: {name: NumPy or CuPy array}. ``metadata``: JSON-able values kept with them.
    Older generations but the last good one are removed, after the new one is safe on disk.
    Raises CheckpointError, with the folder as it was, when a tensor holds inf or NaN, when the
    disk refuses (full, read-only), and where the generations before have lost their manifests.
    """
    folder = Path(folder)
    if not generations(folder, name) and _numbers(folder, name) - {1}:
        lost = describe_unlisted(folder, unlisted(folder, name))
        raise CheckpointError(f"cannot save {name} in {folder}: {lost}")
    host = {key: to_cpu(array) for key, array in tensors.items()}
    _check_finite(host, f"save: {name}", ". Begin anew with a smaller --lr")
    data = encode(host, metadata)
    path = _path(folder, name, max([0, *_numbers(folder, name)]) + 1, "safetensors")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove(folder.glob(f".{name}-*.tmp"))
        _write(path, data)
        _write(path.with_suffix(".json"), _manifest(path, data))
    except OSError as error:
        _remove([path.with_suffix(".json"), path])
        older = generations(folder, name)
        left = f"the one saved before, {older[0].name}, is intact" if older else "there is none yet"
        raise CheckpointError(
            f"cannot save {name} in {folder} ({len(data):,} bytes): {error.strerror or error}; "
            f"{left}. Free some space, or choose another --out."
        ) from error
    _verified.add(_identity(path))
    _prune(folder, name)
    return path


def adopt(path):
    """Write the manifest of a safetensors file of ours that lost it.

    Raises CheckpointError for a file that is not whole or holds inf or NaN, as ``read`` does.
    """
    read(path)
    _write(path.with_suffix(".json"), _manifest(path, path.read_bytes()))


def _manifest(path, data):
    """Return the bytes of the manifest for a file with these bytes."""
    digest = hashlib.sha256(data).hexdigest()
    said = {"format": FORMAT, "file": path.name, "bytes": len(data), "sha256": digest}
    return json.dumps(said, indent=1).encode()


def encode(tensors, metadata=None):
    """Return NumPy arrays and JSON-able metadata as the bytes of a safetensors file."""
    from safetensors.numpy import save as to_bytes

    texts = {"format": FORMAT, "metadata": json.dumps(metadata or {})}
    return to_bytes({key: np.asarray(a, order="C") for key, a in tensors.items()}, texts)


def _write(path, data):
    """Write a file so that it is there with all its bytes or not at all."""
    temporary = path.with_name(f".{path.stem}-{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        _remove([temporary])
        raise
    _sync_folder(path.parent)


def _sync_folder(folder):
    if os.name == "nt":  # where folders cannot be opened, and renames are durable by themselves
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _prune(folder, name):
    """Remove all but the last good generations, manifests first. What cannot be removed stays."""
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


def generations(folder, name):
    """Return the manifests of ``name`` in ``folder``, newest first, unread."""
    paths = (_path(Path(folder), name, n, "json") for n in _numbers(folder, name))
    return sorted((path for path in paths if path.exists()), reverse=True)


def exists(folder, name):
    """Tell whether there is a generation of ``name``, be it one without a manifest."""
    return bool(_numbers(folder, name))


def unlisted(folder, name=None):
    """Return the safetensors files of ours, of one name or of all, that have no manifest, newest
    first."""
    found = []
    for path in sorted(Path(folder).glob("*.safetensors"), reverse=True):
        match = FILE.fullmatch(path.name)
        if match and name in (None, match[1]) and not path.with_suffix(".json").exists():
            found.append(path)
    return found


def describe_unlisted(folder, files):
    """Return what is the matter with files without manifests, and what to do."""
    names = ", ".join(path.name for path in files)
    return (
        f"no manifest (.json) is left beside {names}, and nothing is written over them. Copy the "
        f"manifests back, or write new ones: gpuattn recover {shlex.quote(str(folder))}"
    )


def load(folder, name, expected=None):
    """Return (tensors, metadata) of the newest good generation of ``name``, as NumPy arrays.

    ``expected``: {name: anything with ``shape`` and ``dtype``}; the tensors must be exactly these.
    Size and SHA-256 are checked first, then names, shapes, dtypes, and that all numbers are finite.
    A generation that fails is passed over with a warning; CheckpointError says what is wrong with
    each when none is good, or that there is none. Where no generation has its manifest, the newest
    whole file is used, with a warning.
    """
    listed, faults = None, []
    while listed != (now := generations(folder, name)):  # again if a run saved meanwhile
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
    """Return (tensors, metadata) by a manifest, or of a safetensors file that has none."""
    if path.suffix == ".json":
        tensors, metadata = decode(_verified_bytes(path), path.stem)
        _check(tensors, expected, path.stem)
        return tensors, metadata
    found = read(path, expected)
    warnings.warn(
        f"{path.name} has no manifest, so its SHA-256 cannot be checked; write one: gpuattn "
        f"recover {shlex.quote(str(path.parent))}",
        stacklevel=3,
    )
    return found


def shapes(folder, name):
    """Return {name: shape} of the newest generation of ``name`` by its header alone, unverified.

    None where there is no header to read.
    """
    found = _header(folder, name)
    return found and found[0]


def notes(folder, name):
    """Return the metadata of the newest generation of ``name``, as ``shapes`` does, or None."""
    found = _header(folder, name)
    return found and found[1]


def digest(tensors):
    """Return the SHA-256 of {name: array}, names and values, whatever file they come from."""
    found = hashlib.sha256()
    for name, array in sorted(tensors.items()):
        found.update(f"{name} {array.dtype} {array.shape} ".encode())
        found.update(np.ascontiguousarray(array).view(np.uint8).data)
    return found.hexdigest()


def _header(folder, name):
    """Return ({name: shape}, metadata) of the newest generation, unverified, or None."""
    for path in (generations(folder, name) or unlisted(folder, name))[:1]:
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
            with open(path.with_suffix(".safetensors"), "rb") as file:
                header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            noted = json.loads(header.pop("__metadata__", {}).get("metadata", "{}"))
            return {key: tuple(entry["shape"]) for key, entry in header.items()}, noted
    return None


def read(path, expected=None):
    """Return (tensors, metadata) of one safetensors file of ours, checked as by ``load``.

    There is no hash to compare with. Raises CheckpointError.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    tensors, metadata = decode(data, path.name)
    _check(tensors, expected, path.name)
    return tensors, metadata


def decode(data, name):
    """Return (tensors, metadata) from the bytes of a safetensors file of ours.

    ``name``: what errors call it. Raises CheckpointError for anything else.
    """
    from safetensors import SafetensorError, deserialize

    try:
        entries = dict(deserialize(data))
        header = json.loads(
            data[8 : 8 + int.from_bytes(data[:8], "little")], object_pairs_hook=_once
        )
        texts = header.pop("__metadata__", {})
        if texts.get("format") != FORMAT:
            got = repr(texts.get("format"))
            raise CheckpointError(problem("load", f"the format of {name}", got, repr(FORMAT)))
        metadata = json.loads(texts["metadata"])
    except (SafetensorError, ValueError, KeyError, RecursionError) as error:
        raise CheckpointError(f"{name} is not a whole safetensors file: {error}") from error
    tensors = {}
    for key in header:
        entry = entries[key]
        if entry["dtype"] not in DTYPES:
            accepted = ", ".join(DTYPES)
            raise CheckpointError(problem("load", f"{key} in {name}", entry["dtype"], accepted))
        flat = np.frombuffer(entry["data"], DTYPES[entry["dtype"]])
        tensors[key] = flat.reshape(entry["shape"])
    return tensors, metadata


def _once(pairs):
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [key for key, _ in pairs]
        twice = next(key for key in names if names.count(key) > 1)
        raise ValueError(f"{twice!r} is in it twice")
    return found


def fault(folder, name):
    """Return what is wrong with the newest generation of ``name``, or "": by its size alone."""
    for manifest in generations(folder, name)[:1]:
        try:
            _sized(manifest)
        except CheckpointError as error:
            return str(error)
    return ""


def _verified_bytes(manifest):
    """Return the bytes a manifest speaks of. Raises CheckpointError unless they are these."""
    path, said = _sized(manifest)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error.strerror}") from error
    if hashlib.sha256(data).hexdigest() != said.get("sha256"):
        raise CheckpointError(f"{path.name} is damaged: its SHA-256 is not the one noted at saving")
    _verified.add(_identity(path))
    return data


def _sized(manifest):
    """Return (path, manifest) of a file with as many bytes as its manifest says."""
    path = manifest.with_suffix(".safetensors")
    try:
        said = json.loads(manifest.read_bytes())
        if not isinstance(said, dict) or said.get("format") != FORMAT:
            raise ValueError(f"its format is not {FORMAT}")
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{manifest.name} cannot be read: {error}") from error
    if said.get("file") != path.name:  # the name is never followed: it may lead anywhere
        got = repr(said.get("file"))
        raise CheckpointError(problem("load", f"the file in {manifest.name}", got, path.name))
    try:
        size = path.stat().st_size
        if size != said.get("bytes"):
            raise CheckpointError(f"{path.name} has {size} bytes, want {said.get('bytes')}")
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error.strerror}") from error
    return path, said


# ---- what must hold -----------------------------------------------------------------------------


def differences(expected, found, most=5):
    """Return how {name: array} ``found`` differs from ``expected`` in all but values, or ""."""
    faults = [f"{name} is missing" for name in expected if name not in found]
    for name, array in found.items():
        if name not in expected:
            faults.append(f"{name} is unknown")
        elif tuple(array.shape) != tuple(expected[name].shape):
            faults.append(f"{name} has shape {array.shape}, want {expected[name].shape}")
        elif array.dtype != expected[name].dtype:
            faults.append(f"{name} is {array.dtype}, want {expected[name].dtype}")
    more = [f"and {len(faults) - most} more"] if len(faults) > most else []
    return "; ".join(faults[:most] + more)


def _check(tensors, expected, name):
    other = differences(expected, tensors) if expected is not None else ""
    if other:
        raise CheckpointError(f"{name} is of another model: {other}")
    _check_finite(tensors, name)


def _check_finite(tensors, name, advice=""):
    for key, array in tensors.items():
        if is_floating(array.dtype) and not np.isfinite(array).all():
            raise CheckpointError(f"{name}: {key} holds inf or NaN{advice}")


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
