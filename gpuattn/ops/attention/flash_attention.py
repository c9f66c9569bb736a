"""Attention, softmax(scale * q k^T) v, without storing the T x S logits.

Dao et al., "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness" (2022);
Dao, "FlashAttention-2" (2023). ``IMPLS`` lists the forms, each a module of this folder.
"""

import math
from operator import itemgetter
from typing import Any

from gpuattn.autodiff.tape import op, raw
from gpuattn.impls import Call, Fusion, Impl, Impls
from gpuattn.ops.arguments import check_choice, check_flags, dropout_key, number, take_arrays
from gpuattn.ops.attention import (
    ampere,
    hopper,
    hopper_backward,
    hopper_head,
    numba,
    reference,
    short,
    simt,
)
from gpuattn.ops.attention.arguments import NAME, check, window_sides


@op
def flash_attention(
    q: Any, k: Any, v: Any, *, causal: bool = False, align: str = "bottom_right",
    window: int | tuple[int | None, int | None] | None = None, scale: float | None = None,
    bias: Any = None, key_lengths: Any = None, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, alibi_slopes: Any = None,
    softcap: float | None = None, sink: Any = None, dropout_p: float = 0.0, seed: Any = None,
    return_lse: bool = False, deterministic: bool = False, tf32: bool = False,
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
    tokens, head sizes in steps of 8 to 64; chosen from 97 tokens on), "raw-hopper" (compute
    capability 9.0, 16-bit, head sizes in steps of 8 to 256), "raw-ampere" (the same on any GPU;
    with ``tf32`` also float32, in steps of 4 to 128), "raw-simt" (any dtype but float64, head sizes
    to 256), "numba" or "reference". The gradient is chosen by itself, from the form asked for on.
    Raises ValueError for shapes or parameters that do not fit, TypeError for dtypes,
    UnsupportedError where the form asked for does not take the call.
    """
    inputs = take_arrays(NAME, {"q": q, "k": k, "v": v}, {
        "bias": bias, "key_lengths": key_lengths, "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k, "alibi_slopes": alibi_slopes, "sink": sink,
    })  # fmt: skip
    if inputs["cu_seqlens_k"] is None:
        inputs["cu_seqlens_k"] = inputs["cu_seqlens_q"]
    limits = check({name: raw(x) for name, x in inputs.items()}, max_seqlen_q, max_seqlen_k)
    bias = inputs["bias"]
    if bias is not None and bias.ndim < 4:
        inputs["bias"] = bias.reshape((1,) * (4 - bias.ndim) + tuple(bias.shape))
    check_flags(NAME, causal=causal, return_lse=return_lse, deterministic=deterministic, tf32=tf32)
    check_choice(NAME, "align", align, "bottom_right", "top_left")
    dropout_p = number(NAME, "dropout_p", dropout_p, "0 <= p < 1", lambda p: 0 <= p < 1)
    if softcap is not None:
        accepted = "a positive number, or None"
        softcap = number(NAME, "softcap", softcap, accepted, lambda c: 0 < c < math.inf)
    head_dim = raw(inputs["q"]).shape[-1]
    scale = head_dim**-0.5 if scale is None else scale
    return Call(
        IMPLS,
        inputs.values(),
        impl,
        window=window_sides(causal, window),
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
    )


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
    Impl("reference", reference.forward, reference.backward, fusion=IN_LAYOUT),
)  # fmt: skip
