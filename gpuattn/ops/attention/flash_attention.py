"""Attention, softmax(scale * q k^T) v, without storing the T x S logits.

Dao et al., "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness" (2022);
Dao, "FlashAttention-2" (2023). ``IMPLS`` lists the forms, each a module of this folder.
"""

import math
from operator import itemgetter
from typing import Any

import numpy as np

from gpuattn.arrays import check_floats, check_together, is_floating, on_gpu, to_cpu
from gpuattn.autodiff.frozen import is_debugging
from gpuattn.autodiff.tape import op, raw
from gpuattn.errors import UnsupportedError, problem
from gpuattn.impls import Call, Fusion, Impl, Impls
from gpuattn.modes import mode
from gpuattn.ops.arguments import (
    check_choice,
    check_flags,
    dropout_key,
    integer,
    number,
    take_arrays,
)
from gpuattn.ops.attention import (
    ampere,
    hopper,
    hopper_backward,
    hopper_head,
    numba,
    reference,
    short,
    simt,
    unfused,
)
from gpuattn.typing import Array

NAME = "flash_attention"


@op
def flash_attention(
    q: Array, k: Array, v: Array, *, causal: bool = False, align: str = "bottom_right",
    window: int | tuple[int | None, int | None] | None = None, scale: float | None = None,
    bias: Array | None = None, key_lengths: Array | None = None, cu_seqlens_q: Array | None = None,
    cu_seqlens_k: Array | None = None, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None, alibi_slopes: Array | None = None,
    softcap: float | None = None, sink: Array | None = None, dropout_p: float = 0.0,
    seed: Any = None, return_lse: bool = False, deterministic: bool = False, tf32: bool = False,
    impl: str | None = None,
) -> Any:  # fmt: skip
    """Return the output (B, T, H, Dv) in the dtype of ``q``; with ``return_lse``, (out, lse).

    ``q``: (B, T, H, D); ``k``: (B, S, Hk, D); ``v``: (B, S, Hk, Dv), arrays or Tensors of one
    float dtype with any strides; Hk divides H. Packed sequences: (tokens, H, D) with int32
    ``cu_seqlens_q`` (and ``cu_seqlens_k``, by default the same), the B + 1 offsets 0, ..., tokens,
    and ``max_seqlen_q``, ``max_seqlen_k``, the longest lengths (by default all tokens: slow).

    A logit is scale * q_i . k_j (``scale``: 1 / sqrt(D) by default); ``softcap`` c turns it into
    c * tanh(logit / c); then ``bias`` and ALiBi are added, the latter -slope * |i + offset - j|
    with ``alibi_slopes`` (H,) or (B, H). The offset is S - T (``align="bottom_right"``: the last
    query is aligned with the last key) or 0 (``"top_left"``), separately for each sequence.
    ``causal``: query i sees keys j <= i + offset. ``window``: (left, right), the most keys seen on
    either side of i + offset, None for all; an int is both. ``key_lengths`` (B,): only this many
    keys of a sequence, from the first, are seen; does not change the offset. ``bias`` broadcasts to
    (B, H, T, S) (packed: to the longest lengths, by the i and j of each sequence): bool (True:
    seen), or float in the dtype of ``q`` or float32. ``sink`` (H,): the logit of one more key whose
    value is zero. ``dropout_p`` in [0, 1): the probability that a weight is dropped; the others are
    scaled by 1 / (1 - p). ``seed``: None, an int or a ``rng.Key``; the mask is that of
    ``ops.attention.dropout.attention_keep_mask``.
    ``lse``: log(sum(exp(logits))), float32, natural logarithm, (B, H, T) or (H, tokens).
    A query that sees no key gives 0, lse -inf (the sink, if there is one), and no gradient.
    On a GPU a NaN in ``v`` also reaches nearby queries that a mask hides it from, as 0 * NaN does;
    ``key_lengths`` and ``cu_seqlens_k`` prevent that.

    Gradients flow to q, k, v, float bias and sink, from out and lse. ``deterministic``: never use
    atomics in the gradient. ``tf32``: tensor cores may round float32 q, k, v and weights to TF32
    (10 bits of mantissa) in the forward; the gradient stays in float32. No effect on 16 bits.

    ``impl``: None for the first that accepts, "raw" for the first of CUDA, or a name:
    "raw-short" (16-bit, at most 256 tokens, head sizes in steps of 8 to 128; chosen up to 64
    tokens), "raw-hopper-head" (compute capability 9.0, 16-bit, causal self-attention of at most 256
    tokens, head sizes in steps of 8 to 64; chosen from 97 tokens on; gradients of 193 to 256 tokens
    without a mask too), "raw-hopper" (compute capability 9.0, 16-bit, head sizes in steps of 8 to
    256), "raw-ampere" (the same on any GPU from 8.0; with ``tf32`` also float32, in steps of 4 to
    128; on 7.5 it and "raw-short" take float16 alone, and gradients of head sizes to 192),
    "raw-simt" (any dtype but float64, head sizes to 256), "numba", "unfused" (stores the tables of
    logits and weights, only where it is asked for; no lse) or "reference". The gradient is chosen
    by itself, from the form asked for on.
    Raises ValueError for shapes or parameters that do not fit, TypeError for dtypes,
    UnsupportedError where the form asked for does not take the call.
    """
    inputs = take_arrays(NAME, {"q": q, "k": k, "v": v}, {
        "bias": bias, "key_lengths": key_lengths, "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k, "alibi_slopes": alibi_slopes, "sink": sink,
    })  # fmt: skip
    if inputs["cu_seqlens_k"] is None:
        inputs["cu_seqlens_k"] = inputs["cu_seqlens_q"]
    limits = _check({name: raw(x) for name, x in inputs.items()}, max_seqlen_q, max_seqlen_k)
    bias = inputs["bias"]
    if bias is not None and bias.ndim < 4:
        inputs["bias"] = bias.reshape((1,) * (4 - bias.ndim) + tuple(bias.shape))
    check_flags(NAME, causal=causal, return_lse=return_lse, deterministic=deterministic, tf32=tf32)
    check_choice(NAME, "align", align, "bottom_right", "top_left")
    dropout_p = number(NAME, "dropout_p", dropout_p, "0 <= p < 1", lambda p: 0 <= p < 1)
    if softcap is not None:
        accepted = "a positive number, or None"
        softcap = number(NAME, "softcap", softcap, accepted, lambda c: 0 < c < math.inf)
    if return_lse and (impl or mode.get().impls.get(NAME)) == "unfused":
        raise UnsupportedError(f"{NAME}: unfused returns no lse; without it any other form does")
    head_dim = raw(inputs["q"]).shape[-1]
    scale = head_dim**-0.5 if scale is None else scale
    return Call(
        IMPLS,
        inputs.values(),
        impl,
        window=_window_sides(causal, window),
        align=align,
        scale=number(NAME, "scale", scale),
        softcap=softcap,
        dropout_p=dropout_p,
        key=dropout_key(NAME, dropout_p, seed),
        max_seqlen_q=limits[0],
        max_seqlen_k=limits[1],
        deterministic=bool(deterministic),
        tf32=bool(tf32),
        finish=None if return_lse else itemgetter(0),
        values_checked=cu_seqlens_q is not None and not on_gpu(raw(cu_seqlens_q)),
    )


