"""Copies rows of packed arrays into rows of tables: the keys of sources or prompts into a cache.

Device code: ``rawkernels/attention/store_rows.cu``.
"""

import math
from collections.abc import Sequence

import numpy as np

from gpuattn.arrays import on_gpu
from gpuattn.cuda.kernels import kernel
from gpuattn.errors import problem
from gpuattn.typing import Array

NAME = "store_rows"
BLOCK = 128
COPY = np.dtype(
    [
        *((name, np.uint64) for name in ("table", "source")), ("step", np.int64),
        *((name, np.int32) for name in ("room", "rows", "bytes", "unused")),
    ]
)  # fmt: skip


def store_rows(
    pairs: Sequence[tuple[Array, Array]], starts: Array, places: Array, count: int = 1
) -> None:
    """Copy rows ``starts[i]`` ... ``starts[i] + count - 1`` of each source into its table.

    ``pairs``: one or two of (table, source). A table (N, room, ...) is C-contiguous. A source
    (rows, ...) has the dtype of its table, of 2 bytes or more; its rows are contiguous.
    ``starts``, ``places``: int32 (n,). ``table[places[i], t]`` becomes ``source[starts[i] + t]``,
    past the end of the source its last row, for t < ``count`` <= room. If entries with the same
    place have different starts, either may be stored. Nothing is read back, so a CUDA graph can
    hold the call. Raises ValueError for shapes and dtypes that do not fit.
    """
    for table, source in pairs:
        if table.shape[2:] != source.shape[1:] or table.dtype != source.dtype:
            got = f"{source.dtype} of shape {source.shape}"
            accepted = f"{table.dtype} rows of shape {table.shape[2:]}"
            raise ValueError(problem(NAME, "a source", got, accepted))
        if count > table.shape[1]:
            raise ValueError(problem(NAME, "count", count, f"up to the room, {table.shape[1]}"))
    if on_gpu(starts):
        structs = [_copy(table, source) for table, source in pairs]
        one, other = structs if len(structs) == 2 else (*structs, np.zeros(1, COPY))
        kernel("attention/store_rows.cu", NAME)(
            (len(starts), count), (BLOCK,), *(x.view(f"V{COPY.itemsize}") for x in (one, other)),
            starts, places,
        )  # fmt: skip
        return
    rows = starts[:, None] + np.arange(count)
    for table, source in pairs:
        table[:, :count][places] = source[np.minimum(rows, len(source) - 1)]


def _copy(table, source):
    """Return one COPY, (1,)."""
    row = math.prod(table.shape[2:]) * table.itemsize
    assert table.flags.c_contiguous and table.itemsize % 2 == 0
    assert len(source) == 0 or source[0].flags.c_contiguous, source.strides
    fields = table.data.ptr, source.data.ptr, source.strides[0], table.shape[1], len(source), row, 0
    return np.array([fields], COPY)
