"""Attention, softmax(scale * q k^T) v, without storing the T x S logits.

Dao et al., "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness" (2022);
Dao, "FlashAttention-2" (2023). Reference: ``attention_reference.py``; CUDA, by what the GPU has:
``attention_{hopper,ampere,short,simt}.py``; to read: ``numbakernels/flash_attention.py``.
"""

import math
from operator import itemgetter

import numpy as np

from gpuattn import arrays
from gpuattn.arrays import get_xp
from gpuattn.autodiff.tape import op, raw
from gpuattn.impls import Call, Fusion, Impl, Impls
from gpuattn.numbakernels import device
from gpuattn.ops.arguments import check_choice, check_flags, dropout_key, number, take_arrays
from gpuattn.ops.attention import ampere, ampere_backward, hopper, reference, simt
from gpuattn.ops.attention.arguments import NAME, check, window_sides
from gpuattn.ops.attention.launch import UNLIMITED

MAX_NUMBA_HEAD_DIM = 128


@op
def flash_attention(
    q, k, v, *, causal=False, align="bottom_right", window=None, scale=None, bias=None,
    key_lengths=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
    alibi_slopes=None, softcap=None, sink=None, dropout_p=0.0, seed=None, return_lse=False,
    deterministic=False, tf32=False, impl=None,
):  # fmt: skip
    """Return the output (B, T, H, Dv) in the dtype of ``q``; with ``return_lse``, (out, lse).

    ``q``: (B, T, H, D); ``k``: (B, S, Hk, D); ``v``: (B, S, Hk, Dv), arrays or Tensors of one
    float dtype with any strides; Hk divides H. Packed sequences: (tokens, H, D) with int32
    ``cu_seqlens_q`` (and ``cu_seqlens_k``, by default the same), the B + 1 offsets 0, ..., tokens,
    and ``max_seqlen_q``, ``max_seqlen_k``, the longest lengths (by default all tokens: slow).

    A logit is scale * q_i . k_j (``scale``: 1 / sqrt(D) by default); then ``softcap`` c bends it to
    c * tanh(logit / c); then ``bias`` and ALiBi are added, the latter -slope * |i + offset - j|
    with ``alibi_slopes`` (H,) or (B, H). The offset is S - T (``align="bottom_right"``: the last
    query stands at the last key) or 0 (``"top_left"``), for each sequence by itself.
    ``causal``: query i sees keys j <= i + offset. ``window``: (left, right), the most keys seen on
    either side of i + offset, None for all; an int is both. ``key_lengths`` (B,): only the first
    so many keys count; moves no offset. ``bias`` broadcasts to (B, H, T, S) (packed: to the longest
    lengths, by local i and j): bool (True: seen), or float in the dtype of ``q`` or float32.
    ``sink`` (H,): the logit of one more key whose value is zero.
    ``dropout_p`` in [0, 1): so many probabilities are dropped, the others scaled by 1 / (1 - p);
    ``seed``: None, an int or a ``rng.Key``; the bits are those of
    ``attention_dropout.attention_keep_mask``.
    ``lse``: log(sum(exp(logits))), float32, natural logarithm, (B, H, T) or (H, tokens).
    A query that sees no key gives 0, lse -inf (the sink, if there is one), and no gradient.
    A NaN in ``v`` reaches, on a GPU, queries nearby that a mask hides it from, as 0 * NaN does;
    ``key_lengths`` and ``cu_seqlens_k`` keep it out.

    Gradients flow to q, k, v, float bias and sink, from out and lse. ``deterministic``: never use
    atomics in the gradient. ``tf32``: tensor cores may round float32 q, k, v and weights to TF32
    (10 bits of mantissa) in the forward; the gradient stays in float32, 16-bit inputs as they are.
    ``impl``: "raw-hopper" (compute capability 9.0), "raw-ampere" (both: 16-bit, head sizes in steps
    of 8 to 256; the latter also TF32, in steps of 4 to 128), "raw-simt" (head sizes to 256),
    "numba", "reference", or None for the first that accepts. Raises ValueError for shapes or
    parameters that do not fit, TypeError for dtypes.
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


# ---- numba: gpuattn/numbakernels/flash_attention.py --------------------------------------------


def _refuse_numba(
    q, k, v, bias, key_lengths, cu_q, cu_k, slopes, sink, *, window, softcap, dropout_p, **_
):
    features = {
        "bias": bias, "cu_seqlens": cu_q, "alibi_slopes": slopes, "sink": sink, "softcap": softcap,
        "window": window[0], "dropout": dropout_p or None,
    }  # fmt: skip
    used = [name for name, value in features.items() if value is not None]
    if used:
        return f"{', '.join(used)} given; the kernel knows causal, scale and key_lengths only"
    if q.dtype != np.float32:
        return f"q is {q.dtype}, the kernel takes float32"
    if window[1] not in (None, 0):
        return f"the window ends {window[1]} keys to the right, the kernel knows 0 (causal) or none"
    if max(q.shape[-1], v.shape[-1]) > MAX_NUMBA_HEAD_DIM:
        size = max(q.shape[-1], v.shape[-1])
        return f"the head size is {size}, the kernel takes at most {MAX_NUMBA_HEAD_DIM}"
    if max(q.shape[0], q.shape[2]) > 65535:
        return f"batch and heads are {q.shape[0]} and {q.shape[2]}, the kernel takes at most 65535"
    return device.refusal(q)


def _numba_arguments(q, k, v, key_lengths, scale, window, align):
    from gpuattn.numbakernels.flash_attention import TILE, kernels

    xp, (B, T, H, D), (S, kv_heads) = get_xp(q), q.shape, k.shape[1:3]
    if key_lengths is None:
        lengths = xp.full(B, S, np.int32)
    else:
        lengths = key_lengths.clip(0, S).astype(np.int32)
    causal = 0 if align == "top_left" else S - T
    numbers = np.float32(scale), np.int32(UNLIMITED if window[1] is None else causal)
    grids = (-(-T // TILE), H, B), (-(-S // TILE), kv_heads, B)
    return kernels(D, v.shape[-1]), grids, (TILE,), lengths, numbers


def _forward_numba(q, k, v, *extras, needs, scale, window, align, **_):
    (run, _, _), (grid, _), block, lengths, numbers = _numba_arguments(
        q, k, v, extras[1], scale, window, align
    )
    B, T, H, _ = q.shape
    out = arrays.empty(q, (B, T, H, v.shape[-1]), q.dtype)
    lse = arrays.empty(q, (B, H, T), np.float32)
    device.launch(run, grid, block, q, k, v, lengths, out, lse, *numbers)
    return (out, lse), ((q, k, v, *extras, out, lse) if any(needs) else None)


def _backward_numba(saved, dout, dlse, *, needs, into, scale, window, align, **_):
    q, k, v, *extras, out, lse = saved
    (_, run_q, run_kv), (grid_q, grid_kv), block, lengths, numbers = _numba_arguments(
        q, k, v, extras[1], scale, window, align
    )
    dout = arrays.zeros(q, out.shape) if dout is None else dout
    dlse = arrays.zeros(q, lse.shape, np.float32) if dlse is None else dlse
    dq, dk, dv = (arrays.empty(x, x.shape, x.dtype) for x in (q, k, v))
    delta = arrays.empty(q, lse.shape, np.float32)
    device.launch(run_q, grid_q, block, q, k, v, lengths, out, lse, dout, dlse, dq, delta, *numbers)
    device.launch(run_kv, grid_kv, block, q, k, v, lengths, lse, delta, dout, dk, dv, *numbers)
    return dq, dk, dv, *(None,) * len(extras)


IN_LAYOUT = Fusion(writes_into_layout=True)


def _cuda(name, form, backward):
    return Impl(name, form.forward, backward, form.refuse, form.describe, fusion=IN_LAYOUT)


IMPLS = Impls(
    "flash_attention",
    _cuda("raw-hopper", hopper, hopper.backward),
    _cuda("raw-ampere", ampere, ampere_backward.backward),
    _cuda("raw-simt", simt, simt.backward),
    Impl("numba", _forward_numba, _backward_numba, _refuse_numba),
    Impl("reference", reference.forward, reference.backward, fusion=IN_LAYOUT),
)
