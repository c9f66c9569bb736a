"""Softmax over the last axis with a scale and a mask: y = exp(s - max s) / sum exp(s - max s).

Device code: ``rawkernels/softmax.cu`` and, to read, ``gpuattn/numbakernels/softmax.py``.
"""

import math

import numpy as np

from gpuattn import arrays
from gpuattn.arrays import as_array, check_floats, check_together, ctype, get_xp, wide
from gpuattn.autodiff.tape import Box, apply, raw
from gpuattn.errors import UnsupportedError, problem
from gpuattn.impls import Impl, Impls
from gpuattn.kernels import dtype_refusal, kernel, kernel_refusal
from gpuattn.numbakernels import device

MAX_COLS = 2**31 - 1024  # columns are counted in 32 bits
MAX_GRID = 2**31 - 1
BLOCKS = ((1024, 128), (MAX_COLS, 512))  # (up to this many columns, threads a row)


def softmax(x, *, scale=1.0, mask=None, causal=False, impl=None):
    """Return the softmax of ``scale * x + mask`` over the last axis, in the dtype of ``x``.

    ``x``: (..., S), float array or Tensor, any strides. ``mask``: broadcasts to ``x``; bool (True
    keeps an element) or additive, in the dtype of ``x``; it takes no gradient. ``causal``: on
    (..., T, S), query i sees keys j <= i + S - T. ``impl``: "raw-simt", "numba", "reference", or
    None for the first that accepts.

    A row with nothing to see (all -inf or masked) is 0 and has gradient 0. A row that holds +inf
    or NaN where it is seen is NaN, and no other row is. Raises TypeError for dtypes other than
    float32, float16, bfloat16 and float64, ValueError for a scale that is not finite and for a
    mask that does not broadcast.
    """
    x = x if isinstance(x, Box) else as_array(x, "softmax", "x")
    mask = mask if mask is None or isinstance(mask, Box) else as_array(mask, "softmax", "mask")
    _check(raw(x), raw(mask))
    if isinstance(mask, Box) and mask.requires_grad:
        raise UnsupportedError("softmax: mask takes no gradient; compute softmax(x + mask) instead")
    if not math.isfinite(scale):
        raise ValueError(problem("softmax", "scale", scale, "a finite number"))
    if causal and raw(x).ndim < 2:
        accepted = "(..., T, S) with causal=True"
        raise ValueError(problem("softmax", "x.shape", raw(x).shape, accepted))
    return apply(IMPLS, (x, mask), impl, scale=float(scale), causal=bool(causal))


def _check(x, mask):
    check_together("softmax", x=x, mask=mask)
    check_floats("softmax", x=x)
    if x.ndim == 0:
        raise ValueError(problem("softmax", "x.shape", x.shape, "at least one axis"))
    if mask is None:
        return
    if mask.dtype not in (np.bool_, x.dtype):
        raise TypeError(problem("softmax", "mask.dtype", mask.dtype, f"bool or {x.dtype}"))
    try:
        fits = np.broadcast_shapes(mask.shape, x.shape) == x.shape
    except ValueError:
        fits = False
    if not fits:
        accepted = f"a shape that broadcasts to {x.shape}"
        raise ValueError(problem("softmax", "mask.shape", mask.shape, accepted))


def _mask_kind(mask):
    """Return what kernels call it: 0 no mask, 1 keep where true, 2 add."""
    return 0 if mask is None else 1 if mask.dtype == bool else 2


# ---- reference: NumPy or CuPy -------------------------------------------------------------------


def _forward_reference(x, mask, *, needs, scale, causal):
    xp, work = get_xp(x), wide(x.dtype)
    if x.size == 0:
        y = arrays.empty(x, x.shape)
        return y, (y,)
    p = x.astype(work, order="C")
    if scale != 1:
        p *= scale
    keep = mask if mask is not None and mask.dtype == bool else None
    if mask is not None and keep is None:
        p += mask.astype(work, copy=False)
    if causal:
        queries, keys = x.shape[-2:]
        visible = xp.tri(queries, keys, keys - queries, dtype=bool)
        keep = visible if keep is None else keep & visible
    if keep is not None:
        p = xp.where(keep, p, work.type(-np.inf))
    # the bound keeps -inf - (-inf), a NaN, out of rows that see nothing
    p -= xp.maximum(p.max(-1, keepdims=True), np.finfo(work).min)
    xp.exp(p, out=p)
    total = p.sum(-1, keepdims=True)
    total += total == 0
    p /= total
    y = p.astype(x.dtype, copy=False)
    return y, (y,) if any(needs) else None


def _backward_reference(saved, dy, *, needs, into, scale, causal):
    (y,) = saved
    work = wide(y.dtype)
    p, dp = y.astype(work, copy=False), dy.astype(work, order="C", copy=False)
    ds = p * dp
    ds -= p * ds.sum(-1, keepdims=True)
    if scale != 1:
        ds *= scale
    return ds.astype(y.dtype, copy=False), None


