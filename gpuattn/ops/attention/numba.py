"""numba, to read and to compare with: ``numbakernels/flash_attention.py``."""

from typing import Any

import numpy as np

from gpuattn import arrays
from gpuattn.arrays import get_xp
from gpuattn.numbakernels import device
from gpuattn.ops.attention.launch import UNLIMITED, result
from gpuattn.typing import Array

MAX_HEAD_DIM = 128


def refuse(
    q: Array, k: Array, v: Array, bias: Any, key_lengths: Any, cu_q: Any, cu_k: Any, slopes: Any,
    sink: Any, *, window: tuple, softcap: float | None, dropout_p: float, **_: Any,
) -> str | None:  # fmt: skip
    """Return why neither direction runs here, or None."""
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
    size = max(q.shape[-1], v.shape[-1])
    if size > MAX_HEAD_DIM:
        return f"the head size is {size}, the kernel takes at most {MAX_HEAD_DIM}"
    if max(q.shape[0], q.shape[2]) > 65535:
        return f"batch and heads are {q.shape[0]} and {q.shape[2]}, the kernel takes at most 65535"
    return device.refusal(q, "q")


def _arguments(q, k, v, key_lengths, scale, window, align):
    """Return (kernels, the grids of queries and of keys, block, lengths, numbers)."""
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


def forward(
    q: Array, k: Array, v: Array, *extras: Any, needs: tuple, scale: float, window: tuple,
    align: str, **_: Any,
) -> tuple:  # fmt: skip
    """Return (out, lse) and what the gradient needs."""
    (run, *_), (grid, _), block, lengths, numbers = _arguments(
        q, k, v, extras[1], scale, window, align
    )
    B, T, H, _ = q.shape
    out = arrays.empty(q, (B, T, H, v.shape[-1]), q.dtype)
    lse = arrays.empty(q, (B, H, T), np.float32)
    device.launch(run, grid, block, q, k, v, lengths, out, lse, *numbers)
    return result((q, k, v, *extras), out, lse, needs)


def backward(
    saved: tuple, dout: Any, dlse: Any, *, needs: tuple, into: tuple, scale: float, window: tuple,
    align: str, **_: Any,
) -> tuple:  # fmt: skip
    """Return the gradients of q, k and v (None for the rest)."""
    q, k, v, *extras, out, lse = saved
    (_, run_q, run_kv), (grid_q, grid_kv), block, lengths, numbers = _arguments(
        q, k, v, extras[1], scale, window, align
    )
    dout = arrays.zeros(q, out.shape) if dout is None else dout
    dlse = arrays.zeros(q, lse.shape, np.float32) if dlse is None else dlse
    dq, dk, dv = (arrays.empty(x, x.shape, x.dtype) for x in (q, k, v))
    delta = arrays.empty(q, lse.shape, np.float32)
    device.launch(run_q, grid_q, block, q, k, v, lengths, out, lse, dout, dlse, dq, delta, *numbers)
    device.launch(run_kv, grid_kv, block, q, k, v, lengths, lse, delta, dout, dk, dv, *numbers)
    return dq, dk, dv, *(None,) * len(extras)
