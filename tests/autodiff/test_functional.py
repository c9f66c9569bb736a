"""Gradients of functions, nested gradients, and checkpoint, which recomputes to save memory."""

import collections

import numpy as np
import pytest

from gpuattn import (
    Tensor,
    checkpoint,
    dropout,
    grad,
    gradcheck,
    linear,
    manual_seed,
    no_grad,
    softmax,
    stop_gradient,
    to_cpu,
    value_and_grad,
)  # fmt: skip
from gpuattn.autodiff import backward_pass, tape
from gpuattn.errors import GradientError, UnsupportedError
from gpuattn.impls import Impl, Impls


def test_grad_of_several_arguments(xp):
    a, b = xp.asarray([1.0, 2.0]), xp.asarray([3.0, 4.0])
    da, db = grad(lambda a, b: (a * b).sum(), argnums=(0, 1))(a, b)
    assert to_cpu(da).tolist() == [3.0, 4.0]
    assert to_cpu(db).tolist() == [1.0, 2.0]
    assert type(da) is type(a)


def test_value_and_structure():
    params = {"w": np.array([2.0]), "layers": [np.array([3.0]), (np.array([4.0]),)]}
    value, g = value_and_grad(lambda p: (p["w"] * p["layers"][0] * p["layers"][1][0]).sum())(params)
    assert value == 24.0
    assert type(value) is np.ndarray
    assert g["w"] == 12.0
    assert g["layers"][0] == 8.0
    assert g["layers"][1][0] == 6.0


def test_unused_argument_is_zero():
    assert grad(lambda a, b: (a * a).sum(), argnums=1)(np.ones(2), np.ones(3)).tolist() == [0, 0, 0]


def test_nested_gradients_keep_their_variables_apart():
    # d/dx [x * d/dy (x + y) at y = 1] = 1: the inner gradient must not include x
    outer = grad(lambda x: x * grad(lambda y: x + y)(1.0))
    assert float(outer(5.0)) == 1.0


def test_hessian_vector_product():
    def f(x):
        return (x**3).sum()

    x, v = np.array([1.0, 2.0]), np.array([1.0, -1.0])
    hvp = grad(lambda x: (grad(f)(x) * v).sum())(x)
    assert hvp.tolist() == [6.0, -12.0]


def test_grad_does_not_change_other_leaves():
    w = Tensor(np.ones(2), requires_grad=True)
    grad(lambda x: (x * w).sum())(np.ones(2))
    assert w.grad is None


def test_a_variable_of_the_outer_gradient_may_be_closed_over():
    # d/dy of d/dx (x^2 y) = 2x
    outer = grad(lambda y: grad(lambda x: x * x * y)(3.0))
    assert float(outer(2.0)) == 6.0


def test_grad_where_nothing_is_recorded():
    w = Tensor(np.array([1.0, 2.0]), requires_grad=True)
    with no_grad():
        assert grad(lambda w: (w * w).sum())(w).tolist() == [2.0, 4.0]


def test_grad_does_not_write_to_slots():
    w = Tensor(np.ones((2, 2)), requires_grad=True)
    w.grad_slot = np.full((2, 2), 7.0)
    grad(lambda x: linear(x, w).sum())(np.ones((3, 2)))
    assert (w.grad_slot == 7.0).all()
    assert not w.grad_started


def test_a_fused_op_names_the_remedy_for_one_derivative():
    w = Tensor(np.ones(3), requires_grad=True)
    with pytest.raises(UnsupportedError, match=r"pass arrays to gpuattn\.grad"):
        grad(lambda w: softmax(w).sum())(w)
    assert grad(lambda w: softmax(w).sum())(w.data).tolist() == [0, 0, 0]


def test_named_tuples_keep_their_type():
    Point = collections.namedtuple("Point", "x y")
    g = grad(lambda p: p.x * p.y)(Point(2.0, 3.0))
    assert g == Point(3.0, 2.0)


def test_stop_gradient():
    assert grad(lambda x: (stop_gradient(x) * x).sum())(np.array([3.0])).tolist() == [3.0]


