"""Tensors as the bytes of a safetensors file, and back; checks of tensors.

The library safetensors reads. It does not write here: its writer copies each tensor twice while it
holds Python's lock, so that training could not go on beside it, and puts the metadata in random
order. ``pieces`` copies nothing, and the same tensors give the same bytes.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from gpuattn.arrays import BFLOAT16, is_floating
from gpuattn.errors import CheckpointError, problem

FORMAT = "gpuattn/1"
DTYPES = {  # in the order in which safetensors stores them
    "U64": np.dtype("uint64"),
    "I64": np.dtype("int64"),
    "F64": np.dtype("float64"),
    "F32": np.dtype("float32"),
    "U32": np.dtype("uint32"),
    "I32": np.dtype("int32"),
    "BF16": BFLOAT16,
    "F16": np.dtype("float16"),
    "U8": np.dtype("uint8"),
    "BOOL": np.dtype("bool"),
}
KINDS = {dtype: kind for kind, dtype in DTYPES.items()}
BLOCK = 1 << 18  # values looked at together: their temporary arrays stay in the cache


def pieces(
    tensors: dict[str, np.ndarray], metadata: dict[str, Any] | None = None
) -> list[bytes | np.ndarray]:
    """Return the bytes of a safetensors file, to be written one piece after the other.

    The first piece is the header. The others are the tensors as flat arrays of uint8: views of
    those in C order, copies of others. ``metadata``: JSON-able values.
    Raises CheckpointError for a dtype that is not in ``DTYPES``.
    """
    for name, array in tensors.items():
        if array.dtype not in KINDS:
            accepted = ", ".join(map(str, KINDS))
            raise CheckpointError(problem("save", f"{name}.dtype", array.dtype, accepted))
    order = {kind: place for place, kind in enumerate(DTYPES)}
    names = sorted(tensors, key=lambda name: (order[KINDS[tensors[name].dtype]], name))
    header: dict[str, Any] = {
        "__metadata__": {"format": FORMAT, "metadata": json.dumps(metadata or {})}
    }
    end = 0
    for name in names:
        array = tensors[name]
        begin, end = end, end + array.nbytes
        header[name] = {
            "dtype": KINDS[array.dtype], "shape": array.shape, "data_offsets": [begin, end],
        }  # fmt: skip
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    flat = (tensors[name].reshape(-1).view(np.uint8) for name in names)
    return [len(text).to_bytes(8, "little") + text, *flat]


def read_header(path: Path) -> tuple[dict[str, tuple[int, ...]], dict[str, Any]]:
    """Return ({name: shape}, metadata) of a file, by its header alone.

    Raises OSError, and ValueError, LookupError, TypeError or AttributeError for other bytes.
    """
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    metadata = json.loads(header.pop("__metadata__", {}).get("metadata", "{}"))
    return {key: tuple(entry["shape"]) for key, entry in header.items()}, metadata


def read(
    path: str | Path, expected: dict[str, Any] | None = None
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return (tensors, metadata) of one checkpoint file, checked as by ``checkpoint.load``.

    But for the hash. Raises CheckpointError.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    tensors, metadata = decode(data, path.name)
    check(tensors, expected, path.name)
    return tensors, metadata


def decode(data: bytes, name: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return (tensors, metadata) from the bytes of a checkpoint's safetensors file.

    ``name``: of the file, for errors. Raises CheckpointError for other bytes.
    """
    from safetensors import SafetensorError, deserialize

    try:
        entries = dict(deserialize(data))
        header = json.loads(
            data[8 : 8 + int.from_bytes(data[:8], "little")], object_pairs_hook=once
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


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the dict of a JSON object's pairs. Raises ValueError for a key that is there twice."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key!r} is in it twice")
        found[key] = value
    return found


def digest(tensors: dict[str, np.ndarray]) -> str:
    """Return the SHA-256 of the names, dtypes, shapes and values of {name: array}."""
    found = hashlib.sha256()
    for name, array in sorted(tensors.items()):
        found.update(f"{name} {array.dtype} {array.shape} ".encode())
        found.update(np.ascontiguousarray(array).view(np.uint8).data)
    return found.hexdigest()


# ---- checks -------------------------------------------------------------------------------------


def differences(expected: dict[str, Any], found: dict[str, Any], most: int = 5) -> str:
    """Return how {name: array} ``found`` differs from ``expected`` in names, shapes and dtypes.

    At most ``most`` differences; "" if there is none.
    """
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


def check(tensors: dict[str, np.ndarray], expected: dict[str, Any] | None, name: str) -> None:
    """Raise CheckpointError for tensors that are not like ``expected``, and for inf and NaN."""
    other = differences(expected, tensors) if expected is not None else ""
    if other:
        raise CheckpointError(f"{name} is of another model: {other}")
    check_finite(tensors, name)


def check_finite(tensors: dict[str, np.ndarray], name: str, advice: str = "") -> None:
    """Raise CheckpointError for a tensor that holds inf or NaN. ``name``: of the checkpoint."""
    for key, array in tensors.items():
        if is_floating(array.dtype) and not is_finite(array):
            raise CheckpointError(f"{name}: {key} holds inf or NaN{advice}")


def has_bits_of(one: np.ndarray, other: np.ndarray) -> bool:
    """Return whether two arrays have the same dtype, shape and bits."""
    same = one.dtype == other.dtype and one.shape == other.shape
    return same and np.array_equal(_bits(one), _bits(other))


def is_finite(array: np.ndarray) -> bool:
    """Return whether a float array holds neither inf nor NaN.

    16-bit arrays are judged by their bits: ``np.isfinite`` takes longer for them.
    """
    flat = array.reshape(-1)
    blocks = (flat[i : i + BLOCK] for i in range(0, flat.size, BLOCK))
    if array.dtype.itemsize != 2:
        return all(np.isfinite(block).all() for block in blocks)
    infinity = 0x7C00 if array.dtype == np.float16 else 0x7F80
    return all((_bits(block) & np.uint16(0x7FFF)).max() < infinity for block in blocks)


def _bits(array):
    return array.view(f"u{array.dtype.itemsize}")
