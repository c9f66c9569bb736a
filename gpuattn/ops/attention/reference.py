"""The reference of ``flash_attention``: key blocks with an online softmax, on NumPy or CuPy.

Memory is linear in the number of tokens. Training on NumPy runs this too: products are written to
their destination without a temporary, and packed sequences are padded into a few grids.
"""

import math
from typing import Any

import numpy as np

from gpuattn.arrays import LOWEST, empty, for_each, get_xp, wide, zeros
from gpuattn.autodiff.gradient_layout import target_like
from gpuattn.ops.attention.gradient import finite_lse, sink_gradient, sum_to
from gpuattn.ops.attention.grids import BLOCK, INF, Grid, by_heads, column, layouts, make_grid, part
from gpuattn.typing import Array

MAX_SINGLE_THREADED = 1 << 18  # multiply-adds of a product that OpenBLAS computes in one thread


def attend(grid: Grid, q: Array, k: Array, v: Array, sink: Array | None) -> tuple[Array, Array]:
    """Return the output (N, T, heads, Dv) and lse (N, heads, T). ``q`` is scaled already."""
    xp, (N, kv_heads, G, T, _) = grid.xp, q.shape
    dtype, lowest = q.dtype, LOWEST[q.dtype]
    result = xp.zeros((N, T, kv_heads * G, v.shape[-1]), dtype)
    out, shape = by_heads(result, G), (N, kv_heads, G, T, 1)
    blocks = list(grid.blocks())
    top: Any = None
    total: Any = None
    if sink is not None:  # one more key, of value zero
        top, total = xp.zeros(shape, dtype) + sink, xp.ones(shape, dtype)
    elif not blocks or blocks[0][0] != slice(0, T):  # the first block is not of all queries
        top, total = xp.full(shape, -INF, dtype), xp.zeros(shape, dtype)
    may_hold_nan, fresh = xp is not np or not math.isfinite(v.sum()), True
    for rows, cols in blocks:
        p, _ = grid.logits(q, k, rows, cols)
        new = p.max(-1, keepdims=True)
        first = top is None
        if not first:
            old = top[..., rows, :]
            new = xp.maximum(old, new)
        finite = xp.maximum(new, lowest)  # -inf - lowest is -inf
        p -= finite
        xp.exp(p, out=p)
        sums = p.sum(-1, keepdims=True)
        if first:
            top, total = new, sums
        else:
            rescale = xp.exp(old - finite)
            total[..., rows, :] = total[..., rows, :] * rescale + sums
            top[..., rows, :] = new
        if grid.dropout_p:
            p *= grid.keep(p.shape, rows, cols, p.dtype)
        here = out[..., rows, :]
        if not fresh:
            here *= rescale
        if may_hold_nan:
            here += weighted_sum(p, v[..., cols, :])
        else:
            put_product(here, p, v[..., cols, :], fresh)
        fresh = False
    out /= xp.maximum(total, 1)  # 0 without a key, else at least exp(0)
    lse = xp.log(total, out=total)
    lse += top
    return result, lse.reshape(N, kv_heads * G, T)


def weighted_sum(p: Array, v: Array) -> Array:
    """Return p @ v; a row of ``v`` whose weight is 0 adds nothing even if it is NaN."""
    xp = get_xp(v)
    finite = xp.isfinite(v)
    reached = xp.matmul((p != 0).astype(p.dtype), (~finite).astype(p.dtype)) != 0
    clean = xp.matmul(p, xp.where(finite, v, v.dtype.type(0)))
    return xp.where(reached, xp.matmul(p, v), clean)


def put_product(target: Array, a: Array, b: Array, fresh: bool = True) -> None:
    """Set ``target`` to a @ b, or add to it if not ``fresh``.

    Sums over the group, axis 2, where that has size 1 in ``target``.
    """
    xp, shared = get_xp(a), target.shape[2] != a.shape[2]
    if xp is np and fresh and not shared:
        np.matmul(a, b, out=target)
        return
    product = xp.matmul(a, b)
    product = product.sum(2, keepdims=True) if shared else product
    if fresh:
        target[...] = product
    else:
        target += product


