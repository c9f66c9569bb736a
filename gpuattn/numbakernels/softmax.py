"""Softmax, one team of threads per row: the readable form of ``rawkernels/softmax.cu``.

A row is read once, 16 bytes at a time, and stays in registers; a row too long for that is processed
in steps and read twice. All matrices are (rows, cols) of one dtype, from ``vectors.numbers``, with
rows padded to whole vectors. The sizes in ``reduce.layout`` are compile-time constants.
Launch: grid = (rows / teams of a block,), block = (team * teams of a block,).
"""

import functools
from collections.abc import Callable

import numpy as np

from gpuattn.numbakernels.device import cuda, jit
from gpuattn.numbakernels.reduce import NEG_INF, ZERO, reductions, teams_of_a_block
from gpuattn.numbakernels.vectors import exp2, gather, load, store

ONE, LOG2_E = np.float32(1), np.float32(1.4426950408889634)
LOWEST = np.finfo(
    np.float32
).min  # a bound that keeps -inf - (-inf) out of rows that are masked everywhere
KEEP, ADD = 1, 2


@functools.cache
def softmax_forward(
    team: int, vectors: int, width: int, kind: int, edges: bool, long: bool
) -> Callable:
    """Return the kernel in which each thread of a team keeps ``vectors`` vectors of a row.

    ``width``: numbers of a vector. ``kind``: 0 for no mask, KEEP (keep where true) or ADD.
    ``edges``: some vectors are outside of the row or masked. ``long``: a row takes several steps.
    """
    held, teams = vectors * width, teams_of_a_block(team)
    team_max, team_sum = reductions(team)

    @jit(device=True)
    def read(x, mask, row, first, visible, scale, values):
        """Write scale * x + mask to ``values``, -inf where the column is masked."""
        last = x.shape[1] - width  # read instead of vectors after the row
        for i in range(vectors):
            column = first + i * team * width
            part = load(x, row, min(column, last) if edges else column)
            for k in range(width):
                values[i * width + k] = part[k] * scale
        if kind == ADD:
            for i in range(vectors):
                column = first + i * team * width
                part = load(mask, row, min(column, last) if edges else column)
                for k in range(width):
                    values[i * width + k] += part[k]
        if edges or kind == KEEP:
            for i in range(vectors):
                column = first + i * team * width
                if kind == KEEP or column + width > visible:
                    for k in range(width):
                        if column + k >= visible or (kind == KEEP and not mask[row, column + k]):
                            values[i * width + k] = NEG_INF

    @jit(device=True)
    def exponentials(values, peak):
        """Replace logits by exp(logit - peak) and return this thread's sum of them."""
        total = ZERO
        for n in range(held):
            values[n] = exp2((values[n] - peak) * LOG2_E)
            total += values[n]
        return total

    @jit
    def forward(x, mask, y, cols, queries, scale):
        """Write softmax(scale * x + mask) to ``y``.

        ``queries``: for a causal mask, the rows T of each matrix (T, S); else 0.
        """
        partial = cuda.shared.array((3, 32), np.float32)
        values = cuda.local.array(held, np.float32)
        row = cuda.blockIdx.x * teams + cuda.threadIdx.x // team
        if row >= x.shape[0]:
            return
        first, stride = cuda.threadIdx.x % team * width, held * team
        steps = (cols + stride - 1) // stride if long else 1
        visible = cols
        if edges and queries > 0:
            visible = min(cols, row % queries + 1 + cols - queries)

        peak, total = LOWEST, ZERO
        for step in range(steps):
            read(x, mask, row, first + step * stride, visible, scale, values)
            high = peak
            for n in range(held):
                high = max(high, values[n])
            high = team_max(high, partial[step % 2])
            if long:
                total *= exp2((peak - high) * LOG2_E)
            total += exponentials(values, high)
            peak = high
        total = team_sum(total, partial[2])
        factor = ZERO  # of a row that is masked everywhere
        if total != ZERO:
            factor = ONE / total

        for step in range(
            steps - 1, -1, -1
        ):  # backwards: values of the last step are still in registers
            if long and step < steps - 1:
                read(x, mask, row, first + step * stride, visible, scale, values)
                exponentials(values, peak)
            for n in range(held):
                values[n] *= factor
            for i in range(vectors):
                column = first + step * stride + i * team * width
                if not edges or column < y.shape[1]:
                    store(y, row, column, gather(y, values, i * width))

    return forward


@functools.cache
def softmax_backward(team: int, vectors: int, width: int, edges: bool, long: bool) -> Callable:
    """Return the kernel of the gradient; arguments as in ``softmax_forward``."""
    held, teams = vectors * width, teams_of_a_block(team)
    _, team_sum = reductions(team)

    @jit(device=True)
    def read(y, dy, row, first, cols, p, g):
        """Load ``y`` and ``dy`` to ``p`` and ``g``; return the sum of p * g of this thread."""
        last = y.shape[1] - width
        for i in range(vectors):
            column = first + i * team * width
            place = min(column, last) if edges else column
            y_part, dy_part = load(y, row, place), load(dy, row, place)
            for k in range(width):
                p[i * width + k], g[i * width + k] = y_part[k], dy_part[k]
            if edges:
                for k in range(width):
                    if column + k >= cols:
                        p[i * width + k], g[i * width + k] = ZERO, ZERO
        dot = ZERO
        for n in range(held):
            dot += p[n] * g[n]
        return dot

    @jit
    def backward(y, dy, dx, cols, scale):
        """Write dx = scale * y * (dy - sum(y * dy))."""
        partial = cuda.shared.array(32, np.float32)
        p = cuda.local.array(held, np.float32)
        g = cuda.local.array(held, np.float32)
        row = cuda.blockIdx.x * teams + cuda.threadIdx.x // team
        if row >= y.shape[0]:
            return
        first, stride = cuda.threadIdx.x % team * width, held * team
        steps = (cols + stride - 1) // stride if long else 1

        dot = ZERO
        for step in range(steps):
            dot += read(y, dy, row, first + step * stride, cols, p, g)
        dot = team_sum(dot, partial)

        for step in range(
            steps - 1, -1, -1
        ):  # backwards: values of the last step are still in registers
            if long and step < steps - 1:
                read(y, dy, row, first + step * stride, cols, p, g)
            for n in range(held):
                p[n] *= scale * (g[n] - dot)
            for i in range(vectors):
                column = first + step * stride + i * team * width
                if not edges or column < dx.shape[1]:
                    store(dx, row, column, gather(dx, p, i * width))

    return backward
