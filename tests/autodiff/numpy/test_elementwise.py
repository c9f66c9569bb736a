"""First and second derivatives of every function in the table, for various shapes."""

import numpy as np
import pytest
from fake_graphs import graphs_on

from gpuattn import Tensor, gradcheck, to_cpu
from gpuattn.autodiff import backward_pass
from gpuattn.autodiff.numpy.elementwise import PLAIN, RULES
from gpuattn.errors import UnsupportedError

MATRIX = {"shape": (4, 3), "low": -2.0}
POSITIVE = {"shape": (4, 3), "low": 0.3}
UNIT = {"shape": (4, 3), "low": -0.9, "high": 0.9}
ONE = {
    "negative": (np.negative, MATRIX), "positive": (np.positive, MATRIX),
    "absolute": (np.absolute, MATRIX), "square": (np.square, MATRIX),
    "sqrt": (np.sqrt, POSITIVE), "reciprocal": (np.reciprocal, POSITIVE),
    "exp": (np.exp, MATRIX), "exp2": (np.exp2, MATRIX), "expm1": (np.expm1, MATRIX),
    "log": (np.log, POSITIVE), "log2": (np.log2, POSITIVE), "log10": (np.log10, POSITIVE),
    "log1p": (np.log1p, POSITIVE), "sin": (np.sin, MATRIX), "cos": (np.cos, MATRIX),
    "tan": (np.tan, {"shape": (4, 3), "low": -0.5}), "sinh": (np.sinh, MATRIX),
    "cosh": (np.cosh, MATRIX), "tanh": (np.tanh, MATRIX), "arctan": (np.arctan, MATRIX),
    "arcsin": (np.arcsin, UNIT), "arccos": (np.arccos, UNIT), "arctanh": (np.arctanh, UNIT),
    "arcsinh": (np.arcsinh, MATRIX), "arccosh": (lambda x: np.arccosh(x + 1), POSITIVE),
    "sum": (np.sum, MATRIX), "sum axis": (lambda x: np.sum(x, axis=0), MATRIX),
    "sum keepdims": (lambda x: np.sum(x, axis=(0, 1), keepdims=True), MATRIX),
    "mean": (np.mean, MATRIX), "mean axis": (lambda x: np.mean(x, axis=-1), MATRIX),
    "max": (np.max, MATRIX), "max axis": (lambda x: x.max(1), MATRIX),
    "min": (lambda x: np.min(x, axis=0, keepdims=True), MATRIX),
    "var": (lambda x: np.var(x, axis=1, ddof=1), MATRIX), "std": (np.std, MATRIX),
    "cumsum": (lambda x: np.cumsum(x, axis=1) ** 2, MATRIX),
    "cumsum flat": (lambda x: np.cumsum(x) ** 2, MATRIX),
    "clip": (lambda x: np.clip(x, -0.7, 0.9) ** 2, MATRIX),
    "where": (lambda x: np.where(x.data > 0 if isinstance(x, Tensor) else x > 0, x**2, x), MATRIX),
    "reshape": (lambda x: np.reshape(x, (3, 4)) ** 2, MATRIX),
    "ravel": (lambda x: np.ravel(x) ** 2, MATRIX),
    "transpose": (lambda x: np.transpose(x) ** 2, MATRIX), "T": (lambda x: x.T ** 2, MATRIX),
    "swapaxes": (lambda x: np.swapaxes(x, 0, 1) ** 2, MATRIX),
    "moveaxis": (lambda x: np.moveaxis(x, 0, -1) ** 2, MATRIX),
    "expand": (lambda x: np.expand_dims(x, 1) ** 2, MATRIX),
    "squeeze": (lambda x: np.squeeze(np.expand_dims(x, 1), 1) ** 2, MATRIX),
    "broadcast_to": (lambda x: np.broadcast_to(x, (2, 4, 3)) ** 2, MATRIX),
    "flip": (lambda x: np.flip(x, 0) * x, MATRIX), "tril": (lambda x: np.tril(x) ** 2, MATRIX),
    "triu": (lambda x: np.triu(x, 1) ** 2, MATRIX),
    "slice": (lambda x: x[1:, ::-2] ** 2, MATRIX), "integer": (lambda x: x[2] ** 2, MATRIX),
    "indices": (lambda x: x[[0, 0, 3]] ** 2, MATRIX),
    "pairs": (lambda x: x[np.array([0, 0, 1]), np.array([2, 2, 1])] ** 2, MATRIX),
    "newaxis": (lambda x: x[:, None, 1] ** 2, MATRIX),
    "take flat": (lambda x: np.take(x, [5, 5, 0]) ** 2, MATRIX),
    "take": (lambda x: np.take(x, [1, 1, 0], axis=1) ** 2, MATRIX),
    "concatenate": (lambda x: np.concatenate([x, x * 2, x[:1]], axis=0) ** 2, MATRIX),
    "stack": (lambda x: np.stack([x, x**2], axis=1) ** 2, MATRIX),
    "split": (lambda x: np.split(x, [1], axis=0)[1] ** 2, MATRIX),
    "split both": (lambda x: np.multiply(*np.split(x, 2, axis=0)), MATRIX),
    "astype": (lambda x: x.astype(np.float64) ** 2, MATRIX),
    "iterate": (lambda x: sum(row.sum() ** 2 for row in x), MATRIX),
}  # fmt: skip
TWO = {
    "add": lambda a, b: a + b, "subtract": lambda a, b: a - b, "multiply": lambda a, b: a * b,
    "divide": lambda a, b: a / b, "power": lambda a, b: a**b, "maximum": np.maximum,
    "minimum": np.minimum, "logaddexp": np.logaddexp, "arctan2": np.arctan2, "hypot": np.hypot,
    "where": lambda a, b: np.where(np.array([True, False, True]), a * b, b),
}  # fmt: skip
SHAPES = {
    "same": ((4, 3), (4, 3)), "row": ((4, 3), (3,)), "column": ((4, 1), (1, 3)),
    "number": ((), (4, 3)), "deep": ((2, 1, 3), (4, 3)),
}  # fmt: skip
PRODUCTS = {
    "matrices": ((4, 3), (3, 5)), "stacks": ((2, 4, 3), (2, 3, 5)),
    "broadcast": ((2, 4, 3), (3, 5)),
    "vector right": ((4, 3), (3,)), "vector left": ((3,), (3, 5)), "vectors": ((3,), (3,)),
    "vector stack": ((3,), (2, 3, 5)), "stack vector": ((2, 4, 3), (3,)),
}  # fmt: skip
EINSUMS = {
    "ij,jk": ((4, 3), (3, 2)), "ji": ((4, 3),),
    "ij,jk->ik": ((4, 3), (3, 2)), "bij,bkj->bik": ((2, 4, 3), (2, 5, 3)),
    "ij,ij": ((4, 3), (4, 3)), "i,j->ij": ((4,), (3,)), "ij->j": ((4, 3),),
    "ij,j->": ((4, 3), (3,)), "ij,k->ki": ((4, 3), (2,)),
}  # fmt: skip