def attend_backward(
    grid: Grid,
    q: Array,
    k: Array,
    v: Array,
    lse: Array,
    delta: Array,
    dout: Array,
    dbias: Array | None,
) -> tuple[Array, Array, Array]:
    """Return dq (of the scaled q), dk and dv as (N, T or S, heads, D).

    ``dbias``: None, or an array like ``grid.bias`` that its gradient is added to.
    """
    xp, (N, kv_heads, G, T, D) = grid.xp, q.shape
    dq = xp.zeros((N, T, kv_heads * G, D), q.dtype)
    dk, dv = (xp.zeros((N, grid.S, kv_heads, x.shape[-1]), q.dtype) for x in (k, v))
    lse, fresh = finite_lse(lse), True
    for rows, cols in grid.blocks():
        p, bend = grid.logits(q, k, rows, cols)
        p -= lse[..., rows, :]
        xp.exp(p, out=p)
        dout_rows = dout[..., rows, :]
        ds = xp.matmul(dout_rows, v[..., cols, :].swapaxes(-1, -2))
        dropped = p
        if grid.dropout_p:
            keep = grid.keep(p.shape, rows, cols, p.dtype)
            ds *= keep
            dropped = p * keep
        put_product(by_heads(dv, 1)[..., cols, :], dropped.swapaxes(-1, -2), dout_rows)
        ds -= delta[..., rows, :]
        ds *= p
        if dbias is not None:
            target = part(dbias, rows, cols)
            target += sum_to(ds, target.shape)
        if bend is not None:
            ds *= bend
        put_product(by_heads(dq, G)[..., rows, :], ds, k[..., cols, :], fresh)
        put_product(by_heads(dk, 1)[..., cols, :], ds.swapaxes(-1, -2), q[..., rows, :])
        fresh = False
    return dq, dk, dv


def row_dot(a: Array, b: Array, dtype: np.dtype) -> Array:
    """Return the sums of a * b over the last axis."""
    a, b = a.astype(dtype, copy=False), b.astype(dtype, copy=False)
    return np.vecdot(a, b) if get_xp(a) is np else (a * b).sum(-1)


def _operands(grid, layout, q, k, v, key_lengths, scale):
    dtype = wide(q.dtype)
    q = layout.take(q, 0).astype(dtype, copy=False) * dtype.type(scale)
    k, v = (layout.take(x, 1).astype(dtype, copy=False) for x in (k, v))
    if key_lengths is not None:  # keys past the end may be NaN
        real = grid.xp.arange(grid.S)[:, None, None] < grid.keys[:, 0]
        k, v = (grid.xp.where(real, x, dtype.type(0)) for x in (k, v))
    return by_heads(q, grid.groups), by_heads(k, 1), by_heads(v, 1)


def _sink(sink, grid, dtype):
    return None if sink is None else sink.astype(dtype).reshape(-1, grid.groups, 1, 1)


# ---- the implementation ------------------------------------------------------------------------


def forward(
    q: Array, k: Array, v: Array, *extras: Any, needs: tuple, scale: float, max_seqlen_q: int,
    max_seqlen_k: int, deterministic: bool, **params: Any,
) -> tuple:  # fmt: skip
    """Return (out, lse) and what the gradient needs; see ``flash_attention``."""
    _, key_lengths, cu_q, cu_k, _, sink = extras
    dtype, shape = wide(q.dtype), (*q.shape[:-1], v.shape[-1])

    def attended(layout):
        with np.errstate(all="ignore"):
            grid = make_grid(layout, q, k, extras, params)
            operands = _operands(grid, layout, q, k, v, key_lengths, scale)
            return attend(grid, *operands, _sink(sink, grid, dtype))

    def run(layout):
        result, log_sum = attended(layout)
        layout.put(out, result, 0)
        layout.put(lse, log_sum.swapaxes(1, 2), 0)

    parts = layouts(q, k, cu_q, cu_k, max_seqlen_q, max_seqlen_k)
    if len(parts) == 1 and cu_q is None:
        out, lse = attended(parts[0])
        out = out.astype(q.dtype, copy=False)
    else:
        out, lse = _target(q, shape, cu_q, q.dtype), _target(q, shape[:-1], cu_q, dtype)
        _run_all(run, parts, q.shape[-1])
        out, lse = out[: len(q)], lse[: len(q)].swapaxes(-1, -2)
    return (out, lse), ((q, k, v, *extras, out, lse) if any(needs) else None)


