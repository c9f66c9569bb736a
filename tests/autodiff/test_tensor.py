"""A Tensor in NumPy's protocols, and refused operations."""

import copy
import gc
import pickle

import numpy as np
import pytest

import gpuattn
from gpuattn import Tensor, to_cpu, topk_logprobs
from gpuattn.errors import GradientError, UnsupportedError


def test_the_example_of_the_readme(xp):
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
    for found, want in (
        (t > 1.5, [False, True]), (t >= 2, [False, True]), (t < 2, [True, False]),
        (t <= 1, [True, False]), (t == 1, [True, False]), (t != t, [False, False]),
    ):  # fmt: skip
        assert type(found) is np.ndarray
        assert found.tolist() == want
    assert type(np.isnan(t)) is np.ndarray
    assert np.argmax(t) == 1


def test_unknown_function_is_named():
    with pytest.raises(UnsupportedError, match=r"np\.linalg\.svd has no gradient rule"):
        np.linalg.svd(Tensor(np.eye(2), requires_grad=True))
    with pytest.raises(UnsupportedError, match=r"np\.spacing"):
        np.spacing(Tensor(np.ones(2)))


def test_out_is_refused():
    with pytest.raises(UnsupportedError, match="out="):
        np.exp(Tensor(np.ones(2)), out=np.empty(2))
    with pytest.raises(UnsupportedError, match="out="):
        np.sum(Tensor(np.ones(2)), out=np.empty(()))


def test_ufunc_methods_name_the_alternative():
    with pytest.raises(UnsupportedError, match=r"np\.add\.reduce is not recorded; use np\.sum"):
        np.add.reduce(Tensor(np.ones(2)))


def test_array_methods():
    t = Tensor(np.array([[1.0, -2.0], [3.0, 4.0]]), requires_grad=True)
    assert t.clip(0, 3).data.tolist() == [[1.0, 0.0], [3.0, 3.0]]
    assert t.flatten().dot(t.ravel()).item() == 30.0
    assert t.prod(axis=0).data.tolist() == [3.0, -8.0]
    assert t.repeat(2, axis=1).shape == (2, 4)
    assert t.take([0], axis=1).data.tolist() == [[1.0], [3.0]]
    assert t.argmax() == 3
    assert t.argmin(axis=1).tolist() == [1, 0]
    assert f"{t.sum():.2f}" == "6.00"
    assert f"{t}".startswith("Tensor(array(")


def test_in_place_operators_return_a_new_tensor():
    t = Tensor(np.ones(2, np.float32), requires_grad=True)
    y = t * 1
    before = y
    y += np.float32(2)
    assert before.data.tolist() == [1.0, 1.0]
    y.sum().backward()
    assert t.grad.tolist() == [1.0, 1.0]
    plain = np.ones(2, np.float32)
    with pytest.raises(UnsupportedError, match="out= cannot be recorded"):
        plain += t


def test_numpy_scalars_and_booleans_on_either_side():
    t = Tensor(np.ones((2, 2), np.float32), requires_grad=True)
    for out in (np.float32(2) * t, t * np.float32(2), True * t, t + True, np.True_ * t):
        assert isinstance(out, Tensor)
        assert out.dtype == np.float32
    with pytest.raises(ValueError, match="broadcast"):
        t + np.ones(3, np.float32)


def test_empty_arrays(xp):
    t = Tensor(xp.zeros((0, 3), "float32"), requires_grad=True)
    assert to_cpu((t @ xp.ones((3, 2), "float32")).data).shape == (0, 2)
    np.sum(np.exp(t) * 2, axis=0).sum().backward()
    assert t.grad.shape == (0, 3)


def test_arguments_have_the_names_of_numpy():
    t = Tensor(np.arange(6.0).reshape(2, 3), requires_grad=True)
    assert np.clip(t, a_min=1, a_max=2).data.max() == 2
    assert np.clip(t, min=1).data.min() == 1
    assert np.swapaxes(t, axis1=0, axis2=1).shape == (3, 2)
    assert len(np.split(t, indices_or_sections=3, axis=1)) == 3
    assert np.moveaxis(t, (0, 1), (1, 0)).shape == (3, 2)
    assert np.concatenate([t, t], axis=None).shape == (12,)
    assert [a.tolist() for a in np.where(t)] == [[0, 0, 1, 1, 1], [1, 2, 0, 1, 2]]
    with pytest.raises(UnsupportedError, match=r"np\.sum: .*positional"):
        np.sum(t, 0, np.float64)


def test_integer_tensors_index():
    t, places = Tensor(np.arange(6.0).reshape(2, 3)), Tensor(np.array([2, 0]))
    assert t[0][places].data.tolist() == [2.0, 0.0]
    assert t[1:, places].data.tolist() == [[5.0, 3.0]]


