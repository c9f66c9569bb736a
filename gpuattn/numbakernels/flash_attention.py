"""FlashAttention in readable form: one thread per query (or key), tiles in shared memory.

Dao et al. (2022), algorithm 1, float32. Arrays are (B, T, H, D) as in
``ops/attention/flash_attention.py``. ``lengths``: (B,) int32, the keys of each sequence.
``diagonal``: 2**30 without a causal mask, else query i attends to keys j <= i + diagonal.
"""

import functools
import math
from typing import Any

import numpy as np

from gpuattn.numbakernels.device import cuda, jit

TILE = 32  # threads in a block, and rows in a tile
ZERO, ONE = np.float32(0), np.float32(1)
INF = np.float32(math.inf)


@functools.cache
def kernels(head_dim: int, value_dim: int) -> Any:
    """Return the kernels (forward, dq, dkv) for head sizes, which are compile-time constants."""

    @jit(device=True)
    def load(tile, rows, first, count):
        """Copy rows[first : first + TILE] to shared memory, zeros for rows from ``count`` on."""
        for r in range(TILE):
            for d in range(cuda.threadIdx.x, rows.shape[1], TILE):
                tile[r, d] = rows[first + r, d] if first + r < count else ZERO

    @jit(device=True)
    def dot(a, b):
        total = ZERO
        for d in range(a.shape[0]):
            total += a[d] * b[d]
        return total

    @jit
    def forward(q, k, v, lengths, out, lse, scale, diagonal):
        b, h, i = cuda.blockIdx.z, cuda.blockIdx.y, cuda.blockIdx.x * TILE + cuda.threadIdx.x
        g = h // (q.shape[2] // k.shape[2])  # the KV head of this query head
        T, S = q.shape[1], min(lengths[b], k.shape[1])
        k_tile = cuda.shared.array((TILE, head_dim), np.float32)
        v_tile = cuda.shared.array((TILE, value_dim), np.float32)
        row = cuda.local.array(head_dim, np.float32)
        sums = cuda.local.array(value_dim, np.float32)
        for d in range(head_dim):
            row[d] = q[b, i, h, d] * scale if i < T else ZERO
        for d in range(value_dim):
            sums[d] = ZERO
        top, total = -INF, ZERO
        end = min(
            S, (cuda.blockIdx.x + 1) * TILE + diagonal
        )  # the last key that a query of the block attends to, plus 1
        for first in range(0, end, TILE):
            cuda.syncthreads()  # other threads may still read the last tiles
            load(k_tile, k[b, :, g], first, S)
            load(v_tile, v[b, :, g], first, S)
            cuda.syncthreads()
            for r in range(min(TILE, S - first)):
                if first + r > i + diagonal:
                    break
                s = dot(row, k_tile[r])
                if s > top:  # a new maximum: rescale the sums
                    rescale = math.exp(top - s)
                    total *= rescale
                    for d in range(value_dim):
                        sums[d] *= rescale
                    top = s
                p = math.exp(s - top)
                total += p
                for d in range(value_dim):
                    sums[d] += p * v_tile[r, d]
        if i < T:
            for d in range(value_dim):
                out[b, i, h, d] = sums[d] / total if total != ZERO else ZERO
            lse[b, h, i] = top + math.log(total) if total != ZERO else -INF

    @jit
    def backward_q(q, k, v, lengths, out, lse, dout, dlse, dq, delta, scale, diagonal):
        b, h, i = cuda.blockIdx.z, cuda.blockIdx.y, cuda.blockIdx.x * TILE + cuda.threadIdx.x
        g = h // (q.shape[2] // k.shape[2])
        T, S = q.shape[1], min(lengths[b], k.shape[1])
        k_tile = cuda.shared.array((TILE, head_dim), np.float32)
        v_tile = cuda.shared.array((TILE, value_dim), np.float32)
        row = cuda.local.array(head_dim, np.float32)
        grad = cuda.local.array(value_dim, np.float32)
        sums = cuda.local.array(head_dim, np.float32)
        for d in range(head_dim):
            row[d] = q[b, i, h, d] * scale if i < T else ZERO
            sums[d] = ZERO
        for d in range(value_dim):
            grad[d] = dout[b, i, h, d] if i < T else ZERO
        my_lse, my_delta = INF, ZERO
        if i < T:
            my_lse = lse[b, h, i]
            my_delta = dot(grad, out[b, i, h]) - dlse[b, h, i]
            delta[b, h, i] = my_delta
        end = min(S, (cuda.blockIdx.x + 1) * TILE + diagonal)
        for first in range(0, end, TILE):
            cuda.syncthreads()
            load(k_tile, k[b, :, g], first, S)
            load(v_tile, v[b, :, g], first, S)
            cuda.syncthreads()
            for r in range(min(TILE, S - first)):
                if first + r > i + diagonal:
                    break
                p = math.exp(dot(row, k_tile[r]) - my_lse)
                ds = p * (dot(grad, v_tile[r]) - my_delta)
                for d in range(head_dim):
                    sums[d] += ds * k_tile[r, d]
        if i < T:
            for d in range(head_dim):
                dq[b, i, h, d] = sums[d] * scale

    @jit
    def backward_kv(q, k, v, lengths, lse, delta, dout, dk, dv, scale, diagonal):
        b, g, j = cuda.blockIdx.z, cuda.blockIdx.y, cuda.blockIdx.x * TILE + cuda.threadIdx.x
        heads = q.shape[2] // k.shape[2]
        T, S = q.shape[1], min(lengths[b], k.shape[1])
        q_tile = cuda.shared.array((TILE, head_dim), np.float32)
        dout_tile = cuda.shared.array((TILE, value_dim), np.float32)
        key = cuda.local.array(head_dim, np.float32)
        value = cuda.local.array(value_dim, np.float32)
        dk_sums = cuda.local.array(head_dim, np.float32)
        dv_sums = cuda.local.array(value_dim, np.float32)
        for d in range(head_dim):
            key[d] = k[b, j, g, d] * scale if j < S else ZERO
            dk_sums[d] = ZERO
        for d in range(value_dim):
            value[d] = v[b, j, g, d] if j < S else ZERO
            dv_sums[d] = ZERO
        for h in range(g * heads, (g + 1) * heads):
            start = max(0, cuda.blockIdx.x * TILE - diagonal) // TILE * TILE
            for first in range(start, T, TILE):
                cuda.syncthreads()
                load(q_tile, q[b, :, h], first, T)
                load(dout_tile, dout[b, :, h], first, T)
                cuda.syncthreads()
                for r in range(min(TILE, T - first)):
                    i = first + r
                    if j < S and j <= i + diagonal:
                        p = math.exp(dot(key, q_tile[r]) - lse[b, h, i])
                        ds = p * (dot(value, dout_tile[r]) - delta[b, h, i])
                        for d in range(value_dim):
                            dv_sums[d] += p * dout_tile[r, d]
                        for d in range(head_dim):
                            dk_sums[d] += ds * q_tile[r, d]
        if j < k.shape[1]:
            for d in range(head_dim):
                dk[b, j, g, d] = dk_sums[d] * scale
            for d in range(value_dim):
                dv[b, j, g, d] = dv_sums[d]

    return forward, backward_q, backward_kv
