"""Addresses of device memory: where arrays lie, and which ones a struct of a kernel holds."""

import math
from typing import Any

import numpy as np

from gpuattn.typing import Array

NUMBERS = np.dtype(np.int32), np.dtype(np.int64), np.dtype(np.float32)
WORD = 8  # bytes of an address


class Unplaced(Exception):
    """A call works with something that no later call can be given."""


def extent(x: Array) -> tuple[int, int]:
    """Return the first address of an array, and the one behind its last byte."""
    low = high = x.data.ptr
    for n, step in zip(x.shape, x.strides, strict=True):
        if n:
            low, high = low + min(0, (n - 1) * step), high + max(0, (n - 1) * step)
    return low, high + x.itemsize


def addresses_in(struct: Any) -> list[tuple[int, int]]:
    """Return (offset, address) of every address in a struct that a kernel takes by value.

    ``struct``: a view, as bytes, of numbers, or of an array of one element with named fields.
    """
    fields = struct if struct.dtype.names else struct.base
    if fields is not None and fields.dtype in NUMBERS:
        return []
    if fields is None or not fields.dtype.names or fields.size != 1:
        raise Unplaced  # such as a tensor map that nobody told of
    found = []
    for dtype, at, *_ in fields.dtype.fields.values():
        if dtype.base != np.uint64:
            continue
        if at % WORD:
            raise Unplaced
        count = math.prod(dtype.shape)
        raw = np.frombuffer(fields.tobytes(), np.uint64, count, at)
        found += [(at + WORD * i, int(value)) for i, value in enumerate(raw) if value]
    return found
