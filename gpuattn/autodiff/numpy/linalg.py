"""Linear algebra of matrices and stacks of them on the tape: inv, solve, det and cholesky.

Derivatives as in Giles, "Collected matrix derivative results for forward and reverse mode
algorithmic differentiation" (2008). 16-bit matrices are computed in float32 and cast once.
"""

from functools import partial

import numpy as np

from gpuattn.arrays import get_xp
from gpuattn.autodiff.numpy.elementwise import array_op, compute, evaluate, like, meta, rule
from gpuattn.autodiff.numpy.shapes import broadcast_to
from gpuattn.autodiff.tape import Box, apply, raw
from gpuattn.typing import Array

_compute, _evaluate = (partial(f, widen_gpu=True) for f in (compute, evaluate))


def _transposed(x):
    return np.swapaxes(x, -1, -2)


# ---- inverse and solve ---------------------------------------------------------------------------


def _forward_inv(x, *, needs):
    out = _compute(np.linalg.inv, x)
    return out, (out,)


def _backward_inv(saved, grad, *, needs, into):
    return (_evaluate(_inv_gradient, grad, *saved),)


def _inv_gradient(grad, out):
    return -(_transposed(out) @ grad @ _transposed(out))


INV = array_op("np.linalg.inv", _forward_inv, _backward_inv)


@rule(np.linalg.inv)
def inv(a: Array) -> Array:
    return apply(INV, (a,))


def _forward_solve(a, b, *, needs):
    out = _compute(np.linalg.solve, a, b)
    return out, (a, out, meta(b))


def _backward_solve(saved, grad, *, needs, into):
    a, out, of_b = saved
    db = _evaluate(_solve_transposed, grad, a)
    da = _evaluate(_solve_left, db, out) if needs[0] else None
    return None if da is None else like(da, meta(raw(a))), like(db, of_b) if needs[1] else None


def _solve_transposed(grad, a):
    return np.linalg.solve(_transposed(a), grad)


def _solve_left(db, out):
    return -(db @ _transposed(out))


SOLVE = array_op("np.linalg.solve", _forward_solve, _backward_solve)


@rule(np.linalg.solve)
def solve(a: Array, b: Array) -> Array:
    """As ``np.linalg.solve``: ``b`` is a vector if it has one axis, or else matrices."""
    if np.ndim(b) == 1:
        return np.squeeze(solve(a, np.expand_dims(b, -1)), -1)
    stacks = np.broadcast_shapes(np.shape(a)[:-2], np.shape(b)[:-2])
    return apply(SOLVE, (_stacked(a, stacks), _stacked(b, stacks)))


def _stacked(x, stacks):
    """Return matrices ``x`` broadcast to (*stacks, rows, columns)."""
    return x if np.shape(x)[:-2] == stacks else broadcast_to(x, (*stacks, *np.shape(x)[-2:]))


# ---- determinant: its gradient, the cofactors, exists at singular matrices too -------------------


def _forward_det(x, *, needs):
    out = _compute(np.linalg.det, x)
    return out, (x, out)


def _backward_det(saved, grad, *, needs, into):
    x, out = saved
    grad = np.expand_dims(grad, (-1, -2))
    if isinstance(grad, Box):  # second derivatives exist here for regular matrices only
        return (grad * np.expand_dims(out, (-1, -2)) * _transposed(np.linalg.inv(x)),)
    return (_evaluate(_det_gradient, grad, x),)


def _det_gradient(grad, x):
    """Return grad * cofactors(x): with x = u diag(s) v they are det(u v) u diag(prod / s) v."""
    u, s, v = np.linalg.svd(x)
    ones = np.ones_like(s[..., :1])
    before = np.cumprod(np.concatenate([ones, s[..., :-1]], -1), -1)
    behind = np.flip(np.cumprod(np.concatenate([ones, np.flip(s, -1)[..., :-1]], -1), -1), -1)
    sign = np.linalg.det(u) * np.linalg.det(v)
    weights = np.expand_dims(before * behind, -2) * np.expand_dims(sign, (-1, -2))
    return grad * ((u * weights) @ v)


DET = array_op("np.linalg.det", _forward_det, _backward_det)


@rule(np.linalg.det)
def det(a: Array) -> Array:
    return apply(DET, (a,))


# ---- Cholesky ------------------------------------------------------------------------------------


def _forward_cholesky(x, *, needs):
    out = _compute(np.linalg.cholesky, x)
    return out, (out,)


def _backward_cholesky(saved, grad, *, needs, into):
    return (_evaluate(_cholesky_gradient, grad, *saved),)


def _cholesky_gradient(grad, out):
    xp, size = get_xp(raw(out)), out.shape[-1]
    lower = xp.tril(xp.ones((size, size), raw(out).dtype)) - xp.eye(size, dtype=raw(out).dtype) / 2
    inverse = np.linalg.inv(out)
    half = _transposed(inverse) @ (lower * (_transposed(out) @ grad)) @ inverse
    return (half + _transposed(half)) / 2


CHOLESKY = array_op("np.linalg.cholesky", _forward_cholesky, _backward_cholesky)


@rule(np.linalg.cholesky)
def cholesky(a: Array) -> Array:
    """As ``np.linalg.cholesky``. The gradient of ``a`` is symmetric, as ``a`` is."""
    return apply(CHOLESKY, (a,))
