"""The dropout bits of attention: the same in NumPy and in ``rawkernels/attention``.

Philox takes 14 wide products for eight numbers, longer than attention takes for eight logits. So it
fills two tables: of every 16 queries of a head (8 x 8 factors F and summands A) and of every 16
keys (8 x 8 words K). A logit's word is made of what its blocks have at (q % 8, k % 8), a linear
function of K modulo 2^32, and a mix (Carter and Wegman, "Universal classes of hash functions",
1979; tables of random words: Patrascu and Thorup, "The power of simple tabulation hashing", 2012):

    y = F * K + A;  z = y ^ y >> 16

Four numbers of 7 bits lie in z: byte 2 * (q // 8 % 2) + k // 8 % 2 has that of logit (q, k), which
is kept where number + bound >= 128. F is odd, so that both steps are bijections: every word is
uniform, and any two or three words are as independent as Philox's. Of four at the corners of a
rectangle of blocks y1 - y2 and y3 - y4 have the same power of two as a factor, and no more in
common; the mix hides that.

A bound is (1 - p) * 128, rounded up or down at random for 16 queries of a head, as often up as
makes the mean right to 2^-16. One random number decides that for the four bytes of a word; they are
a quarter of its range apart, those of a query half of it: few queries have both rounded alike.
"""

import numpy as np

from gpuattn import arrays
from gpuattn.cuda.kernels import kernel
from gpuattn.rng import device_arguments, philox, threshold

TILE = 16  # queries or keys of a table's row
QUERY_DRAWS, KEY_DRAWS = 33, 16  # of four words a row; the last of queries are their bounds
PADDING = 16  # rows behind the last: kernels read whole tiles
QUERIES, KEYS = 0, 1  # whose words


def attention_keep_mask(xp, shape, p, key):
    """Return the dropout mask of attention as a boolean (B, H, T, S) array.

    ``key``: a ``rng.Key``. The bits of logit (i, j) are a function of the key, of b * H + h and of
    (i, j) alone.
    """
    B, H, T, S = shape
    heads = xp.arange(B * H, dtype=np.uint64)
    return keep_block(xp, heads, slice(0, T), slice(0, S), p, key).reshape(shape)


def keep_block(xp, heads, rows, cols, p, key):
    """Return the mask (heads, rows, cols) of the given b * H + h (uint64)."""
    top, left = rows.start // TILE, cols.start // TILE
    i = xp.arange(top, -(-rows.stop // TILE), dtype=np.uint64)
    j = xp.arange(left, -(-cols.stop // TILE), dtype=np.uint64)
    z, points = words(xp, heads, i, j, key)
    z &= np.uint32(0x7F7F7F7F)
    z += round_bounds(xp, points, p)[:, :, None, None, None]
    # every platform we run on is little-endian: the low byte comes first
    kept = z.view(np.uint8).reshape(len(heads), len(i), len(j), 8, 8, 2, 2) >= np.uint8(128)
    kept = kept.transpose(0, 1, 5, 3, 2, 6, 4).reshape(len(heads), len(i) * TILE, len(j) * TILE)
    first_row, first_col = top * TILE, left * TILE
    return kept[
        :,
        rows.start - first_row : rows.stop - first_row,
        cols.start - first_col : cols.stop - first_col,
    ]


def words(xp, heads, i, j, key):
    """Return the words (heads, i, j, q % 8, k % 8) of blocks i of queries and j of keys, uint32.

    And the random numbers of the bounds of i, (heads, i), in the low 16 bits of uint32.
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


def round_bounds(xp, points, p):
    """Return bounds as four bytes in an uint32, rounded as random numbers (uint32) decide."""
    whole, rest = divmod(threshold(p), 512)
    packed = xp.zeros(points.shape, np.uint32)
    for byte, quarter in enumerate((0, 2, 1, 3)):
        point = (points + np.uint32(quarter << 14)) & np.uint32(0xFFFF)
        up = point + np.uint32(128 * rest) >= np.uint32(0x10000)
        packed |= (up.astype(np.uint32) + np.uint32(whole)) << np.uint32(8 * byte)
    return packed


def _draw(xp, side, heads, blocks, count, key):
    """Return ``count`` draws of four words, uint32, for each of heads and blocks."""
    stream = xp.full((), key.stream, np.uint64)
    step = xp.asarray(key.step, np.uint64).reshape(())
    c0 = blocks[:, None] << np.uint64(5) | xp.arange(count, dtype=np.uint64)
    c1 = heads[..., None] | np.uint64(side << 31)
    return xp.stack(philox(key.seed, c0, c1, stream, step), -1).astype(np.uint32)


class Tables:
    """Both tables on the GPU, drawn anew for a launch.

    Sequences are laid end to end, and each begins a row of its own: ``rows`` of queries and of keys
    for a head. ``tokens``: of all sequences, the same.
    """

    def __init__(self, like, p, key, *, heads, sequences, queries, keys, tokens, cu_q, cu_k):
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
