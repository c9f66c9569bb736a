"""What the CUDA kernels of attention take: one struct, filled from the arguments of a call."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from gpuattn import arrays, rng
from gpuattn.arrays import get_xp
from gpuattn.cuda import tensor_maps
from gpuattn.cuda.gpu import hopper_refusal
from gpuattn.cuda.kernels import kernel_refusal
from gpuattn.ops.attention.dropout import Tables
from gpuattn.typing import Array

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

MAX_TILES = 2**31 - 1  # thread blocks of one launch
UNLIMITED = 1 << 30  # keys that a window without a limit on one side reaches
BIAS_KINDS = {"bool": 1, "float32": 2, "float16": 3, "bfloat16": 3}


class Launch:
    """The arguments of a call as kernels take them: ``problem`` is the struct, passed by value.

    The other attributes decide grids and tiles. ``strided``: arrays beside q, k and v whose strides
    kernels need, by their names in STRIDED. ``tables``: whether to draw the tables of dropout.
    Holds references to the arrays whose addresses are in the struct.
    """

    def __init__(
        self, q: Array, k: Array, v: Array, bias: Array | None, key_lengths: Array | None,
        cu_q: Array | None, cu_k: Array | None, slopes: Array | None, sink: Array | None, *,
        window: tuple[int | None, int | None], align: str, scale: float, softcap: float | None,
        dropout_p: float, key: Any, max_seqlen_q: int, max_seqlen_k: int, deterministic: bool,
        tf32: bool = False, tables: bool = True, **strided: Array,
    ) -> None:  # fmt: skip
        packed = cu_q is not None
        self.packed, self.deterministic = packed, deterministic
        self.left, self.right = (UNLIMITED if s is None else min(s, UNLIMITED) for s in window)
        self.sequences = q.shape[0] if cu_q is None else len(cu_q) - 1
        self.heads, self.kv_heads = q.shape[-2], k.shape[-2]
        self.queries, self.keys = max_seqlen_q, max_seqlen_k
        rows = q.shape[-3]  # T, or all tokens
        self.dropout = drops(dropout_p)
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
        # whether more than a positive scale turns a product q_i . k_j into a logit
        self.extras = bool(scale <= 0 or softcap or bias is not None or slopes is not None)


def drops(dropout_p: float) -> bool:
    """Return whether any weight is dropped: a ``dropout_p`` up to 2^-17 rounds to 0."""
    return dropout_p > 0 and rng.threshold(dropout_p) < 65536


def outputs(q: Array, v: Array) -> tuple[Array, Array]:
    """Return uninitialised arrays for the output, in the dtype of ``q``, and lse, float32."""
    *lead, rows, heads, _ = q.shape
    out = arrays.empty(q, (*q.shape[:-1], v.shape[-1]))
    return out, arrays.empty(q, (*lead, heads, rows), np.float32)


def result(inputs: tuple, out: Array, lse: Array, needs: tuple) -> tuple:
    """Return what every form's forward returns: the outputs, and what any gradient needs."""
    return (out, lse), ((*inputs, out, lse) if any(needs) else None)


# ---- refusals that forms share ------------------------------------------------------------------


def tma_refusal(q: Array, k: Array, v: Array) -> str | None:
    """Return why kernels that read q, k and v by TMA and multiply by wgmma cannot, or None."""
    if reason := kernel_refusal(q, "q"):
        return reason
    if reason := hopper_refusal(q.device.id):
        return reason
    return inputs_refusal(tensor_maps.refusal, q, k, v)


class _Layout(NamedTuple):
    """The attributes of an array that decide whether a kernel can read it."""

    dtype: np.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    ptr: int  # modulo 16

    @property
    def data(self) -> "_Layout":
        return self

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def inputs_refusal(refusal: Callable, q: Array, k: Array, v: Array) -> str | None:
    """Return the first sentence of ``refusal(x, name)`` of q, k and v, or None.

    Cached, as several forms ask at each call: ``refusal`` may depend on dtype, shape, strides and
    alignment to 16 bytes.
    """
    layouts = [(x.dtype, x.shape, x.strides, x.data.ptr % 16) for x in (q, k, v)]
    return _inputs_refusal(refusal, *layouts)


@functools.lru_cache(1024)
def _inputs_refusal(refusal, *layouts):
    for layout, name in zip(layouts, "qkv", strict=True):
        if reason := refusal(_Layout(*layout), name):
            return reason
    return None


def tiles_refusal(q: Array, cu_q: Array | None, longest: int, rows: int) -> str | None:
    """Return why tiles of ``rows`` of the ``longest`` length are too many for a launch, or None."""
    sequences = q.shape[0] if cu_q is None else len(cu_q) - 1
    tiles = (longest // rows + 1) * q.shape[-2] * sequences
    if tiles > MAX_TILES:
        return f"{tiles} tiles, the kernel takes {MAX_TILES}; give the true max_seqlen_q"
    return None


def _strides(x, packed):
    """Return the strides (batch, row, head, column) in elements; 0 for no batch axis."""
    steps = [step // x.itemsize for step in x.strides]
    return [0, *steps] if packed else steps


def _contiguous(x, dtype):
    return None if x is None else get_xp(x).ascontiguousarray(x, dtype)
