"""Shapes and indexing on the tape: reshape, transpose, slices, joining, splitting."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpuattn.arrays import get_xp, wide, zeros
from gpuattn.autodiff.numpy.elementwise import array_op, like, meta, rule
from gpuattn.autodiff.tape import Box, apply, raw
from gpuattn.typing import Array, Shape

# ---- reshape and transpose -----------------------------------------------------------------------


def _forward_reshape(x, *, needs, shape):
    return x.reshape(shape), (x.shape,)


def _backward_reshape(saved, grad, *, needs, into, shape):
    return (grad.reshape(saved[0]),)


RESHAPE = array_op("np.reshape", _forward_reshape, _backward_reshape)


@rule(np.reshape)
def reshape(x: Array, shape: Any) -> Array:
    return apply(RESHAPE, (x,), shape=shape)


@rule(np.ravel)
def ravel(x: Array) -> Array:
    return reshape(x, -1)


@rule(np.expand_dims)
def expand_dims(x: Array, axis: int | tuple[int, ...]) -> Array:
    return reshape(x, np.expand_dims(raw(x), axis).shape)


@rule(np.squeeze)
def squeeze(x: Array, axis: int | tuple[int, ...] | None = None) -> Array:
    return reshape(x, np.squeeze(raw(x), axis).shape)


def _forward_transpose(x, *, needs, axes):
    return x.transpose(axes), ()


def _backward_transpose(saved, grad, *, needs, into, axes):
    return (grad.transpose(tuple(np.argsort(axes).tolist())),)


TRANSPOSE = array_op("np.transpose", _forward_transpose, _backward_transpose)


@rule(np.transpose)
def transpose(x: Array, axes: Any = None) -> Array:
    ndim = raw(x).ndim
    axes = range(ndim)[::-1] if axes is None else [a % ndim for a in axes]
    return apply(TRANSPOSE, (x,), axes=tuple(axes))


@rule(np.swapaxes)
def swapaxes(x: Array, axis1: int, axis2: int) -> Array:
    axes = list(range(raw(x).ndim))
    axes[axis1], axes[axis2] = axes[axis2], axes[axis1]
    return transpose(x, axes)


@rule(np.moveaxis)
def moveaxis(x: Array, source: int | tuple[int, ...], destination: int | tuple[int, ...]) -> Array:
    ndim = raw(x).ndim
    order = np.moveaxis(np.empty((0,) * ndim), source, destination)  # checks the axes
    froms, tos = (a if isinstance(a, tuple | list) else [a] for a in (source, destination))
    axes = [i for i in range(order.ndim) if i not in {a % ndim for a in froms}]
    for to, came in sorted((d % ndim, a % ndim) for d, a in zip(tos, froms, strict=True)):
        axes.insert(to, came)
    return transpose(x, axes)


def _forward_broadcast(x, *, needs, shape):
    return np.broadcast_to(x, shape), (meta(x),)


def _backward_broadcast(saved, grad, *, needs, into, shape):
    return (like(grad, saved[0]),)


BROADCAST = array_op("np.broadcast_to", _forward_broadcast, _backward_broadcast)


@rule(np.broadcast_to)
def broadcast_to(x: Array, shape: Shape) -> Array:
    return apply(BROADCAST, (x,), shape=shape if isinstance(shape, tuple) else (shape,))


def _forward_flip(x, *, needs, axis):
    return np.flip(x, axis), ()


def _backward_flip(saved, grad, *, needs, into, axis):
    return (np.flip(grad, axis),)


FLIP = array_op("np.flip", _forward_flip, _backward_flip)


@rule(np.flip)
def flip(x: Array, axis: int | tuple[int, ...] | None = None) -> Array:
    return apply(FLIP, (x,), axis=axis)


def _forward_triangle(x, *, needs, k, keep):
    return keep(x, k), ()


def _backward_triangle(saved, grad, *, needs, into, k, keep):
    return (keep(grad, k),)


TRIANGLE = array_op("np.tril", _forward_triangle, _backward_triangle)


@rule(np.tril)
def tril(x: Array, k: int = 0) -> Array:
    return apply(TRIANGLE, (x,), k=k, keep=np.tril)


@rule(np.triu)
def triu(x: Array, k: int = 0) -> Array:
    return apply(TRIANGLE, (x,), k=k, keep=np.triu)


# ---- indexing: reading and scattering are each other's derivative --------------------------------


def _forward_index(x, *, needs, key):
    out = x[key]
    return np.asarray(out) if isinstance(out, np.generic) else out, (x.shape,)


def _backward_index(saved, grad, *, needs, into, key):
    return (scatter(grad, key, saved[0]),)


INDEX = array_op("indexing", _forward_index, _backward_index)


def index(x: Array, key: Any) -> Array:
    """Return ``x[key]`` for slices, integers, integer arrays and boolean masks."""
    key = tuple([raw(k) for k in key]) if isinstance(key, tuple) else raw(key)
    return apply(INDEX, (x,), key=key)


def _forward_scatter(x, *, needs, key, shape):
    if not _has_integer_array(key):
        out = zeros(x, shape)
        out[key] = x
        return out, ()
    out = zeros(x, shape, wide(x.dtype))
    get_xp(out).add.at(out, key, x.astype(out.dtype, copy=False))  # read twice, added twice
    return out.astype(x.dtype, copy=False), ()


def _backward_scatter(saved, grad, *, needs, into, key, shape):
    return (grad[key],)


SCATTER = array_op("scatter", _forward_scatter, _backward_scatter)


def scatter(x: Array, key: Any, shape: Shape) -> Array:
    """Return zeros of ``shape`` with ``x`` added at ``[key]``."""
    return apply(SCATTER, (x,), key=key, shape=shape)


def _has_integer_array(key):
    keys = key if isinstance(key, tuple) else (key,)
    return any(
        isinstance(k, list) or getattr(k, "dtype", np.dtype(bool)).kind in "iu" for k in keys
    )


@rule(np.take)
def take(x: Array, indices: Array, axis: int | None = None) -> Array:
    if axis is None:
        return index(reshape(x, -1), indices)
    return index(x, (slice(None),) * (axis % raw(x).ndim) + (indices,))


# ---- joining and splitting -----------------------------------------------------------------------


def _forward_concatenate(*arrays, needs, axis):
    return np.concatenate(arrays, axis), tuple([meta(a) for a in arrays])


def _backward_concatenate(saved, grad, *, needs, into, axis):
    before, end, parts = (slice(None),) * (axis % grad.ndim), 0, []
    for shape, dtype in saved:
        begin, end = end, end + shape[axis]
        parts.append(like(grad[(*before, slice(begin, end))], (shape, dtype)))
    return tuple(parts)


CONCATENATE = array_op("np.concatenate", _forward_concatenate, _backward_concatenate)


@rule(np.concatenate)
def concatenate(arrays: Sequence[Array], axis: int | None = 0) -> Array:
    if axis is None:
        arrays, axis = [ravel(a) for a in arrays], 0
    return apply(CONCATENATE, tuple(arrays), axis=axis)


@rule(np.stack)
def stack(arrays: Sequence[Array], axis: int = 0) -> Array:
    return concatenate([expand_dims(a, axis) for a in arrays], axis)


def _forward_split(x, *, needs, sections, axis):
    outs = tuple(np.split(x, sections, axis))
    return outs, tuple([(out.shape, out.dtype) for out in outs])


def _backward_split(saved, *grads, needs, into, sections, axis):
    first = next(g for g in grads if g is not None)
    parts = [zeros(raw(first), *m) if g is None else g for g, m in zip(grads, saved, strict=True)]
    return (np.concatenate(parts, axis),)


SPLIT = array_op("np.split", _forward_split, _backward_split)


@rule(np.split)
def split(x: Array, indices_or_sections: Any, axis: int = 0) -> list[Array]:
    """Return a tuple of parts: an op with several outputs."""
    return apply(SPLIT, (x,), sections=indices_or_sections, axis=axis)


def copy_of(x: Array) -> Array:
    """Return the same values as a new recorded result (the identity on the tape)."""
    return apply(BROADCAST, (x,), shape=raw(x).shape) if isinstance(x, Box) else x