# ---- checks of the arguments ---------------------------------------------------------------------


def _window_sides(causal, window):
    """Return the window as (left, right), None for no limit. Raises ValueError or TypeError."""
    accepted = "None, or widths >= 0 as w or (left, right)"
    sides = tuple(window) if isinstance(window, tuple | list) else (window, window)
    if len(sides) != 2:
        raise ValueError(problem(NAME, "window", window, accepted))
    left, right = (
        None if side is None else integer(NAME, "window", side, accepted) for side in sides
    )
    return left, 0 if causal else right


def _check(given, max_seqlen_q, max_seqlen_k):
    """Return the longest lengths of queries and keys.

    ``given``: arrays or None by their argument names. Raises ValueError for shapes that do not
    match, TypeError for dtypes.
    """
    check_together(NAME, **given)
    q, k, v, bias = (given[name] for name in ("q", "k", "v", "bias"))
    cu_q, cu_k = given["cu_seqlens_q"], given["cu_seqlens_k"]
    check_floats(NAME, q=q, k=k, v=v)
    packed = cu_k is not None
    form = "(tokens, H, D)" if packed else "(B, T, H, D)"
    for name in ("q", "k", "v"):
        if given[name].ndim != 4 - packed:
            advice = "" if packed else "Packed sequences need cu_seqlens_q."
            raise ValueError(problem(NAME, f"{name}.shape", given[name].shape, form, advice))
    if not packed and q.shape[0] != k.shape[0]:
        accepted = f"batch size {q.shape[0]}, as in q"
        raise ValueError(problem(NAME, "k.shape", k.shape, accepted))
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(problem(NAME, "v.shape", v.shape, f"{k.shape[:-1]} + (Dv,), as in k"))
    (H, D), (kv_heads, key_dim) = q.shape[-2:], k.shape[-2:]
    if key_dim != D or D == 0 or v.shape[-1] == 0:
        sizes = f"{D}, {key_dim} and {v.shape[-1]}"
        accepted = "the same size >= 1 for q and k, any size >= 1 for v"
        raise ValueError(problem(NAME, "the head size of q, k and v", sizes, accepted))
    if (H % kv_heads or not H) if kv_heads else H:
        accepted = f"a multiple of the {kv_heads} heads of k and v"
        raise ValueError(problem(NAME, "the number of heads of q", H, accepted))
    if packed:
        sequences, limits = _check_offsets(
            (cu_q, cu_k), (q.shape[0], k.shape[0]), (max_seqlen_q, max_seqlen_k)
        )
    elif max_seqlen_q is not None or max_seqlen_k is not None:
        name, got = "max_seqlen_q", max_seqlen_q
        if got is None:
            name, got = "max_seqlen_k", max_seqlen_k
        raise ValueError(problem(NAME, name, got, "None, except with cu_seqlens_q"))
    else:
        sequences, limits = q.shape[0], (q.shape[1], k.shape[1])
    lengths, slopes, sink = given["key_lengths"], given["alibi_slopes"], given["sink"]
    if bias is not None:
        _check_bias(bias, (sequences, H, *limits), q.dtype)
    _check_extra("key_lengths", lengths, "iu", [(sequences,)])
    _check_extra("alibi_slopes", slopes, "f", [(H,), (sequences, H)])
    if sink is not None and sink.shape != (H,):
        raise ValueError(problem(NAME, "sink.shape", sink.shape, f"({H},)"))
    if sink is not None and not is_floating(sink.dtype):
        raise TypeError(problem(NAME, "sink.dtype", sink.dtype, "a float dtype"))
    return limits


