"""Functions composed of others: NumPy's values, and first and second derivatives."""

import numpy as np
import pytest

from gpuattn import Tensor, gradcheck, to_cpu
from gpuattn.errors import UnsupportedError

MATRIX, VECTOR, STACK = (4, 3), (5,), (2, 3, 3)
ONE = {
    "prod": (np.prod, MATRIX), "prod axis": (lambda x: np.prod(x, axis=1), MATRIX),
    "prod keepdims": (lambda x: np.prod(x, axis=0, keepdims=True), MATRIX),
    "cumprod": (np.cumprod, MATRIX), "cumprod axis": (lambda x: np.cumprod(x, axis=1), STACK),
    "cumprod long": (lambda x: x.cumprod(-1), (2, 9)),
    "average": (np.average, MATRIX),
    "average rows": (lambda x: np.average(x, axis=1, weights=[1.0, 2.0, 4.0]), MATRIX),
    "median": (np.median, MATRIX), "median axis": (lambda x: np.median(x, axis=1), MATRIX),
    "median keepdims": (lambda x: np.median(x, axis=(2, 0), keepdims=True), STACK),
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
    "average": (lambda a, w: np.average(a, weights=w**2 + 1), (4, 3), (4, 3)),
    "average axes": (
        lambda a, w: np.average(a, axis=(2, 0), weights=w**2 + 1, keepdims=True), (4, 3, 2), (2, 4)
    ),
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


@pytest.mark.parametrize("zeros", [[1], [0], [3], [1, 2], [0, 1, 2, 3]], ids=str)
def test_cumulative_products_with_zeros(xp, zeros):
    """Compared with sums over all products without the factor of the derivative."""
    x, grad = np.array([2.0, -3.0, 5.0, 7.0]), np.array([1.0, 10.0, 100.0, 1000.0])
    x[zeros] = 0
    leaf = Tensor(xp.asarray(x), requires_grad=True)
    np.cumprod(leaf).backward(xp.asarray(grad))
    want = [sum(grad[j] * np.prod(np.delete(x[: j + 1], i)) for j in range(i, 4)) for i in range(4)]
    np.testing.assert_allclose(to_cpu(leaf.grad), want)


def test_cumulative_products_of_small_arrays(xp):
    for shape in ((0,), (1,), (0, 2)):
        x = Tensor(xp.ones(shape), requires_grad=True)
        np.cumprod(x, axis=0).sum().backward()
        assert to_cpu(x.grad).tolist() == np.ones(shape).tolist()


def test_ties_of_the_median_share_the_gradient(xp):
    x = xp.asarray([[3.0, 1.0, 3.0, 9.0], [2.0, 2.0, 2.0, 8.0], [4.0, 6.0, 4.0, 6.0]])
    x = Tensor(x, requires_grad=True)
    np.median(x, axis=1).sum().backward()
    want = [[0.5, 0, 0.5, 0], [1 / 3, 1 / 3, 1 / 3, 0], [0.25, 0.25, 0.25, 0.25]]
    np.testing.assert_allclose(to_cpu(x.grad), want)


def test_the_median_of_nan_is_nan(xp):
    x = Tensor(xp.asarray([[1.0, np.nan, 3.0], [1.0, np.inf, 3.0]]), requires_grad=True)
    out = np.median(x, axis=1)
    np.testing.assert_array_equal(to_cpu(out.data), [np.nan, 3.0])
    with np.errstate(invalid="ignore"):
        out.sum().backward()
    np.testing.assert_array_equal(to_cpu(x.grad), [[np.nan] * 3, [0.0, 0.0, 1.0]])


def test_16_bit_products_and_medians_are_rounded_once(xp):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 8)).astype(np.float16)
    for fun in (lambda x: np.cumprod(x, axis=1), lambda x: np.median(x, axis=1)):
        exact, found = (Tensor(xp.asarray(x.astype(dtype)), requires_grad=True) for dtype in "df")
        half = Tensor(xp.asarray(x), requires_grad=True)
        outs = [fun(t) for t in (exact, found, half)]
        for out in outs:
            out.sum().backward()
        assert outs[2].dtype == half.grad.dtype == np.float16
        np.testing.assert_allclose(outs[2].numpy(), outs[0].numpy(), rtol=1e-3)
        np.testing.assert_allclose(to_cpu(half.grad), to_cpu(exact.grad), rtol=2e-3, atol=1e-4)


def test_averages_with_invalid_weights_are_refused():
    x = Tensor(np.ones((2, 3)), requires_grad=True)
    with pytest.raises(ZeroDivisionError, match=r"np\.average"):
        np.average(x, weights=np.zeros((2, 3)))
    with pytest.raises(ValueError, match=r"np\.average: weights\.shape is \(2,\)"):
        np.average(x, axis=1, weights=np.ones(2))
    with pytest.raises(ValueError, match=r"weights\.shape is \(3,\); accepted: \(2, 3\)"):
        np.average(x, weights=np.ones(3))


def test_the_norm_of_zero_has_a_gradient_of_zero(xp):
    x = Tensor(xp.zeros(3), requires_grad=True)
    np.linalg.norm(x).backward()
    assert to_cpu(x.grad).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("fun", [
    lambda x: np.linalg.norm(x, 2), lambda x: np.linalg.norm(x, "nuc"),
    lambda x: np.pad(x, 1, "edge"), lambda x: np.prod(x, axis=(0, 1)),
    lambda x: np.average(x, returned=True), lambda x: np.median(x, overwrite_input=True),
    lambda x: np.median(x[:0]), lambda x: np.linalg.cholesky(x, upper=True),
])  # fmt: skip
def test_unrecorded_functions_are_refused(fun):
    with pytest.raises(UnsupportedError, match="recorded"):
        fun(Tensor(np.ones((2, 2)), requires_grad=True))
