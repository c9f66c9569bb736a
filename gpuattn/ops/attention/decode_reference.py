"""The reference of ``decode_attention``: gather the keys, then softmax(q k^T) v."""

from typing import Any, NamedTuple

import numpy as np

from gpuattn.arrays import LOWEST, checked_index, empty, get_xp, wide
from gpuattn.typing import Array


class _Part(NamedTuple):
    """n sequences.

    ``rows``: queries, scaled, (n, Hk, sharers, T, group, D). ``lengths``: (n,). ``real``: (n,
    keys), which keys count, or None for all. ``k``, ``v``: (n, keys, Hk, D). ``slopes``: None, or
    (n, Hk, sharers, 1, group, 1).
    """

    rows: Array
    lengths: Array
    real: Array | None
    k: Array
    v: Array
    slopes: Any


def forward(
    q: Array, k: Array, v: Array, lengths: Array, page_table: Array | None, slots: Array | None,
    slopes: Array | None, sink: Array | None, *, needs: tuple, scale: float, window: int | None,
    softcap: float | None, splits: int | None, batch_invariant: bool,
) -> tuple:  # fmt: skip
    """Return (out, lse) and None; see ``decode_attention``. ``splits`` has no effect here.

    With ``batch_invariant`` NumPy computes sequences of different lengths apart, each with as many
    keys as it has: more keys of weight 0 would change the order of sums.
    """
    xp, dtype, (B, T, H, D) = get_xp(q), wide(q.dtype), q.shape
    sequences, kv_heads, value_dim = len(lengths), k.shape[2], v.shape[3]
    sharers, group = B // max(sequences, 1), H // kv_heads
    room = k.shape[1] * (1 if page_table is None else page_table.shape[1])
    lengths = xp.minimum(xp.maximum(lengths, 0), room)
    all_real = False
    if xp is np:  # on a GPU it would synchronize
        room = int(lengths.max(initial=0))
        all_real = room == lengths.min(initial=room)
    real = None
    if window is not None or not all_real:
        keys = xp.arange(room)
        real = keys < lengths[:, None]
        if window is not None:
            real &= keys >= lengths[:, None] - T - window
    k, v = (_gather(x, sequences, room, real, page_table, slots, dtype) for x in (k, v))
    if slopes is not None:
        slopes = xp.broadcast_to(slopes.astype(dtype), (B, H))
        slopes = slopes.reshape(sequences, sharers, kv_heads, group).transpose(0, 2, 1, 3)
        slopes = slopes[:, :, :, None, :, None]
    rows = q.reshape(sequences, sharers, T, kv_heads, group, D).transpose(0, 3, 1, 2, 4, 5)
    rows = xp.ascontiguousarray(rows).astype(dtype) * dtype.type(scale)
    whole = _Part(rows, lengths, real, k, v, slopes)
    settings = {"sink": sink, "window": window, "softcap": softcap}
    if batch_invariant and xp is np:
        out = empty(k, (*rows.shape[:-1], value_dim))
        lse = empty(k, rows.shape[:-1])
        for n in np.unique(lengths):
            alike = np.flatnonzero(lengths == n)
            part = _Part(*(None if x is None else x[alike] for x in whole))
            k, v = (np.ascontiguousarray(x[:, :n]) for x in (part.k, part.v))
            real = None if part.real is None or window is None else part.real[:, :n]
            part = part._replace(k=k, v=v, real=real)
            out[alike], lse[alike] = _attend(part, **settings)
    else:
        out, lse = _attend(whole, **settings)
    out = out.transpose(0, 2, 3, 1, 4, 5).reshape(B, T, H, value_dim).astype(q.dtype, copy=False)
    return (out, lse.transpose(0, 2, 1, 4, 3).reshape(B, H, T)), None


def _attend(part, *, sink, window, softcap):
    """Return the output (n, Hk, sharers, T, group, Dv) of a _Part, and its lse without the Dv."""
    rows, lengths, real, k, v, slopes = part
    xp, dtype, (n, kv_heads, sharers, T, group, D) = get_xp(k), k.dtype, rows.shape
    room, seen = k.shape[1], None if real is None else real[:, None, None, None, None]
    with np.errstate(all="ignore"):
        flat = rows.reshape(n, kv_heads, sharers * T * group, D)
        x = xp.matmul(flat, k.transpose(0, 2, 3, 1))
        x = x.reshape(*rows.shape[:-1], room)
        if softcap is not None:
            x = dtype.type(softcap) * xp.tanh(x / dtype.type(softcap))
        if T > 1 or slopes is not None or window is not None:
            at = lengths[:, None] - T + xp.arange(T)  # the key that each query is aligned with
            back = (at[:, :, None] - xp.arange(room))[:, None, None, :, None]
            if slopes is not None:
                x -= slopes * back.astype(dtype)
            before = back >= 0
            seen = before if seen is None else before & seen
            if window is not None:
                seen &= back <= window
        if seen is not None:
            x = xp.where(seen, x, dtype.type(-np.inf))

        top = x.max(-1, keepdims=True) if room else xp.full((*x.shape[:-1], 1), -np.inf, dtype)
        if sink is not None:  # one more key, of value zero
            sink = sink.astype(dtype).reshape(kv_heads, 1, 1, group, 1)
            top = xp.maximum(top, sink)
        base = xp.maximum(top, LOWEST[dtype])  # -inf - LOWEST is -inf
        x -= base
        p = xp.exp(x, out=x)
        total = p.sum(-1, keepdims=True)
        if sink is not None:
            total += xp.exp(sink - base)
        p = p.reshape(n, kv_heads, sharers * T * group, room)
        out = xp.matmul(p, v.swapaxes(1, 2)).reshape(*rows.shape[:-1], v.shape[-1])
        out /= xp.maximum(total, 1)  # 0 without a key, else at least exp(0)
        return out, (base + xp.log(total))[..., 0]


def _gather(cache, sequences, room, real, page_table, slots, dtype):
    """Return the keys or values of each sequence, (N, keys, Hk, D); zeros unless ``real``."""
    xp = get_xp(cache)
    if page_table is not None:
        page, keys = cache.shape[1], xp.arange(room)
        pages = page_table[:, keys // page]
        pages = pages if real is None else xp.where(real, pages, 0)
        found = cache[checked_index(pages, len(cache), "decode_attention: page_table"), keys % page]
    elif slots is not None:
        beam, keys = slots.shape[1], xp.arange(room)
        slot = slots.reshape(sequences, slots.shape[2])[:, :room]
        slot = slot if real is None else xp.where(real, slot, 0)
        first = xp.arange(sequences)[:, None] // beam * beam
        found = cache[first + checked_index(slot, beam, "decode_attention: slots"), keys]
    else:
        found = cache[:, :room]
    found = found.astype(dtype, copy=False)
    if real is None:
        return found
    return xp.where(real[:, :, None, None], found, dtype.type(0))
