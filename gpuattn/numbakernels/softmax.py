"""Softmax over rows, one block of threads a row: the readable form of ``rawkernels/softmax.cu``.

A row is read once, 16 bytes at a time, and stays in registers; one too long for that goes through
them in steps and is read twice. All matrices are (rows, cols) of one dtype, as ``vectors.numbers``
gives them, with room for whole vectors at the end of a row.
Launch: grid = (rows,), block = any multiple of 32 threads.
"""

import numpy as np

from gpuattn.numbakernels.device import SIMULATED, cuda, exp, jit
from gpuattn.numbakernels.reduce import NEG_INF, ZERO, block_max, block_sum
from gpuattn.numbakernels.vectors import gather, load, store

ONE = np.float32(1)
LOWEST = np.finfo(np.float32).min  # as a bound it keeps -inf - (-inf) out of rows that see nothing
KEEP, ADD = 1, 2
FORWARD, BACKWARD = (8, 8) if SIMULATED else (32, 16)  # numbers of a row that a thread holds


@jit(device=True)
def column_of(begin, i, width):
    """Return where this thread's ``i``-th vector begins, of those from column ``begin`` on."""
    return begin + (i * cuda.blockDim.x + cuda.threadIdx.x) * width


@jit(device=True)
def read_logits(x, keep, bias, row, begin, kind, visible, scale, values):
    """Put scale * x + mask into ``values``, -inf where the row does not see the column."""
    width = len(load(x, 0, 0))  # known to the compiler
    last = x.shape[1] - width  # read instead of what is beyond the row
    for i in range(FORWARD // width):
        part = load(x, row, min(column_of(begin, i, width), last))
        for k in range(width):
            values[i * width + k] = part[k] * scale
    if kind == ADD:
        for i in range(FORWARD // width):
            part = load(bias, row, min(column_of(begin, i, width), last))
            for k in range(width):
                values[i * width + k] += part[k]
    for i in range(FORWARD // width):
        column = column_of(begin, i, width)
        if kind == KEEP or column + width > visible:
            for k in range(width):
                if column + k >= visible or (kind == KEEP and not keep[row, column + k]):
                    values[i * width + k] = NEG_INF


@jit(device=True)
def read_product(y, dy, row, begin, cols, p, g):
    """Put numbers of ``y`` and ``dy`` into ``p`` and ``g``, and return this thread's sum of p g."""
    width = len(load(y, 0, 0))
    last = y.shape[1] - width
    for i in range(BACKWARD // width):
        column = column_of(begin, i, width)
        y_part, dy_part = load(y, row, min(column, last)), load(dy, row, min(column, last))
        for k in range(width):
            p[i * width + k], g[i * width + k] = y_part[k], dy_part[k]
        if column + width > cols:
            for k in range(width):
                if column + k >= cols:
                    p[i * width + k], g[i * width + k] = ZERO, ZERO
    dot = ZERO
    for i in range(BACKWARD):
        dot += p[i] * g[i]
    return dot


@jit(device=True)
def write(y, row, begin, values, count):
    """Write this thread's vectors of ``count`` numbers, those that are in the row."""
    width = len(gather(y, values, 0))
    for i in range(count // width):
        column = column_of(begin, i, width)
        if column < y.shape[1]:
            store(y, row, column, gather(y, values, i * width))


@jit(device=True)
def exponentials(values, peak):
    """Replace logits by exp(logit - peak) and return this thread's sum of them."""
    total = ZERO
    for i in range(FORWARD):
        values[i] = exp(values[i] - peak)
        total += values[i]
    return total


@jit
def softmax_forward(x, keep, bias, y, cols, kind, queries, scale):
    """Write softmax(scale * x + mask) to ``y``.

    ``kind``: 0 for no mask, KEEP (the bool matrix ``keep``: seen where true) or ADD (``bias``).
    ``queries``: causal over matrices of so many rows; 0 for not causal.
    """
    partial = cuda.shared.array(32, np.float32)
    values = cuda.local.array(FORWARD, np.float32)
    row, stride = cuda.blockIdx.x, FORWARD * cuda.blockDim.x
    steps = (cols + stride - 1) // stride
    visible = cols
    if queries > 0:
        visible = min(cols, row % queries + 1 + cols - queries)

    peak, total = LOWEST, ZERO
    for step in range(steps):
        read_logits(x, keep, bias, row, step * stride, kind, visible, scale, values)
        high = peak
        for i in range(FORWARD):
            high = max(high, values[i])
        high = block_max(high, partial)
        total = total * exp(peak - high) + exponentials(values, high)
        peak = high
    total = block_sum(total, partial)
    factor = ZERO  # of a row that sees nothing
    if total != ZERO:
        factor = ONE / total

    for step in range(steps - 1, -1, -1):  # the last step's are still there
        if step < steps - 1:
            read_logits(x, keep, bias, row, step * stride, kind, visible, scale, values)
            exponentials(values, peak)
        for i in range(FORWARD):
            values[i] *= factor
        write(y, row, step * stride, values, FORWARD)


@jit
def softmax_backward(y, dy, dx, cols, scale):
    """Write dx = scale * y * (dy - sum(y * dy))."""
    partial = cuda.shared.array(32, np.float32)
    p = cuda.local.array(BACKWARD, np.float32)
    g = cuda.local.array(BACKWARD, np.float32)
    row, stride = cuda.blockIdx.x, BACKWARD * cuda.blockDim.x
    steps = (cols + stride - 1) // stride

    dot = ZERO
    for step in range(steps):
        dot += read_product(y, dy, row, step * stride, cols, p, g)
    dot = block_sum(dot, partial)

    for step in range(steps - 1, -1, -1):  # the last step's are still there
        if step < steps - 1:
            read_product(y, dy, row, step * stride, cols, p, g)
        for i in range(BACKWARD):
            p[i] *= scale * (g[i] - dot)
        write(dx, row, step * stride, p, BACKWARD)
