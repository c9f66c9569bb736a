"""Gradients passed as pending matmuls: which rules get one, and unchanged results."""

import numpy as np
import pytest

import gpuattn
from gpuattn.autodiff import backward_pass, tape
from gpuattn.autodiff.hooks import hooked
from gpuattn.autodiff.pending_matmul import PendingMatmul
from gpuattn.autodiff.tensor import Tensor
from gpuattn.impls import Fusion, Impl, Impls


class Pair:
    """An op (3 x, 5 x) that accepts pending matmuls, and a linear op that offers them.

    ``given``: the gradients that the first op's backward rule received.
    """

    def __init__(self, takes=True):
        self.given = []
        scales = Impl(
            "array",
            self._scaled,
            self._unscaled,
            fusion=Fusion(takes_matmul=lambda *_, **__: takes),
        )
        self.scales = Impls("scales", scales)
        self.linear = Impls(
            "linear", Impl("array", self._times, self._offer, fusion=Fusion(offers_matmul=True))
        )

    def scaled(self, x):
        return tape.apply(self.scales, (x,))

    def times(self, x, weight):
        return tape.apply(self.linear, (x, weight))

    def _scaled(self, x, *, needs):
        return (3 * x, 5 * x), ()

    def _unscaled(self, saved, first, second, *, needs, into):
        self.given.append(type(first))
        if isinstance(first, PendingMatmul):
            first = first.compute()
        parts = [n * g for n, g in ((3, first), (5, second)) if g is not None]
        return (sum(parts[1:], parts[0]),)

    def _times(self, x, weight, *, needs):
        return x @ weight.T, (x, weight)

    def _offer(self, saved, dz, *, needs, into, fold):
        x, weight = saved
        product = PendingMatmul(dz, weight, (*dz.shape[:-1], weight.shape[1]))
        dx = None if fold and fold(product) else product.compute()
        return dx, dz.T @ x


@pytest.fixture
def values():
    rng = np.random.default_rng(0)
    return rng.standard_normal((4, 3)), rng.standard_normal((2, 3)), rng.standard_normal((5, 2))


def gradients(pair, values, program):
    x, weight, other = (Tensor(v, requires_grad=True) for v in values)
    program(pair, x, weight, other).backward()
    return x.grad, weight.grad


def one_use(pair, x, weight, other):
    normed, h = pair.scaled(x)
    return (pair.times(normed, weight) ** 2).sum() + (h**2).sum()


def test_the_rule_receives_a_pending_matmul(values):
    pair, plain = Pair(), Pair(takes=False)
    found, want = gradients(pair, values, one_use), gradients(plain, values, one_use)
    assert pair.given == [PendingMatmul] and plain.given == [np.ndarray]
    for got, expected in zip(found, want, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-12)


def two_products(pair, x, weight, other):
    normed, _ = pair.scaled(x)
    return (pair.times(normed, weight) ** 2).sum() + pair.times(normed, weight * 2).sum()


def a_use_recorded_before(pair, x, weight, other):
    normed, h = pair.scaled(x)
    early = (h**3).sum()  # its backward runs last: its gradient is missing when one is offered
    return early + pair.times(normed, weight).sum()


def another_use_of_the_result(pair, x, weight, other):
    normed, _ = pair.scaled(x)
    return pair.times(normed, weight).sum() + (normed**2).sum()


@pytest.mark.parametrize(
    "program", [two_products, a_use_recorded_before, another_use_of_the_result]
)
def test_not_while_another_gradient_is_missing(values, program):
    pair, plain = Pair(), Pair(takes=False)
    found, want = gradients(pair, values, program), gradients(plain, values, program)
    assert pair.given == [np.ndarray]
    for got, expected in zip(found, want, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-12)


def test_a_later_use_runs_its_backward_first(values):
    def program(pair, x, weight, other):
        normed, h = pair.scaled(x)
        y = pair.times(normed, weight)
        return y.sum() + (h**3).sum()

    pair = Pair()
    gradients(pair, values, program)
    assert pair.given == [PendingMatmul]


def test_a_chain_of_pending_matmuls(values):
    """The gradient of an op that accepts a matmul may itself be a matmul for the op before."""

    class Both(Pair):
        def __init__(self):
            super().__init__()
            both = Fusion(offers_matmul=True, takes_matmul=lambda *_, **__: True)
            impl = Impl("array", self._times, self._fold_both, fusion=both)
            self.linear = Impls("linear", impl)

        def _fold_both(self, saved, dz, *, needs, into, fold):
            dz = dz.compute() if isinstance(dz, PendingMatmul) else dz
            return self._offer(saved, dz, needs=needs, into=into, fold=fold)

    def program(pair, x, weight, other):
        normed, _ = pair.scaled(x)
        return (pair.times(pair.times(normed, weight), other) ** 2).sum()

    both = Both()
    found, want = gradients(both, values, program), gradients(Pair(False), values, program)
    assert both.given == [PendingMatmul]
    for got, expected in zip(found, want, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-12)


def test_not_where_the_intermediate_gradient_is_needed(values):
    pair = Pair()
    x, weight, _ = (Tensor(v, requires_grad=True) for v in values)
    normed, _ = pair.scaled(x)
    loss = pair.times(normed, weight).sum()
    (between,) = backward_pass.gradients([loss], [np.ones(())], [normed])
    np.testing.assert_allclose(between, np.ones((4, 2)) @ values[1])
    assert PendingMatmul not in pair.given


def test_not_while_ops_are_watched(values):
    pair = Pair()
    with hooked(lambda op, direction, function: function):
        gradients(pair, values, one_use)
    assert pair.given == [np.ndarray]


def test_parameters_are_reported_when_their_gradient_is_written(values):
    """A rule that offers a matmul has not written its parameter gradients yet."""
    pair = Pair()
    x, weight, _ = (Tensor(v, requires_grad=True) for v in values)
    told = {}
    loss = one_use(pair, x, weight, None)
    backward_pass.backward(
        loss, np.ones(()), on_ready=lambda leaf: told.update({id(leaf): leaf.grad})
    )
    assert pair.given == [PendingMatmul]
    assert set(told) == {id(x), id(weight)} and all(grad is not None for grad in told.values())


def test_recomputed_layers_fold_too(values):
    pair = Pair()

    def layer(x, weight):
        normed, h = pair.scaled(x)
        return pair.times(normed, weight) + h[:, :2]

    x, weight, _ = (Tensor(v, requires_grad=True) for v in values)
    gpuattn.checkpoint(layer, x, weight).sum().backward()
    assert pair.given == [PendingMatmul]
    np.testing.assert_allclose(weight.grad, np.ones((4, 2)).T @ (3 * values[0]))