def _check_bias(bias, full, dtype):
    accepted = (dtype, np.dtype("float32"), np.dtype(bool))
    if bias.dtype not in accepted:
        names = " or ".join(dict.fromkeys(map(str, accepted)))
        raise TypeError(problem(NAME, "bias.dtype", bias.dtype, names))
    shape = (1,) * (4 - bias.ndim) + bias.shape
    if len(shape) > 4 or any(n not in (1, m) for n, m in zip(shape, full, strict=True)):
        accepted = f"what broadcasts to (B, H, T, S) = {full}"
        raise ValueError(problem(NAME, "bias.shape", bias.shape, accepted))


def _check_extra(name, x, kinds, shapes):
    if x is None:
        return
    if x.dtype.kind not in kinds:
        accepted = "integers" if "i" in kinds else "float32 or float64"
        raise TypeError(problem(NAME, f"{name}.dtype", x.dtype, accepted))
    if x.shape not in shapes:
        raise ValueError(problem(NAME, f"{name}.shape", x.shape, " or ".join(map(str, shapes))))


def _check_offsets(offsets, tokens, longest):
    """Check cu_seqlens; return the number of sequences and the longest lengths.

    On a GPU the values are checked only in debug(), because reading them synchronizes.
    """
    if offsets[0] is None:
        accepted = "None, except with cu_seqlens_q"
        raise ValueError(problem(NAME, "cu_seqlens_k", "given", accepted))
    limits = []
    for side, cu, n, limit in zip("qk", offsets, tokens, longest, strict=True):
        name, limit_name = f"cu_seqlens_{side}", f"max_seqlen_{side}"
        if cu.dtype != np.int32:
            advice = f"Try {name}.astype('int32')."
            raise TypeError(problem(NAME, f"{name}.dtype", cu.dtype, "int32", advice))
        if cu.ndim != 1 or len(cu) == 0:
            raise ValueError(problem(NAME, f"{name}.shape", cu.shape, "(B + 1,)"))
        sequences, least = len(cu) - 1, "at least the longest length"
        limit = n if limit is None else integer(NAME, limit_name, limit, least)
        if limit * sequences < n:
            accepted = f"{least}: there are {n} tokens in {sequences} sequences"
            raise ValueError(problem(NAME, limit_name, limit, accepted))
        limits.append(limit)
        if on_gpu(cu) and not is_debugging():
            continue
        values = to_cpu(cu)
        lengths = np.diff(values)
        if values[0] != 0 or values[-1] != n or (lengths < 0).any():
            accepted = f"offsets that start at 0, never fall and end at the {n} tokens"
            raise ValueError(problem(NAME, name, values, accepted))
        if lengths.max(initial=0) > limit:
            raise ValueError(problem(NAME, limit_name, limit, f"{least}, {lengths.max()}"))
    if len(offsets[0]) != len(offsets[1]):
        got, accepted = len(offsets[1]) - 1, f"{len(offsets[0]) - 1}, as of queries"
        raise ValueError(problem(NAME, "the number of key sequences", got, accepted))
    return len(offsets[0]) - 1, tuple(limits)


