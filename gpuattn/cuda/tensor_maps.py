"""Tensor maps: how TMA finds tiles of a strided array, encoded by the driver.

A map is 128 bytes that a kernel takes by value (``const __grid_constant__ TensorMap``). It holds a
bare address: the caller of a kernel keeps the array alive.
"""

import ctypes
import functools
from typing import Any

import numpy as np

from gpuattn.arrays import ctype, recorders, rows_refusal

KINDS = {"f16": 6, "bf16": 9}  # CU_TENSOR_MAP_DATA_TYPE_*
COLUMNS = 64  # of a box: 128 bytes of 16-bit numbers, the width of the 128-byte swizzle
SWIZZLE_128B, PROMOTE_L2_128B = 3, 2
ALIGNMENT = 64  # bytes: what the driver demands of the address that it writes a map to


def refusal(x: Any, name: str) -> str | None:
    """Return why no map describes ``x`` (..., rows, heads, columns), the argument ``name``."""
    if ctype(x.dtype) not in KINDS:
        return f"{name} is {x.dtype}, the kernels that use TMA take float16 and bfloat16"
    if reason := rows_refusal(x, name):
        return reason
    steps = (step for n, step in zip(x.shape, x.strides, strict=True) if n > 1)
    if x.size and any(step <= 0 for step in steps):
        return f"{name} repeats rows or goes backwards; try a contiguous copy"
    return None


def tensor_map(x: Any, rows: int) -> np.ndarray:
    """Return the map of ``x``, (batches, rows, heads, columns) or packed (rows, heads, columns).

    Boxes are ``rows`` x 64 columns x 1 head x 1 batch. Coordinates go (column, row, head, batch).
    ``x``: on the GPU, for which ``refusal`` returns None. Raises RuntimeError where the driver
    fails.
    """
    shape = (1, *x.shape) if x.ndim == 3 else x.shape
    strides = (0, *x.strides) if x.ndim == 3 else x.strides
    # the driver wants a positive multiple of 16 also for a stride that is never used
    steps = tuple(step if n > 1 else 16 for n, step in zip(shape, strides, strict=True))
    kind = ctype(x.dtype)
    encoded = _encode(x.data.ptr, shape, steps, kind, rows)
    if (recorder := recorders.get()) is not None:
        recorder.mapped(encoded, x, lambda pointer: _encode(pointer, shape, steps, kind, rows))
    return encoded


@functools.lru_cache(4096)
def _encode(
    pointer: int, shape: tuple[int, ...], strides: tuple[int, ...], kind: str, rows: int
) -> np.ndarray:
    batches, length, heads, columns = (max(n, 1) for n in shape)
    dims = (ctypes.c_uint64 * 4)(columns, length, heads, batches)
    steps = (ctypes.c_uint64 * 3)(strides[1], strides[2], strides[0])
    box = (ctypes.c_uint32 * 4)(COLUMNS, rows, 1, 1)
    ones = (ctypes.c_uint32 * 4)(1, 1, 1, 1)
    room = np.zeros(128 + ALIGNMENT, np.uint8)
    start = -room.ctypes.data % ALIGNMENT
    words = room[start : start + 128]
    status = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(words.ctypes.data), KINDS[kind], 4, ctypes.c_void_p(pointer), dims, steps,
        box, ones, 0, SWIZZLE_128B, PROMOTE_L2_128B, 0,
    )  # fmt: skip
    if status:
        raise RuntimeError(
            f"cuTensorMapEncodeTiled failed with {status} for shape {shape}, strides {strides}"
        )
    return words.view("V128")


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
