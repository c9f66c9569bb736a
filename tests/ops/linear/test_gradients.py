"""Launches of the gradient of a linear layer, and the arrays that its forward saves."""

import numpy as np
import pytest
from fake_gpu import GPUS
from fake_launches import as_array, launches_on

from gpuattn import Tensor, explain
from gpuattn.arrays import BFLOAT16
from gpuattn.autodiff.pending_matmul import PendingMatmul
from gpuattn.gemm.cublaslt import Reason
from gpuattn.ops.linear import gradients
from gpuattn.ops.linear.linear import linear

ROWS, IN, OUT = 40, 64, 96
SLOT = np.zeros(OUT, np.float32)


def floats(*shape):
    return np.ones(shape, np.float32)


def planned(
    kind, pending=False, needs=(True, True, True), into=(None, None, None), width=IN, out=OUT,
    rows=ROWS,
):  # fmt: skip
    saved = gradients.save(kind, floats(rows, width), floats(out, width), needs)
    dy = floats(rows, out)
    if pending:
        dy = PendingMatmul(floats(ROWS, 8), floats(8, OUT), (ROWS, OUT))
    return gradients.plan(saved, dy, needs, into)


@pytest.mark.parametrize("kind, pending, dz, dbias", [
    ("none", False, "dy", "joint"), ("codes", False, "codes", "joint"),
    ("codes", True, "codes", "sums"), ("z", False, "elementwise", "sums"),
    ("y", False, "elementwise", "sums"), ("z", True, "matmul", "joint"),
    ("y", True, "matmul", "joint"),
])  # fmt: skip
def test_how_dz_and_dbias_are_computed(kind, pending, dz, dbias):
    found = planned(kind, pending)
    assert (found.dz, found.sums, found.joint) == (dz, dbias == "sums", dbias == "joint")
    without = planned(kind, pending, needs=(True, True, False))
    assert (without.dz, without.sums, without.joint) == (dz, False, False)


def test_when_one_launch_computes_both_parameter_gradients():
    assert planned("none", into=(None, None, (SLOT, False))).joint
    assert not planned("none", into=(None, None, (SLOT, True))).joint, "it cannot add"
    assert not planned("none", needs=(True, True, False)).joint
    assert not planned("none", needs=(True, False, True)).joint
    assert not planned("none", out=1).joint, "cuBLASLt has no algorithm for one output"


