"""unfused: the formula in three kernels, which stores the tables of scores and weights.

    S = q k^T;  P = softmax(S);  out = P v

It is what fused kernels are measured against: it runs only where it is asked for by name, as in
``use_impl(flash_attention="unfused")``, so that a whole model can run it. Both tables are (B, H, T,
S), on a GPU in the dtype of ``q``, on NumPy in float32 or float64. q is scaled before the product,
which keeps float16 scores in range. The gradient is the formula too, from the stored weights:

    dv = P^T dout;  dP = dout v^T;  dS = P * (dP - rowsum(dP * P));  dq = dS k;  dk = dS^T q
"""

from typing import Any

import numpy as np

from gpuattn import arrays
from gpuattn.arrays import get_xp, on_gpu, wide
from gpuattn.autodiff.gradient_layout import target_like
from gpuattn.errors import SlowerRefusal
from gpuattn.gemm.matmul import matmul_stacks
from gpuattn.impls import choose
from gpuattn.ops.attention.dropout import attention_keep_mask
from gpuattn.ops.attention.gradient import bias_gradient
from gpuattn.ops.attention.grids import Packed
from gpuattn.ops.attention.launch import drops
from gpuattn.ops.softmax import IMPLS as SOFTMAX
from gpuattn.typing import Array

PARAMS = {"scale": 1.0, "p": 0.0, "key": None, "donate": True}  # of the op ``softmax``


def refuse(
    q: Array, k: Array, v: Array, bias: Any, key_lengths: Any, cu_q: Any, cu_k: Any, slopes: Any,
    sink: Any, *, window: tuple, align: str, softcap: float | None, **_: Any,
) -> str | None:  # fmt: skip
    """Return why neither direction runs here unless asked for, or does not run at all."""
    features = {"alibi_slopes": slopes, "sink": sink, "softcap": softcap}
    if used := [name for name, value in features.items() if value is not None]:
        return f"{', '.join(used)} given; the formula here knows masks, bias and dropout only"
    if window not in ((None, None), (None, 0)):
        return f"the window is {window}, the formula here knows (None, 0) (causal) or none"
    if cu_q is not None and bias is not None:
        return "bias given with cu_seqlens; the formula here knows it for a dense batch only"
    if window[1] == 0 and cu_q is not None and cu_q is not cu_k:
        return "a causal mask of packed sequences needs the same cu_seqlens for queries and keys"
    if window[1] == 0 and cu_q is None and align == "top_left" and q.shape[1] != k.shape[1]:
        return "a causal mask that is aligned top-left needs as many queries as keys"
    return SlowerRefusal("it stores tables of T x S numbers; ask for it by name, to compare")


def _softmax(scores, mask, lengths, causal):
    """Return the weights, in the memory of the scores."""
    inputs, needs, params = [scores, mask, lengths], (False,) * 3, PARAMS | {"causal": causal}
    chosen = choose(SOFTMAX, inputs, needs=needs, **params)
    return chosen.forward(*inputs, needs=needs, **params)[0]


def _softmax_gradient(weights, dweights, causal):
    needs, params = (True, False, False), PARAMS | {"causal": causal}
    chosen = choose(SOFTMAX, [weights, None, None], needs=needs, **params)
    saved = (weights, None) if chosen.name == "reference" else (weights,)
    return chosen.backward(saved, dweights, needs=needs, into=(None,) * 3, **params)[0]


def _product(a, b):
    """Return a @ b for stacks of matrices."""
    return matmul_stacks(a, b) if on_gpu(a) else np.matmul(a, b)


def _seen(x, key_lengths):
    """Return rows (B, S, H, D) with 0 past the end of their sequence: there may be NaN."""
    if key_lengths is None:
        return x
    xp, work = get_xp(x), wide(x.dtype)
    inside = xp.arange(x.shape[1]) < key_lengths[:, None]
    inside = inside[..., None, None]
    return xp.where(inside, x.astype(work, copy=False), work.type(0)).astype(x.dtype, copy=False)


