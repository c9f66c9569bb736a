"""GELU and ReLU with an optional bias: y = f(x + bias).

GELU: Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016; its tanh form is
y = z (1 + tanh(sqrt(2 / pi) (z + 0.044715 z^3))) / 2.
Device code: ``rawkernels/bias_activation.cu`` and ``rawkernels/column_sum.cu``.
"""

import functools
import math

import numpy as np

from gpuattn import arrays
from gpuattn.arrays import (
    as_array,
    check_floats,
    check_together,
    ctype,
    for_each,
    get_xp,
    wide,
)
from gpuattn.autodiff import tape
from gpuattn.errors import problem
from gpuattn.impls import Impl, Impls
from gpuattn.kernels import kernel, kernel_refusal

# the constant ACTIVATION of bias_activation.cu; "gelu" is the tanh form
ACTIVATIONS = {None: 0, "relu": 1, "gelu": 2, "gelu_exact": 3}
BLOCK = 128
MIN_ROWS, MAX_CHUNKS = 32, 512  # rows of one block at least, blocks along the rows at most
CPU_BLOCK = 1 << 17  # elements at a time on NumPy; shorter calls do not keep two threads busy
TANH_INNER, TANH_CUBIC = math.sqrt(2 / math.pi), 0.044715


def gelu(x, bias=None, *, approximate="tanh", impl=None):
    """Return the GELU of ``x + bias``, in the shape and dtype of ``x``.

    ``x``: (..., cols) float array or Tensor. ``bias``: (cols,) in the dtype of ``x``, or None.
    ``approximate``: "tanh", or "none" for the exact form x * Phi(x).
    ``impl``: an implementation's name, or None for the fastest that accepts the arguments.
    Raises TypeError for other or mixed dtypes, ValueError for a bias that does not fit.
    """
    x, bias = _checked("gelu", x, bias)
    if approximate not in ("tanh", "none"):
        raise ValueError(problem("gelu", "approximate", repr(approximate), '"tanh" or "none"'))
    activation = "gelu" if approximate == "tanh" else "gelu_exact"
    return tape.apply(GELU, (x, bias), impl, activation=activation)


def relu(x, bias=None, *, impl=None):
    """Return ``max(x + bias, 0)``, in the shape and dtype of ``x``; NaN stays NaN.

    ``x``: (..., cols) float array or Tensor. ``bias``: (cols,) in the dtype of ``x``, or None.
    ``impl``: an implementation's name, or None for the fastest that accepts the arguments.
    Raises TypeError for other or mixed dtypes, ValueError for a bias that does not fit.
    """
    x, bias = _checked("relu", x, bias)
    return tape.apply(RELU, (x, bias), impl, activation="relu")


def _checked(function, x, bias):
    x = x if isinstance(x, tape.Box) else as_array(x, function, "x")
    if bias is not None:
        bias = bias if isinstance(bias, tape.Box) else as_array(bias, function, "bias")
    raw_x, raw_bias = tape.raw(x), tape.raw(bias)
    check_together(function, x=raw_x, bias=raw_bias)
    check_floats(function, x=raw_x, bias=raw_bias)
    if raw_bias is not None and (raw_x.ndim == 0 or raw_bias.shape != raw_x.shape[-1:]):
        accepted = f"the last axis of x, which has shape {raw_x.shape}"
        raise ValueError(problem(function, "bias.shape", raw_bias.shape, accepted))
    return x, bias


# ---- reference: NumPy or CuPy ----------------------------------------------------------------


def _forward_reference(x, bias, *, needs, activation):
    z = x.astype(wide(x.dtype), copy=False)
    if bias is not None:
        z = z + bias.astype(z.dtype, copy=False)
    y, slope = activate(z, activation, any(needs))
    return y.astype(x.dtype, copy=False), ((slope,) if any(needs) else None)


def _backward_reference(saved, dy, *, needs, into, activation):
    (slope,) = saved
    dz = dy.astype(wide(dy.dtype), copy=False) * slope
    dx = dz.astype(dy.dtype, copy=False) if needs[0] else None
    dbias = dz.reshape(-1, dz.shape[-1]).sum(0).astype(dy.dtype, copy=False) if needs[1] else None
    return dx, dbias


def activate(z, activation, want_slope):
    """Return (f(z), f'(z) or None) for float32 or float64 ``z``; the slope of ReLU is boolean."""
    xp = get_xp(z)
    if activation == "relu":
        return xp.maximum(z, 0), (z > 0 if want_slope else None)
    return (_gelu_tanh if activation == "gelu" else _gelu_exact)(xp, z, want_slope)


def _gelu_tanh(xp, z, want_slope):
    x = z.reshape(-1)
    y, slope = xp.empty(x.shape, x.dtype), xp.empty(x.shape, x.dtype) if want_slope else None

    def run(start):
        part = slice(start, start + step)
        here = x[part]
        square = xp.multiply(here, here, out=slope[part] if want_slope else None)
        gate = square * (TANH_INNER * TANH_CUBIC)
        gate += TANH_INNER
        gate *= here
        xp.tanh(gate, out=gate)
        gate *= 0.5
        gate += 0.5
        out = xp.multiply(here, gate, out=y[part])
        if not want_slope:
            return
        square *= 6 * TANH_INNER * TANH_CUBIC  # gate + y (1 - gate) 2 u', tanh being taken of u
        square += 2 * TANH_INNER
        square *= out
        square -= square * gate
        square += gate

    step = CPU_BLOCK if xp is np else max(x.size, 1)
    for_each(run, range(0, x.size, step))
    return y.reshape(z.shape), slope.reshape(z.shape) if want_slope else None


