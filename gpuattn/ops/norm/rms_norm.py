"""RMSNorm over the last axis: y = x / sqrt(mean(x^2) + eps) * weight.

Zhang and Sennrich, "Root mean square layer normalization" (2019). Device code:
``rawkernels/norm/layer_norm.cu`` with RMS = true.
"""

from gpuattn.autodiff.tape import op
from gpuattn.impls import Call, Impl, Impls
from gpuattn.ops.norm.launch import refuse_raw
from gpuattn.ops.norm.layer_norm import (
    backward_raw,
    check_inputs,
    column_sum,
    forward_raw,
    normalize,
    normalized_gradient,
    weighted,
)
from gpuattn.typing import Array


@op
def rms_norm(
    x: Array, weight: Array | None = None, *, eps: float = 1e-6, impl: str | None = None
) -> Call[Array]:
    """Return the rows of ``x`` divided by their root mean square, times ``weight``.

    ``x``: (..., D), float array or Tensor, any strides. ``weight``: (D,) in the dtype of ``x``, or
    None for 1. Sums are in float32 (float64 for float64). ``impl``: "raw-simt", "reference", or
    None for the first that accepts.

    Raises TypeError for dtypes other than float32, float16, bfloat16, float64 or for mixed ones,
    ValueError for shapes that do not fit and for an ``eps`` that is not positive and finite.
    """
    inputs, eps = check_inputs("rms_norm", {"x": x}, {"weight": weight}, eps)
    return Call(IMPLS, inputs, impl, eps=eps)


# ---- reference: NumPy or CuPy -------------------------------------------------------------------


def _forward_reference(x, weight, *, needs, eps):
    normalized, rstd = normalize(x, eps, rms=True)
    y = weighted(normalized, weight, None, x.dtype)
    return y, (normalized, rstd, weight, x.dtype) if any(needs) else None


def _backward_reference(saved, dy, *, needs, into, eps):
    normalized, rstd, weight, dtype = saved
    dy = dy.astype(normalized.dtype, order="C", copy=False)
    dx = dweight = None
    if needs[0]:
        g = dy if weight is None else dy * weight.astype(dy.dtype, copy=False)
        dx = normalized_gradient(g, normalized, rstd, rms=True).astype(dtype, copy=False)
    if needs[1]:
        dweight = column_sum(dy * normalized, into[1], dtype)
    return dx, dweight


# ---- raw: rawkernels/norm/layer_norm.cu ---------------------------------------------------------


def _forward_raw(x, weight, *, needs, eps):
    return forward_raw(x, weight, None, needs, eps, rms=True)


def _backward_raw(saved, dy, *, needs, into, eps):
    dx, dweight, _ = backward_raw(saved, dy, (*needs, False), (*into, None), rms=True)
    return dx, dweight


IMPLS = Impls(
    "rms_norm",
    Impl("raw-simt", _forward_raw, _backward_raw, refuse_raw),
    Impl("reference", _forward_reference, _backward_reference),
)