def test_integer_results_need_no_gradient():
    best, where = topk_logprobs(Tensor(np.ones((2, 3)), requires_grad=True), 1)
    assert best.requires_grad
    assert not where.requires_grad


def test_unsupported_argument_is_named():
    with pytest.raises(UnsupportedError, match=r"np\.add: where= is not recorded"):
        np.add(Tensor(np.ones(2)), 1, where=np.array([True, False]))
    with pytest.raises(UnsupportedError, match="initial"):
        np.sum(Tensor(np.ones(2)), initial=3)


def test_asarray_of_a_tensor_is_refused():
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


def test_repr_names_device_and_content():
    x = Tensor(np.ones(1), requires_grad=True)
    assert "numpy, requires_grad=True" in repr(x)
    assert "by np.exp" in repr(np.exp(x))


def test_mixing_numpy_and_cupy_is_refused(gpu):
    with pytest.raises(TypeError):
        Tensor(np.ones(2), requires_grad=True) + gpu.ones(2)


@pytest.fixture
def unraisable(monkeypatch):
    """Return the errors that Python only prints, such as those of ``__del__``."""
    found = []
    monkeypatch.setattr("sys.unraisablehook", found.append)
    return found


def test_deep_copies_of_leaves(xp):
    x = Tensor(xp.asarray([1.0, 2.0]), requires_grad=True)
    (x * x).sum().backward()
    one, two = copy.deepcopy([x, x])
    assert one is two, "a tensor that is shared stays shared"
    assert one.requires_grad and one.tolist() == [1.0, 2.0]
    assert to_cpu(one.grad).tolist() == [2.0, 4.0]
    one[0] = 5.0
    one.grad[...] = 0
    assert x.tolist() == [1.0, 2.0] and to_cpu(x.grad).tolist() == [2.0, 4.0]


def test_deep_copies_of_results_are_refused(unraisable):
    x = Tensor(np.ones(2), requires_grad=True)
    y = np.exp(x)
    with pytest.raises(GradientError, match=r"a result of np\.exp .*leaves.*x\.detach\(\)"):
        copy.deepcopy(y)
    assert copy.deepcopy(y.detach()).tolist() == y.tolist()
    y.sum().backward()
    assert x.grad.tolist() == y.tolist()
    gc.collect()
    assert not unraisable


def test_a_copied_leaf_has_its_own_memory():
    x = Tensor(np.ones(2), requires_grad=True)
    y = x * x
    other = copy.deepcopy(x)
    other.data[0] = 3.0
    y.sum().backward()
    assert x.grad.tolist() == [2.0, 2.0]


def test_a_shallow_copy_is_another_name():
    x = Tensor(np.ones(2), requires_grad=True)
    y = copy.copy(np.exp(x))
    y.sum().backward()
    assert x.grad.tolist() == y.tolist()
    assert copy.copy(x).data is x.data


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles(xp, protocol, unraisable):
    x = Tensor(xp.asarray([1.0, 2.0]), requires_grad=True)
    y = np.exp(x) * x
    leaf, plain, result = pickle.loads(pickle.dumps((x, y.detach(), y), protocol))
    assert [t.requires_grad for t in (leaf, plain, result)] == [True, False, False]
    assert leaf.tolist() == x.tolist() and result.tolist() == plain.tolist() == y.tolist()
    assert gpuattn.get_xp(leaf.data) is xp
    for t in (leaf, plain, result):
        t[0] = 7.0  # also of arrays that the tape holds read-only
    y.sum().backward()
    gc.collect()
    assert not unraisable


def test_lists(xp):
    assert Tensor(xp.asarray([[1, 2], [3, 4]])).tolist() == [[1, 2], [3, 4]]
    assert Tensor(xp.asarray(2.5)).tolist() == 2.5


def test_dlpack_exports_a_tensor(xp):
    x = Tensor(xp.asarray([1.0, 2.0]))
    taken = xp.from_dlpack(x)
    assert gpuattn.arrays.same_memory(taken, x.data)
    assert x.__dlpack_device__() == x.data.__dlpack_device__()
    assert Tensor(x).tolist() == x.tolist(), "Tensor(tensor) wraps the same array"


def test_dlpack_export_of_a_recorded_tensor_is_refused(xp):
    x = Tensor(xp.ones(2), requires_grad=True)
    for wants in (x, np.exp(x)):
        with pytest.raises(BufferError, match=r"export x\.detach\(\)"):
            xp.from_dlpack(wants)
    with pytest.raises(TypeError, match=r"Tensor that requires a gradient.*\.detach\(\)"):
        Tensor(x)


def test_masked_arrays_do_not_become_tensors():
    with pytest.raises(TypeError, match="Tensor: data is a MaskedArray"):
        Tensor(np.ma.masked_array([1.0, 2.0], [True, False]))