def test_non_scalar_and_integers():
    with pytest.raises(GradientError, match=r"shape \(2,\)"):
        grad(lambda x: x * 2)(np.ones(2))
    with pytest.raises(TypeError, match="int64"):
        grad(lambda x: x.sum())(np.arange(2))
    with pytest.raises(TypeError, match="str"):
        grad(lambda x: x)("no")


def test_gradcheck_catches_a_wrong_rule():
    wrong = Impls("wrong", Impl("array", lambda x, needs: (x**2, (x,)),
                                lambda saved, g, needs, into: (g * saved[0],)))  # fmt: skip
    with pytest.raises(GradientError, match="differences give"):
        gradcheck(lambda x: tape.apply(wrong, (x,)), np.ones(3))
    with pytest.raises(TypeError, match="float64"):
        gradcheck(np.exp, np.ones(3, np.float32))


def test_gradcheck_catches_a_wrong_second_derivative():
    half = Impls("half", Impl("array", lambda x, needs: (x**2, (x,)),
                              lambda saved, g, needs, into: (g * (2 * tape.raw(saved[0])),),
                              differentiable_twice=True))  # fmt: skip

    def square(x):
        return tape.apply(half, (x,))

    assert gradcheck(square, np.ones(3)) < 1e-6
    with pytest.raises(GradientError, match="differences give"):
        gradcheck(square, np.ones(3), order=2)


def test_checkpoint_gives_the_same_gradients(xp):
    rng = np.random.default_rng(0)
    w = Tensor(xp.asarray(rng.standard_normal((3, 3))), requires_grad=True)
    x = Tensor(xp.asarray(rng.standard_normal((2, 3))), requires_grad=True)
    runs = []

    def block(x):
        runs.append(1)
        return np.tanh(x @ w)

    np.sum(checkpoint(block, x) ** 2).backward()
    assert len(runs) == 2, "backward computes the block again"
    kept = to_cpu(w.grad), to_cpu(x.grad)
    w.grad = x.grad = None
    np.sum(block(x) ** 2).backward()
    np.testing.assert_array_equal(kept[0], to_cpu(w.grad))
    np.testing.assert_array_equal(kept[1], to_cpu(x.grad))


def test_checkpoint_inside_grad():
    g = grad(lambda w: checkpoint(lambda x: x * w, np.ones(3)).sum())(np.arange(3.0))
    assert g.tolist() == [1.0, 1.0, 1.0]
    assert grad(lambda w: checkpoint(lambda: w))(2.0) == 1.0


def test_checkpoint_reaches_a_result_used_outside_too():
    w = Tensor(np.array([2.0]), requires_grad=True)
    h = w * w
    (checkpoint(lambda x: x * h, np.array([3.0])) + h).sum().backward()
    assert w.grad.tolist() == [16.0]  # d/dw of 4 w^2


def test_checkpoint_writes_gradients_to_their_slots_and_reports_them():
    w, idle = (Tensor(np.ones((2, 2)), requires_grad=True) for _ in range(2))
    for p in (w, idle):
        p.grad_slot = np.full((2, 2), np.nan)
    ready = []
    out = checkpoint(lambda x: linear(x, w) + stop_gradient(idle * 1), np.ones((2, 2)))
    backward_pass.backward(out.sum(), np.ones(()), on_ready=ready.append)
    assert w.grad_slot.tolist() == [[2.0, 2.0], [2.0, 2.0]]
    assert not idle.grad_slot.any(), "a parameter used without a gradient has a gradient of zero"
    assert {id(p) for p in ready} == {id(w), id(idle)}


def test_dropout_after_a_checkpoint_draws_other_bits():
    manual_seed(3)
    x = np.ones(1000)
    first, second = checkpoint(lambda x: dropout(x, 0.5), x), dropout(x, 0.5)
    assert (first.data != second).any()


def test_checkpoint_repeats_its_dropout():
    manual_seed(3)
    x = Tensor(np.ones(1000), requires_grad=True)
    y = checkpoint(lambda x: dropout(x, 0.5), x)
    y.sum().backward()
    np.testing.assert_array_equal(x.grad, y.data)
