"""LayerNorm over the last axis: y = (x - mean) / sqrt(variance + eps) * weight + bias.

Ba, Kiros and Hinton, "Layer normalization" (2016). Device code: ``rawkernels/layer_norm.cu``
(RMSNorm's too) and, to read, ``gpuattn/numbakernels/layer_norm.py``. The functions without an
underscore below are shared with ``rms_norm.py`` and ``dropout_add_norm.py``.
"""

import math

import numpy as np

from gpuattn import arrays
from gpuattn.arrays import as_array, check_floats, check_together, ctype, get_xp, wide
from gpuattn.autodiff.tape import Box, apply, raw
from gpuattn.errors import problem
from gpuattn.impls import Impl, Impls
from gpuattn.kernels import dtype_refusal, kernel, kernel_refusal
from gpuattn.numbakernels import device

MAX_COLS = 2**31 - 1024  # columns are counted in 32 bits
MAX_GRID = 2**31 - 1
BLOCKS = ((1024, 128), (MAX_COLS, 512))  # (up to this many columns, threads a row)
MAX_PARTS = 512  # blocks that each sum their rows for the weight gradient
SUM_BLOCK = 128  # of column_sum.cu


def layer_norm(x, weight=None, bias=None, *, eps=1e-5, impl=None):
    """Return the rows of ``x`` with mean 0 and variance 1, times ``weight`` plus ``bias``.

    ``x``: (..., D), float array or Tensor, any strides. ``weight``, ``bias``: (D,) in the dtype of
    ``x``, or None for 1 and 0. The variance is the mean squared deviation (divided by D), found in
    a second pass, in float32 (float64 for float64). ``impl``: "raw-simt", "numba", "reference", or
    None for the first that accepts.

    Raises TypeError for dtypes other than float32, float16, bfloat16, float64 or for mixed ones,
    ValueError for shapes that do not fit and for an ``eps`` that is not positive and finite.
    """
    inputs = check_inputs("layer_norm", {"x": x}, {"weight": weight, "bias": bias}, eps)
    return apply(IMPLS, inputs, impl, eps=float(eps))


def check_inputs(function, rows, vectors, eps):
    """Return all inputs as Boxes, arrays or None, or raise what the public functions promise.

    ``rows``: name -> (..., D) of one shape. ``vectors``: name -> (D,) or None.
    """
    given = {**rows, **vectors}
    for name, value in given.items():
        if value is not None and not isinstance(value, Box):
            given[name] = as_array(value, function, name)
    plain = {name: raw(value) for name, value in given.items()}
    check_together(function, **plain)
    check_floats(function, **plain)
    shape = plain[next(iter(rows))].shape
    if not shape:
        raise ValueError(problem(function, next(iter(rows)), "0-dimensional", "(..., D)"))
    for name, value in plain.items():
        want = shape if name in rows else shape[-1:]
        if value is not None and value.shape != want:
            raise ValueError(problem(function, f"{name}.shape", value.shape, want))
    if not 0 < eps < math.inf:
        raise ValueError(problem(function, "eps", eps, "a positive, finite number", "Try 1e-5."))
    return tuple(given.values())


# ---- reference: NumPy or CuPy -------------------------------------------------------------------


def row_dot(a, b):
    """Return the sum over the last axis of a * b, keeping it."""
    if get_xp(a) is np:
        return np.vecdot(a, b)[..., None]
    return (a * b).sum(-1, keepdims=True)


def row_sum(a):
    """Return the sum over the last axis, keeping it."""
    if get_xp(a) is np:
        return row_dot(a, np.ones(a.shape[-1], a.dtype))  # BLAS: half the time of a.sum(-1)
    return a.sum(-1, keepdims=True)


def normalize(x, eps, rms=False):
    """Return (normalized rows, 1 / deviation) in the dtype to accumulate in."""
    xp, work = get_xp(x), wide(x.dtype)
    x = x.astype(work, order="C", copy=False)
    cols = max(x.shape[-1], 1)
    if rms:
        normalized = x
    else:
        # less the first element: exact for a constant row, right however large the mean
        normalized = x - x[..., :1]
        normalized -= row_sum(normalized) / cols
    rstd = row_dot(normalized, normalized)
    rstd /= cols
    rstd += eps
    xp.sqrt(rstd, out=rstd)
    xp.reciprocal(rstd, out=rstd)
    if rms:
        return normalized * rstd, rstd
    normalized *= rstd
    return normalized, rstd