def _stack(x, groups, scale=None):
    """Return (B, T, H, D) as matrices (B * H / groups, groups * T, D) of the tables' dtype."""
    B, T, H, D = x.shape
    dtype = x.dtype if on_gpu(x) else wide(x.dtype)
    x = x.reshape(B, T, H // groups, groups, D).transpose(0, 2, 3, 1, 4)
    x = get_xp(x).ascontiguousarray(x, dtype)
    if scale is not None:
        x = (x * float(scale)).astype(dtype, copy=False)  # of bfloat16 the product is float32
    return x.reshape(B * (H // groups), groups * T, D)


def _unstack(stack, target):
    """Write such matrices to an array (B, T, H, D)."""
    B, T, H, D = target.shape
    heads = stack.shape[0] // B if B else 1
    parts = stack.reshape(B, heads, H // heads, T, D).transpose(0, 3, 1, 2, 4)
    target[...] = parts.reshape(B, T, H, D)


def forward(
    q: Array, k: Array, v: Array, bias: Array | None, key_lengths: Array | None, *extras: Any,
    needs: tuple, scale: float, window: tuple, dropout_p: float, key: Any, max_seqlen_q: int,
    max_seqlen_k: int, **_: Any,
) -> tuple:  # fmt: skip
    """Return (out, lse) and what the gradient needs. ``lse`` is NaN: no pass computes it.

    Packed sequences are padded to the longest.
    """
    inputs = q, k, v, bias, key_lengths, *extras
    *lead, H, _ = q.shape
    out = arrays.empty(q, (*lead, H, v.shape[-1]))
    lse = arrays.empty(q, (*lead[:-1], H, lead[-1]), np.float32)
    lse[...] = np.nan
    if not out.size or not k.size:
        out[...] = 0
        return (out, lse), (*inputs, out, lse, None, None, None, None) if any(needs) else None
    arrays.unrecorded_write()
    layout, lengths = None, key_lengths
    if extras[0] is not None:
        layout = _padded(q, k, extras[0], extras[1], max_seqlen_q, max_seqlen_k)
        lengths = layout.keys
        if key_lengths is not None:
            lengths = get_xp(q).minimum(lengths, key_lengths)
    q, k, v = _taken(layout, q, k, v)
    (B, T, H, _), (S, kv_heads) = q.shape, k.shape[1:3]
    groups, heads = H // kv_heads, B * kv_heads
    queries = _stack(q, groups, scale)
    keys, values = (_stack(_seen(x, lengths), 1) for x in (k, v))
    scores = _product(queries, keys.swapaxes(1, 2)).reshape(B, H, T, S)
    mask = bias if bias is None or bias.dtype == bool else bias.astype(scores.dtype, copy=False)
    weights = _softmax(scores, mask, lengths, window[1] == 0)
    kept, used = None, weights
    if drops(dropout_p):
        kept = attention_keep_mask(get_xp(q), weights.shape, dropout_p, key)
        used = _drop(weights, kept, dropout_p)
    _put(layout, out, _product(used.reshape(heads, groups * T, S), values), (B, T, H))
    saved = (*inputs, out, lse, weights, kept, used, lengths) if any(needs) else None
    return (out, lse), saved


def _padded(q, k, cu_q, cu_k, *longest):
    """Return the layout of packed sequences, padded to one batch."""
    starts = [cu[:-1].astype(np.int64) for cu in (cu_q, cu_k)]
    lengths = [cu[1:] - first for cu, first in zip((cu_q, cu_k), starts, strict=True)]
    return Packed(get_xp(q), slice(None), starts, lengths, longest, (q.shape[0], k.shape[0]))


def _taken(layout, *inputs):
    """Return q, k and v, or what is like q, in a dense batch."""
    if layout is None:
        return inputs
    return tuple(layout.take(x, int(i > 0)) for i, x in enumerate(inputs))


def _put(layout, target, stack, lead, side=0):
    """Write the matrices of a batch of ``lead`` = (B, T, H) to ``target``."""
    if layout is None:
        _unstack(stack, target)
        return
    dense = arrays.empty(target, (*lead, target.shape[-1]))
    _unstack(stack, dense)
    room = arrays.empty(target, (len(target) + 1, *target.shape[1:]))  # a row for the padding
    layout.put(room, dense, side)
    target[...] = room[:-1]


def _drop(x, kept, p):
    """Return a table with 0 where it is not kept, else divided by 1 - p."""
    work = wide(x.dtype)
    factors = kept * work.type(1 / (1 - p))
    return (x.astype(work, copy=False) * factors).astype(x.dtype, copy=False)


def backward(
    saved: tuple, dout: Any, dlse: Any, *, needs: tuple, into: tuple, scale: float, window: tuple,
    dropout_p: float, max_seqlen_q: int, max_seqlen_k: int, **_: Any,
) -> tuple:  # fmt: skip
    """Return the gradients of q, k, v and bias (None for the rest)."""
    (q, k, v, bias), (cu_q, cu_k) = saved[:4], saved[5:7]
    weights, kept, used, lengths = saved[-4:]
    dq, dk, dv = (_target(x, slot) for x, slot in zip((q, k, v), into, strict=False))
    dbias = arrays.zeros(q, bias.shape, bias.dtype) if needs[3] else None
    rest = (None,) * 5
    if dout is None or weights is None:
        for x in (dq, dk, dv):
            x[...] = 0
        return dq, dk, dv, dbias, *rest
    arrays.unrecorded_write()
    layout = None
    if cu_q is not None:
        layout = _padded(q, k, cu_q, cu_k, max_seqlen_q, max_seqlen_k)
    (dout,) = _taken(layout, dout.astype(q.dtype, copy=False))
    if layout is not None:
        dout = _seen(dout, layout.queries)
    q, k, v = _taken(layout, q, k, v)
    B, H, T, S = weights.shape
    groups, table = H // k.shape[2], (B * k.shape[2], -1, S)
    of_queries, of_keys = (B, T, H), (B, S, k.shape[2])
    dout, k, v = _stack(dout, groups), _stack(_seen(k, lengths), 1), _stack(_seen(v, lengths), 1)
    _put(layout, dv, _product(used.reshape(table).swapaxes(1, 2), dout), of_keys, 1)
    dweights = _product(dout, v.swapaxes(1, 2)).reshape(weights.shape)
    if kept is not None:
        dweights = _drop(dweights, kept, dropout_p)
    dscores = _softmax_gradient(weights, dweights, window[1] == 0)
    if needs[3]:
        dbias = bias_gradient(dscores.astype(wide(dscores.dtype), copy=False), bias)
    dscores = dscores.reshape(table)
    dqueries = _product(dscores, k)
    _put(layout, dq, dqueries * float(scale), of_queries)
    _put(layout, dk, _product(dscores.swapaxes(1, 2), _stack(q, groups, scale)), of_keys, 1)
    return dq, dk, dv, dbias, *rest


def _target(x, slot):
    target = target_like(slot, x)
    return arrays.empty(x, x.shape) if target is None else target
