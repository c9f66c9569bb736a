"""GELU, ReLU, SiLU and SwiGLU with their slopes, on NumPy or CuPy arrays; the error function.

The formulas are in ``bias_activation``.
"""

import functools
import math

import numpy as np

from gpuattn.arrays import for_each, get_xp
from gpuattn.typing import Array

CPU_BLOCK = 1 << 17  # elements at a time on NumPy; with fewer, two threads are not kept busy
TANH_INNER, TANH_CUBIC = math.sqrt(2 / math.pi), 0.044715
ERF_TOP = 6.0  # 1 - erf(6) is 2e-17


def activate(z: Array, activation: str, want_slope: bool) -> tuple[Array, Array | None]:
    """Return (f(z), f'(z) or None) for float32 or float64 ``z``; the slope of ReLU is boolean."""
    xp = get_xp(z)
    if activation == "relu":
        return xp.maximum(z, 0), (z > 0 if want_slope else None)
    forms = {"gelu": _gelu_tanh, "gelu_exact": _gelu_exact, "silu": _silu, "swiglu": _swiglu}
    return forms[activation](xp, z, want_slope)


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
        square *= 6 * TANH_INNER * TANH_CUBIC  # gate + y (1 - gate) 2 u', for tanh(u)
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


def _silu(xp, z, want_slope):
    share = (1 + xp.tanh(z * 0.5)) * 0.5  # the sigmoid, without overflow
    value = z * share
    return value, (share + value * (1 - share) if want_slope else None)


def _swiglu(xp, z, want_slope):
    gate, up = xp.split(z, 2, axis=-1)
    value, slope = _silu(xp, gate, want_slope)
    return value * up, (xp.concatenate((slope * up, value), axis=-1) if want_slope else None)


def erf(x: Array) -> Array:
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
    from numpy.polynomial import chebyshev  # slow to import, rarely needed

    first, last = 1 / (2 + ERF_TOP), 1 / 2

    def scaled_erfc(w):
        points = 2 / (w * (last - first) + first + last) - 2
        return np.array([math.erfc(v) * math.exp(v * v) for v in points])

    return tuple(chebyshev.cheb2poly(chebyshev.chebinterpolate(scaled_erfc, degree))[::-1].tolist())