def weighted(normalized, weight, bias, dtype):
    """Return normalized * weight + bias in ``dtype``."""
    work = normalized.dtype
    y = normalized if weight is None else normalized * weight.astype(work, copy=False)
    if bias is not None:
        bias = bias.astype(work, copy=False)
        y = y + bias if weight is None else get_xp(y).add(y, bias, out=y)
    return y.astype(dtype, copy=y is normalized)


def normalized_gradient(g, normalized, rstd, rms=False):
    """Return the gradient of x, given that of the normalized rows; may overwrite ``g``."""
    cols = max(g.shape[-1], 1)
    mean = 0 if rms else row_sum(g) / cols
    dx = normalized * (row_dot(g, normalized) / -cols)
    dx += g
    if not rms:
        dx -= mean
    dx *= rstd
    return dx


def column_sum(values, slot, dtype):
    """Return the sums over all rows of (..., D) in ``dtype``, or write them to ``slot``."""
    rows = math.prod(values.shape[:-1])
    total = get_xp(values).ones(rows, values.dtype) @ values.reshape(rows, values.shape[-1])
    if slot is None:
        return total.astype(dtype, copy=False)
    place, accumulate = slot
    if accumulate:
        place += total.astype(place.dtype, copy=False)
    else:
        place[...] = total
    return None


def _forward_reference(x, weight, bias, *, needs, eps):
    normalized, rstd = normalize(x, eps)
    y = weighted(normalized, weight, bias, x.dtype)
    return y, (normalized, rstd, weight, x.dtype) if any(needs) else None


def _backward_reference(saved, dy, *, needs, into, eps):
    normalized, rstd, weight, dtype = saved
    dy = dy.astype(normalized.dtype, order="C", copy=False)
    dx = dweight = dbias = None
    if needs[0]:
        g = dy if weight is None else dy * weight.astype(dy.dtype, copy=False)
        dx = normalized_gradient(g, normalized, rstd).astype(dtype, copy=False)
    if needs[1]:
        dweight = column_sum(dy * normalized, into[1], dtype)
    if needs[2]:
        dbias = column_sum(dy, into[2], dtype)
    return dx, dweight, dbias


# ---- numba: gpuattn/numbakernels/layer_norm.py --------------------------------------------------


def _refuse_numba(x, *others, **params):
    return dtype_refusal(x) or device.refusal(x)


def _float_vector(vector, like, missing):
    xp = get_xp(like)
    if vector is None:
        return xp.full(like.shape[-1], missing, np.float32)
    return xp.ascontiguousarray(vector, np.float32)


def _forward_numba(x, weight, bias, *, needs, eps):
    from gpuattn.numbakernels.layer_norm import layer_norm_forward
    from gpuattn.numbakernels.reduce import THREADS

    rows = device.float_rows(x)
    y = arrays.empty(x, rows.shape, np.float32)
    mean, rstd = (arrays.empty(x, len(rows), np.float32) for _ in range(2))
    vectors = _float_vector(weight, x, 1), _float_vector(bias, x, 0)
    grid = (len(rows) if x.size else 0,)
    numbers = (np.float32(eps),)
    device.launch(layer_norm_forward, grid, (THREADS,), rows, *vectors, y, mean, rstd, *numbers)
    y = y.astype(x.dtype, copy=False).reshape(x.shape)
    return y, (x, weight, mean, rstd) if any(needs) else None


