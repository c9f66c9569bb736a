"""Residual, dropout and norm in one pass: h = residual + dropout(x + x_bias), norm(h).

The norm is that of ``layer_norm.py`` or ``rms_norm.py``, the mask that of ``dropout.py``. Device
code: ``rawkernels/norm/dropout_add_norm.cu``.
"""

from functools import partial
from typing import Any

import numpy as np

from gpuattn import arrays, rng
from gpuattn.arrays import get_xp, wide, zeros
from gpuattn.autodiff.tape import op
from gpuattn.cuda.kernels import kernel
from gpuattn.impls import Call, Fusion, Impl, Impls
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
from gpuattn.typing import Array


@op
def dropout_add_norm(
    x: Array,
    residual: Array,
    weight: Array | None,
    bias: Array | None = None,
    *,
    x_bias: Array | None = None,
    p: float = 0.0,
    norm: str = "layer",
    eps: float = 1e-5,
    seed: Any = None,
    impl: str | None = None,
) -> Call[tuple[Array, Array]]:
    """Return (normed, h): h = residual + dropout(x + x_bias) and normed = norm(h).

    ``x``, ``residual``: (..., D) of one shape and float dtype, arrays or Tensors, any strides.
    ``weight``, ``bias``, ``x_bias``: (D,) in that dtype, or None. ``norm``: "layer" or "rms".
    ``p``, ``seed``: as in ``dropout``; ``eps``: as in ``layer_norm``. The norm is computed from h
    as it is returned, rounded to its dtype. Gradients flow from both results. ``impl``: "raw-simt",
    "reference", or None for the first that accepts.

    Raises TypeError for other or mixed dtypes, ValueError for shapes that do not fit, p outside
    0..1, an ``eps`` that is not positive and finite, and an unknown ``norm``.
    """
    rows = {"x": x, "residual": residual}
    vectors = {"weight": weight, "bias": bias, "x_bias": x_bias}
    inputs, eps = check_inputs("dropout_add_norm", rows, vectors, eps)
    return Call(IMPLS, inputs, impl, **settings("dropout_add_norm", norm, p, seed), eps=eps)


def settings(function: str, norm: str, p: float, seed: Any) -> dict[str, Any]:
    """Check these arguments of a public function; return the parameters that they stand for."""
    check_choice(function, "norm", norm, "layer", "rms")
    p = probability(function, "p", p)
    return {"rms": norm == "rms", "p": p, "key": dropout_key(function, p, seed)}


@op
def norm_and_residual(
    x: Array,
    weight: Array | None,
    bias: Array | None = None,
    *,
    norm: str = "layer",
    eps: float = 1e-5,
    impl: str | None = None,
) -> Call[tuple[Array, Array]]:
    """Return (norm(x), x), whose gradients are summed in one pass: the start of a residual block.

    ``x``: (..., D). ``weight``, ``bias``: (D,) in its dtype, or None. The second result is a view
    of ``x``. ``norm``, ``eps``, ``impl`` and errors: as in ``dropout_add_norm``.
    """
    inputs, eps = check_inputs("norm_and_residual", {"x": x}, {"weight": weight, "bias": bias}, eps)
    check_choice("norm_and_residual", "norm", norm, "layer", "rms")
    return Call(NORM_AND_RESIDUAL, inputs, impl, rms=norm == "rms", eps=eps)


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


def _norm_reference(x, weight, bias, *, needs, rms, eps):
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


def _backward_raw(saved, dnormed, dh, second=None, *, needs, into, p, key, rms, eps):
    h, weight, mean, rstd = saved
    dnormed = zeros(h, h.shape) if dnormed is None else dnormed.astype(h.dtype, copy=False)
    dnormed, dnormed_step = rows_of(dnormed)
    dh, dh_step = _rows_or_none(dh, h.dtype)
    dresidual = arrays.empty(h, h.shape)
    drops = rng.threshold(p) < 65536  # else p is too small to drop an element
    dx = arrays.empty(h, h.shape) if drops else None
    second, second_step = _rows_or_none(second, h.dtype)
    given, outs = (h, weight, mean, rstd, dnormed, dh, second), (dx, dresidual)
    numbers = dnormed_step, dh_step, second_step, *device_numbers(p, key)
    constants = {"RMS": rms, "WEIGHT": weight is not None, "SECOND": second is not None}
    if layout := pairs_layout(h, needs[2:]):
        sums = _run_pairs(layout, given, outs, numbers, needs[2:], constants)
    else:
        sums = _run_rows(given, outs, numbers, needs[2:], constants)
    vectors = add_parts(sums, into[2:], h.dtype)
    return dresidual if dx is None else dx, dresidual, *vectors


def _rows_or_none(x, dtype):
    """Return (x in ``dtype``, elements from one row to the next), or (None, 0)."""
    return (None, 0) if x is None else rows_of(x.astype(dtype, copy=False))


def _run_pairs(layout, given, outs, numbers, wanted, more):
    """Launch the kernel in which warps take two rows; return the partial column sums."""
    constants, block, grid, shared = layout
    h, (dx, _), name = given[0], outs, "dropout_add_norm_backward_pairs"
    sums = parts_of(h, grid, wanted)
    rows = h.size // max(h.shape[-1], 1)
    constants = constants | {"DROPOUT": dx is not None} | more
    kernel(f"norm/{name}.cu", name, **constants)(
        (grid,), (block,), *given, *outs, *sums, rows, *numbers, shared_bytes=shared
    )
    return sums


def _run_rows(given, outs, numbers, wanted, more):
    """Launch the kernel for rows of any length; return the partial column sums."""
    h, name, x_bias, second = given[0], "dropout_add_norm_backward", wanted[2], given[-1]
    constants, grid, shared = backward_layout(h, 3 + (second is not None), 2 + x_bias)
    sums = parts_of(h, grid, wanted)
    rows, cols = h.size // max(h.shape[-1], 1), h.shape[-1]
    constants = constants | {"X_BIAS": x_bias} | more
    kernel(f"norm/{name}.cu", name, **constants)(
        (grid,), (constants["BLOCK"],), *given, *outs, *sums, rows, cols, *numbers,
        shared_bytes=shared,
    )  # fmt: skip
    return sums


def _norm_raw(x, weight, bias, *, needs, rms, eps):
    h = get_xp(x).ascontiguousarray(x)
    normed, saved = forward_raw(h, weight, bias, needs, eps, rms)
    return (normed, h.view()), (h, *saved[2:]) if any(needs) else None


def _norm_gradient(backward, saved, dnormed, dh, *, needs, into, rms, eps):
    """Return what the gradient of dropout_add_norm is for its residual, without dropout."""
    needs, into = (False, *needs, False), (None, *into, None)
    grads = backward(saved, dnormed, dh, needs=needs, into=into, p=0.0, key=None, rms=rms, eps=eps)
    return grads[1:4]


IMPLS = Impls(
    "dropout_add_norm",
    Impl("raw-simt", _forward_raw, _backward_raw, refuse_raw, fusion=Fusion(takes_second=True)),
    Impl("reference", _forward_reference, _backward_reference),
)
NORM_AND_RESIDUAL = Impls(
    "norm_and_residual",
    Impl("raw-simt", _norm_raw, partial(_norm_gradient, _backward_raw), refuse_raw),
    Impl("reference", _norm_reference, partial(_norm_gradient, _backward_reference)),
)