def test_a_weight_that_fills_a_gpu_is_not_deferred():
    assert planned("none").small
    assert not planned("none", width=128 * gradients.FULL_TILES).small
    assert not planned("none", needs=(True, False, True)).small, "a frozen weight"
    some = {"width": 128 * gradients.DEEP_TILES, "out": 8}
    assert planned("none", **some, rows=gradients.DEEP // 64).small
    assert not planned("none", **some, rows=gradients.DEEP).small


@pytest.mark.parametrize("activation, bias, kind, kept, saves_bias", [
    (None, True, "none", False, False), ("relu", True, "y", True, False),
    ("gelu", False, "z", True, False), ("gelu", True, "z", True, True),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore::gpuattn.errors.SlowPathWarning")
def test_what_is_saved_without_cublaslt(activation, bias, kind, kept, saves_bias):
    x, weight = as_array(floats(ROWS, IN)), as_array(floats(OUT, IN))
    vector = as_array(floats(OUT)) if bias else None
    with launches_on(GPUS["9.0"]):
        y = linear(x, Tensor(weight, requires_grad=True), vector, activation=activation)
    tag, saved_x, saved_weight, value, saved_bias = y.node.saved
    assert (tag, value is not None, saved_bias is not None) == (kind, kept, saves_bias)
    assert saved_x is x and saved_weight is None, "x is for dweight, the weight for dx"


def test_explain_names_the_library():
    x = as_array(np.ones((ROWS, IN), BFLOAT16))
    with launches_on(GPUS["9.0"]):
        found = explain(linear, x, x, impl="raw")
    assert found.chosen == "cublaslt"
    assert found.details == {"library": "CuPy's cuBLAS, as cuBLASLt cannot be loaded: a fake GPU"}
    assert "matmul by CuPy's cuBLAS" in str(found)


@pytest.mark.parametrize("dtype, both", [(np.float32, True), (np.float64, False)])
def test_a_bias_is_summed_with_the_deferred_gradient_of_its_weight(monkeypatch, dtype, both):
    """Where both have one dtype, as a kernel writes them."""
    deferred = []
    monkeypatch.setattr(gradients.weight_gradients, "takes", lambda *_: True)
    monkeypatch.setattr(gradients, "defer", lambda *given: not deferred.append(given))
    monkeypatch.setattr(gradients, "matmul_and_sums", lambda *_: Reason("no library"))
    monkeypatch.setattr(gradients, "launch_backward", lambda *given: (given[2], None))
    x, dy = floats(ROWS, 384), floats(ROWS, 128)
    into = None, (floats(128, 384), False), (np.zeros(128, dtype), True)
    needs = (True, True, True)
    saved = gradients.save("none", x, floats(128, 384), needs)
    dx, *others = gradients.backward(saved, dy, needs=needs, into=into, activation=None)
    assert dx.shape == x.shape and others == [None, None]
    ((launch, given, reads, targets),) = deferred
    assert launch is gradients.weight_gradients.launch and len(reads) == 2
    assert len(targets) == (2 if both else 1) and targets[0] is into[1][0]
    problem = gradients.weight_gradients.Problem(*given)
    assert problem.out is into[1][0] and problem.accumulate_bias is both
    assert problem.bias is (into[2][0] if both else None)


def test_the_bias_alone_of_a_frozen_weight(monkeypatch):
    monkeypatch.setattr(gradients, "launch_backward", lambda *given: (given[2], given[2].sum(0)))
    needs, dy = (True, False, True), floats(ROWS, OUT)
    saved = gradients.save("none", floats(ROWS, IN), floats(OUT, IN), needs)
    found = gradients.backward(saved, dy, needs=needs, into=(None,) * 3, activation=None)
    np.testing.assert_array_equal(found[0], dy @ floats(OUT, IN))
    assert found[1] is None
    np.testing.assert_array_equal(found[2], dy.sum(0))


@pytest.mark.parametrize("answer", ["done", Reason("cuBLASLt has no algorithm")])
@pytest.mark.parametrize("slots", [False, True])
def test_without_a_joint_launch_the_bias_is_summed_alone(monkeypatch, rng, answer, slots):
    x, dy = (rng.standard_normal((ROWS, width), np.float32) for width in (IN, OUT))
    weight = rng.standard_normal((OUT, IN), np.float32)
    summed = []

    def matmul_and_sums(dz, x, sums, out, accumulate, share):
        if answer != "done":
            return answer
        sums[...] = dz.sum(0)
        return np.matmul(dz.T, x, out=out)

    def launch_backward(x, bias, dy, want_bias, slot, activation):
        summed.append(slot)
        if slot is None:
            return dy, dy.sum(0)
        slot[0][...] = dy.sum(0)
        return dy, None

    monkeypatch.setattr(gradients, "matmul_and_sums", matmul_and_sums)
    monkeypatch.setattr(gradients, "launch_backward", launch_backward)
    places = np.empty_like(weight), np.empty(OUT, np.float32)
    into = (None, *[(place, False) if slots else None for place in places])
    needs = (True, True, True)
    saved = gradients.save("none", x, weight, needs)
    found = gradients.backward(saved, dy, needs=needs, into=into, activation=None)
    assert len(summed) == (answer != "done")
    if slots:
        assert found[1:] == (None, None)
        found = found[0], *places
    for got, want in zip(found, (dy @ weight, dy.T @ x, dy.sum(0)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
