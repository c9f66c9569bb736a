"""A linear layer: y = f(x @ weight.T + bias).

The product is a library's (``gpuattn/gemm/matmul.py``), which adds the bias and applies the
activation as it writes; where it cannot, they are one more kernel,
``linear/bias_activation.cu``. In the gradient of two layers the activation between them comes
with the product (``hopper.py``).
On Hopper a layer with GELU and no bias keeps slopes for that (``linear_gelu_hopper.py``).
"""

import math

from gpuattn import arrays
from gpuattn.arrays import check_floats, check_together, get_xp, wide
from gpuattn.autodiff.pending_matmul import PendingMatmul
from gpuattn.autodiff.side_stream import defer, on_side_stream
from gpuattn.autodiff.tape import op, raw
from gpuattn.errors import problem
from gpuattn.gemm.cublaslt import Reason
from gpuattn.gemm.matmul import matmul, matmul_activated, matmul_and_sums
from gpuattn.impls import Call, Fusion, Impl, Impls
from gpuattn.ops.arguments import check_choice, take_arrays
from gpuattn.ops.linear import gelu_hopper, hopper, weight_gradients
from gpuattn.ops.linear.bias_activation import activate, launch_backward, launch_forward, refuse_raw

ASIDE_TILES = 200  # of 128 x 128 numbers of a weight's gradient: so many fill a GPU
ASIDE_SHARE = 2  # half of the multiprocessors are for what it runs beside


@op
def linear(x, weight, bias=None, *, activation=None, impl=None):
    """Return ``f(x @ weight.T + bias)``: (..., out), in the dtype of ``x``.

    ``x``: (..., in). ``weight``: (out, in). ``bias``: (out,) or None. All of one float dtype.
    ``activation``: None, "relu" or "gelu" (the tanh form, see ``gelu``).
    ``impl``: an implementation's name, or None for the fastest that accepts the arguments.
    Raises TypeError for other or mixed dtypes, ValueError for shapes that do not fit.
    """
    inputs = tuple(take_arrays("linear", {"x": x, "weight": weight}, {"bias": bias}).values())
    _check(*map(raw, inputs))
    check_choice("linear", "activation", activation, None, "relu", "gelu")
    return Call(IMPLS, inputs, impl, activation=activation)


def _check(x, weight, bias):
    check_together("linear", x=x, weight=weight, bias=bias)
    check_floats("linear", x=x, weight=weight, bias=bias)
    if weight.ndim != 2:
        raise ValueError(problem("linear", "weight.shape", weight.shape, "(out, in)"))
    if x.ndim == 0 or x.shape[-1] != weight.shape[1]:
        accepted = f"(..., {weight.shape[1]}), for weight.shape {weight.shape}"
        raise ValueError(problem("linear", "x.shape", x.shape, accepted))
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(problem("linear", "bias.shape", bias.shape, weight.shape[:1]))


def _as_rows(x):
    return x if x.ndim == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


# ---- reference: NumPy or CuPy ----------------------------------------------------------------


def _forward_reference(x, weight, bias, *, needs, activation):
    dtype = wide(x.dtype)
    rows, matrix = (_as_rows(x).astype(dtype, copy=False), weight.astype(dtype, copy=False))
    y = matmul(rows, matrix, transpose_b=True)
    if bias is not None:
        y += bias.astype(dtype, copy=False)
    slope = None
    if activation is not None:
        y, slope = activate(y, activation, any(needs))
    out = y.astype(x.dtype, copy=False).reshape(*x.shape[:-1], len(weight))
    return out, (_kept(x, weight, needs, slope) if any(needs) else None)


def _backward_reference(saved, dy, *, needs, into, activation):
    x, weight, slope = saved
    dz = _as_rows(dy).astype(wide(dy.dtype), copy=False)
    if activation is not None:
        dz = dz * slope
    dx, dweight = _product_gradients(x, weight, dz, dy, needs, into)
    dbias = dz.sum(0).astype(dy.dtype, copy=False) if needs[2] else None
    return dx, dweight, dbias


def _kept(x, weight, needs, *rest):
    """Return what the gradients that are needed read."""
    return (x if needs[1] else None, weight if needs[0] else None, *rest)


def _product_gradients(x, weight, dz, dy, needs, into, share=1):
    """Return (dx, dweight), or None where not needed or written into its place.

    The products are done in the dtype of ``dz`` (N, out), the gradient before the activation.
    """
    dx = dweight = None
    if needs[0]:
        dx = matmul(dz, weight.astype(dz.dtype, copy=False)).astype(dy.dtype, copy=False)
        dx = dx.reshape(*dy.shape[:-1], weight.shape[1])
    if needs[1]:
        rows = _as_rows(x).astype(dz.dtype, copy=False)
        out, accumulate = into[1] or (None, False)
        dweight = matmul(dz, rows, transpose_a=True, out=out, accumulate=accumulate, share=share)
        dweight = None if into[1] else dweight.astype(dy.dtype, copy=False)
    return dx, dweight