# ---- the forms ----------------------------------------------------------------------------------

IN_LAYOUT = Fusion(writes_into_layout=True)
IMPLS = Impls(  # each direction runs the first form that accepts; all save the same arrays
    NAME,
    Impl(
        "raw-short", short.forward, short.backward, short.refuse, short.describe,
        refuse_backward=short.refuse, specialized=True, fusion=IN_LAYOUT,
    ),
    Impl(
        "raw-hopper-head", hopper_head.forward, hopper_head.backward, hopper_head.refuse_forward,
        hopper_head.describe, refuse_backward=hopper_head.refuse_backward,
        compile_backward=hopper_head.compile_backward, specialized=True, fusion=IN_LAYOUT,
    ),
    Impl(
        "raw-hopper", hopper.forward, hopper_backward.backward, hopper.refuse, hopper.describe,
        refuse_backward=hopper_backward.refuse, compile_backward=hopper_backward.compile_backward,
        fusion=IN_LAYOUT,
    ),
    Impl(
        "raw-ampere", ampere.forward, ampere.backward, ampere.refuse, ampere.describe,
        refuse_backward=ampere.refuse_backward, fusion=IN_LAYOUT,
    ),
    Impl(
        "raw-simt", simt.forward, simt.backward, simt.refuse, simt.describe,
        refuse_backward=simt.refuse, fusion=IN_LAYOUT,
    ),
    Impl("numba", numba.forward, numba.backward, numba.refuse, refuse_backward=numba.refuse),
    Impl(
        "unfused", unfused.forward, unfused.backward, unfused.refuse,
        refuse_backward=unfused.refuse, specialized=True, fusion=IN_LAYOUT,
    ),
    Impl("reference", reference.forward, reference.backward, fusion=IN_LAYOUT),
)  # fmt: skip
