"""Attention, softmax(scale * q k^T) v, without storing the T x S logits.

Dao et al., "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness" (2022);
Dao, "FlashAttention-2" (2023). Reference: ``attention_reference.py``; device code:
``rawkernels/flash_attention_{forward,backward}.cu``; to read: ``numbakernels/flash_attention.py``.
"""

import math

import numpy as np

from gpuattn import arrays, rng
from gpuattn.arrays import as_array, ctype, get_xp
from gpuattn.autodiff import tape
from gpuattn.autodiff.tape import Box, raw
from gpuattn.errors import problem
from gpuattn.impls import Impl, Impls
from gpuattn.kernels import kernel, kernel_refusal
from gpuattn.numbakernels import device
from gpuattn.ops import attention_reference
from gpuattn.ops.attention_arguments import NAME, check, number, window_sides
from gpuattn.ops.attention_reference import sink_gradient, sum_to

MAX_HEAD_DIM = 256  # of the CUDA kernels
MAX_NUMBA_HEAD_DIM = 128
MAX_DROPOUT_LENGTH = 1 << 20  # a 16 x 16 tile has two 16-bit coordinates in the Philox counter
MAX_BLOCKS = 2**31 - 1
WIDTHS = (32, 64, 128, 256)  # what HEAD_DIM is rounded up to
UNLIMITED = 1 << 30


