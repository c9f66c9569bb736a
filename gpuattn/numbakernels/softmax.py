"""Softmax over rows, one block of threads a row: the readable form of ``rawkernels/softmax.cu``.

All matrices are float32 (rows, cols). Launch: grid = (rows,).
"""

import math

import numpy as np

from gpuattn.numbakernels.device import cuda, jit
from gpuattn.numbakernels.reduce import NEG_INF, ZERO, block_max, block_sum

ONE = np.float32(1)
KEEP, ADD = 1, 2


@jit(device=True)
def logit_at(x, mask, row, j, kind, visible, scale):
    """Return scale * x + mask, or -inf where the row does not see column ``j``."""
    if j >= visible:
        return NEG_INF
    if kind == KEEP and mask[row, j] == ZERO:
        return NEG_INF
    logit = x[row, j] * scale
    if kind == ADD:
        logit += mask[row, j]
    return logit


@jit
def softmax_forward(x, mask, y, kind, queries, scale):
    """Write softmax(scale * x + mask) to ``y``.

    ``kind``: 0 for no mask, KEEP (seen where not zero) or ADD. ``queries``: causal over matrices
    of so many rows; 0 for not causal.
    """
    partial = cuda.shared.array(32, np.float32)
    row, first, step = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x
    cols = x.shape[1]
    visible = cols
    if queries > 0:
        visible = min(cols, row % queries + 1 + cols - queries)

    peak = NEG_INF
    for j in range(first, cols, step):
        peak = max(peak, logit_at(x, mask, row, j, kind, visible, scale))
    peak = block_max(peak, partial)
    if peak == NEG_INF:
        peak = ZERO  # a row that sees nothing: exp(-inf - 0) = 0

    total = ZERO
    for j in range(first, cols, step):
        total += math.exp(logit_at(x, mask, row, j, kind, visible, scale) - peak)
    total = block_sum(total, partial)
    if total == ZERO:
        total = ONE

    for j in range(first, cols, step):
        y[row, j] = math.exp(logit_at(x, mask, row, j, kind, visible, scale) - peak) / total


@jit
def softmax_backward(y, dy, dx, scale):
    """Write dx = scale * y * (dy - sum(y * dy))."""
    partial = cuda.shared.array(32, np.float32)
    row, first, step = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x
    cols = y.shape[1]
    dot = ZERO
    for j in range(first, cols, step):
        dot += y[row, j] * dy[row, j]
    dot = block_sum(dot, partial)
    for j in range(first, cols, step):
        dx[row, j] = scale * y[row, j] * (dy[row, j] - dot)
