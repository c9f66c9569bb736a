"""The border between two sub-layers in one pass: h = residual + dropout(x + x_bias), norm(h).

The norm is that of ``layer_norm.py`` or ``rms_norm.py``, the mask that of ``dropout.py``. Device
code: ``rawkernels/norm/dropout_add_norm.cu``.
"""

from functools import partial

import numpy as np

from gpuattn import arrays, rng
from gpuattn.arrays import get_xp, wide, zeros
from gpuattn.autodiff.tape import op
from gpuattn.cuda.kernels import kernel
from gpuattn.impls import Call, Impl, Impls
from gpuattn.ops.arguments import check_choice, dropout_key, probability
from gpuattn.ops.dropout import device_numbers, drop, keep_of
from gpuattn.ops.norm.launch import (
    add_parts,
    backward_layout,
    forward_layout,
    pairs_layout,
    parts_of,
    refuse_raw,
    rows_of,
)
from gpuattn.ops.norm.layer_norm import (
    check_inputs,
    column_sum,
    contiguous,
    forward_raw,
    normalize,
    normalized_gradient,
    weighted,
)


@op
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
    inputs, eps = check_inputs("dropout_add_norm", rows, vectors, eps)
    check_choice("dropout_add_norm", "norm", norm, "layer", "rms")
    p = probability("dropout_add_norm", "p", p)
    key = dropout_key("dropout_add_norm", p, seed)
    return Call(IMPLS, inputs, impl, p=p, key=key, rms=norm == "rms", eps=eps)


@op
def norm_beside(x, weight, bias=None, *, norm="layer", eps=1e-5, impl=None):
    """Return (norm(x), x): the start of a residual stream, whose two gradients are added in a pass.

    All else is as in ``dropout_add_norm``.
    """
    inputs, eps = check_inputs("norm_beside", {"x": x}, {"weight": weight, "bias": bias}, eps)
    check_choice("norm_beside", "norm", norm, "layer", "rms")
    return Call(BESIDE, inputs, impl, rms=norm == "rms", eps=eps)


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


def _beside_reference(x, weight, bias, *, needs, rms, eps):
    normalized, rstd = normalize(x, eps, rms)
    saved = (normalized, rstd, weight, None, x.dtype) if any(needs) else None
    return (weighted(normalized, weight, bias, x.dtype), x.view()), saved


# ---- raw: rawkernels/norm/dropout_add_norm.cu, its gradients dropout_add_norm_backward*.cu ------


def _forward_raw(x, residual, weight, bias, x_bias, *, needs, p, key, rms, eps):
    (x, step), (residual, residual_step) = rows_of(x), rows_of(residual)
    vectors = weight, bias, x_bias = contiguous(weight, bias, x_bias)
    rows, cols = x.size // max(x.shape[-1], 1), x.shape[-1]
    normed, h = arrays.empty(x, x.shape), arrays.empty(x, x.shape)
    mean = rstd = None
    if any(needs):
        mean, rstd = (arrays.empty(x, rows, np.float32) for _ in range(2))
    names = zip(("WEIGHT", "BIAS", "X_BIAS"), vectors, strict=True)
    given = {name: vector is not None for name, vector in names}
    constants, block_rows = forward_layout(cols, x.dtype, 2, sum(given.values()))
    constants = constants | given | {"RMS": rms}
    forward = kernel("norm/dropout_add_norm.cu", "dropout_add_norm_forward", **constants)
    grid, block = (-(-rows // block_rows),), (constants["BLOCK"],)
    numbers = rows, cols, step, residual_step, eps, *device_numbers(p, key)
    forward(grid, block, x, residual, *vectors, normed, h, mean, rstd, *numbers)
    return (normed, h), (h, weight, mean, rstd) if any(needs) else None


def _backward_raw(saved, dnormed, dh, *, needs, into, p, key, rms, eps):
    h, weight, mean, rstd = saved
    dnormed = zeros(h, h.shape) if dnormed is None else dnormed.astype(h.dtype, copy=False)
    dnormed, dnormed_step = rows_of(dnormed)
    dh, dh_step = (None, 0) if dh is None else rows_of(dh.astype(h.dtype, copy=False))
    rows, cols = h.size // max(h.shape[-1], 1), h.shape[-1]
    dresidual = arrays.empty(h, h.shape)
    dx = arrays.empty(h, h.shape) if rng.threshold(p) < 65536 else None  # else it drops none
    given = {"RMS": rms, "WEIGHT": weight is not None}
    if layout := pairs_layout(h, needs[2:]):
        name, (constants, block, grid, shared) = "dropout_add_norm_backward_pairs", layout
        constants, counts = constants | {"DROPOUT": dx is not None}, (rows,)
    else:
        name, (constants, grid, shared) = (
            "dropout_add_norm_backward", backward_layout(h, 3, 2 + needs[4]),
        )  # fmt: skip
        block, counts = constants["BLOCK"], (rows, cols)
        constants = constants | {"X_BIAS": needs[4]}
    sums = parts_of(h, grid, needs[2:])
    numbers = *counts, dnormed_step, dh_step, *device_numbers(p, key)
    kernel(f"norm/{name}.cu", name, **constants, **given)(
        (grid,), (block,), h, weight, mean, rstd, dnormed, dh, dx, dresidual, *sums, *numbers,
        shared_bytes=shared,
    )  # fmt: skip
    vectors = add_parts(sums, into[2:], h.dtype)
    return dresidual if dx is None else dx, dresidual, *vectors


def _beside_raw(x, weight, bias, *, needs, rms, eps):
    h = get_xp(x).ascontiguousarray(x)
    normed, saved = forward_raw(h, weight, bias, needs, eps, rms)
    return (normed, h.view()), (h, *saved[2:]) if any(needs) else None


def _beside_gradient(backward, saved, dnormed, dh, *, needs, into, rms, eps):
    """Return what dropout_add_norm's gradient does for its residual, without dropout."""
    needs, into = (False, *needs, False), (None, *into, None)
    grads = backward(saved, dnormed, dh, needs=needs, into=into, p=0.0, key=None, rms=rms, eps=eps)
    return grads[1:4]


IMPLS = Impls(
    "dropout_add_norm",
    Impl("raw-simt", _forward_raw, _backward_raw, refuse_raw),
    Impl("reference", _forward_reference, _backward_reference),
)
BESIDE = Impls(
    "norm_beside",
    Impl("raw-simt", _beside_raw, partial(_beside_gradient, _backward_raw), refuse_raw),
    Impl("reference", _beside_reference, partial(_beside_gradient, _backward_reference)),
)
