"""Linear algebra on the tape: NumPy's values, first and second derivatives, singular matrices."""

import numpy as np
import pytest

from gpuattn import Tensor, get_xp, grad, gradcheck, to_cpu
from gpuattn.autodiff import backward_pass, tape


def identity(x):
    return get_xp(tape.raw(x)).eye(x.shape[-1])


def regular(x):
    """Add to the diagonal so that the matrices of ``x`` are invertible."""
    return x + 3 * identity(x)


def positive(x):
    return x @ np.swapaxes(x, -1, -2) + identity(x)


ONE, STACK = (3, 3), (2, 4, 3, 3)
CASES = {
    "inv": (np.linalg.inv, regular, [ONE]), "inv stack": (np.linalg.inv, regular, [STACK]),
    "inv number": (np.linalg.inv, regular, [(1, 1)]),
    "det": (np.linalg.det, regular, [ONE]), "det stack": (np.linalg.det, regular, [STACK]),
    "cholesky": (np.linalg.cholesky, positive, [ONE]),
    "cholesky stack": (np.linalg.cholesky, positive, [STACK]),
    "solve": (np.linalg.solve, regular, [ONE, (3, 2)]),
    "solve vector": (np.linalg.solve, regular, [ONE, (3,)]),
    "solve stack": (np.linalg.solve, regular, [STACK, (2, 4, 3, 2)]),
    "solve stack and vector": (np.linalg.solve, regular, [STACK, (3,)]),
    "solve one and stack": (np.linalg.solve, regular, [ONE, (2, 4, 3, 2)]),
    "solve stacks that broadcast": (np.linalg.solve, regular, [(2, 1, 3, 3), (4, 3, 2)]),
}  # fmt: skip


@pytest.mark.parametrize("fun, prepare, shapes", CASES.values(), ids=CASES)
def test_values_and_derivatives(rng, xp, fun, prepare, shapes):
    inputs = [rng.standard_normal(shape) for shape in shapes]

    def call(a, *b):
        return fun(prepare(a), *b)

    want = fun(prepare(inputs[0]), *inputs[1:])
    arrays = [xp.asarray(x) for x in inputs]
    got = call(*[Tensor(x, requires_grad=True) for x in arrays])
    assert isinstance(got, Tensor) and got.shape == want.shape
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-10, atol=1e-12)

    def squared(*xs):  # always Tensors, because CuPy's solve does not broadcast stacks
        return call(*[x if isinstance(x, Tensor) else Tensor(x) for x in xs]) ** 2

    assert gradcheck(squared, *arrays, order=2, tol=1e-5) <= 1e-5


def test_the_determinant_of_singular_matrices_has_its_cofactors(xp):
    rank_2 = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]])
    rank_1 = np.outer([1.0, 2.0, 3.0], [1.0, -1.0, 2.0])
    x = np.stack([rank_2, rank_1, np.zeros((3, 3)), np.eye(3)])
    leaf = Tensor(xp.asarray(x), requires_grad=True)
    np.linalg.det(leaf).sum().backward()
    want = np.empty_like(x)
    for n, i, j in np.ndindex(x.shape):
        minor = np.delete(np.delete(x[n], i, 0), j, 1)
        want[n, i, j] = (-1) ** (i + j) * (minor[0, 0] * minor[1, 1] - minor[0, 1] * minor[1, 0])
    np.testing.assert_allclose(to_cpu(leaf.grad), want, atol=1e-12)


def test_the_gradient_of_cholesky_is_symmetric(rng, xp):
    x = positive(rng.standard_normal((2, 4, 4)))
    found = to_cpu(grad(lambda a: np.sum(np.linalg.cholesky(a) ** 3))(xp.asarray(x)))
    np.testing.assert_allclose(found, np.swapaxes(found, -1, -2), atol=1e-12)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_dtypes_stay(xp, dtype):
    b = Tensor(xp.ones((2, 2), dtype), requires_grad=True)
    for fun in (np.linalg.inv, np.linalg.det, np.linalg.cholesky, lambda x: np.linalg.solve(x, b)):
        x = Tensor(2 * xp.eye(2, dtype=dtype), requires_grad=True)
        out = fun(x)
        out.sum().backward()
        assert out.dtype == x.grad.dtype == dtype
    assert b.grad.dtype == dtype


def test_gradients_of_a_mixed_system_have_the_dtypes_of_its_sides():
    a = Tensor(2 * np.eye(2, dtype=np.float32), requires_grad=True)
    b = Tensor(np.ones(2), requires_grad=True)
    x = np.linalg.solve(a, b)
    found = backward_pass.gradients([x], [np.ones(2)], [a, b])
    assert [g.dtype for g in found] == [np.float32, np.float64]


def test_matrices_without_elements(xp):
    x = Tensor(xp.zeros((2, 0, 0)), requires_grad=True)
    out = np.linalg.det(x)
    assert out.tolist() == [1.0, 1.0]
    out.sum().backward()
    assert x.grad.shape == (2, 0, 0)


def test_what_numpy_refuses_is_refused():
    with pytest.raises(np.linalg.LinAlgError, match="[Ss]ingular"):
        np.linalg.inv(Tensor(np.zeros((2, 2)), requires_grad=True))
    with pytest.raises(np.linalg.LinAlgError, match="square"):
        np.linalg.det(Tensor(np.zeros((2, 3)), requires_grad=True))