def draw(rng, shape, low=-2.0, high=2.0):
    return rng.uniform(low, high, shape)


@pytest.mark.parametrize("fun, draws", ONE.values(), ids=ONE)
def test_one_argument(rng, fun, draws):
    assert gradcheck(fun, draw(rng, **draws), order=2, tol=2e-6) <= 2e-6


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("fun", TWO.values(), ids=TWO)
def test_two_arguments_broadcast(rng, fun, shapes):
    a, b = (draw(rng, shape, low=0.3) for shape in shapes)
    assert gradcheck(fun, a, b, order=2, tol=2e-6) <= 2e-6


@pytest.mark.parametrize("shapes", PRODUCTS.values(), ids=PRODUCTS)
def test_matmul(rng, shapes):
    assert gradcheck(np.matmul, *[draw(rng, s) for s in shapes], order=2) <= 1e-6


@pytest.mark.parametrize("subscripts", EINSUMS)
def test_einsum(rng, subscripts):
    operands = [draw(rng, s) for s in EINSUMS[subscripts]]
    assert gradcheck(lambda *xs: np.einsum(subscripts, *xs) ** 2, *operands, order=2) <= 1e-6


def test_at_least_45_functions_are_recorded():
    assert len(RULES) >= 45
    assert not set(RULES) & PLAIN


