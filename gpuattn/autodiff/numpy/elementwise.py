"""NumPy's functions on the tape: a table of derivatives.

``RULES`` maps a NumPy function to the function that records it. A derivative is written once, in
operators and NumPy functions, so that it works on arrays and, for higher order, on Tensors.
Functions whose derivative is not one formula are in ``shapes.py``, ``products.py`` and
``linalg.py``, functions composed of others in ``composed.py``.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from gpuattn.arrays import BFLOAT16, check_devices, is_array, on_gpu
from gpuattn.autodiff.arithmetic import by_kernel
from gpuattn.autodiff.tape import Box, apply, op, raw
from gpuattn.impls import Call, Impl, Impls
from gpuattn.typing import Array, ArrayLike, DType, Shape

NARROW = (np.dtype("float16"), BFLOAT16)
RULES: dict[Callable, Callable] = {}  # numpy function -> recording function
# numpy function -> which of inputs "a", "b" and output "o" its partial derivatives take, and these
PARTIALS: dict[Callable, tuple[str, tuple[Callable, ...]]] = {}
PLAIN = {
    np.equal, np.not_equal, np.less, np.less_equal, np.greater, np.greater_equal,
    np.isnan, np.isinf, np.isfinite, np.sign, np.floor, np.ceil, np.rint, np.logical_not,
    np.logical_and, np.logical_or, np.argmax, np.argmin, np.argsort, np.shape, np.ndim, np.size,
    np.zeros_like, np.ones_like, np.full_like, np.empty_like, np.all, np.any, np.allclose,
    np.array_equal, np.isclose, np.result_type, np.may_share_memory, np.shares_memory,
    np.floor_divide, np.trunc, np.round, np.signbit, np.nonzero, np.flatnonzero, np.count_nonzero,
    np.argpartition, np.searchsorted, np.unique,
}  # fmt: skip  # piecewise constant: computed on the arrays, nothing to record


def rule(*functions: Callable) -> Callable:
    """Register a function as the recording form of some NumPy functions."""

    def register(fun):
        RULES.update(dict.fromkeys(functions, fun))
        return fun

    return register


def array_op(name: str, forward: Callable, backward: Callable) -> Impls:
    """Return the Impls of a basic op: one for NumPy and CuPy, with derivatives of any order."""
    return Impls(name, Impl("array", forward, backward, differentiable_twice=True))


# ---- 16-bit arrays: compute in float32, cast once ------------------------------------------------


def compute(function: Callable, *arrays: Any, widen_gpu: bool = False, **params: Array) -> Array:
    """Return ``function(*arrays)`` in the arrays' own dtype: Python numbers never promote.

    16-bit NumPy arrays are computed in float32 and cast once; ``widen_gpu``: 16-bit CuPy arrays
    too (CuPy has no batched 16-bit matmul). Raises ValueError for arrays of two GPUs, which CuPy
    would read from one another.
    """
    # beside a NumPy array there are no others, which CuPy refuses; the first may be a number
    if type(arrays[0]) is not np.ndarray and type(arrays[-1]) is not np.ndarray:
        check_devices("arithmetic", dict(enumerate(arrays)))
    narrow = {a.dtype for a in arrays if is_array(a) and a.dtype in NARROW}
    if not narrow:
        return _as_array(function(*arrays, **params))
    widen = widen_gpu or not any(map(on_gpu, arrays))
    given = [a.astype(np.float32) if widen and _is_narrow(a) else a for a in arrays]
    out = function(*given, **params)
    if out.dtype.kind != "f":
        return _as_array(out)
    wide = [a.dtype for a in arrays if is_array(a) and a.dtype in (np.float32, np.float64)]
    return _as_array(out.astype(np.result_type(*narrow, *wide), copy=False))


def _is_narrow(a):
    return is_array(a) and a.dtype in NARROW


def _as_array(out):
    """Return an array: NumPy returns scalars for 0-d results."""
    return np.asarray(out) if isinstance(out, np.generic) else out


def meta(x: Any) -> tuple[Shape, np.dtype] | None:
    """Return what ``like`` needs of an input: its shape and dtype, or None for a Python number."""
    return (x.shape, x.dtype) if is_array(x) else None


def like(grad: Array, kept: tuple[Shape, np.dtype] | None) -> Array | None:
    """Undo broadcasting and promotion: ``grad`` summed down to the shape and dtype of an input."""
    if kept is None:
        return None
    shape, dtype = kept
    if grad.shape != shape:
        lead = grad.ndim - len(shape)
        stretched = [i for i, n in enumerate(shape) if n == 1 and grad.shape[lead + i] != 1]
        axes = (*range(lead), *(lead + i for i in stretched))
        grad = compute_sum(grad, axes).reshape(shape)
    return grad if grad.dtype == dtype else grad.astype(dtype)


def compute_sum(x: Array, axes: Any) -> Array:
    """Sum an array or a Tensor over ``axes``, accumulating 16-bit numbers in float32."""
    total: Any = np.sum  # of a Tensor it is recorded
    return total(x, axis=axes) if isinstance(x, Box) else compute(total, x, axis=axes)


# ---- element by element --------------------------------------------------------------------------


def elementwise(function: Callable, keep: str, *partials: Callable) -> Callable:
    """Record a ufunc. ``keep``: which of inputs "a", "b" and output "o" the partials are given."""
    name = f"np.{function.__name__}"

    def forward(*arrays, needs):
        out = by_kernel(function, *arrays)
        out = compute(function, *arrays) if out is None else out
        named = dict(zip("ab", arrays, strict=False), o=out)
        return out, (tuple([meta(a) for a in arrays]), *[named[k] for k in keep])

    def backward(saved, grad, *, needs, into):
        metas, *kept = saved
        return tuple(
            [
                like(evaluate(partial, grad, *kept), m) if need else None
                for partial, m, need in zip(partials, metas, needs, strict=True)
            ]
        )

    impls = array_op(name, forward, backward)
    PARTIALS[function] = keep, partials

    def check(*inputs):
        return Call(impls, inputs)

    check.__name__ = function.__name__
    return rule(function)(op(check, len(partials)))


def evaluate(partial: Callable, grad: Array, *kept: Any, **params: Any) -> Any:
    """Return ``partial(grad, *kept)``: by ``compute``, or for higher order recorded."""
    if isinstance(grad, Box):
        params.pop("widen_gpu", None)
        return partial(grad, *kept, **params)
    return compute(partial, grad, *kept, **params)


def _mask(condition, x):
    """Return a comparison as numbers in the dtype of x; its derivative is 0."""
    return condition.astype(raw(x).dtype)


def _share(a, b, o):
    """Return the share of the gradient of max/min for the first argument: one half at ties."""
    a, b, o = raw(a), raw(b), raw(o)
    return ((a == o) * 0.5 + (b != o) * 0.5).astype(o.dtype)


def _power_base(g, a, b, o):
    # b = 0 gives 0 * a^0 = 0, where 0 * 0^-1 would be NaN
    return g * b * np.power(a, b - 1 + (raw(b) == 0))


def _power_exponent(g, a, b, o):
    positive = raw(a) > 0
    return g * o * np.log(np.where(positive, a, 1.0)) * positive


add = elementwise(np.add, "", lambda g: g, lambda g: g)
subtract = elementwise(np.subtract, "", lambda g: g, lambda g: -g)
multiply = elementwise(np.multiply, "ab", lambda g, a, b: g * b, lambda g, a, b: g * a)
divide = elementwise(np.divide, "ab", lambda g, a, b: g / b, lambda g, a, b: -g * a / (b * b))
power = elementwise(np.power, "abo", _power_base, _power_exponent)
maximum = elementwise(
    np.maximum, "abo", lambda g, *k: g * _share(*k), lambda g, *k: g * (1 - _share(*k))
)
minimum = elementwise(
    np.minimum, "abo", lambda g, *k: g * _share(*k), lambda g, *k: g * (1 - _share(*k))
)
logaddexp = elementwise(
    np.logaddexp, "abo", lambda g, a, b, o: g * np.exp(a - o), lambda g, a, b, o: g * np.exp(b - o)
)
negative = elementwise(np.negative, "", lambda g: -g)
positive = elementwise(np.positive, "", lambda g: g)
absolute = elementwise(np.absolute, "a", lambda g, a: g * np.sign(raw(a)))
square = elementwise(np.square, "a", lambda g, a: g * (2 * a))
sqrt = elementwise(np.sqrt, "o", lambda g, o: g / (2 * o))
reciprocal = elementwise(np.reciprocal, "o", lambda g, o: -g * o * o)
exp = elementwise(np.exp, "o", lambda g, o: g * o)
exp2 = elementwise(np.exp2, "o", lambda g, o: g * o * float(np.log(2)))
expm1 = elementwise(np.expm1, "o", lambda g, o: g * (o + 1))
log = elementwise(np.log, "a", lambda g, a: g / a)
log2 = elementwise(np.log2, "a", lambda g, a: g / (a * float(np.log(2))))
log10 = elementwise(np.log10, "a", lambda g, a: g / (a * float(np.log(10))))
log1p = elementwise(np.log1p, "a", lambda g, a: g / (a + 1))
sin = elementwise(np.sin, "a", lambda g, a: g * np.cos(a))
cos = elementwise(np.cos, "a", lambda g, a: -g * np.sin(a))
tan = elementwise(np.tan, "o", lambda g, o: g * (1 + o * o))
sinh = elementwise(np.sinh, "a", lambda g, a: g * np.cosh(a))
cosh = elementwise(np.cosh, "a", lambda g, a: g * np.sinh(a))
tanh = elementwise(np.tanh, "o", lambda g, o: g * (1 - o * o))
arcsin = elementwise(np.arcsin, "a", lambda g, a: g / np.sqrt(1 - a * a))
arccos = elementwise(np.arccos, "a", lambda g, a: -g / np.sqrt(1 - a * a))
arctan = elementwise(np.arctan, "a", lambda g, a: g / (1 + a * a))
arctan2 = elementwise(
    np.arctan2,
    "ab",
    lambda g, a, b: g * b / (a * a + b * b),
    lambda g, a, b: -g * a / (a * a + b * b),
)
hypot = elementwise(np.hypot, "abo", lambda g, a, b, o: g * a / o, lambda g, a, b, o: g * b / o)
arcsinh = elementwise(np.arcsinh, "a", lambda g, a: g / np.sqrt(a * a + 1))
arccosh = elementwise(np.arccosh, "a", lambda g, a: g / np.sqrt(a * a - 1))
arctanh = elementwise(np.arctanh, "a", lambda g, a: g / (1 - a * a))


# ---- where, clip, casts --------------------------------------------------------------------------


def _forward_where(condition, a, b, *, needs):
    return compute(np.where, condition, a, b), (meta(a), meta(b), condition)


def _backward_where(saved, grad, *, needs, into):
    # selected, not multiplied by 0, which would turn inf of the other side into NaN
    a, b, condition = saved
    da = like(np.where(raw(condition), grad, 0.0), a) if needs[1] else None
    return None, da, like(np.where(raw(condition), 0.0, grad), b) if needs[2] else None


WHERE = array_op("np.where", _forward_where, _backward_where)


@rule(np.where)
def where(condition: ArrayLike, x: Any = None, y: Any = None) -> Array:
    if x is None and y is None:
        return np.where(raw(condition))
    return apply(WHERE, (raw(condition), x, y))


def _forward_clip(x, low, high, *, needs):
    return compute(np.clip, x, low, high), (x, low, high)


def _backward_clip(saved, grad, *, needs, into):
    x, low, high = (raw(s) for s in saved)
    inside = True if low is None else x >= low
    inside = inside if high is None else inside & (x <= high)
    return like(grad * _mask(inside, grad), meta(x)), None, None


CLIP = array_op("np.clip", _forward_clip, _backward_clip)


@rule(np.clip)
def clip(
    x: Array, a_min: Any = None, a_max: Any = None, *, min: Any = None, max: Any = None
) -> Array:
    low, high = (min if a_min is None else a_min), (max if a_max is None else a_max)
    return apply(CLIP, (x, raw(low), raw(high)))


def _forward_astype(x, *, needs, dtype):
    return x.astype(dtype), (meta(x),)


def _backward_astype(saved, grad, *, needs, into, dtype):
    return (like(grad, saved[0]),)


ASTYPE = array_op("astype", _forward_astype, _backward_astype)


@rule(np.astype)
def astype(x: Array, dtype: DType) -> Array:
    """Cast; the gradient is cast back."""
    return x if raw(x).dtype == dtype else apply(ASTYPE, (x,), dtype=np.dtype(dtype))


# ---- sums, means, maxima -----------------------------------------------------------------------


def spread(grad: Array, shape: Shape, axis: int | tuple[int, ...] | None, keepdims: bool) -> Array:
    """Return the gradient of a reduction broadcast to the shape of its input."""
    if axis is not None and not keepdims:
        axes = {a % len(shape) for a in (axis if isinstance(axis, tuple) else (axis,))}
        grad = grad.reshape(tuple([1 if i in axes else n for i, n in enumerate(shape)]))
    return np.broadcast_to(grad, shape)


def _forward_sum(x, *, needs, axis, keepdims):
    return compute(np.sum, x, axis=axis, keepdims=keepdims), (x.shape,)


def _backward_sum(saved, grad, *, needs, into, axis, keepdims):
    return (spread(grad, saved[0], axis, keepdims),)


SUM = array_op("np.sum", _forward_sum, _backward_sum)


@rule(np.sum)
def sum(x: Array, axis: int | tuple[int, ...] | None = None, *, keepdims: bool = False) -> Array:
    return apply(SUM, (x,), axis=axis, keepdims=keepdims)


def _forward_mean(x, *, needs, axis, keepdims):
    out = compute(np.mean, x, axis=axis, keepdims=keepdims)
    return out, (x.shape, out.size / x.size if x.size else 0.0)


def _backward_mean(saved, grad, *, needs, into, axis, keepdims):
    shape, share = saved
    return (spread(grad * share, shape, axis, keepdims),)


MEAN = array_op("np.mean", _forward_mean, _backward_mean)


@rule(np.mean)
def mean(x: Array, axis: int | tuple[int, ...] | None = None, *, keepdims: bool = False) -> Array:
    return apply(MEAN, (x,), axis=axis, keepdims=keepdims)


def _forward_extreme(x, *, needs, axis, keepdims, function):
    out = compute(function, x, axis=axis, keepdims=keepdims)
    return out, (x, out)


def _backward_extreme(saved, grad, *, needs, into, axis, keepdims, function):
    x, out = (raw(s) for s in saved)
    tied = x == spread(out, x.shape, axis, keepdims)
    share = tied / tied.sum(axis=axis, keepdims=True)  # ties share the gradient equally
    return (spread(grad, x.shape, axis, keepdims) * share.astype(x.dtype),)


EXTREME = array_op("np.max", _forward_extreme, _backward_extreme)


@rule(np.max, np.amax)
def max(x: Array, axis: int | tuple[int, ...] | None = None, *, keepdims: bool = False) -> Array:
    return apply(EXTREME, (x,), axis=axis, keepdims=keepdims, function=np.max)


@rule(np.min, np.amin)
def min(x: Array, axis: int | tuple[int, ...] | None = None, *, keepdims: bool = False) -> Array:
    return apply(EXTREME, (x,), axis=axis, keepdims=keepdims, function=np.min)


@rule(np.var)
def var(
    x: Array, axis: int | tuple[int, ...] | None = None, *, ddof: float = 0, keepdims: bool = False
) -> Array:
    squares = square(x - mean(x, axis, keepdims=True))
    axes = range(raw(x).ndim) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    count = math.prod([raw(x).shape[a] for a in axes])
    return sum(squares, axis, keepdims=keepdims) / (count - ddof)


@rule(np.std)
def std(
    x: Array, axis: int | tuple[int, ...] | None = None, *, ddof: float = 0, keepdims: bool = False
) -> Array:
    return sqrt(var(x, axis, ddof=ddof, keepdims=keepdims))


def _forward_cumsum(x, *, needs, axis):
    return compute(np.cumsum, x, axis=axis), ()


def _backward_cumsum(saved, grad, *, needs, into, axis):
    return (np.flip(np.cumsum(np.flip(grad, axis), axis=axis), axis),)


CUMSUM = array_op("np.cumsum", _forward_cumsum, _backward_cumsum)


@rule(np.cumsum)
def cumsum(x: Array, axis: int | None = None) -> Array:
    if axis is None:
        x, axis = x.reshape(-1), 0
    return apply(CUMSUM, (x,), axis=axis)
