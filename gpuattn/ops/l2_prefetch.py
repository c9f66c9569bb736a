"""Rows that forward kernels have brought to L2 ahead of the blocks that will read them.

One thread of each row asks for a later row as a whole, by one instruction: DRAM then reads longer
runs between what the blocks write. Where L2 may hold the rows already it only costs time.
Measured in ``rawkernels/notes/softmax.md`` and ``norms.md``.
"""

from gpuattn.cuda.gpu import gpu

DISTANCE = 2 << 20  # bytes from the row that is read to the one that is brought
LEAST_ROW = 8 << 10  # bytes
LEAST_ARRAY = 64 << 20  # bytes: more than L2 holds


def rows_ahead(x):
    """Return how many rows ahead, for rows (..., D) of whole 16-byte vectors; 0 for none."""
    row = x.shape[-1] * x.itemsize
    if row < LEAST_ROW or x.nbytes < LEAST_ARRAY or not gpu(x.device.id).has_l2_prefetch:
        return 0
    return max(DISTANCE // row, 1)
