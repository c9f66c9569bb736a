"""GELU and ReLU: values, gradients, bias, odd shapes, errors."""

import math

import numpy as np
import pytest
from checks import DTYPES, check_gradient, check_implementation, dtype_of, implementations

from gpuattn import Tensor
from gpuattn.arrays import to_cpu
from gpuattn.autodiff import tape
from gpuattn.ops import bias_activation
from gpuattn.ops.bias_activation import GELU, RELU, erf, gelu, relu

# 129: one past a block's columns; 33: one past a block's rows; (600, 3): more rows than one chunk
SHAPES = {"one": (1, 1), "odd": (33, 129), "stacked": (2, 5, 64), "tall": (600, 3), "empty": (0, 8)}
KINDS = {"gelu": (GELU, "gelu"), "gelu_exact": (GELU, "gelu_exact"), "relu": (RELU, "relu")}
FUNCTIONS = {
    "gelu": gelu,
    "gelu_exact": lambda x, bias=None: gelu(x, bias, approximate="none"),
    "relu": relu,
}


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name, where", implementations(GELU))
def test_implementations(rng, name, where, shape, dtype, kind, with_bias):
    x = 3 * rng.standard_normal(shape)
    bias = rng.standard_normal(shape[-1:]) if with_bias else None
    impls, activation = KINDS[kind]
    check_implementation(impls, name, where, [x, bias], dtype, activation=activation)


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_gradient(rng, function):
    check_gradient(function, rng.standard_normal((4, 7)))
    check_gradient(function, rng.standard_normal((2, 4, 7)), rng.standard_normal(7))


def test_written_out_definitions(xp, rng):
    values = 3 * rng.standard_normal(500)
    x = xp.asarray(values)
    exact = [0.5 * v * (1 + math.erf(v / math.sqrt(2))) for v in values]
    tanh = [
        0.5 * v * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))) for v in values
    ]
    np.testing.assert_allclose(to_cpu(gelu(x, approximate="none")), exact, atol=1e-13)
    np.testing.assert_allclose(to_cpu(gelu(x)), tanh, atol=1e-13)
    np.testing.assert_array_equal(to_cpu(relu(x)), np.maximum(values, 0))


@pytest.mark.parametrize("bias", [False, True])
def test_blocks_do_not_show(monkeypatch, rng, bias):
    x = Tensor(rng.standard_normal((33, 129)).astype(np.float32).T, requires_grad=True)
    b = rng.standard_normal(33).astype(np.float32) if bias else None
    found = []
    for size in (1 << 20, 1000):
        monkeypatch.setattr(bias_activation, "CPU_BLOCK", size)
        y = gelu(x, b)
        (dx,) = tape.gradients([y], [np.ones_like(y.data)], [x])
        found.append((y.numpy(), gelu(x.data, b), dx))
    for whole, blocks in zip(*found, strict=True):
        np.testing.assert_allclose(blocks, whole, rtol=1e-6, atol=1e-7)


def test_erf_against_the_c_library():
    x = np.concatenate([np.linspace(-7, 7, 4001), [0.0, -0.0, 1e-300, 30, -np.inf, np.inf]])
    want = np.array([math.erf(v) for v in x])
    np.testing.assert_allclose(erf(x), want, atol=1e-14)
    np.testing.assert_allclose(erf(x.astype(np.float32)), want, atol=5e-7)
    assert np.isnan(erf(np.array([np.nan]))).all()


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_extremes(xp, function, dtype):
    x = xp.asarray(np.array([np.nan, 6e4, -6e4, 0.0]).astype(dtype_of(dtype)))
    got = to_cpu(function(x)).astype(np.float64)
    assert np.isnan(got[0])
    assert got[1] == to_cpu(x)[1]
    assert got[2] == got[3] == 0


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_views_of_any_strides(xp, rng, function):
    whole = rng.standard_normal((6, 20)).astype(np.float32)
    bias = rng.standard_normal(20).astype(np.float32)
    for cut in (np.s_[::2, ::-1], np.s_[:, 3:13], np.s_[1:2]):
        x, b = xp.asarray(whole)[cut], xp.asarray(bias)[cut[1] if isinstance(cut, tuple) else ...]
        want = function(to_cpu(x).copy(), to_cpu(b).copy())
        np.testing.assert_allclose(to_cpu(function(x, b)), want, rtol=1e-5, atol=1e-6)


def test_the_bias_gradient_goes_to_its_place(xp, rng):
    x = xp.asarray(rng.standard_normal((70, 5)).astype(np.float32))
    bias = Tensor(xp.zeros(5, np.float32), requires_grad=True)
    plain = Tensor(xp.zeros(5, np.float32), requires_grad=True)
    bias.grad_slot = xp.full(7, np.nan, np.float32)[1:6]
    ones = xp.ones((70, 5), np.float32)
    for _ in range(2):  # the second time it adds
        tape.backward(gelu(Tensor(x), bias), ones)
        tape.backward(gelu(Tensor(x), plain), ones)
    np.testing.assert_allclose(to_cpu(bias.grad_slot), to_cpu(plain.grad), rtol=1e-6)


def test_errors(xp):
    x = xp.ones((2, 3), np.float32)
    with pytest.raises(ValueError, match="gelu: approximate is 'fast'"):
        gelu(x, approximate="fast")
    with pytest.raises(ValueError, match=r"relu: bias.shape is \(2,\)"):
        relu(x, xp.ones(2, np.float32))
    with pytest.raises(TypeError, match="share one dtype"):
        gelu(x, xp.ones(3, np.float16))
    for dtype in (np.int32, np.bool_, np.complex64):
        with pytest.raises(TypeError, match="relu: x.dtype"):
            relu(x.astype(dtype))
    with pytest.raises(TypeError, match="list"):
        relu([1.0])


def test_no_fall_back_on_a_gpu(gpu, recwarn):
    gelu(gpu.ones((2, 3), np.float16))
    assert not recwarn.list
