"""Functions made of others: NumPy's values, and derivatives of first and second order."""

import numpy as np
import pytest

from gpuattn import Tensor, gradcheck, to_cpu
from gpuattn.errors import UnsupportedError

MATRIX, VECTOR, STACK = (4, 3), (5,), (2, 3, 3)
ONE = {
    "prod": (np.prod, MATRIX), "prod axis": (lambda x: np.prod(x, axis=1), MATRIX),
    "prod keepdims": (lambda x: np.prod(x, axis=0, keepdims=True), MATRIX),
    "norm": (np.linalg.norm, MATRIX), "norm vector": (np.linalg.norm, VECTOR),
    "norm rows": (lambda x: np.linalg.norm(x, axis=-1, keepdims=True), MATRIX),
    "norm 1": (lambda x: np.linalg.norm(x, 1, axis=0), MATRIX),
    "norm inf": (lambda x: np.linalg.norm(x, np.inf), VECTOR),
    "norm fro": (lambda x: np.linalg.norm(x, "fro", axis=(1, 2)), STACK),
    "diagonal": (np.diagonal, MATRIX), "diagonal below": (lambda x: np.diagonal(x, -1), MATRIX),
    "diagonal of axes": (lambda x: np.diagonal(x, 1, 0, 2), STACK),
    "diag out": (lambda x: np.diag(x, 1), MATRIX), "diag in": (lambda x: np.diag(x, -2), VECTOR),
    "trace": (np.trace, MATRIX), "trace of stacks": (lambda x: np.trace(x, 0, 1, 2), STACK),
    "repeat": (lambda x: np.repeat(x, 2), MATRIX),
    "repeat each": (lambda x: np.repeat(x, [0, 2, 1], axis=1), MATRIX),
    "tile": (lambda x: np.tile(x, 2), MATRIX),
    "tile more": (lambda x: np.tile(x, (2, 1, 3)), MATRIX),
    "roll": (lambda x: np.roll(x, 2), MATRIX), "roll axis": (lambda x: np.roll(x, -1, 1), MATRIX),
    "roll axes": (lambda x: np.roll(x, (1, 2), (0, 1)), MATRIX),
    "pad": (lambda x: np.pad(x, 1), MATRIX),
    "pad sides": (lambda x: np.pad(x, ((0, 2), (1, 0)), constant_values=3.0), MATRIX),
    "diff": (lambda x: np.diff(x, axis=0), MATRIX), "diff 2": (lambda x: np.diff(x, 2), VECTOR),
    "sort": (np.sort, MATRIX), "sort flat": (lambda x: np.sort(x, axis=None), MATRIX),
    "take_along_axis": (
        lambda x: np.take_along_axis(x, np.array([[2], [0], [0], [1]]), axis=1), MATRIX
    ),
    "take_along_axis one row": (
        lambda x: np.take_along_axis(x, np.array([[2, 1]]), axis=-1), MATRIX
    ),
    "take_along_axis flat": (
        lambda x: np.take_along_axis(x, np.array([7, 7, 1]), axis=None), MATRIX
    ),
    "vstack": (lambda x: np.vstack([x[0], x]), MATRIX),
    "hstack": (lambda x: np.hstack([x, x[:, :1]]), MATRIX),
    "hstack vectors": (lambda x: np.hstack([x, x[:2]]), VECTOR),
}  # fmt: skip
TWO = {
    "outer": (np.outer, (4,), (3,)), "inner": (np.inner, (4, 3), (2, 3)),
    "inner vectors": (np.inner, (3,), (3,)), "vecdot": (np.vecdot, (4, 3), (3,)),
    "dot number": (np.dot, (), (3, 2)), "inner number": (np.inner, (2, 2), ()),
    "dot deep": (np.dot, (2, 4, 3), (5, 3, 2)), "dot vector": (np.dot, (2, 4, 3), (3,)),
    "tensordot": (np.tensordot, (2, 4, 3), (4, 3, 5)),
    "tensordot axes": (lambda a, b: np.tensordot(a, b, axes=([0, -1], [1, 0])), (2, 4, 3), (3, 2)),
    "tensordot 0": (lambda a, b: np.tensordot(a, b, 0), (2,), (3,)),
}  # fmt: skip
if hasattr(np, "matvec"):
    TWO |= {"matvec": (np.matvec, (2, 4, 3), (3,)), "vecmat": (np.vecmat, (4,), (2, 4, 3))}
CASES = {name: (fun, [shape]) for name, (fun, shape) in ONE.items()}
CASES |= {name: (fun, shapes) for name, (fun, *shapes) in TWO.items()}


@pytest.mark.parametrize("fun, shapes", CASES.values(), ids=CASES)
def test_values_are_those_of_numpy(rng, xp, fun, shapes):
    inputs = [rng.standard_normal(shape) for shape in shapes]
    want = fun(*inputs)
    got = fun(*[Tensor(xp.asarray(x), requires_grad=True) for x in inputs])
    assert isinstance(got, Tensor)
    assert got.shape == want.shape
    np.testing.assert_allclose(to_cpu(got.data), want, rtol=1e-12)


@pytest.mark.parametrize("fun, shapes", CASES.values(), ids=CASES)
def test_derivatives(rng, fun, shapes):
    inputs = [rng.standard_normal(shape) for shape in shapes]
    assert gradcheck(lambda *xs: fun(*xs) ** 2, *inputs, order=2, tol=2e-6) <= 2e-6


def test_a_product_with_zeros(xp):
    x = Tensor(xp.asarray([2.0, 0.0, 3.0]), requires_grad=True)
    np.prod(x).backward()
    assert to_cpu(x.grad).tolist() == [0.0, 6.0, 0.0]
    assert np.prod(x[:0]).item() == 1.0


def test_the_norm_of_zero_has_a_gradient_of_zero(xp):
    x = Tensor(xp.zeros(3), requires_grad=True)
    np.linalg.norm(x).backward()
    assert to_cpu(x.grad).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("fun", [
    lambda x: np.linalg.norm(x, 2), lambda x: np.linalg.norm(x, "nuc"),
    lambda x: np.pad(x, 1, "edge"), lambda x: np.prod(x, axis=(0, 1)),
])  # fmt: skip
def test_what_is_not_recorded_is_said(fun):
    with pytest.raises(UnsupportedError, match="recorded"):
        fun(Tensor(np.ones((2, 2)), requires_grad=True))
