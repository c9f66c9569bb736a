"""Prefetching rows to L2: how many rows ahead forward kernels do it.

One thread per row prefetches a whole later row by one bulk instruction, so that DRAM reads longer
runs between the writes of the blocks. Where L2 may hold the rows already it only costs time.
Measured in ``rawkernels/notes/softmax.md`` and ``norms.md``.
"""

from gpuattn.cuda.gpu import gpu
from gpuattn.typing import Array

DISTANCE = 2 << 20  # bytes from the row that is read to the one that is prefetched
MIN_ROW = 8 << 10  # bytes
MIN_ARRAY = 64 << 20  # bytes: more than L2 holds


def prefetch_rows(x: Array) -> int:
    """Return how many rows ahead to prefetch ``x`` (..., D), or 0 for no prefetch."""
    row = x.shape[-1] * x.itemsize
    if row < MIN_ROW or x.nbytes < MIN_ARRAY or not gpu(x.device.id).has_l2_prefetch:
        return 0
    return max(DISTANCE // row, 1)
