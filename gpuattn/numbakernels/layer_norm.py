"""LayerNorm over rows, a block of threads for each: ``rawkernels/layer_norm.cu`` to read.

All matrices are float32 (rows, cols), ``weight`` and ``bias`` (cols,), ``mean`` and ``rstd``
(rows,). ``mean`` is that of the row less its first element, which loses nothing to a large mean.
"""

import math

import numpy as np

from gpuattn.numbakernels.device import cuda, jit
from gpuattn.numbakernels.reduce import ZERO, block_sum

ONE = np.float32(1)


@jit
def layer_norm_forward(x, weight, bias, y, mean, rstd, eps):
    """Write y = normalized * weight + bias. Launch: grid = (rows,)."""
    partial = cuda.shared.array(32, np.float32)
    row, first, step = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x
    cols = x.shape[1]
    pivot = x[row, 0]

    total = ZERO
    for j in range(first, cols, step):
        total += x[row, j] - pivot
    centre = block_sum(total, partial) / np.float32(cols)

    total = ZERO
    for j in range(first, cols, step):
        deviation = x[row, j] - pivot - centre
        total += deviation * deviation
    scale = ONE / math.sqrt(block_sum(total, partial) / np.float32(cols) + eps)

    for j in range(first, cols, step):
        y[row, j] = (x[row, j] - pivot - centre) * scale * weight[j] + bias[j]
    if first == 0:
        mean[row] = centre
        rstd[row] = scale


@jit
def layer_norm_backward(x, weight, dy, mean, rstd, dx):
    """Write dx = rstd * (g - mean(g) - normalized * mean(g * normalized)), g = weight * dy.

    Launch: grid = (rows,).
    """
    partial = cuda.shared.array(32, np.float32)
    row, first, step = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x
    cols = x.shape[1]
    pivot, scale = x[row, 0], rstd[row]

    total, dot = ZERO, ZERO
    for j in range(first, cols, step):
        g = weight[j] * dy[row, j]
        total += g
        dot += g * (x[row, j] - pivot - mean[row]) * scale
    total = block_sum(total, partial) / np.float32(cols)
    dot = block_sum(dot, partial) / np.float32(cols)

    for j in range(first, cols, step):
        normalized = (x[row, j] - pivot - mean[row]) * scale
        dx[row, j] = scale * (weight[j] * dy[row, j] - total - normalized * dot)


@jit
def layer_norm_sums(x, dy, mean, rstd, sums):
    """Write column sums of dy * normalized and of dy over every ``parts``-th row.

    ``sums``: (2, parts, cols). Launch: grid = (cols / threads, parts); a thread owns a column.
    """
    j = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if j >= x.shape[1]:
        return
    dweight, dbias = ZERO, ZERO
    for row in range(cuda.blockIdx.y, x.shape[0], cuda.gridDim.y):
        dweight += dy[row, j] * (x[row, j] - x[row, 0] - mean[row]) * rstd[row]
        dbias += dy[row, j]
    sums[0, cuda.blockIdx.y, j] = dweight
    sums[1, cuda.blockIdx.y, j] = dbias
