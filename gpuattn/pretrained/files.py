"""The files of a Hugging Face folder: config.json, and safetensors read by memory map.

A safetensors file is 8 bytes with the length of the header (little endian), the header, and the
data of the tensors end to end. The header is JSON: {name: {"dtype", "shape", "data_offsets": [first
byte, byte after the last], counted from the end of the header}}. Every rule of the format is
checked before a tensor is mapped (https://github.com/huggingface/safetensors#format). Faults are
collected as sentences, so that one error tells all of them. Nothing is unpickled.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gpuattn.errors import type_of
from gpuattn.tensor_file import DTYPES, once
from gpuattn.typing import StrPath

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
GENERATION, PREPROCESSOR = "generation_config.json", "preprocessor_config.json"
MAX_HEADER, MAX_JSON = 100 << 20, 100 << 20  # bytes; the format allows no longer headers
KINDS = DTYPES | {"I16": np.dtype("int16"), "U16": np.dtype("uint16"), "I8": np.dtype("int8")}
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


class Stored(NamedTuple):
    """A tensor in a file: ``start`` is the number of its first byte."""

    path: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int

    def map(self) -> np.ndarray:
        """Return the tensor as a read-only memory map."""
        return self.map_values(0, math.prod(self.shape)).reshape(self.shape)

    def map_values(self, first: int, count: int) -> np.ndarray:
        """Return a read-only memory map of ``count`` values from number ``first`` on."""
        if not count:
            return np.empty(0, self.dtype)
        start = self.start + first * self.dtype.itemsize
        return np.memmap(self.path, self.dtype, "r", start, (count,))


def is_pretrained(folder: StrPath) -> bool:
    """Return whether a folder has the files of a Hugging Face model, not those of a run."""
    folder = Path(folder)
    has = any((folder / name).exists() for name in (CONFIG, WEIGHTS, INDEX))
    return has and not (folder / "config.toml").exists()


def read_config(folder: Path, faults: list[str]) -> dict[str, Any]:
    """Return config.json as a dict. Sentences on what is wrong go to ``faults``."""
    config = read_json(folder / CONFIG, faults)
    if "auto_map" in config:
        faults.append(
            f"{CONFIG}: auto_map is {config['auto_map']!r}: the model comes with Python code of "
            "its own, which is never run"
        )
    return config


def read_preprocessor(folder: Path, faults: list[str]) -> dict[str, Any]:
    """Return preprocessor_config.json as a dict, empty where there is none."""
    path = folder / PREPROCESSOR
    return read_json(path, faults) if path.exists() else {}


def read_kept(folder: Path) -> dict[str, bytes]:
    """Return {name: bytes} of the files that are saved again as they were."""
    paths = [folder / name for name in (GENERATION, PREPROCESSOR)]
    return {path.name: path.read_bytes() for path in paths if path.is_file()}


def find_tensors(folder: Path, faults: list[str], unread: set[str]) -> dict[str, Stored] | None:
    """Return {name: Stored} of model.safetensors, or of all the shards that the index lists; None
    where nothing says which tensors there are.

    No data are read. Sentences on what is wrong go to ``faults``, and to ``unread`` the names of
    tensors that are there and cannot be read.
    """
    if (folder / WEIGHTS).exists():
        return _read_header(folder / WEIGHTS, faults, unread)
    if (folder / INDEX).exists():
        return _read_shards(folder, faults, unread)
    pickles = sorted(p.name for p in folder.glob("*") if p.suffix in PICKLES)
    if pickles:
        faults.append(
            f"{', '.join(pickles)} can run any program when opened, and is not opened. Save the "
            f"model as {WEIGHTS}: model.save_pretrained(folder) of transformers does"
        )
    else:
        faults.append(f"{WEIGHTS} is missing, and there is no {INDEX}")
    return None


def _read_shards(folder, faults, unread):
    """Return the tensors of all shards; each must be in the shard where the index says it is."""
    listed = read_json(folder / INDEX, faults).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(s, str) for s in listed.values()):
        faults.append(f"{INDEX}: weight_map is no object of names and files")
        return None
    found: dict[str, Stored] = {}
    for shard in sorted(set(listed.values())):
        inside = None
        if shard != Path(shard).name or "\\" in shard or not shard.endswith(".safetensors"):
            faults.append(
                f"{INDEX} names the file {shard!r}; accepted: the name of a .safetensors file "
                "in the folder"
            )
        else:
            inside = _read_header(folder / shard, faults, unread)
        if inside is None:
            unread.update(name for name, place in listed.items() if place == shard)
        for name, stored in (inside or {}).items():
            if name in found:
                faults.append(f"{name} is in {found[name].path.name} and again in {shard}")
            elif listed.get(name) != shard:
                faults.append(f"{name} is in {shard}, where {INDEX} does not list it")
            found[name] = stored
    faults += [f"{name} is in {INDEX}, not in {shard}" for name, shard in listed.items()
               if name not in found and name not in unread]  # fmt: skip
    return found


def _read_header(path, faults, unread):
    """Return {name: Stored} of one file, without tensors that break a rule of the format; None of a
    file that cannot be read."""
    name = path.name
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(MAX_HEADER, size - 8):
                faults.append(
                    f"{name} has {size:,} bytes and says that its header has {length:,}; accepted: "
                    f"up to {MAX_HEADER:,}, within the file"
                )
                return None
            header = _parse(file.read(length))
    except (OSError, ValueError, RecursionError) as error:
        faults.append(f"{name} cannot be read: {getattr(error, 'strerror', None) or error}")
        return None
    header.pop("__metadata__", None)
    found, spans = {}, []
    for key, entry in header.items():
        try:
            dtype, shape, first, last = _entry(entry)
        except ValueError as error:
            faults.append(f"{key} in {name} {error}")
            unread.add(key)
            continue
        spans.append((first, last, key))
        found[key] = Stored(path, dtype, shape, 8 + length + first)
    if len(found) == len(header):
        _check_tiles(sorted(spans), size - 8 - length, name, faults)
    return found


def _entry(entry):
    """Return (dtype, shape, first byte, byte after the last) of a tensor.

    Raises ValueError with the end of a sentence on the tensor.
    """
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError("has no entry of dtype, shape and data_offsets")
    kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"is {kind!r}; accepted: {', '.join(KINDS)}")
    if not _counts(shape) or not _counts(offsets) or len(offsets) != 2:
        raise ValueError(f"has the shape {shape!r} and the offsets {offsets!r}: no whole numbers")
    first, last = offsets
    size = math.prod(shape) * KINDS[kind].itemsize
    if last - first != size:
        raise ValueError(f"has {last - first:,} bytes; its shape {shape} of {kind} has {size:,}")
    return KINDS[kind], tuple(shape), first, last


def _counts(value):
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def _check_tiles(spans, size, name, faults):
    """Add a fault unless the tensors' bytes (first, last, name), sorted, cover the data once."""
    end, before = 0, "the header"
    for first, last, key in spans:
        if first != end:
            what = "overlap" if first < end else "leave a gap"
            faults.append(f"{name}: {before} and {key} {what} at byte {min(first, end):,}")
        if last >= end:
            end, before = last, key
    if end > size:
        faults.append(f"{name} is cut off: its tensors have {end:,} bytes, it holds {size:,}")
    elif end < size:
        faults.append(f"{name} has {size - end:,} bytes after its last tensor")


def read_json(path: Path, faults: list[str]) -> dict[str, Any]:
    """Return the object in a JSON file; {} and a fault where there is none."""
    try:
        if path.stat().st_size > MAX_JSON:
            raise ValueError(f"it has {path.stat().st_size:,} bytes")
        return _parse(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        faults.append(f"{path.name} cannot be read: {getattr(error, 'strerror', None) or error}")
        return {}


def to_json(values: Mapping[str, Any]) -> bytes:
    """Return the bytes of a JSON file, as transformers writes it."""
    return (json.dumps(values, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def _parse(data):
    """Return a JSON object. ValueError for anything else, and for keys that are there twice."""
    found = json.loads(data, object_pairs_hook=once)
    if not isinstance(found, dict):
        raise ValueError(f"it holds {type_of(found)}, no object")
    return found