# ---- numba: gpuattn/numbakernels/softmax.py -----------------------------------------------------


def _refuse_numba(x, mask, **params):
    return dtype_refusal(x) or device.refusal(x)


def _forward_numba(x, mask, *, needs, scale, causal):
    from gpuattn.numbakernels.reduce import THREADS
    from gpuattn.numbakernels.softmax import softmax_forward

    rows = device.float_rows(x)
    y = arrays.empty(x, rows.shape, np.float32)
    full = rows if mask is None else device.float_rows(get_xp(x).broadcast_to(mask, x.shape))
    queries = x.shape[-2] if causal else 0
    numbers = _mask_kind(mask), queries, np.float32(scale)
    grid = (len(rows) if x.size else 0,)
    device.launch(softmax_forward, grid, (THREADS,), rows, full, y, *numbers)
    y = y.astype(x.dtype, copy=False).reshape(x.shape)
    return y, (y,) if any(needs) else None


def _backward_numba(saved, dy, *, needs, into, scale, causal):
    from gpuattn.numbakernels.reduce import THREADS
    from gpuattn.numbakernels.softmax import softmax_backward

    (y,) = saved
    rows = device.float_rows(y)
    dx = arrays.empty(y, rows.shape, np.float32)
    grid = (len(rows) if y.size else 0,)
    device.launch(
        softmax_backward, grid, (THREADS,), rows, device.float_rows(dy), dx, np.float32(scale)
    )
    return dx.astype(y.dtype, copy=False).reshape(y.shape), None


# ---- raw: rawkernels/softmax.cu -----------------------------------------------------------------


def _refuse_raw(x, mask, **params):
    if reason := kernel_refusal(x):
        return reason
    if x.shape[-1] > MAX_COLS:
        return f"x has {x.shape[-1]} columns, the kernel takes at most {MAX_COLS}"
    return None


def _block_for(cols):
    return next(block for limit, block in BLOCKS if cols <= limit)


def _mask_layout(mask, shape):
    """Return (mask, sizes, strides) such that the mask of row r and column j is at
    ``i0 * strides[0] + i1 * strides[1] + i2 * strides[2] + j * strides[3]`` elements, where
    (i0, i1, i2) are the digits of r: i2 = r % sizes[1], i1 = r // sizes[1] % sizes[0], i0 the rest.
    """
    xp = get_xp(mask)
    full = xp.broadcast_to(mask, shape)
    merged = []  # [size, stride] of the leading axes, those that run on merged
    for size, stride in zip(shape[:-1], full.strides[:-1], strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == stride * size:
            merged[-1] = [merged[-1][0] * size, stride]
        else:
            merged.append([size, stride])
    if len(merged) > 3:
        return _mask_layout(xp.ascontiguousarray(full), shape)
    merged = [[1, 0]] * (3 - len(merged)) + merged
    strides = [stride // mask.itemsize for _, stride in merged]
    return mask, [size for size, _ in merged[1:]], [*strides, full.strides[-1] // mask.itemsize]


def _forward_raw(x, mask, *, needs, scale, causal):
    cols = x.shape[-1]
    x = get_xp(x).ascontiguousarray(x)
    y = arrays.empty(x, x.shape)
    rows, block = x.size // max(cols, 1), _block_for(cols)
    sizes, strides = (1, 1), (0, 0, 0, 0)
    if mask is not None and x.size:
        mask, sizes, strides = _mask_layout(mask, x.shape)
    constants = {"scalar": ctype(x.dtype), "MASK": _mask_kind(mask), "BLOCK": block}
    forward = kernel("softmax.cu", "softmax_forward", **constants)
    grid = (min(rows, MAX_GRID),)
    queries = x.shape[-2] if causal else 0
    forward(grid, (block,), x, mask, y, rows, cols, queries, scale, *sizes, *strides)
    return y, (y,) if any(needs) else None


def _backward_raw(saved, dy, *, needs, into, scale, causal):
    (y,) = saved
    cols = y.shape[-1]
    rows, block = y.size // max(cols, 1), _block_for(cols)
    dy = get_xp(y).ascontiguousarray(dy, y.dtype)
    dx = arrays.empty(y, y.shape)
    constants = {"scalar": ctype(y.dtype), "MASK": _mask_kind(None), "BLOCK": block}
    backward = kernel("softmax.cu", "softmax_backward", **constants)
    backward((min(rows, MAX_GRID),), (block,), y, dy, dx, rows, cols, scale)
    return dx, None


IMPLS = Impls(
    "softmax",
    Impl("raw-simt", _forward_raw, _backward_raw, _refuse_raw),
    Impl("numba", _forward_numba, _backward_numba, _refuse_numba),
    Impl("reference", _forward_reference, _backward_reference),
)
