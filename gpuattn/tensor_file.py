"""{name: array} as the bytes of a safetensors file, and how two of them differ.

``Module.save`` writes one such file; ``runtime.checkpoint`` keeps generations of them.
"""

import json
from typing import Any

import numpy as np

from gpuattn.arrays import BFLOAT16
from gpuattn.errors import CheckpointError, problem

FORMAT = "gpuattn/1"
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


def encode(tensors: dict[str, Any], metadata: dict[str, Any] | None = None) -> bytes:
    """Return NumPy arrays and JSON-able metadata as the bytes of a safetensors file."""
    from safetensors.numpy import save as to_bytes

    texts = {"format": FORMAT, "metadata": json.dumps(metadata or {})}
    return to_bytes({key: np.asarray(a, order="C") for key, a in tensors.items()}, texts)


def decode(data: bytes, name: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return (tensors, metadata) from the bytes of a checkpoint's safetensors file.

    ``name``: of the file, for errors. Raises CheckpointError for other bytes.
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