def _run_all(run, layouts, head_dim, in_order=False):
    """Call ``run`` on every layout, in several threads unless BLAS itself uses threads.

    Two threaded products at a time wait for each other and take several times as long.
    """
    largest = max((part.T * min(part.S, BLOCK) for part in layouts), default=0) * head_dim
    if in_order or largest > MAX_SINGLE_THREADED:
        for layout in layouts:
            run(layout)
    else:
        for_each(run, layouts)


def _target(like, shape, cu, dtype):
    """Return an array for results; of packed sequences it has one more row, for the padding."""
    rows = shape[0] if cu is None else shape[0] + 1
    return empty(like, (rows, *shape[1:]), dtype)


def _gradient(x, slot, cu):
    """Return the array for a gradient: that of ``into``, unless the padding needs a row."""
    target = target_like(slot, x) if cu is None else None
    return _target(x, x.shape, cu, x.dtype) if target is None else target


def backward(
    saved: tuple, dout: Any, dlse: Any, *, needs: tuple, into: tuple, scale: float,
    max_seqlen_q: int, max_seqlen_k: int, deterministic: bool, **params: Any,
) -> tuple:  # fmt: skip
    """Return the gradients of q, k, v, bias and sink (None for the rest)."""
    q, k, v, *extras, out, lse = saved
    bias, key_lengths, cu_q, cu_k, _, sink = extras
    dtype, xp = wide(q.dtype), get_xp(q)
    dout = zeros(q, out.shape) if dout is None else dout
    delta = row_dot(dout, out, dtype)  # (..., T, H)
    if dlse is not None:
        delta -= dlse.swapaxes(-1, -2)
    dq, dk, dv = (_gradient(x, slot, cu_q) for x, slot in zip((q, k, v), into, strict=False))
    dbias = zeros(q, bias.shape, dtype) if needs[3] else None

    def run(layout):
        with np.errstate(all="ignore"):
            grid = make_grid(layout, q, k, extras, params)
            operands = _operands(grid, layout, q, k, v, key_lengths, scale)
            dout_here, lse_here, delta_here = (
                by_heads(layout.take(x, 0).astype(dtype, copy=False), grid.groups)
                for x in (dout, lse.swapaxes(-1, -2)[..., None], delta[..., None])
            )
            if layout.queries is not None:  # padding: all its p are 0
                real = xp.arange(grid.T)[:, None] < column(layout.queries)
                lse_here = xp.where(real, lse_here, dtype.type(INF))
            dbias_here = None if dbias is None else zeros(q, grid.bias.shape, dtype)
            grads = attend_backward(grid, *operands, lse_here, delta_here, dout_here, dbias_here)
            grads[0][...] *= dtype.type(scale)
            for target, grad, side in zip((dq, dk, dv), grads, (0, 1, 1), strict=True):
                layout.put(target, grad, side)
            if dbias is not None:
                members = layout.members if bias.shape[0] > 1 else slice(None)
                dbias[members] += dbias_here.reshape(dbias[members].shape)

    parts = layouts(q, k, cu_q, cu_k, max_seqlen_q, max_seqlen_k)
    # a bias that broadcasts over sequences is summed in order
    _run_all(run, parts, q.shape[-1], in_order=dbias is not None)
    with np.errstate(all="ignore"):
        dsink = sink_gradient(sink, lse, delta.swapaxes(-1, -2)) if needs[8] else None
    dq, dk, dv = dq[: len(q)], dk[: len(k)], dv[: len(v)]
    dbias = None if dbias is None else dbias.astype(bias.dtype, copy=False)
    return dq, dk, dv, dbias, None, None, None, None, dsink