def flash_attention(
    q, k, v, *, causal=False, align="bottom_right", window=None, scale=None, bias=None,
    key_lengths=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
    alibi_slopes=None, softcap=None, sink=None, dropout_p=0.0, seed=None, return_lse=False,
    deterministic=False, impl=None,
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
    ``dropout_p``: probabilities are dropped, the others scaled by 1 / (1 - p); ``seed``: None, an
    int or a ``rng.Key``; bits as ``attention_dropout.attention_keep_mask`` returns them.
    ``lse``: log(sum(exp(logits))), float32, natural logarithm, (B, H, T) or (H, tokens).
    A query that sees no key gives 0, lse -inf (the sink, if there is one), and no gradient.

    Gradients flow to q, k, v, float bias and sink, from out and lse. ``deterministic``: never use
    atomics in the gradient. ``impl``: "raw-simt" (head sizes to 256), "numba", "reference", or
    None for the first that accepts. Raises ValueError for shapes or parameters that do not fit,
    TypeError for dtypes.
    """
    inputs = {
        "q": q, "k": k, "v": v, "bias": bias, "key_lengths": key_lengths,
        "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "alibi_slopes": alibi_slopes,
        "sink": sink,
    }  # fmt: skip
    for name, x in inputs.items():
        if x is not None and not isinstance(x, Box):
            inputs[name] = as_array(x, NAME, name)
    if inputs["cu_seqlens_k"] is None:
        inputs["cu_seqlens_k"] = inputs["cu_seqlens_q"]
    limits = check({name: raw(x) for name, x in inputs.items()}, max_seqlen_q, max_seqlen_k)
    bias = inputs["bias"]
    if bias is not None and bias.ndim < 4:
        inputs["bias"] = bias.reshape((1,) * (4 - bias.ndim) + tuple(bias.shape))
    if align not in ("bottom_right", "top_left"):
        raise ValueError(problem(NAME, "align", repr(align), "'bottom_right' or 'top_left'"))
    dropout_p = number("dropout_p", dropout_p, "0 <= p <= 1", lambda p: 0 <= p <= 1)
    if dropout_p and max(limits) > MAX_DROPOUT_LENGTH:
        accepted = f"lengths up to {MAX_DROPOUT_LENGTH} with dropout"
        raise ValueError(problem(NAME, "the longest sequence", max(limits), accepted))
    if softcap is not None:
        softcap = number("softcap", softcap, "a positive number", lambda c: 0 < c < math.inf)
    head_dim = raw(q).shape[-1]
    scale = head_dim**-0.5 if scale is None else scale
    out, lse = tape.apply(
        IMPLS,
        inputs.values(),
        impl,
        window=window_sides(causal, window),
        align=align,
        scale=number("scale", scale, "a finite number", math.isfinite),
        softcap=softcap,
        dropout_p=dropout_p,
        key=rng.as_key(seed) if dropout_p else None,
        max_seqlen_q=limits[0],
        max_seqlen_k=limits[1],
        deterministic=bool(deterministic),
    )
    return (out, lse) if return_lse else out


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


# ---- raw: rawkernels/flash_attention_{forward,backward}.cu -------------------------------------

STRIDED = ("q", "k", "v", "out", "dout", "dq", "dk", "dv", "bias")
PROBLEM = np.dtype(
    [(name, np.int64, 4) for name in STRIDED]
    + [(name, np.int64) for name in ("lse_batch", "lse_head")]
    + [(name, np.int32) for name in (
        "heads", "group", "queries", "keys", "head_dim", "value_dim", "left", "right",
        "bottom_right", "bias_kind", "slopes_batch",
    )]
    + [(name, np.float32) for name in ("scale", "softcap", "keep_scale")]
    + [(name, np.uint32) for name in ("threshold", "seed_low", "seed_high", "stream", "step")]
    + [("padding", np.int32)],
)  # fmt: skip
"""The struct Attention of ``rawkernels/common/attention.cuh``."""


def _refuse_raw(q, k, v, bias, key_lengths, cu_q, *_, max_seqlen_q, max_seqlen_k, **__):
    if reason := kernel_refusal(q, "q"):
        return reason
    size = max(q.shape[-1], v.shape[-1])
    if size > MAX_HEAD_DIM:
        return f"the head size is {size}, the kernel takes 1 to {MAX_HEAD_DIM}"
    sequences = q.shape[0] if cu_q is None else len(cu_q) - 1
    blocks = (max(max_seqlen_q, max_seqlen_k) // 16 + 1) * q.shape[-2] * sequences
    if blocks > MAX_BLOCKS:
        return f"{blocks} tiles, the kernel takes {MAX_BLOCKS}; give the true max_seqlen_q"
    return None


def _strides(x, packed):
    """Return the strides (batch, row, head, column) in elements; 0 for no batch axis."""
    steps = [step // x.itemsize for step in x.strides]
    return [0, *steps] if packed else steps


def _dropout_arguments(dropout_p, key):
    """Return the fields of PROBLEM, and the update's number on the device (or None)."""
    if not dropout_p:
        return {"threshold": 65536, "keep_scale": 1}, None
    low, high, stream, step, device_step = rng.device_arguments(key)
    fields = {
        "threshold": rng.threshold(dropout_p),
        "keep_scale": 1 / (1 - dropout_p) if dropout_p < 1 else 0,
        "seed_low": low, "seed_high": high, "stream": stream, "step": step,
    }  # fmt: skip
    return fields, device_step


class _Launch:
    """What all kernels of a call take: the problem as a struct, and the arrays they read."""

    def __init__(
        self, q, k, v, bias, key_lengths, cu_q, cu_k, slopes, sink, *, window, align, scale,
        softcap, dropout_p, key, max_seqlen_q, max_seqlen_k, deterministic, **strided,
    ):  # fmt: skip
        xp, packed = get_xp(q), cu_q is not None
        left, right = (UNLIMITED if side is None else min(side, UNLIMITED) for side in window)
        self.sequences = len(cu_q) - 1 if packed else q.shape[0]
        self.heads, self.kv_heads = q.shape[-2], k.shape[-2]
        self.queries, self.keys = max_seqlen_q, max_seqlen_k
        rows = q.shape[-3]  # T, or all tokens
        fields, self.step = _dropout_arguments(dropout_p, key)
        fields |= {
            "lse_batch": 0 if packed else self.heads * rows, "lse_head": rows,
            "heads": self.heads, "group": self.heads // max(self.kv_heads, 1),
            "queries": self.queries, "keys": self.keys, "head_dim": q.shape[-1],
            "value_dim": v.shape[-1], "left": left, "right": right,
            "bottom_right": align == "bottom_right", "scale": scale, "softcap": softcap or 0,
        }  # fmt: skip
        for name, x in {"q": q, "k": k, "v": v, **strided}.items():
            fields[name] = _strides(x, packed)
        if bias is not None:
            kinds = {"bool": 1, "float32": 2}
            fields["bias_kind"] = kinds.get(bias.dtype.name, 3)
            full = (self.sequences, self.heads, self.queries, self.keys)
            batch, head, row, column = _strides(xp.broadcast_to(bias, full), False)
            fields["bias"] = batch, row, head, column
        if slopes is not None:
            fields["slopes_batch"] = self.heads if slopes.ndim == 2 else 0
        problem = np.zeros(1, PROBLEM)
        for name, value in fields.items():
            problem[name] = value
        self.problem = problem.view(f"V{PROBLEM.itemsize}")
        lengths = _contiguous(key_lengths, np.int32)
        offsets = (_contiguous(cu, np.int32) for cu in (cu_q, cu_k))
        self.arrays = q, k, v, bias, lengths, *offsets, _contiguous(slopes, np.float32)
        self.sink = _contiguous(sink, np.float32)
        self.width = next(w for w in WIDTHS if max(q.shape[-1], v.shape[-1]) <= w)
        self.rows = 16 if self.width > 128 else 32

    def kernel(self, part):
        """Return the kernel ``flash_attention_<part>``."""
        file = f"flash_attention_{'forward' if part == 'forward' else 'backward'}.cu"
        scalar = ctype(self.arrays[0].dtype)
        return kernel(file, f"flash_attention_{part}", scalar=scalar, HEAD_DIM=self.width)

    def __call__(self, part, longest, heads, *args):
        """Launch a kernel whose blocks take ``rows`` of the ``longest`` rows of a head."""
        tiles, weights, numbers = (3, 1, 0) if part == "forward" else (4, 2, 2)
        floats = tiles * (self.width + 4) + weights * (self.rows + 4) + numbers
        grid = (-(-longest // self.rows) * heads * self.sequences,)
        run, shared_bytes = self.kernel(part), 4 * floats * self.rows
        run(grid, (4 * self.rows,), self.problem, *self.arrays, *args, shared_bytes=shared_bytes)


def _contiguous(x, dtype):
    return None if x is None else get_xp(x).ascontiguousarray(x, dtype)


def _forward_raw(q, k, v, *extras, needs, **params):
    *lead, rows, heads, _ = q.shape
    out = arrays.empty(q, (*q.shape[:-1], v.shape[-1]))
    lse = arrays.empty(q, (*lead, heads, rows), np.float32)
    launch = _Launch(q, k, v, *extras, **params, out=out)
    launch("forward", launch.queries, heads, launch.sink, launch.step, out, lse)
    return (out, lse), ((q, k, v, *extras, out, lse) if any(needs) else None)


def _backward_raw(saved, dout, dlse, *, needs, into, **params):
    q, k, v, *extras, out, lse = saved
    bias, *_, sink = extras
    dout = arrays.zeros(q, out.shape) if dout is None else dout.astype(q.dtype, copy=False)
    dq, dk, dv = (arrays.empty(x, x.shape) for x in (q, k, v))
    launch = _Launch(q, k, v, *extras, **params, out=out, dout=dout, dq=dq, dk=dk, dv=dv)
    delta, rows = arrays.empty(q, lse.shape, np.float32), lse.size // max(launch.heads, 1)
    warps = (-(-lse.size // 4),)
    dlse = _contiguous(dlse, np.float32)
    launch.kernel("delta")(warps, (128,), launch.problem, out, dout, dlse, delta, rows)
    dbias = dsink = None
    if needs[3]:
        full = launch.sequences, launch.heads, launch.queries, launch.keys
        dbias = arrays.zeros(q, full, np.float32)
    shared = launch.step, dout, lse, delta
    if needs[1] or needs[2]:
        launch("dkv", launch.keys, launch.kv_heads, *shared, dk, dv)
    if needs[0] or needs[3]:
        launch("dq", launch.queries, launch.heads, *shared, dq, dbias)
    if needs[3]:
        dbias = sum_to(dbias, bias.shape).astype(bias.dtype, copy=False)
    if needs[8]:
        dsink = sink_gradient(sink, lse, delta)
    return dq, dk, dv, dbias, None, None, None, None, dsink


IMPLS = Impls(
    "flash_attention",
    Impl("raw-simt", _forward_raw, _backward_raw, _refuse_raw),
    Impl("numba", _forward_numba, _backward_numba, _refuse_numba),
    Impl("reference", attention_reference.forward, attention_reference.backward),
)