def test_the_gradient_of_power_zero_is_zero(xp):
    x = Tensor(xp.asarray([0.0, 2.0]), requires_grad=True)
    (x**0).sum().backward()
    assert to_cpu(x.grad).tolist() == [0.0, 0.0]


def test_where_ignores_infinite_gradients_of_unchosen_values(xp):
    x = Tensor(xp.asarray([0.0, 4.0]), requires_grad=True)
    y = np.where(x > 0, x, 1.0)
    slope = xp.asarray([np.inf, 1.0])
    y.backward(slope)
    assert to_cpu(x.grad).tolist() == [0.0, 1.0]


def test_gradients_of_joined_arrays_have_their_dtypes():
    a = Tensor(np.ones(2, np.float32), requires_grad=True)
    joined = np.concatenate([a * 1, np.ones(2)])
    assert joined.dtype == np.float64
    (found,) = backward_pass.gradients([joined], [np.ones(4)], [a])
    assert found.dtype == np.float32


def test_the_gradient_of_a_cast_is_cast_back():
    x = Tensor(np.ones(2), requires_grad=True)
    (found,) = backward_pass.gradients([x.astype(np.float32) * 3], [np.ones(2, np.float32)], [x])
    assert found.dtype == np.float64
    assert found.tolist() == [3.0, 3.0]


def test_gradients_of_16_bit_items_are_summed_in_float32():
    x = Tensor(np.ones(2, np.float16), requires_grad=True)
    x[np.zeros(5000, int)].sum().backward()
    assert x.grad.tolist() == [5000.0, 0.0]


def test_ties_of_max_share_the_gradient(xp):
    x = Tensor(xp.asarray([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]]), requires_grad=True)
    np.max(x, axis=1).sum().backward()
    np.testing.assert_allclose(to_cpu(x.grad), [[0, 0.5, 0.5], [1 / 3, 1 / 3, 1 / 3]])


def test_ties_of_maximum_are_halved():
    a, b = (Tensor(np.array([1.0, 2.0]), requires_grad=True) for _ in "ab")
    np.maximum(a, b).sum().backward()
    assert a.grad.tolist() == b.grad.tolist() == [0.5, 0.5]


def test_second_derivative_in_closed_form():
    from gpuattn import grad

    third = grad(grad(grad(lambda x: np.sin(x) * x**2)))
    x = 0.7
    want = -(x**2) * np.cos(x) - 6 * x * np.sin(x) + 6 * np.cos(x)
    assert abs(float(third(x)) - want) < 1e-12


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_dtypes_stay_and_scalars_do_not_promote(xp, dtype):
    from gpuattn.arrays import BFLOAT16

    dtype = BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype)
    x = Tensor(xp.ones((2, 3), dtype), requires_grad=True)
    y = np.exp(x * 2.5) + 1
    assert y.dtype == dtype
    y.sum().backward()
    assert x.grad.dtype == dtype


def test_sixteen_bit_sums_are_accumulated_in_float32():
    from gpuattn.arrays import BFLOAT16

    x = Tensor(np.ones(4096, BFLOAT16))
    assert float(np.sum(x)) == 4096.0  # NumPy alone gives 256
    assert float(np.mean(x)) == 1.0


def test_unrecorded_einsum_arguments_are_refused():
    x = Tensor(np.eye(3), requires_grad=True)
    with pytest.raises(UnsupportedError, match="letter twice"):
        np.einsum("ii->i", x)


def test_arrays_of_two_gpus_are_refused():
    with graphs_on("9.0") as cp:
        x, y = (Tensor(cp.full((2, 3), 1, np.float32)) for _ in range(2))
        np.testing.assert_array_equal((x + y).data, 2)
        y.data.number = 1
        for call in (lambda: x + y, lambda: x * y, lambda: x - y):
            with pytest.raises(ValueError, match=r"several GPUs: {0: [01], 1: [01]}. Copy them"):
                call()
