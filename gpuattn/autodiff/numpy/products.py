"""Matrix products and einsum on the tape."""

import math
from typing import Any

import numpy as np

from gpuattn.arrays import is_floating, on_gpu
from gpuattn.autodiff.numpy.elementwise import array_op, compute, like, meta, rule
from gpuattn.autodiff.tape import Box, apply, raw
from gpuattn.errors import UnsupportedError
from gpuattn.gemm.matmul import matmul_stacks
from gpuattn.typing import Array


def _product(a, b):
    """``a @ b`` of arrays or Tensors; sums of 16-bit stacks of matrices are kept in float32."""
    if isinstance(a, Box) or isinstance(b, Box):
        return a @ b
    floats = on_gpu(a) and on_gpu(b) and a.dtype == b.dtype and is_floating(a.dtype)
    if floats and min(a.ndim, b.ndim) > 1:
        return matmul_stacks(a, b)
    return compute(np.matmul, a, b, widen_gpu=a.ndim > 2 or b.ndim > 2)


def _forward_matmul(a, b, *, needs):
    return _product(a, b), (a, b)


def _backward_matmul(saved, grad, *, needs, into):
    a, b = saved
    da = like(_matmul_left(grad, a, b), meta(raw(a))) if needs[0] else None
    db = like(_matmul_right(grad, a, b), meta(raw(b))) if needs[1] else None
    return da, db


def _matmul_left(grad, a, b):
    if b.ndim == 1:
        return grad * b if a.ndim == 1 else np.expand_dims(grad, -1) * b
    if a.ndim == 1:
        return np.squeeze(_product(np.expand_dims(grad, -2), np.swapaxes(b, -1, -2)), -2)
    return _product(grad, np.swapaxes(b, -1, -2))


def _matmul_right(grad, a, b):
    if a.ndim == 1:
        return grad * a if b.ndim == 1 else np.expand_dims(a, -1) * np.expand_dims(grad, -2)
    if b.ndim == 1:
        return np.squeeze(_product(np.swapaxes(a, -1, -2), np.expand_dims(grad, -1)), -1)
    return _product(np.swapaxes(a, -1, -2), grad)


MATMUL = array_op("np.matmul", _forward_matmul, _backward_matmul)


@rule(np.matmul)
def matmul(a: Array, b: Array) -> Array:
    return apply(MATMUL, (a, b))


@rule(np.dot)
def dot(a: Array, b: Array) -> Array:
    if 0 in (np.ndim(a), np.ndim(b)):
        return np.multiply(a, b)
    if np.ndim(a) > 2 or np.ndim(b) > 2:
        return tensordot(a, b, axes=(-1, -2 if np.ndim(b) > 1 else -1))
    return matmul(a, b)


@rule(np.tensordot)
def tensordot(a: Array, b: Array, axes: Any = 2) -> Array:
    """As ``np.tensordot``, by one matmul."""
    n, m = np.ndim(a), np.ndim(b)
    if isinstance(axes, int):
        axes = range(n - axes, n), range(axes)
    of_a, of_b = (
        [axis % size for axis in (some if np.iterable(some) else [some])]
        for some, size in zip(axes, (n, m), strict=True)
    )
    free_a = [i for i in range(n) if i not in of_a]
    free_b = [i for i in range(m) if i not in of_b]
    sizes_a, sizes_b = ([np.shape(x)[i] for i in free] for x, free in ((a, free_a), (b, free_b)))
    left = np.reshape(np.transpose(a, [*free_a, *of_a]), (math.prod(sizes_a), -1))
    right = np.reshape(np.transpose(b, [*of_b, *free_b]), (-1, math.prod(sizes_b)))
    return np.reshape(matmul(left, right), (*sizes_a, *sizes_b))


# ---- einsum --------------------------------------------------------------------------------------


def _forward_einsum(*arrays, needs, subscripts):
    return compute(lambda *a: np.einsum(subscripts, *a), *arrays), arrays


def _backward_einsum(saved, grad, *, needs, into, subscripts):
    terms, out = _terms(subscripts)
    results = []
    for i, (need, term) in enumerate(zip(needs, terms, strict=True)):
        if not need:
            results.append(None)
            continue
        others = [saved[j] for j in range(len(saved)) if j != i]
        labels = [terms[j] for j in range(len(saved)) if j != i]
        reachable = "".join(c for c in term if c in out or any(c in t for t in labels))
        text = f"{','.join([out, *labels])}->{reachable}"
        partial = np.einsum(text, grad, *others)
        shape = raw(saved[i]).shape  # an index of this operand alone was summed: broadcast over it
        if reachable != term:
            partial = partial.reshape(
                [n if c in reachable else 1 for c, n in zip(term, shape, strict=True)]
            )
            partial = np.broadcast_to(partial, shape)
        results.append(like(partial, meta(raw(saved[i]))))
    return tuple(results)


def _terms(subscripts):
    inputs, _, out = subscripts.partition("->")
    return inputs.split(","), out


EINSUM = array_op("np.einsum", _forward_einsum, _backward_einsum)


@rule(np.einsum)
def einsum(subscripts: str, *operands: Array) -> Array:
    """``np.einsum`` with letters: no ellipsis, no letter twice in one operand."""
    text = subscripts.replace(" ", "")
    if "->" not in text:
        letters = sorted(c for c in set(text) - {","} if text.count(c) == 1)
        text = f"{text}->{''.join(letters)}"
    terms, _ = _terms(text)
    if "." in text or any(len(set(t)) < len(t) for t in terms):
        raise UnsupportedError(
            f"np.einsum({subscripts!r}) is not recorded: an ellipsis, or a letter twice in one "
            "operand. Name every axis once; take diagonals with indexing"
        )
    return apply(EINSUM, operands, subscripts=text)
