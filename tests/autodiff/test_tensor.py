"""A Tensor in NumPy's own protocols, and what it refuses."""

import numpy as np
import pytest

import gpuattn
from gpuattn import Tensor, to_cpu
from gpuattn.errors import GradientError, UnsupportedError


def test_the_sentence_of_the_readme(xp):
    rng = np.random.default_rng(0)
    x, y = (xp.asarray(rng.standard_normal(s)) for s in ((5, 3), (5, 4)))
    w = Tensor(xp.asarray(rng.standard_normal((3, 4))), requires_grad=True)
    loss = np.mean((np.tanh(x @ w) - y) ** 2)
    loss.backward()
    t = np.tanh(to_cpu(x) @ w.numpy())
    want = to_cpu(x).T @ (2 * (t - to_cpu(y)) * (1 - t * t)) / 20
    np.testing.assert_allclose(to_cpu(w.grad), want, rtol=1e-12)
    assert gpuattn.get_xp(w.grad) is xp


@pytest.mark.parametrize("fun", [
    lambda a, t: a + t, lambda a, t: a - t, lambda a, t: a * t, lambda a, t: a / t,
    lambda a, t: a @ t, lambda a, t: a**t,
])  # fmt: skip
def test_plain_array_on_either_side(xp, fun):
    a, t = xp.full((2, 2), 2.0), Tensor(xp.full((2, 2), 3.0), requires_grad=True)
    for left, right in ((a, t), (t, a)):
        out = fun(left, right)
        assert isinstance(out, Tensor)
        out.sum().backward()
        want = fun(
            to_cpu(gpuattn.autodiff.tape.raw(left)), to_cpu(gpuattn.autodiff.tape.raw(right))
        )
        np.testing.assert_allclose(out.numpy(), want)


@pytest.mark.parametrize("fun", [
    lambda t: 2 + t, lambda t: 2 - t, lambda t: 2 * t, lambda t: 2 / t, lambda t: 2**t,
    lambda t: t + 2, lambda t: t - 2, lambda t: t * 2, lambda t: t / 2, lambda t: t**2,
])  # fmt: skip
def test_python_numbers(fun):
    t = Tensor(np.array([3.0], np.float32), requires_grad=True)
    assert fun(t).dtype == np.float32
    assert fun(t).item() == pytest.approx(fun(3.0), rel=1e-6)


def test_comparisons_are_plain_arrays():
    t = Tensor(np.array([1.0, 2.0]))
    assert type(t > 1.5) is np.ndarray
    assert type(np.isnan(t)) is np.ndarray
    assert np.argmax(t) == 1


def test_unknown_function_is_named():
    with pytest.raises(UnsupportedError, match=r"np\.svd has no gradient rule"):
        np.linalg.svd(Tensor(np.eye(2), requires_grad=True))
    with pytest.raises(UnsupportedError, match=r"np\.arcsin"):
        np.arcsin(Tensor(np.ones(2)))


def test_out_is_refused():
    with pytest.raises(UnsupportedError, match="out="):
        np.exp(Tensor(np.ones(2)), out=np.empty(2))
    with pytest.raises(UnsupportedError, match="out="):
        np.sum(Tensor(np.ones(2)), out=np.empty(()))


def test_ufunc_methods_say_what_to_use():
    with pytest.raises(UnsupportedError, match=r"np\.add\.reduce is not recorded; use np\.sum"):
        np.add.reduce(Tensor(np.ones(2)))


def test_unsupported_argument_is_named():
    with pytest.raises(UnsupportedError, match="initial"):
        np.sum(Tensor(np.ones(2)), initial=3)


def test_asarray_never_drops_the_record():
    with pytest.raises(TypeError, match=r"x\.numpy\(\)"):
        np.asarray(Tensor(np.ones(2)))


def test_a_loss_must_be_one_number():
    x = Tensor(np.ones(3), requires_grad=True)
    with pytest.raises(GradientError, match=r"shape \(3,\)"):
        (x * 2).backward()


def test_backward_of_nothing_recorded():
    with pytest.raises(GradientError, match="requires_grad=True"):
        Tensor(np.ones(())).backward()


def test_integer_leaf_is_refused():
    with pytest.raises(TypeError, match="int64; cast"):
        Tensor(np.arange(3), requires_grad=True)


def test_wrong_gradient_shape():
    x = Tensor(np.ones(3), requires_grad=True)
    with pytest.raises(GradientError, match=r"shape \(2,\), want \(3,\)"):
        (x * 2).backward(np.ones(2))


def test_repr_says_where_and_what():
    x = Tensor(np.ones(1), requires_grad=True)
    assert "numpy, requires_grad=True" in repr(x)
    assert "by np.exp" in repr(np.exp(x))


def test_numpy_and_cupy_do_not_mix(gpu):
    with pytest.raises(TypeError):
        Tensor(np.ones(2), requires_grad=True) + gpu.ones(2)
