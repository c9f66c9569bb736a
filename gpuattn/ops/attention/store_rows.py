"""Copies rows of packed arrays into rows of tables: the keys of sources or prompts into a cache.

Device code: ``rawkernels/attention/cache/store_rows.cu``.
"""

import math
from collections.abc import Sequence

import numpy as np

from gpuattn.arrays import on_gpu
from gpuattn.cuda.gpu import gpu
from gpuattn.cuda.kernels import kernel
from gpuattn.errors import problem
from gpuattn.typing import Array

NAME = "store_rows"
BLOCK, EACH, MOST_PAIRS = 128, 8, 24  # EACH: loads of 16 bytes that a thread has under way
BLOCKS = 8  # of a multiprocessor, at least, if there are as many rows
COPY = np.dtype(
    [
        *((name, np.uint64) for name in ("table", "source")), ("step", np.int64),
        *((name, np.int32) for name in ("room", "rows", "bytes", "unused")),
    ]
)  # fmt: skip


def store_rows(
    pairs: Sequence[tuple[Array, Array]], starts: Array, places: Array, count: int = 1,
    lengths: Array | None = None,
) -> None:  # fmt: skip
    """Copy rows ``starts[i]`` ... ``starts[i] + count - 1`` of each source into its table.

    ``pairs``: (table, source), of which MOST_PAIRS are one launch. A table (N, room, ...) is
    C-contiguous. A source (rows, ...) has the dtype of its table, of 2 bytes or more; its rows are
    contiguous. ``starts``, ``places``: int32 (n,). ``table[places[i], t]`` becomes
    ``source[starts[i] + t]``, past the end of the source its last row, for t < ``count`` <= room;
    with ``lengths``, int32 (N,), for t < ``lengths[places[i]]`` alone. If entries with the same
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
        for first in range(0, len(pairs), MOST_PAIRS):
            some = pairs[first : first + MOST_PAIRS]
            copies = np.zeros(MOST_PAIRS, COPY)
            copies[: len(some)] = [_copy(*pair) for pair in some]
            words = _words(copies[: len(some)])
            least = BLOCKS * gpu(pairs[0][0].device.id).multiprocessors
            each = _rows_of_block(len(some) * words, count, len(starts), least)
            kernel("attention/cache/store_rows.cu", NAME)(
                (len(starts), -(-count // each)), (BLOCK,), copies.view(f"V{copies.nbytes}"),
                starts, places, lengths, len(some), words, count, each,
            )  # fmt: skip
        return
    rows = np.arange(count)
    most = np.full(len(starts), count) if lengths is None else lengths[places]
    entries, rows = np.nonzero(rows < most[:, None])
    for table, source in pairs:
        table[places[entries], rows] = source[np.minimum(starts[entries] + rows, len(source) - 1)]


def _copy(table, source):
    """Return the fields of a COPY."""
    row = math.prod(table.shape[2:]) * table.itemsize
    assert table.flags.c_contiguous and table.itemsize % 2 == 0
    assert len(source) == 0 or source[0].flags.c_contiguous, source.strides
    return table.data.ptr, source.data.ptr, source.strides[0], table.shape[1], len(source), row, 0


def _words(copies):
    """Return how many 16 bytes a row has, if all rows are alike and aligned to that; else 0."""
    size, names = int(copies["bytes"][0]), ("table", "source", "step", "bytes")
    aligned = not any((copies[name] % 16).any() for name in names)
    return size // 16 if aligned and (copies["bytes"] == size).all() else 0


def _rows_of_block(loads, count, entries, least):
    """Return how many of ``count`` rows a block copies: about as many as give threads EACH loads.

    ``loads``: of a row of all arrays; 0 if elements are copied one by one, which takes one row.
    ``least``: blocks of the grid, if there are as many rows.
    """
    most = min(EACH * BLOCK // loads, entries * count // least, count) if loads else 1
    return -(-count // -(-count // most)) if most > 1 else 1  # parts of about the same size