# ---- raw: rawkernels/linear/bias_activation.cu, rawkernels/column_sum.cu ------------------------


def _forward_raw(x, weight, bias, *, needs, activation):
    rows, shape = _as_rows(x), (*x.shape[:-1], len(weight))
    slopes = activation == "gelu" and bias is None and any(needs)
    if slopes and gelu_hopper.takes(rows, weight):
        y, codes = gelu_hopper.forward(rows, weight)
        return y.reshape(shape), _kept(x, weight, needs, codes, None)
    z = None
    if activation == "gelu" and any(needs):
        z = arrays.empty(x, (len(rows), len(weight)))
    if bias is None and activation is None:
        y = matmul(rows, weight, transpose_b=True)
    else:
        y = matmul_activated(rows, weight, bias, activation, z)
        if type(y) is Reason:
            product = matmul(rows, weight, transpose_b=True, out=z)
            y = arrays.empty(x, product.shape) if z is not None else product
            launch_forward(product, bias, y, activation)
        else:
            bias = None  # z is with it
    out = y.reshape(shape)
    if not any(needs):
        return out, None
    before = {None: (None, None), "relu": (y, None), "gelu": (z, bias)}[activation]
    return out, _kept(x, weight, needs, *before)


def _backward_raw(saved, dy, *, needs, into, activation, fold=None):
    x, weight, z, bias = saved
    if gelu_hopper.are_codes(z):
        if isinstance(dy, PendingMatmul):
            dz = gelu_hopper.backward(dy, z)
        else:
            dz = gelu_hopper.backward_alone(_as_rows(dy), z)
        activation = None
    elif isinstance(dy, PendingMatmul):
        dz, activation = hopper.backward(dy, z, activation), None
    else:
        dz = get_xp(dy).ascontiguousarray(_as_rows(dy))
    sums = None  # (dweight, dbias) where one launch does both
    places = [slot and slot[0] for slot, need in zip(into[1:], needs[1:], strict=True) if need]
    if activation is None and needs[1] and needs[2]:
        with _aside(x, dz, places) as apart:
            sums = _weight_and_bias_gradients(x, dz, into, ASIDE_SHARE if apart else 1)
    if sums is None:
        dz, dbias = launch_backward(z, bias, dz, needs[2], into[2], activation)
    ours = needs[0]  # unless the op that made x goes on from the product
    if ours and fold is not None:
        ours = not fold(PendingMatmul(dz, weight, (*dy.shape[:-1], weight.shape[1])))
    dx, _ = _product_gradients(x, weight, dz, dy, (ours, False), into)
    if sums is not None or not needs[1]:
        return dx, *(sums or (None, dbias))
    if _later(_as_rows(x), dz, into[1]):
        return dx, None, dbias
    with _aside(x, dz, places[:1]) as apart:
        share = ASIDE_SHARE if apart else 1
        _, dweight = _product_gradients(x, weight, dz, dy, (False, True), into, share)
    return dx, dweight, dbias


def _takes_matmul(saved, product, index, *, needs, activation):
    _, _, z, bias = saved
    if gelu_hopper.are_codes(z):
        return gelu_hopper.takes_matmul(product)
    return activation is not None and bias is None and hopper.takes(product, z, activation)


def _later(x, dz, slot):
    """Return whether the weight's gradient will be computed together with others."""
    if slot is None or _tiles(x, dz) >= ASIDE_TILES or not weight_gradients.takes(dz, x, slot[0]):
        return False
    return defer(weight_gradients.launch, (dz, x, *slot), (dz, x), slot[0])


def _aside(x, dz, places):
    """Return a context for the gradients of parameters: aside, unless they fill a GPU anyway."""
    return on_side_stream((x, dz), places if _tiles(x, dz) < ASIDE_TILES else (None,))


def _tiles(x, dz):
    return math.prod(-(-array.shape[-1] // 128) for array in (x, dz))


def _weight_and_bias_gradients(x, dz, into, share):
    """Return (dweight, dbias), None if written into their places, by one launch; None if it can't.

    It cannot add to a bias gradient.
    """
    out, accumulate = into[1] or (None, False)
    dbias, add = into[2] or (arrays.empty(dz, dz.shape[1:]), False)
    if add:
        return None
    dweight = matmul_and_sums(dz, _as_rows(x), dbias, out, accumulate, share)
    if type(dweight) is Reason:
        return None
    return None if into[1] else dweight, None if into[2] else dbias


IMPLS = Impls(
    "linear",
    Impl(
        "raw-simt",
        _forward_raw,
        _backward_raw,
        refuse_raw,
        fusion=Fusion(offers_matmul=True, takes_matmul=_takes_matmul),
    ),  # fmt: skip
    Impl("reference", _forward_reference, _backward_reference),
)
