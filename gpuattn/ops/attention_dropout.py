"""The dropout bits of attention: the same in NumPy and in ``rawkernels/common/attention.cuh``."""

import numpy as np

from gpuattn.rng import philox, threshold

TILE = 16  # bits are drawn for 16 x 16 logits at a time


def attention_keep_mask(xp, shape, p, key):
    """Return the dropout mask of attention as a boolean (B, H, T, S) array.

    ``key``: a ``rng.Key``. The bits of logit (i, j) are a function of the key, of b * H + h and of
    (i, j) alone: one Philox counter (i // 16 | j // 16 << 16, lane | (b * H + h) << 5) per lane and
    16 x 16 tile gives the eight numbers that lane holds of an mma.m16n8 pair of accumulators.
    """
    B, H, T, S = shape
    heads = xp.arange(B * H, dtype=np.uint64)
    return keep_block(xp, heads, slice(0, T), slice(0, S), p, key).reshape(shape)


def keep_block(xp, heads, rows, cols, p, key):
    """Return the mask (heads, rows, cols) of the given b * H + h (uint64)."""
    top, left = rows.start // TILE, cols.start // TILE
    i = xp.arange(top, -(-rows.stop // TILE), dtype=np.uint64)
    j = xp.arange(left, -(-cols.stop // TILE), dtype=np.uint64)
    lane = xp.arange(32, dtype=np.uint64)
    c0 = (i[:, None] | j << np.uint64(16))[None, :, :, None]
    c1 = (heads[:, None] << np.uint64(5) | lane)[:, None, None, :]
    stream = xp.full((), key.stream, np.uint64)
    step = xp.asarray(key.step, np.uint64).reshape(())
    words = philox(key.seed, c0, c1, stream, step)
    low, half, bound = np.uint64(0xFFFF), np.uint64(16), np.uint64(threshold(p))
    kept = xp.stack([xp.stack(((w & low) < bound, (w >> half) < bound), -1) for w in words], -2)
    # (.., lane, word, half) = (.., row % 8, column % 8 // 2, column // 8, row // 8, column % 2)
    kept = kept.reshape(len(heads), len(i), len(j), 8, 4, 2, 2, 2).transpose(0, 1, 6, 3, 2, 5, 4, 7)
    kept = kept.reshape(len(heads), len(i) * TILE, len(j) * TILE)
    first_row, first_col = top * TILE, left * TILE
    return kept[
        :,
        rows.start - first_row : rows.stop - first_row,
        cols.start - first_col : cols.stop - first_col,
    ]