def _backward_numba(saved, dy, *, needs, into, eps):
    from gpuattn.numbakernels.layer_norm import layer_norm_backward, layer_norm_sums
    from gpuattn.numbakernels.reduce import THREADS

    x, weight, mean, rstd = saved
    rows, dy = device.float_rows(x), device.float_rows(dy)
    dx = arrays.empty(x, rows.shape, np.float32)
    grid = (len(rows) if x.size else 0,)
    vector = _float_vector(weight, x, 1)
    device.launch(layer_norm_backward, grid, (THREADS,), rows, vector, dy, mean, rstd, dx)
    parts = min(MAX_PARTS, len(rows))
    sums = arrays.empty(x, (2, parts, x.shape[-1]), np.float32)
    grid = (-(-x.shape[-1] // THREADS), parts)
    device.launch(layer_norm_sums, grid, (THREADS,), rows, dy, mean, rstd, sums)
    dweight, dbias = (
        column_sum(sums[i - 1], into[i], x.dtype) if needs[i] else None for i in (1, 2)
    )
    return dx.astype(x.dtype, copy=False).reshape(x.shape), dweight, dbias


# ---- raw: rawkernels/layer_norm.cu --------------------------------------------------------------


def refuse_raw(x, *others, **params):
    """Return why the norms' kernels do not take ``x``, or None."""
    if reason := kernel_refusal(x):
        return reason
    if x.shape[-1] > MAX_COLS:
        return f"x has {x.shape[-1]} columns, the kernel takes at most {MAX_COLS}"
    return None


def block_for(cols):
    """Return the threads that reduce one row."""
    return next(block for limit, block in BLOCKS if cols <= limit)


def contiguous(*values):
    """Return the arrays C-contiguous, None as None; those that are already are not copied."""
    return [None if a is None else get_xp(a).ascontiguousarray(a) for a in values]


def parts_of(x, wanted):
    """Return (parts, [(parts, D) float32 array for a column sum, or None, for each ``wanted``])."""
    rows = x.size // max(x.shape[-1], 1)
    parts = min(rows, MAX_PARTS)
    return parts, [
        arrays.empty(x, (parts, x.shape[-1]), np.float32) if want else None for want in wanted
    ]


def add_parts(parts, slot, dtype):
    """Return the sum over the rows of ``parts`` in ``dtype``, or write it to ``slot``."""
    if parts is None:
        return None
    count, cols = parts.shape
    direct = slot is not None and ctype(slot[0].dtype) is not None
    out, accumulate = slot if direct else (arrays.empty(parts, cols, dtype), False)
    finish = kernel("column_sum.cu", "column_sum", scalar=ctype(out.dtype), BLOCK=SUM_BLOCK)
    finish((-(-cols // SUM_BLOCK),), (SUM_BLOCK,), parts, out, count, cols, accumulate)
    return None if direct else out


def forward_raw(x, weight, bias, needs, eps, rms):
    """Return (y, saved) of LayerNorm or RMSNorm."""
    x, weight, bias = contiguous(x, weight, bias)
    rows, cols = x.size // max(x.shape[-1], 1), x.shape[-1]
    y, mean, rstd = arrays.empty(x, x.shape), None, None
    if any(needs):
        mean, rstd = (arrays.empty(x, rows, np.float32) for _ in range(2))
    block = block_for(cols)
    constants = {"scalar": ctype(x.dtype), "RMS": rms, "BLOCK": block}
    forward = kernel("layer_norm.cu", "layer_norm_forward", **constants)
    grid = (min(rows, MAX_GRID),)
    forward(grid, (block,), x, weight, bias, y, mean, rstd, rows, cols, eps)
    return y, (x, weight, mean, rstd) if any(needs) else None


def backward_raw(saved, dy, needs, into, rms):
    """Return (dx, dweight, dbias) of LayerNorm or RMSNorm; ``needs`` and ``into`` are for three."""
    x, weight, mean, rstd = saved
    dy = get_xp(x).ascontiguousarray(dy, x.dtype)
    rows, cols = x.size // max(x.shape[-1], 1), x.shape[-1]
    block = block_for(cols)
    dx = arrays.empty(x, x.shape)
    parts, sums = parts_of(x, needs[1:])
    constants = {"scalar": ctype(x.dtype), "RMS": rms, "BLOCK": block}
    backward = kernel("layer_norm.cu", "layer_norm_backward", **constants)
    grid = (parts if any(needs[1:]) else min(rows, MAX_GRID),)
    backward(grid, (block,), x, weight, dy, mean, rstd, dx, *sums, rows, cols)
    dweight, dbias = (add_parts(*each, x.dtype) for each in zip(sums, into[1:], strict=True))
    return dx, dweight, dbias


def _forward_raw(x, weight, bias, *, needs, eps):
    return forward_raw(x, weight, bias, needs, eps, rms=False)


def _backward_raw(saved, dy, *, needs, into, eps):
    return backward_raw(saved, dy, needs, into, rms=False)


IMPLS = Impls(
    "layer_norm",
    Impl("raw-simt", _forward_raw, _backward_raw, refuse_raw),
    Impl("numba", _forward_numba, _backward_numba, _refuse_numba),
    Impl("reference", _forward_reference, _backward_reference),
)
