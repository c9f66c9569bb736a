"""Splits a batch into grids: sequences that the attention reference computes as one dense batch.

Packed sequences are padded to the longest of their grid. In a grid every array is
(N sequences, KV heads, queries per KV head, T, ...).
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpuattn.arrays import get_xp, wide
from gpuattn.modes import mode
from gpuattn.ops.attention.dropout import TILE, keep_block
from gpuattn.typing import Array, Shape, Xp

BLOCK = 128  # keys at a time
GRID_SIZE = 1 << 17  # elements of q in a grid on NumPy: larger ones do not fit in the cache
INF = float("inf")


@dataclass
class Grid:
    """N sequences in one dense batch: which keys a query sees, and what is added to its logits."""

    xp: Xp
    T: int
    S: int
    groups: int  # query heads per KV head
    members: Any  # a slice or indices: which sequences of the batch
    sequences: int  # of the batch
    offset: Any  # the key that query 0 is aligned with: an int or (N, 1, 1, 1, 1)
    reach: Any  # (least, greatest) offset where known without synchronizing, else None
    keys: Any  # the number of keys: None for all S, or (N, 1, 1, 1, 1)
    bias: Array | None  # added, broadcasts to the logits
    mask: Array | None  # True where a key is seen, broadcasts to the logits
    slopes: Array | None  # ALiBi, broadcasts to the logits
    window: tuple
    softcap: float | None
    dropout_p: float
    key: Any

    def blocks(self) -> Iterator[tuple[slice, slice]]:
        """Yield (rows, columns) slices that hold every visible logit."""
        left, right = self.window
        for start in range(0, self.S, BLOCK):
            stop, first, last = min(start + BLOCK, self.S), 0, self.T
            if self.reach and right is not None:
                first = max(0, start - self.reach[1] - right)
            if self.reach and left is not None:
                last = min(self.T, stop - self.reach[0] + left)
            if first < last:
                yield slice(first, last), slice(start, stop)

    def logits(self, q: Array, k: Array, rows: slice, cols: slice) -> tuple[Array, Array | None]:
        """Return the logits of a block, -inf where hidden, and the derivative of the softcap."""
        xp, slope = self.xp, None
        s = xp.matmul(q[..., rows, :], k[..., cols, :].swapaxes(-1, -2))
        if self.softcap is not None:
            s /= self.softcap
            xp.tanh(s, out=s)
            slope = 1 - s * s
            s *= self.softcap
        if self.bias is not None:
            s += part(self.bias, rows, cols)
        if self.slopes is not None:
            i, j = self._positions(rows, cols)
            s -= self.slopes * abs(i - j).astype(s.dtype)
        other = self.keys is not None or self.mask is not None  # hides more than the window
        if xp is np and not other and isinstance(self.offset, int):
            self._hide_edges(s, rows, cols)
        elif (seen := self._seen(rows, cols)) is not None:
            xp.fmin(s, _bound(seen, s.dtype), out=s)  # fmin, unlike addition, hides NaN too
        return s, slope

    def _hide_edges(self, s, rows, cols):
        """Set the logits that the window hides to -inf.

        Only rows at the edges of the window have any, fewer than BLOCK at either end of a block.
        Most blocks need the same tables for them.
        """
        left, right = self.window
        shift = rows.start + self.offset - cols.start  # the first row is aligned with this column
        height, width = rows.stop - rows.start, cols.stop - cols.start
        # rows before `end` do not see the last column, rows from `begin` on not the first
        end = 0 if right is None else min(height, width - 1 - shift - right)
        begin = height if left is None else max(0, left + 1 - shift)
        for first, last in ((0, end), (begin, height)) if end <= begin else ((0, height),):
            if first < last:
                bound = _window_bound(last - first, width, first + shift, left, right, s.dtype)
                here = s[..., first:last, :]
                np.fmin(here, bound, out=here)

    def _positions(self, rows, cols):
        """Return the key that each query is aligned with, as a column, and the keys, as a row."""
        i = self.xp.arange(rows.start, rows.stop)[:, None] + self.offset
        return i, self.xp.arange(cols.start, cols.stop)

    def _seen(self, rows, cols):
        left, right = self.window
        i, j = self._positions(rows, cols)
        least, greatest = self.reach or (-INF, INF)
        parts = []
        if right is not None and cols.stop - 1 > rows.start + least + right:
            parts.append(j <= i + right)
        if left is not None and cols.start < rows.stop - 1 + greatest - left:
            parts.append(j >= i - left)
        if self.keys is not None:
            parts.append(j < self.keys)
        if self.mask is not None:
            parts.append(part(self.mask, rows, cols))
        seen = parts[0] if parts else None
        for more in parts[1:]:
            seen = seen & more
        return seen

    def keep(self, shape: Shape, rows: slice, cols: slice, dtype: np.dtype) -> Array:
        """Return the dropout mask of a block, 1 / (1 - p) where kept, 0 elsewhere."""
        heads = shape[1] * shape[2]
        numbers = self.xp.arange(self.sequences)[self.members, None] * heads
        numbers = numbers + self.xp.arange(heads)
        keep = keep_block(
            self.xp, numbers.ravel().astype(np.uint64), rows, cols, self.dropout_p, self.key
        )
        factor = dtype.type(1 / (1 - self.dropout_p))
        return keep.reshape(shape) * factor


def _bound(seen, dtype):
    """Return inf where a key is seen, else -inf."""
    return get_xp(seen).where(seen, dtype.type(INF), dtype.type(-INF))


@functools.lru_cache(maxsize=8)  # most blocks, layers and updates ask for the same
def _window_bound(height, width, shift, left, right, dtype):
    """Return the bound of logits in a window, where query 0 is aligned with key ``shift``."""
    distance = np.arange(width) - (np.arange(height)[:, None] + shift)
    seen = np.ones(distance.shape, bool)
    if left is not None:
        seen &= distance >= -left
    if right is not None:
        seen &= distance <= right
    return _bound(seen, dtype)


def part(x: Array, rows: slice, cols: slice) -> Array:
    """Return the block of an array that broadcasts to the logits."""
    x = x[..., rows, :] if x.shape[-2] > 1 else x
    return x[..., cols] if x.shape[-1] > 1 else x


def by_heads(x: Array, groups: int) -> Array:
    """Return (N, T, heads, D) as the view (N, KV heads, queries per KV head, T, D)."""
    N, T, H, D = x.shape
    return x.reshape(N, T, H // groups, groups, D).transpose(0, 2, 3, 1, 4)


class Dense:
    """Some sequences of a (B, T, H, D) batch."""

    def __init__(self, q: Array, k: Array, members: slice) -> None:
        self.T, self.S = q.shape[1], k.shape[1]
        self.members, self.sequences = members, q.shape[0]
        self.queries = self.keys = None
        self.shifts = self.S - self.T

    def take(self, x: Array, side: int) -> Array:
        """Return the rows of ``x`` in this grid; ``side``: 0 for queries, 1 for keys."""
        return x[self.members]

    def put(self, target: Array, values: Array, side: int) -> None:
        """Set the rows of ``target`` in this grid."""
        target[self.members] = values


class Packed:
    """Some sequences of a packed batch, padded to the longest one."""

    def __init__(
        self,
        xp: Xp,
        members: slice | np.ndarray,
        starts: Sequence[Array],
        lengths: Sequence[Array],
        longest: Sequence[int],
        tokens: tuple[int, int],
    ) -> None:
        self.members, self.sequences, self.tokens = members, len(starts[0]), tokens
        self.queries, self.keys = (n[members] for n in lengths)
        self.T, self.S = (min(n, t) for n, t in zip(longest, tokens, strict=True))
        self.shifts = self.keys - self.queries
        self.rows = []  # (N, T or S) token numbers; padding is one past the last token
        for first, n, width, last in zip(
            starts, (self.queries, self.keys), (self.T, self.S), tokens, strict=True
        ):
            i = xp.arange(width)
            self.rows.append(xp.where(i < n[:, None], first[members][:, None] + i, last))

    def take(self, x: Array, side: int) -> Array:
        """Return the rows of ``x`` in this grid, padded; ``side``: 0 for queries, 1 for keys."""
        return x[get_xp(x).minimum(self.rows[side], self.tokens[side] - 1)]

    def put(self, target: Array, values: Array, side: int) -> None:
        """Set the rows of ``target`` in this grid; padding goes to its last row."""
        target[self.rows[side]] = values


def layouts(
    q: Array, k: Array, cu_q: Array | None, cu_k: Array | None, max_seqlen_q: int, max_seqlen_k: int
) -> Sequence[Dense | Packed]:
    """Return the Dense or Packed parts of a batch: on NumPy about as large as the cache."""
    xp, row = get_xp(q), max(q.shape[-2] * q.shape[-1], 1)
    if cu_q is None or cu_k is None:
        B, T = q.shape[:2]
        # half the size: without padding, a small batch is faster as two grids on two threads
        grids = -(-2 * B * T * row // GRID_SIZE) if xp is np else 1
        step = max(-(-B // max(grids, 1)), 1)
        return [Dense(q, k, slice(first, first + step)) for first in range(0, B, step)]
    tokens = q.shape[0], k.shape[0]
    if xp is np:
        alike = not mode.get().batch_invariant
        return _packed(cu_q.tobytes(), cu_k.tobytes(), tokens, row, alike)
    starts, lengths = _starts_and_lengths(cu_q, cu_k)
    limits = max_seqlen_q, max_seqlen_k  # lengths are on the device: one grid for all
    return [Packed(xp, slice(None), starts, lengths, limits, tokens)]


def _starts_and_lengths(*offsets):
    starts = [cu[:-1].astype(np.int64) for cu in offsets]
    return starts, [cu[1:] - first for cu, first in zip(offsets, starts, strict=True)]


@functools.lru_cache(maxsize=8)  # all layers, forward and backward, have the same offsets
def _packed(cu_q, cu_k, tokens, row, alike):
    """Return ``layouts`` of packed sequences on NumPy, from the bytes of their offsets.

    ``row``: elements of a query. ``alike``: in a grid no sequence is twice as long as another.
    """
    starts, lengths = _starts_and_lengths(*(np.frombuffer(cu, np.int32) for cu in (cu_q, cu_k)))
    size = np.maximum(*lengths)
    if alike:
        size = 2 ** np.ceil(np.log2(np.maximum(size, TILE))).astype(int)
    found = []
    for n in np.unique(size):
        members = np.flatnonzero(size == n)
        parts = max(1, -(-len(members) * row * int(n) // GRID_SIZE))
        for some in np.array_split(members, min(parts, len(members))):
            longest = [int(n[some].max()) for n in lengths]
            found.append(Packed(np, some, starts, lengths, longest, tokens))
    return found


def make_grid(
    layout: Dense | Packed, q: Array, k: Array, extras: Sequence, params: Mapping[str, Any]
) -> Grid:
    """Return the Grid of a layout, with masks and biases broadcast to its shape."""
    bias, key_lengths, _, _, slopes, _ = extras
    xp, dtype, groups = get_xp(q), wide(q.dtype), q.shape[-2] // max(k.shape[-2], 1) or 1
    top_left = params["align"] == "top_left"
    offset = 0 if top_left else layout.shifts
    keys = layout.keys
    if key_lengths is not None:
        asked = key_lengths[layout.members]
        keys = asked if keys is None else xp.minimum(keys, asked)
    reach = None
    if isinstance(offset, int):
        reach = (offset, offset)
    elif xp is np:
        reach = (int(offset.min()), int(offset.max()))
        offset = reach[0] if reach[0] == reach[1] else column(offset)
    else:
        offset = column(offset)
    if bias is not None:
        bias = _split_heads(bias, groups)
        bias = bias[layout.members] if bias.shape[0] > 1 else bias
    if slopes is not None:
        slopes = slopes.astype(dtype, copy=False)
        slopes = slopes[None] if slopes.ndim == 1 else slopes[layout.members]
        slopes = slopes.reshape(len(slopes), -1, groups, 1, 1)
    is_mask = bias is not None and bias.dtype == bool
    return Grid(
        xp, layout.T, layout.S, groups, layout.members, layout.sequences, offset, reach,
        keys=None if keys is None else column(keys),
        bias=None if bias is None or is_mask else bias.astype(dtype, copy=False),
        mask=bias if is_mask else None,
        slopes=slopes,
        **{name: params[name] for name in ("window", "softcap", "dropout_p", "key")},
    )  # fmt: skip


def column(x: Array) -> Array:
    """Return (N,) as (N, 1, 1, 1, 1), which broadcasts to the logits."""
    return x.reshape(-1, 1, 1, 1, 1)


def _split_heads(x, groups):
    """Return (N, H or 1, ...) as (N, KV heads or 1, queries per KV head or 1, ...)."""
    shape = (1, 1) if x.shape[1] == 1 else (x.shape[1] // groups, groups)
    return x.reshape(x.shape[0], *shape, *x.shape[2:])
