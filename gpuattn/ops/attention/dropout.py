"""The dropout bits of attention: the same in NumPy and in ``rawkernels/attention``.

Philox needs 14 wide products for eight random numbers, more time than attention needs for eight
logits. So Philox only fills two tables: for every 16 queries of a head (8 x 8 factors F and
summands A) and for every 16 keys (8 x 8 words K). The random word of a logit combines the entries
of its two blocks at (q % 8, k % 8): a linear function of K modulo 2^32, then a mix (Carter and
Wegman, "Universal classes of hash functions", 1979; tables of random words: Patrascu and Thorup,
"The power of simple tabulation hashing", 2012):

    y = F * K + A;  z = y ^ y >> 16

z holds four numbers of 7 bits: byte 2 * (q // 8 % 2) + k // 8 % 2 is that of logit (q, k), which is
kept where number + bound >= 128. F is odd, so both steps are bijections: every word is uniform, and
any two or three words are as independent as Philox's. Of the four words at the corners of a
rectangle of blocks, y1 - y2 and y3 - y4 share a power of two as a factor, and nothing else; the mix
hides that.

A bound is (1 - p) * 128, rounded up or down at random for each 16 queries of a head, so that the
mean is right to 2^-16. One random number decides it for all four bytes of a word, which use it
shifted by quarters of its range. The two bytes of one query use it half the range apart, so that
few queries have both rounded in the same direction.
"""

from typing import Any

import numpy as np

from gpuattn import arrays
from gpuattn.cuda.kernels import kernel
from gpuattn.rng import counters, device_arguments, philox, threshold
from gpuattn.typing import Array, Xp

TILE = 16  # queries or keys of a table row
QUERY_DRAWS, KEY_DRAWS = 33, 16  # draws of four words for a row; the last of a query row: bounds
PADDING = 16  # rows after the last one: kernels read whole tiles
QUERIES, KEYS = 0, 1  # the table that words belong to


def attention_keep_mask(xp: Xp, shape: tuple[int, int, int, int], p: float, key: Any) -> Array:
    """Return the dropout mask of attention as a boolean (B, H, T, S) array: True where kept.

    ``xp``: numpy or cupy. ``p``: the probability of being dropped. ``key``: a ``rng.Key``. The bit
    of logit (i, j) depends only on the key, p, b * H + h and (i, j).
    """
    B, H, T, S = shape
    heads = xp.arange(B * H, dtype=np.uint64)
    return keep_block(xp, heads, slice(0, T), slice(0, S), p, key).reshape(shape)


def keep_block(xp: Xp, heads: Array, rows: slice, cols: slice, p: float, key: Any) -> Array:
    """Return the mask (heads, rows, cols) for the given numbers b * H + h (uint64)."""
    top, left = rows.start // TILE, cols.start // TILE
    i = xp.arange(top, -(-rows.stop // TILE), dtype=np.uint64)
    j = xp.arange(left, -(-cols.stop // TILE), dtype=np.uint64)
    z, points = words(xp, heads, i, j, key)
    z &= np.uint32(0x7F7F7F7F)
    z += round_bounds(xp, points, p)[:, :, None, None, None]
    # all supported platforms are little-endian: the low byte comes first
    kept = z.view(np.uint8).reshape(len(heads), len(i), len(j), 8, 8, 2, 2) >= np.uint8(128)
    kept = kept.transpose(0, 1, 5, 3, 2, 6, 4).reshape(len(heads), len(i) * TILE, len(j) * TILE)
    first_row, first_col = top * TILE, left * TILE
    return kept[
        :,
        rows.start - first_row : rows.stop - first_row,
        cols.start - first_col : cols.stop - first_col,
    ]


def words(xp: Xp, heads: Array, i: Array, j: Array, key: Any) -> tuple[Array, Array]:
    """Return the words of blocks i of queries and j of keys, and the random numbers of the bounds.

    The words are uint32 (heads, i, j, q % 8, k % 8). The numbers are of the blocks i, in the low 16
    bits of uint32 (heads, i).
    """
    drawn = _draw(xp, QUERIES, heads[:, None], i, 32, key)
    odd = (drawn[:, :, :TILE, 0] & np.uint32(1)) << xp.arange(TILE, dtype=np.uint32)
    drawn = drawn.reshape(len(heads), len(i), 8, 4, 2, 2).transpose(4, 0, 1, 3, 5, 2)
    factors, summands = drawn.reshape(2, len(heads), len(i), 1, 8, 8)
    y = _draw(xp, KEYS, heads[:, None], j, 16, key).reshape(len(heads), 1, len(j), 8, 8)
    y = y * (factors | np.uint32(1))
    y += summands
    y ^= y >> np.uint32(16)
    return y, odd.sum(2, dtype=np.uint32)


def round_bounds(xp: Xp, points: Array, p: float) -> Array:
    """Return bounds as four bytes of a uint32, rounded by the random numbers ``points``."""
    whole, rest = divmod(threshold(p), 512)
    packed = xp.zeros(points.shape, np.uint32)
    for byte, quarter in enumerate((0, 2, 1, 3)):
        point = (points + np.uint32(quarter << 14)) & np.uint32(0xFFFF)
        up = point + np.uint32(128 * rest) >= np.uint32(0x10000)
        packed |= (up.astype(np.uint32) + np.uint32(whole)) << np.uint32(8 * byte)
    return packed


def _draw(xp, side, heads, blocks, count, key):
    """Return ``count`` draws of four words, uint32, for each head and block."""
    c0 = blocks[:, None] << np.uint64(5) | xp.arange(count, dtype=np.uint64)
    c1 = heads[..., None] | np.uint64(side << 31)
    return xp.stack(philox(key.seed, c0, c1, *counters(xp, key)), -1).astype(np.uint32)


class Tables:
    """Both tables on the GPU, drawn for one launch.

    Sequences lie one after another, and each begins a new row. ``rows``: the rows of a head, of
    queries and of keys. ``tokens``: the queries and the keys of all sequences.
    """

    def __init__(
        self, like: Array, p: float, key: Any, *, heads: int, sequences: int, queries: int,
        keys: int, tokens: tuple[int, int], cu_q: Array | None, cu_k: Array | None,
    ) -> None:  # fmt: skip
        self.rows = tuple(count // TILE + sequences + PADDING for count in tokens)
        of_queries, of_keys = heads * self.rows[0] * QUERY_DRAWS, heads * self.rows[1] * KEY_DRAWS
        self.query_words = arrays.empty(like, (of_queries + of_keys, 4), np.uint32)
        self.key_words = self.query_words[of_queries:]
        low, high, stream, step, device_step = device_arguments(key)
        blocks = -(-heads * sum(self.rows) // 32) if sequences else 0
        kernel("attention/attention_dropout.cu", "attention_dropout_words")(
            (blocks,), (256,), self.query_words, cu_q, cu_k, sequences,
            heads, *self.rows, queries, keys, threshold(p), low, high, stream, step, device_step,
        )  # fmt: skip
