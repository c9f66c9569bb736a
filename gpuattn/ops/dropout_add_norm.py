"""The border between two sub-layers in one pass: h = residual + dropout(x + x_bias), norm(h).

The norm is that of ``layer_norm.py`` or ``rms_norm.py``, the mask that of ``dropout.py``. Device
code: ``rawkernels/dropout_add_norm.cu``.
"""

import numpy as np

from gpuattn import arrays, rng
from gpuattn.arrays import ctype, get_xp, wide, zeros
from gpuattn.autodiff.tape import apply
from gpuattn.errors import problem
from gpuattn.impls import Impl, Impls
from gpuattn.kernels import kernel
from gpuattn.ops.dropout import check_probability, device_numbers, drop, keep_of
from gpuattn.ops.layer_norm import (
    MAX_GRID,
    add_parts,
    block_for,
    check_inputs,
    column_sum,
    contiguous,
    normalize,
    normalized_gradient,
    parts_of,
    refuse_raw,
    weighted,
)


def dropout_add_norm(
    x, residual, weight, bias=None, *, x_bias=None, p=0.0, norm="layer", eps=1e-5, seed=None,
    impl=None,
):  # fmt: skip
    """Return (normed, h): h = residual + dropout(x + x_bias) and normed = norm(h).

    ``x``, ``residual``: (..., D) of one shape and float dtype, arrays or Tensors, any strides.
    ``weight``, ``bias``, ``x_bias``: (D,) in that dtype, or None. ``norm``: "layer" or "rms".
    ``p``, ``seed``: as in ``dropout``; ``eps``: as in ``layer_norm``. The norm is taken of h as it
    is returned, rounded to its dtype. Gradients flow from both results. ``impl``: "raw-simt",
    "reference", or None for the first that accepts.

    Raises TypeError for other or mixed dtypes, ValueError for shapes that do not fit, p outside
    0..1, an ``eps`` that is not positive and finite, and an unknown ``norm``.
    """
    rows = {"x": x, "residual": residual}
    vectors = {"weight": weight, "bias": bias, "x_bias": x_bias}
    inputs = check_inputs("dropout_add_norm", rows, vectors, eps)
    if norm not in ("layer", "rms"):
        raise ValueError(problem("dropout_add_norm", "norm", repr(norm), "'layer' or 'rms'"))
    p = check_probability("dropout_add_norm", p)
    key = rng.as_key(seed) if p else None
    return apply(IMPLS, inputs, impl, p=p, key=key, rms=norm == "rms", eps=float(eps))


# ---- reference: NumPy or CuPy -------------------------------------------------------------------


def _forward_reference(x, residual, weight, bias, x_bias, *, needs, p, key, rms, eps):
    work, keep = wide(x.dtype), keep_of(x, p, key)
    h = x.astype(work, order="C", copy=False)
    if x_bias is not None:
        h = h + x_bias.astype(work, copy=False)
    if keep is not None:
        h = drop(h, keep, p)
    h = (h + residual.astype(work, copy=False)).astype(x.dtype, copy=False)
    normalized, rstd = normalize(h, eps, rms)
    normed = weighted(normalized, weight, bias, x.dtype)
    return (normed, h), (normalized, rstd, weight, keep, x.dtype) if any(needs) else None


def _backward_reference(saved, dnormed, dh, *, needs, into, p, key, rms, eps):
    normalized, rstd, weight, keep, dtype = saved
    work = normalized.dtype
    grads = [None] * 5
    if dnormed is None:
        dnormed = zeros(normalized, normalized.shape)
    dnormed = dnormed.astype(work, order="C", copy=False)
    if needs[2]:
        grads[2] = column_sum(dnormed * normalized, into[2], dtype)
    if needs[3]:
        grads[3] = column_sum(dnormed, into[3], dtype)
    g = dnormed if weight is None else dnormed * weight.astype(work, copy=False)
    g = normalized_gradient(g, normalized, rstd, rms)
    if dh is not None:
        g += dh.astype(work, copy=False)
    grads[1] = g.astype(dtype, copy=False)
    if keep is not None:
        g = drop(g, keep, p)
    grads[0] = g.astype(dtype, copy=False)
    if needs[4]:
        grads[4] = column_sum(g, into[4], dtype)
    return tuple(grads)


# ---- raw: rawkernels/dropout_add_norm.cu --------------------------------------------------------


def _kernel(verb, x, rms):
    block = block_for(x.shape[-1])
    constants = {"scalar": ctype(x.dtype), "RMS": rms, "BLOCK": block}
    return kernel("dropout_add_norm.cu", f"dropout_add_norm_{verb}", **constants), (block,)


def _forward_raw(x, residual, weight, bias, x_bias, *, needs, p, key, rms, eps):
    inputs = contiguous(x, residual, weight, bias, x_bias)
    rows, cols = x.size // max(x.shape[-1], 1), x.shape[-1]
    normed, h = arrays.empty(x, x.shape), arrays.empty(x, x.shape)
    mean = rstd = None
    if any(needs):
        mean, rstd = (arrays.empty(x, rows, np.float32) for _ in range(2))
    forward, block = _kernel("forward", x, rms)
    numbers = rows, cols, eps, *device_numbers(p, key)
    forward((min(rows, MAX_GRID),), block, *inputs, normed, h, mean, rstd, *numbers)
    return (normed, h), (h, inputs[2], mean, rstd) if any(needs) else None


def _backward_raw(saved, dnormed, dh, *, needs, into, p, key, rms, eps):
    h, weight, mean, rstd = saved
    xp = get_xp(h)
    dnormed = zeros(h, h.shape) if dnormed is None else xp.ascontiguousarray(dnormed, h.dtype)
    dh = None if dh is None else xp.ascontiguousarray(dh, h.dtype)
    rows, cols = h.size // max(h.shape[-1], 1), h.shape[-1]
    dresidual = arrays.empty(h, h.shape)
    dx = arrays.empty(h, h.shape) if p else None
    parts, sums = parts_of(h, needs[2:])
    backward, block = _kernel("backward", h, rms)
    grid = (parts if any(needs[2:]) else min(rows, MAX_GRID),)
    numbers = rows, cols, *device_numbers(p, key)
    backward(grid, block, h, weight, mean, rstd, dnormed, dh, dx, dresidual, *sums, *numbers)
    vectors = (add_parts(*each, h.dtype) for each in zip(sums, into[2:], strict=True))
    return dresidual if dx is None else dx, dresidual, *vectors


IMPLS = Impls(
    "dropout_add_norm",
    Impl("raw-simt", _forward_raw, _backward_raw, refuse_raw),
    Impl("reference", _forward_reference, _backward_reference),
)
