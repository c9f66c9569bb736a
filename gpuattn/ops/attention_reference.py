"""The reference of ``flash_attention``: key blocks with an online softmax, on NumPy or CuPy.

Memory grows with the number of tokens, not with its square. Packed sequences are laid out in
padded grids (on NumPy a few, of like lengths), computed there at once, and put back.
Inside, every array is (N sequences, KV heads, queries per KV head, T, ...).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from gpuattn.arrays import empty, get_xp, wide, zeros
from gpuattn.ops.attention_dropout import TILE, keep_block

BLOCK = 128  # keys at a time
INF = float("inf")


@dataclass
class Grid:
    """N sequences side by side: which keys a query sees, and what is added to its logits."""

    xp: Any
    T: int
    S: int
    groups: int  # query heads per KV head
    numbers: Any  # (N,): which sequences of the batch
    offset: Any  # the key that query 0 stands at: an int or (N, 1, 1, 1, 1)
    reach: Any  # (least, greatest) offset where known without asking the device, else None
    keys: Any  # how many keys exist: None for all S, or (N, 1, 1, 1, 1)
    bias: Any  # added, broadcasts to the logits, or None
    mask: Any  # True where a key is seen, broadcasts to the logits, or None
    slopes: Any  # ALiBi, broadcasts to the logits, or None
    window: tuple
    softcap: float | None
    dropout_p: float
    key: Any

    def blocks(self):
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

    def logits(self, q, k, rows, cols):
        """Return the logits of a block, -inf where hidden, and their derivative by the softcap."""
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
        seen = self._seen(rows, cols)
        if seen is not None:
            bound = xp.where(seen, s.dtype.type(INF), s.dtype.type(-INF))
            xp.fmin(s, bound, out=s)  # fmin, unlike addition, hides NaN too
        return s, slope

    def _positions(self, rows, cols):
        """Return queries (as the keys they stand at) down and keys across."""
        i = self.xp.arange(rows.start, rows.stop)[:, None] + self.offset
        return i, self.xp.arange(cols.start, cols.stop)

    def _seen(self, rows, cols):
        left, right = self.window
        i, j = self._positions(rows, cols)
        parts = []
        if right is not None and not self._all_seen(cols.stop - 1 - rows.start, right):
            parts.append(j <= i + right)
        if left is not None and not self._all_seen(cols.start - rows.stop + 1, -left):
            parts.append(j >= i - left)
        if self.keys is not None:
            parts.append(j < self.keys)
        if self.mask is not None:
            parts.append(part(self.mask, rows, cols))
        seen = parts[0] if parts else None
        for more in parts[1:]:
            seen = seen & more
        return seen

    def _all_seen(self, corner, bound):
        """Return whether the corner logit nearest the bound, at j - i, is on its inner side."""
        if self.reach is None:
            return False
        return corner - self.reach[0] <= bound if bound >= 0 else corner - self.reach[1] >= bound

    def keep(self, shape, rows, cols):
        """Return the dropout mask of a block, 1 / (1 - p) where kept, 0 elsewhere."""
        heads = shape[1] * shape[2]
        numbers = self.numbers[:, None] * heads + self.xp.arange(heads)
        keep = keep_block(
            self.xp, numbers.ravel().astype(np.uint64), rows, cols, self.dropout_p, self.key
        )
        factor = np.float32(1 / (1 - self.dropout_p) if self.dropout_p < 1 else 0)
        return keep.reshape(shape) * factor


def part(x, rows, cols):
    """Return the block of an array that broadcasts to the logits."""
    x = x[..., rows, :] if x.shape[-2] > 1 else x
    return x[..., cols] if x.shape[-1] > 1 else x


def weigh(xp, p, v):
    """Return p @ v, where rows of ``v`` that carry no weight do not count even if they hold NaN."""
    out = xp.matmul(p, v)
    if xp is np and np.isfinite(out.sum()):
        return out
    finite = xp.isfinite(v)
    spoiled = xp.matmul((p != 0).astype(p.dtype), (~finite).astype(p.dtype)) != 0
    return xp.where(spoiled, out, xp.matmul(p, xp.where(finite, v, v.dtype.type(0))))


def attend(grid, q, k, v, sink):
    """Return the output (N, T, heads, Dv) and lse (N, heads, T). ``q`` is scaled already."""
    xp, (N, kv_heads, G, T, _) = grid.xp, q.shape
    dtype = q.dtype
    result = xp.zeros((N, T, kv_heads * G, v.shape[-1]), dtype)
    out = by_heads(result, G)
    top = xp.full((N, kv_heads, G, T, 1), -INF, dtype)
    total = xp.zeros(top.shape, dtype)
    if sink is not None:  # one more key, of value zero
        top[...] = sink
        total[...] = 1
    for rows, cols in grid.blocks():
        s, _ = grid.logits(q, k, rows, cols)
        old = top[..., rows, :]
        new = xp.maximum(old, s.max(-1, keepdims=True))
        finite = xp.where(new == -INF, dtype.type(0), new)
        s -= finite
        xp.exp(s, out=s)
        fade = xp.exp(old - finite)
        total[..., rows, :] = total[..., rows, :] * fade + s.sum(-1, keepdims=True)
        if grid.dropout_p:
            s *= grid.keep(s.shape, rows, cols)
        out[..., rows, :] *= fade
        out[..., rows, :] += weigh(xp, s, v[..., cols, :])
        top[..., rows, :] = new
    out /= xp.where(total == 0, dtype.type(1), total)
    lse = top + xp.log(total)
    return result, lse.reshape(N, kv_heads * G, T)


def attend_backward(grid, q, k, v, sink, out, lse, dout, dlse, dbias):
    """Return dq (of the scaled q), dk, dv as (N, T or S, heads, D), and dsink.

    ``dbias``: None, or an array like ``grid.bias`` that its gradient is added to.
    """
    xp, (N, kv_heads, G, T, D) = grid.xp, q.shape
    S, dtype = k.shape[-2], q.dtype
    dq = xp.zeros((N, T, kv_heads * G, D), dtype)
    dk, dv = (xp.zeros((N, S, kv_heads, x.shape[-1]), dtype) for x in (k, v))
    delta = (dout * out).sum(-1, keepdims=True)
    if dlse is not None:
        delta -= dlse
    lse = xp.where(lse == -INF, dtype.type(INF), lse)  # a row without keys: all its p are 0
    for rows, cols in grid.blocks():
        p, slope = grid.logits(q, k, rows, cols)
        p -= lse[..., rows, :]
        xp.exp(p, out=p)
        dout_rows = dout[..., rows, :]
        ds = xp.matmul(dout_rows, v[..., cols, :].swapaxes(-1, -2))
        dropped = p
        if grid.dropout_p:
            keep = grid.keep(p.shape, rows, cols)
            ds *= keep
            dropped = p * keep
        by_heads(dv, 1)[..., cols, :] += over_group(dropped, dout_rows)
        ds -= delta[..., rows, :]
        ds *= p
        if dbias is not None:
            target = part(dbias, rows, cols)
            target += sum_to(ds, target.shape)
        if slope is not None:
            ds *= slope
        by_heads(dq, G)[..., rows, :] += xp.matmul(ds, k[..., cols, :])
        by_heads(dk, 1)[..., cols, :] += over_group(ds, q[..., rows, :])
    dsink = (
        None
        if sink is None
        else sink_gradient(sink.ravel(), lse.reshape(N, -1, T), delta.reshape(N, -1, T))
    )
    return dq, dk, dv, dsink


def sink_gradient(sink, lse, delta):
    """Return the gradient of the sinks (H,) for ``lse`` and ``delta`` of shape (..., H, T)."""
    xp = get_xp(sink)
    lse = xp.where(lse == -INF, lse.dtype.type(INF), lse)
    p = xp.exp(sink.astype(lse.dtype)[:, None] - lse) * delta
    others = tuple(axis for axis in range(p.ndim) if axis != p.ndim - 2)
    return (-p.sum(others)).astype(sink.dtype, copy=False)


def over_group(weights, rows):
    """Return weights^T @ rows, summed over the query heads that share a KV head."""
    product = get_xp(rows).matmul(weights.swapaxes(-1, -2), rows)
    return product if product.shape[2] == 1 else product.sum(2, keepdims=True)


def sum_to(x, shape):
    """Return ``x`` summed over the axes along which ``shape`` is 1."""
    axes = tuple(a for a, n in enumerate(shape) if n == 1 and x.shape[a] != 1)
    return x.sum(axes, keepdims=True) if axes else x


def by_heads(x, groups):
    """Return (N, T, heads, D) as the view (N, KV heads, queries per KV head, T, D)."""
    N, T, H, D = x.shape
    return x.reshape(N, T, H // groups, groups, D).transpose(0, 2, 3, 1, 4)


# ---- from arrays to grids and back -------------------------------------------------------------


class Dense:
    """The batch is one grid already."""

    def __init__(self, q, k):
        self.numbers = get_xp(q).arange(q.shape[0])
        self.T, self.S = q.shape[1], k.shape[1]
        self.members = slice(None)
        self.queries = self.keys = None
        self.shifts = self.S - self.T

    def take(self, x, side):
        return x

    def put(self, target, values, side):
        target[...] = values


class Packed:
    """Some sequences of a packed batch, padded to the longest of them."""

    def __init__(self, xp, members, starts, lengths, longest, tokens):
        self.members, self.tokens = members, tokens
        self.numbers = xp.arange(len(starts[0]))[members]
        self.queries, self.keys = (n[members] for n in lengths)
        self.T, self.S = (min(n, t) for n, t in zip(longest, tokens, strict=True))
        self.shifts = self.keys - self.queries
        self.rows = []  # (N, T or S) token numbers; padding is one past the last token
        for first, n, width, last in zip(
            starts, (self.queries, self.keys), (self.T, self.S), tokens, strict=True
        ):
            i = xp.arange(width)
            self.rows.append(xp.where(i < n[:, None], first[members][:, None] + i, last))

    def take(self, x, side):
        return x[get_xp(x).minimum(self.rows[side], self.tokens[side] - 1)]

    def put(self, target, values, side):
        target[self.rows[side]] = values  # targets have a row for the padding


def layouts(q, k, cu_q, cu_k, max_seqlen_q, max_seqlen_k):
    """Return what turns the arrays into grids: one for a dense batch, a few for a packed one."""
    if cu_q is None:
        return [Dense(q, k)]
    xp, tokens = get_xp(q), (q.shape[0], k.shape[0])
    starts = [cu[:-1].astype(np.int64) for cu in (cu_q, cu_k)]
    lengths = [cu[1:] - first for cu, first in zip((cu_q, cu_k), starts, strict=True)]
    if xp is not np:  # lengths are on the device: one grid for all
        longest = (max_seqlen_q or tokens[0], max_seqlen_k or tokens[1])
        return [Packed(xp, slice(None), starts, lengths, longest, tokens)]
    size = np.maximum(np.maximum(*lengths), TILE)
    doublings = np.ceil(np.log2(size)).astype(int)
    groups = [np.flatnonzero(doublings == d) for d in np.unique(doublings)]
    return [
        Packed(np, g, starts, lengths, [int(n[g].max()) for n in lengths], tokens) for g in groups
    ]


def make_grid(layout, q, k, extras, params):
    """Return the Grid of a layout: whatever hides or moves logits, brought to its shape."""
    bias, key_lengths, _, _, slopes, _ = extras
    xp, dtype, groups = get_xp(q), wide(q.dtype), q.shape[-2] // max(k.shape[-2], 1)
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
        offset = reach[0] if reach[0] == reach[1] else _column(offset)
    else:
        offset = _column(offset)
    if bias is not None:
        bias = _split_heads(bias, groups)
        bias = bias[layout.members] if bias.shape[0] > 1 else bias
    if slopes is not None:
        slopes = slopes.astype(dtype, copy=False)
        slopes = slopes[None] if slopes.ndim == 1 else slopes[layout.members]
        slopes = slopes.reshape(len(slopes), -1, groups, 1, 1)
    is_mask = bias is not None and bias.dtype == bool
    return Grid(
        xp, layout.T, layout.S, groups, layout.numbers, offset, reach,
        keys=None if keys is None else _column(keys),
        bias=None if bias is None or is_mask else bias.astype(dtype, copy=False),
        mask=bias if is_mask else None,
        slopes=slopes,
        **{name: params[name] for name in ("window", "softcap", "dropout_p", "key")},
    )  # fmt: skip


def _column(x):
    return x.reshape(-1, 1, 1, 1, 1)


def _split_heads(x, groups):
    """Return (N, H or 1, ...) as (N, KV heads or 1, queries per KV head or 1, ...)."""
    shape = (1, 1) if x.shape[1] == 1 else (x.shape[1] // groups, groups)
    return x.reshape(x.shape[0], *shape, *x.shape[2:])


def _operands(grid, layout, q, k, v, key_lengths, scale):
    dtype = wide(q.dtype)
    q = layout.take(q, 0).astype(dtype, copy=False) * dtype.type(scale)
    k, v = (layout.take(x, 1).astype(dtype, copy=False) for x in (k, v))
    if key_lengths is not None:  # what lies behind the end may be NaN
        real = grid.xp.arange(grid.S)[:, None, None] < grid.keys[:, 0]
        k, v = (grid.xp.where(real, x, dtype.type(0)) for x in (k, v))
    return by_heads(q, grid.groups), by_heads(k, 1), by_heads(v, 1)


def _sink(sink, grid, dtype):
    return None if sink is None else sink.astype(dtype).reshape(-1, grid.groups, 1, 1)


# ---- the implementation ------------------------------------------------------------------------


def forward(q, k, v, *extras, needs, scale, max_seqlen_q, max_seqlen_k, deterministic, **params):
    """Return (out, lse) and what the gradient needs; see ``flash_attention``."""
    _, key_lengths, cu_q, cu_k, _, sink = extras
    dtype, shape = wide(q.dtype), (*q.shape[:-1], v.shape[-1])
    out, lse = _target(q, shape, cu_q, q.dtype), _target(q, shape[:-1], cu_q, dtype)
    with np.errstate(all="ignore"):
        for layout in layouts(q, k, cu_q, cu_k, max_seqlen_q, max_seqlen_k):
            grid = make_grid(layout, q, k, extras, params)
            operands = _operands(grid, layout, q, k, v, key_lengths, scale)
            result, log_sum = attend(grid, *operands, _sink(sink, grid, dtype))
            layout.put(out, result, 0)
            layout.put(lse, log_sum.swapaxes(1, 2), 0)
    out, lse = out[: len(q)], lse[: len(q)].swapaxes(-1, -2)
    return (out, lse), ((q, k, v, *extras, out, lse) if any(needs) else None)


def _target(like, shape, cu, dtype):
    """Return an array for results; for packed sequences with one more row, for the padding."""
    rows = shape[0] if cu is None else shape[0] + 1
    return empty(like, (rows, *shape[1:]), dtype)


def backward(
    saved, dout, dlse, *, needs, into, scale, max_seqlen_q, max_seqlen_k, deterministic, **params
):
    """Return the gradients of q, k, v, bias and sink (None for the rest)."""
    q, k, v, *extras, out, lse = saved
    bias, key_lengths, cu_q, cu_k, _, sink = extras
    dtype, xp = wide(q.dtype), get_xp(q)
    dout = xp.zeros(out.shape, dtype) if dout is None else dout
    dq, dk, dv = (_target(x, x.shape, cu_q, x.dtype) for x in (q, k, v))
    dbias = zeros(q, bias.shape, dtype) if needs[3] else None
    dsink = zeros(q, sink.shape, dtype) if needs[8] else None
    with np.errstate(all="ignore"):
        for layout in layouts(q, k, cu_q, cu_k, max_seqlen_q, max_seqlen_k):
            grid = make_grid(layout, q, k, extras, params)
            operands = _operands(grid, layout, q, k, v, key_lengths, scale)

            def rows(x, layout=layout, groups=grid.groups):
                return by_heads(layout.take(x, 0).astype(dtype, copy=False), groups)

            log_sum = rows(lse.swapaxes(-1, -2)[..., None])
            if layout.queries is not None:  # padding: all its p are 0
                real = xp.arange(grid.T)[:, None] < _column(layout.queries)
                log_sum = xp.where(real, log_sum, dtype.type(INF))
            dbias_here = None if dbias is None else zeros(q, grid.bias.shape, dtype)
            *grads, dsink_here = attend_backward(
                grid, *operands, _sink(sink, grid, dtype), rows(out), log_sum, rows(dout),
                None if dlse is None else rows(dlse.swapaxes(-1, -2)[..., None]), dbias_here,
            )  # fmt: skip
            grads[0] *= dtype.type(scale)
            for target, grad, side in zip((dq, dk, dv), grads, (0, 1, 1), strict=True):
                layout.put(target, grad, side)
            if dbias is not None:
                members = layout.members if bias.shape[0] > 1 else slice(None)
                dbias[members] += dbias_here.reshape(-1, *bias.shape[1:])
            if dsink is not None:
                dsink += dsink_here
    dq, dk, dv = dq[: len(q)], dk[: len(k)], dv[: len(v)]
    dbias = None if dbias is None else dbias.astype(bias.dtype, copy=False)
    dsink = None if dsink is None else dsink.astype(sink.dtype, copy=False)
    return dq, dk, dv, dbias, None, None, None, None, dsink
