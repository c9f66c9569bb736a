"""NumPy functions composed of others on the tape, which gives derivatives of any order."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpuattn.arrays import get_xp, on_gpu
from gpuattn.autodiff.numpy.elementwise import array_op, compute, evaluate, rule, spread
from gpuattn.autodiff.numpy.products import tensordot
from gpuattn.autodiff.numpy.shapes import concatenate, index, moveaxis, scatter
from gpuattn.autodiff.tape import apply, raw
from gpuattn.errors import UnsupportedError, problem
from gpuattn.typing import Array

# ---- products ------------------------------------------------------------------------------------


@rule(np.outer)
def outer(a: Array, b: Array) -> Array:
    return np.reshape(a, (-1, 1)) * np.reshape(b, (1, -1))


@rule(np.inner)
def inner(a: Array, b: Array) -> Array:
    if 0 in (np.ndim(a), np.ndim(b)):
        return np.multiply(a, b)
    return tensordot(a, b, axes=(-1, -1))


@rule(np.vecdot)
def vecdot(a: Array, b: Array) -> Array:
    return np.sum(np.multiply(a, b), axis=-1)


if hasattr(np, "matvec"):  # NumPy 2.2

    @rule(np.matvec)
    def matvec(a, b):
        return np.squeeze(np.matmul(a, np.expand_dims(b, -1)), -1)

    @rule(np.vecmat)
    def vecmat(a, b):
        return np.squeeze(np.matmul(np.expand_dims(a, -2), b), -2)


@rule(np.prod)
def prod(x: Array, axis: int | tuple[int, ...] | None = None, *, keepdims: bool = False) -> Array:
    """As ``np.prod``, multiplied in pairs: unlike out / x, the derivative is right at zeros."""
    if axis is None:
        ndim = np.ndim(x)
        out = prod(np.ravel(x), 0)
        return np.reshape(out, (1,) * ndim) if keepdims else out
    if isinstance(axis, tuple):
        raise UnsupportedError("np.prod over several axes is not recorded; take one at a time")
    x = moveaxis(x, axis, 0)
    if len(x) == 0:
        return np.sum(x, axis=0) + 1
    while len(x) > 1:
        half = len(x) // 2
        pairs = x[:half] * x[half : 2 * half]
        x = concatenate([pairs, x[2 * half :]]) if len(x) % 2 else pairs
    return moveaxis(x, 0, axis) if keepdims else x[0]


def _forward_cumprod(x, *, needs, axis):
    out = compute(np.cumprod, x, axis=axis, widen_gpu=True)
    return out, (x, out)


def _backward_cumprod(saved, grad, *, needs, into, axis):
    return (evaluate(_cumprod_gradient, grad, *saved, axis=axis, widen_gpu=True),)


def _cumprod_gradient(grad, x, out, axis):
    """Return out[i - 1] * sums[i]: without a quotient, so it is right at zeros.

    sums[i] = grad[i] + x[i + 1] sums[i + 1], by doubling: ``products[i]`` has ``step`` factors.
    """
    x, out, sums = (np.moveaxis(part, axis, 0) for part in (x, out, grad))
    products, ones = _later(x, 1, np.ones_like), np.ones_like(x[:1])
    step = 1
    while step < len(x):
        sums = sums + products * _later(sums, step, np.zeros_like)
        products = products * _later(products, step, np.zeros_like)
        step *= 2
    return np.moveaxis(np.concatenate([ones, out[:-1]]) * sums, 0, axis)


def _later(x, step, like):
    """Return ``x[i + step]`` at i, with ``like`` (zeros or ones) after the end."""
    return np.concatenate([x[step:], like(x[:step])])


CUMPROD = array_op("np.cumprod", _forward_cumprod, _backward_cumprod)


@rule(np.cumprod)
def cumprod(x: Array, axis: int | None = None) -> Array:
    if axis is None:
        x, axis = np.ravel(x), 0
    return apply(CUMPROD, (x,), axis=axis)


# ---- averages ------------------------------------------------------------------------------------


@rule(np.average)
def average(
    a: Array,
    axis: int | tuple[int, ...] | None = None,
    weights: Array | None = None,
    *,
    keepdims: bool = False,
) -> Array:
    """As ``np.average``: sum(weights * a) / sum(weights). ZeroDivisionError on NumPy for sum 0."""
    if weights is None:
        return np.mean(a, axis=axis, keepdims=keepdims)
    if isinstance(weights, list | tuple):
        weights = get_xp(raw(a)).asarray(weights)
    if np.shape(weights) != np.shape(a):
        weights = _along(weights, np.shape(a), axis)
    total = np.sum(np.broadcast_to(weights, np.shape(a)), axis=axis, keepdims=keepdims)
    if not on_gpu(raw(total)) and not np.all(total):
        raise ZeroDivisionError("np.average: the weights of a result sum to 0")
    return np.sum(np.multiply(a, weights), axis=axis, keepdims=keepdims) / total


def _along(weights, shape, axis):
    """Return weights of the axes ``axis`` as an array that broadcasts to ``shape``."""
    axes = () if axis is None else axis if isinstance(axis, tuple) else (axis,)
    axes = [a % len(shape) for a in axes]
    if not axes or np.shape(weights) != tuple(shape[a] for a in axes):
        accepted = f"{shape}, as a, or the sizes of the axes averaged over"
        raise ValueError(problem("np.average", "weights.shape", np.shape(weights), accepted))
    weights = np.transpose(weights, np.argsort(axes).tolist())
    return np.reshape(weights, [n if a in axes else 1 for a, n in enumerate(shape)])


def _forward_median(x, *, needs):
    ordered = compute(np.sort, x, axis=-1)
    last, size = ordered[..., -1:], x.shape[-1]
    middle = ordered[..., (size - 1) // 2 : size // 2 + 1]  # one, or two of an even number
    middle = np.where(np.isnan(last), last, middle)  # NaN is sorted to the end
    return compute(np.mean, middle, axis=-1), (x, middle)


def _backward_median(saved, grad, *, needs, into):
    x, middle = map(raw, saved)
    share, count = 0, middle.shape[-1]
    for i in range(count):
        tied = x == middle[..., i : i + 1]
        share = share + tied / (count * tied.sum(-1, keepdims=True))
    return (spread(grad, x.shape, -1, False) * share.astype(x.dtype),)


MEDIAN = array_op("np.median", _forward_median, _backward_median)


@rule(np.median)
def median(a: Array, axis: int | tuple[int, ...] | None = None, *, keepdims: bool = False) -> Array:
    """As ``np.median``. Elements that are equal to a middle one share its gradient equally."""
    shape = np.shape(a)
    if 0 in shape:
        raise UnsupportedError(f"np.median: shape {shape} has no elements: nothing is recorded")
    given = range(len(shape)) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    axes = [axis % len(shape) for axis in given]
    others = [i for i in range(len(shape)) if i not in axes]
    rows = np.reshape(np.transpose(a, [*others, *axes]), [*(shape[i] for i in others), -1])
    out = apply(MEDIAN, (rows,))
    return (
        np.reshape(out, [1 if i in axes else n for i, n in enumerate(shape)]) if keepdims else out
    )


# ---- the norm: its gradient at zero is zero, not NaN --------------------------------------------


def _forward_norm(x, *, needs, axis, keepdims):
    def norm(x):
        return np.sqrt(np.sum(x * x, axis=axis, keepdims=keepdims))

    out = compute(norm, x, widen_gpu=True)
    return out, (x, out)


def _backward_norm(saved, grad, *, needs, into, axis, keepdims):
    x, out = saved
    share = grad / (out + (raw(out) == 0))
    return (x * spread(share, raw(x).shape, axis, keepdims),)


NORM = array_op("np.linalg.norm", _forward_norm, _backward_norm)


@rule(np.linalg.norm)
def norm(
    x: Array, ord: Any = None, axis: int | tuple[int, ...] | None = None, keepdims: bool = False
) -> Array:
    """The 2-norm of vectors (Frobenius of matrices), and the 1- and inf-norm of vectors."""
    vectors = isinstance(axis, int) or (axis is None and np.ndim(x) == 1)
    if ord is None or (vectors and ord == 2) or (not vectors and ord == "fro"):
        return apply(NORM, (x,), axis=axis, keepdims=keepdims)
    if vectors and ord == 1:
        return np.sum(np.absolute(x), axis=axis, keepdims=keepdims)
    if vectors and ord == np.inf:
        return np.max(np.absolute(x), axis=axis, keepdims=keepdims)
    raise UnsupportedError(
        f"np.linalg.norm: ord={ord!r} is not recorded here; accepted: None, 1, 2, inf of vectors, "
        "None and 'fro' of matrices"
    )


# ---- indexing, repeating, shifting --------------------------------------------------------------


@rule(np.take_along_axis)
def take_along_axis(x: Array, indices: Array, axis: int = -1) -> Array:
    if axis is None:
        return index(np.ravel(x), indices)
    xp, shape = get_xp(raw(x)), np.shape(x)
    mesh = (
        np.eye(len(shape), dtype=int) * -2 + 1
    )  # row a is the shape of an array along axis a: -1 at a, else 1
    key = [xp.arange(n).reshape(tuple(row)) for n, row in zip(shape, mesh.tolist(), strict=True)]
    key[axis] = xp.asarray(raw(indices))
    return index(x, tuple(key))


@rule(np.sort)
def sort(x: Array, axis: int = -1) -> Array:
    if axis is None:
        x, axis = np.ravel(x), 0
    return take_along_axis(x, np.argsort(raw(x), axis), axis)


@rule(np.diagonal)
def diagonal(x: Array, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Array:
    x = moveaxis(x, (axis1, axis2), (-2, -1))
    height, width = np.shape(x)[-2:]
    rows, cols = _diagonal(x, height, width, offset)
    return index(x, (..., rows, cols))


@rule(np.diag)
def diag(v: Array, k: int = 0) -> Array:
    if np.ndim(v) == 2:
        return diagonal(v, k)
    size = len(v) + abs(k)
    return scatter(v, _diagonal(v, size, size, k), (size, size))


def _diagonal(x, height, width, offset):
    """Return the row and column indices of a diagonal, on the device of ``x``."""
    first = max(-offset, 0)
    rows = get_xp(raw(x)).arange(first, max(first, min(height, width - offset)))
    return rows, rows + offset


@rule(np.trace)
def trace(x: Array, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Array:
    return np.sum(diagonal(x, offset, axis1, axis2), axis=-1)


@rule(np.repeat)
def repeat(x: Array, repeats: Any, axis: int | None = None) -> Array:
    if axis is None:
        x, axis = np.ravel(x), 0
    where = np.repeat(np.arange(np.shape(x)[axis]), repeats)
    return np.take(x, get_xp(raw(x)).asarray(where), axis=axis)


@rule(np.tile)
def tile(x: Array, reps: Any) -> Array:
    reps = tuple(reps) if np.iterable(reps) else (reps,)
    shape = (1,) * (len(reps) - np.ndim(x)) + tuple(np.shape(x))
    reps = (1,) * (len(shape) - len(reps)) + reps
    apart = np.reshape(x, [m for n in shape for m in (1, n)])
    stretched = np.broadcast_to(
        apart, tuple(m for pair in zip(reps, shape, strict=True) for m in pair)
    )
    return np.reshape(stretched, tuple(r * n for r, n in zip(reps, shape, strict=True)))


@rule(np.roll)
def roll(x: Array, shift: Any, axis: int | tuple[int, ...] | None = None) -> Array:
    if axis is None:
        return np.reshape(roll(np.ravel(x), shift, 0), np.shape(x))
    pairs = zip(shift, axis, strict=True) if np.iterable(axis) else [(shift, axis)]
    for by, along in pairs:
        size = np.shape(x)[along]
        numbers = (np.arange(size) - by) % max(size, 1)
        x = np.take(x, get_xp(raw(x)).asarray(numbers), axis=along)
    return x


@rule(np.pad)
def pad(x: Array, pad_width: Any, mode: str = "constant", *, constant_values: Any = 0) -> Array:
    if mode != "constant" or np.ndim(constant_values):
        raise UnsupportedError("np.pad is recorded for mode='constant' with one constant only")
    shape = np.shape(x)
    widths = np.broadcast_to(pad_width, (len(shape), 2)).tolist()
    inside = tuple(slice(before, before + n) for (before, _), n in zip(widths, shape, strict=True))
    full = tuple(n + sum(width) for n, width in zip(shape, widths, strict=True))
    out = scatter(x, inside, full)
    if constant_values:
        border = get_xp(raw(x)).ones(full, bool)
        border[inside] = False
        out = np.where(border, constant_values, out)
    return out


@rule(np.diff)
def diff(x: Array, n: int = 1, axis: int = -1) -> Array:
    before = (slice(None),) * (axis % np.ndim(x))
    for _ in range(n):
        x = index(x, (*before, slice(1, None))) - index(x, (*before, slice(None, -1)))
    return x


@rule(np.vstack)
def vstack(arrays: Sequence[Array]) -> Array:
    return concatenate([np.reshape(a, (1, -1)) if np.ndim(a) < 2 else a for a in arrays])


@rule(np.hstack)
def hstack(arrays: Sequence[Array]) -> Array:
    arrays = [np.ravel(a) if np.ndim(a) == 0 else a for a in arrays]
    return concatenate(arrays, 0 if np.ndim(arrays[0]) == 1 else 1)