def _gelu_exact(xp, z, want_slope):
    gate = erf(z * math.sqrt(0.5))
    gate += 1
    gate *= 0.5
    y = z * gate
    if not want_slope:
        return y, None
    slope = xp.exp(z * z * -0.5)
    slope *= z
    slope *= 1 / math.sqrt(2 * math.pi)
    slope += gate
    return y, slope


ERF_TOP = 6.0  # 1 - erf(6) is 2e-17


def erf(x):
    """Return the error function of float32 or float64 ``x``, within 5e-7 or 1e-14.

    erf(x) = 1 - exp(-x^2) p(w) for x > 0, where w = (1 / (2 + x)) scaled to -1 .. 1.
    """
    xp = get_xp(x)
    size = xp.minimum(xp.abs(x), ERF_TOP)
    first, last = 1 / (2 + ERF_TOP), 1 / 2
    w = 1 / (size + 2)
    w -= (first + last) / 2
    w *= 2 / (last - first)
    head, *tail = _erf_polynomial(8 if x.dtype == np.float32 else 18)
    result = w * head
    for coefficient in tail[:-1]:
        result += coefficient
        result *= w
    result += tail[-1]
    size *= size
    xp.negative(size, out=size)
    result *= xp.exp(size, out=size)
    xp.subtract(1, result, out=result)
    return xp.copysign(result, x)


@functools.cache
def _erf_polynomial(degree):
    """Return the coefficients of p, highest power first, by interpolation of ``math.erfc``."""
    from numpy.polynomial import chebyshev  # slow to import, seldom needed

    first, last = 1 / (2 + ERF_TOP), 1 / 2

    def scaled_erfc(w):
        points = 2 / (w * (last - first) + first + last) - 2
        return np.array([math.erfc(v) * math.exp(v * v) for v in points])

    return tuple(chebyshev.cheb2poly(chebyshev.chebinterpolate(scaled_erfc, degree))[::-1].tolist())


# ---- raw: rawkernels/bias_activation.cu, rawkernels/column_sum.cu ----------------------------


def refuse_raw(x, *_, **__):
    """Return why the kernels do not take ``x``, or None."""
    return kernel_refusal(x)


def _forward_raw(x, bias, *, needs, activation):
    x = get_xp(x).ascontiguousarray(x)
    y = launch_forward(x, bias, arrays.empty(x, x.shape), activation)
    if not any(needs):
        return y, None
    return y, ((y, None) if activation == "relu" else (x, bias))


def _backward_raw(saved, dy, *, needs, into, activation):
    return launch_backward(*saved, dy, needs[1], into[1], activation)


def launch_forward(x, bias, y, activation):
    """Write f(x + bias) to ``y``, which may be ``x``; both C-contiguous. Return ``y``."""
    rows, cols = _rows_and_columns(x, bias is not None)
    chunk = _rows_of_a_block(rows)
    if bias is not None:
        bias = get_xp(bias).ascontiguousarray(bias)
    _kernel("forward", x, activation)(
        _grid(rows, cols, chunk), (BLOCK,), x, bias, y, rows, cols, chunk
    )
    return y


def launch_backward(x, bias, dy, want_bias, slot, activation):
    """Return (dx, dbias): the gradient ``dy`` times f'(x + bias), and its sum over the rows.

    ReLU takes its own output as ``x``, and no bias. dbias is None unless ``want_bias``, and when
    it went to ``slot`` = (place, add to it?). Without an activation x may be None and dx is dy.
    """
    dy = get_xp(dy).ascontiguousarray(dy)
    dx = dy if activation is None else arrays.empty(dy, dy.shape)
    if activation is None and not want_bias:
        return dx, None
    rows, cols = _rows_and_columns(dy, want_bias or bias is not None)
    chunk = _rows_of_a_block(rows)
    grid = _grid(rows, cols, chunk)
    partial = arrays.empty(dy, (grid[1], cols), np.float32) if want_bias else None
    _kernel("backward", dy, activation)(
        grid, (BLOCK,), x, bias, dy, None if dx is dy else dx, partial, rows, cols, chunk
    )
    if not want_bias:
        return dx, None
    out, accumulate = slot or (arrays.empty(dy, (cols,)), False)
    finish = kernel("column_sum.cu", "column_sum", scalar=ctype(out.dtype), BLOCK=BLOCK)
    finish((-(-cols // BLOCK),), (BLOCK,), partial, out, grid[1], cols, accumulate)
    return dx, None if slot else out


def _kernel(verb, x, activation):
    constants = {"scalar": ctype(x.dtype), "ACTIVATION": ACTIVATIONS[activation], "BLOCK": BLOCK}
    return kernel("bias_activation.cu", f"bias_activation_{verb}", **constants)


def _rows_and_columns(x, by_column):
    """Return the sizes that a kernel runs over: without a bias, all elements are one row."""
    if not by_column:
        return 1, x.size
    return math.prod(x.shape[:-1]), x.shape[-1]


def _rows_of_a_block(rows):
    return max(MIN_ROWS, -(-rows // MAX_CHUNKS))


def _grid(rows, cols, chunk):
    return -(-cols // BLOCK), -(-rows // chunk)


GELU = Impls(
    "gelu",
    Impl("raw-simt", _forward_raw, _backward_raw, refuse_raw),
    Impl("reference", _forward_reference, _backward_reference),
)
RELU = Impls("relu", *GELU)
