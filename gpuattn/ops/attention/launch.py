"""What all CUDA kernels of attention take: the problem as one struct, filled from the arguments."""

import numpy as np

from gpuattn import arrays, rng
from gpuattn.arrays import get_xp
from gpuattn.autodiff.gradient_layout import target_like
from gpuattn.ops.attention.dropout import Tables

STRIDED = ("q", "k", "v", "out", "dout", "dq", "dk", "dv", "bias")
POINTERS = (
    "bias_data", "key_lengths", "cu_q", "cu_k", "slopes", "sink", "query_words", "key_words",
)  # fmt: skip
PROBLEM = np.dtype(
    [(name, np.int64, 4) for name in STRIDED]
    + [(name, np.int64) for name in ("lse_batch", "lse_head")]
    + [(name, np.uint64) for name in POINTERS]
    + [(name, np.int32) for name in (
        "sequences", "heads", "group", "queries", "keys", "head_dim", "value_dim", "left", "right",
        "bottom_right", "bias_kind", "slopes_batch", "query_rows", "key_rows",
    )]
    + [(name, np.float32) for name in ("scale", "softcap", "keep_scale")]
)  # fmt: skip
"""The struct Attention of ``rawkernels/attention/common/attention.cuh``."""

MAX_TILES = 2**31 - 1
UNLIMITED = 1 << 30  # a side of the window without an end
BIAS_KINDS = {"bool": 1, "float32": 2, "float16": 3, "bfloat16": 3}


class Launch:
    """A call's problem as kernels take it: ``problem`` by value, and what decides grids and tiles.

    ``strided``: the arrays beside q, k and v whose strides kernels need, by their names in STRIDED.
    ``tables``: whether dropout's are drawn. Keeps alive what the struct points at.
    """

    def __init__(
        self, q, k, v, bias, key_lengths, cu_q, cu_k, slopes, sink, *, window, align, scale,
        softcap, dropout_p, key, max_seqlen_q, max_seqlen_k, deterministic, tf32=False,
        tables=True, **strided,
    ):  # fmt: skip
        packed = cu_q is not None
        self.packed, self.deterministic = packed, deterministic
        self.left, self.right = (UNLIMITED if s is None else min(s, UNLIMITED) for s in window)
        self.sequences = len(cu_q) - 1 if packed else q.shape[0]
        self.heads, self.kv_heads = q.shape[-2], k.shape[-2]
        self.queries, self.keys = max_seqlen_q, max_seqlen_k
        rows = q.shape[-3]  # T, or all tokens
        self.dropout = rng.threshold(dropout_p) < 65536  # else p is too small to drop any
        fields = {
            "lse_batch": 0 if packed else self.heads * rows, "lse_head": rows,
            "sequences": self.sequences, "heads": self.heads,
            "group": self.heads // max(self.kv_heads, 1), "queries": self.queries,
            "keys": self.keys, "head_dim": q.shape[-1], "value_dim": v.shape[-1],
            "left": self.left, "right": self.right, "bottom_right": align == "bottom_right",
            "scale": scale, "softcap": softcap or 0,
            "keep_scale": 1 / (1 - dropout_p) if self.dropout else 1,
        }  # fmt: skip
        for name, x in {"q": q, "k": k, "v": v, **strided}.items():
            fields[name] = _strides(x, packed)
        if bias is not None:
            fields["bias_kind"] = BIAS_KINDS[bias.dtype.name]
            full = self.sequences, self.heads, self.queries, self.keys
            batch, head, row, column = _strides(get_xp(q).broadcast_to(bias, full), False)
            fields["bias"] = batch, row, head, column
        if slopes is not None:
            fields["slopes_batch"] = self.heads if slopes.ndim == 2 else 0
        if key_lengths is not None and not np.can_cast(key_lengths.dtype, np.int32):
            key_lengths = key_lengths.clip(0, max_seqlen_k)  # a cast would wrap
        lengths, cu_q, cu_k = (_contiguous(x, np.int32) for x in (key_lengths, cu_q, cu_k))
        slopes, sink = (_contiguous(x, np.float32) for x in (slopes, sink))
        words = None, None
        if self.dropout and tables:
            once = 1 if packed else self.sequences
            drawn = Tables(
                q, dropout_p, key, heads=self.heads, sequences=self.sequences,
                queries=self.queries, keys=self.keys, tokens=(once * rows, once * k.shape[-3]),
                cu_q=cu_q, cu_k=cu_k,
            )  # fmt: skip
            fields["query_rows"], fields["key_rows"] = drawn.rows
            words = drawn.query_words, drawn.key_words
        self.pointed_at = bias, lengths, cu_q, cu_k, slopes, sink, *words
        for name, x in zip(POINTERS, self.pointed_at, strict=True):
            fields[name] = 0 if x is None else x.data.ptr
        self.fields = fields
        problem = np.zeros(1, PROBLEM)
        for name, value in fields.items():
            problem[name] = value
        self.problem = problem.view(f"V{PROBLEM.itemsize}")
        # more than a positive scale is between a product and its logit
        self.extras = bool(scale <= 0 or softcap or bias is not None or slopes is not None)


def gradient_arrays(inputs, into):
    """Return arrays for the gradients of ``inputs``: new ones, or their places in ``into``.

    A place is taken if it lies as its input does, which kernels have accepted.
    """
    return [_gradient_array(x, slot) for x, slot in zip(inputs, into, strict=False)]


def _gradient_array(x, slot):
    place = target_like(slot, x)
    if place is None or place.strides != x.strides or (place.data.ptr - x.data.ptr) % 16:
        return arrays.empty(x, x.shape)
    return place


def tiles_refusal(q, cu_q, max_seqlen_q, max_seqlen_k):
    """Return why there are too many tiles of 16 rows, the smallest, for one launch, or None."""
    sequences = q.shape[0] if cu_q is None else len(cu_q) - 1
    tiles = (max(max_seqlen_q, max_seqlen_k) // 16 + 1) * q.shape[-2] * sequences
    if tiles > MAX_TILES:
        return f"{tiles} tiles, the kernel takes {MAX_TILES}; give the true max_seqlen_q"
    return None


def _strides(x, packed):
    """Return the strides (batch, row, head, column) in elements; 0 for no batch axis."""
    steps = [step // x.itemsize for step in x.strides]
    return [0, *steps] if packed else steps


def _contiguous(x, dtype):
    return None if x is None else get_xp(x).ascontiguousarray(x, dtype)
