"""GELU, ReLU and SwiGLU: values, gradients, bias, dropout, odd shapes, errors."""

import math

import numpy as np
import pytest
from checks import DTYPES, check_gradient, check_implementation, dtype_of, implementations

from gpuattn import Tensor
from gpuattn import rng as random
from gpuattn.arrays import to_cpu
from gpuattn.autodiff import backward_pass
from gpuattn.ops.linear import activations, bias_activation
from gpuattn.ops.linear.activations import erf
from gpuattn.ops.linear.bias_activation import (
    GELU,
    RELU,
    SILU,
    SWIGLU,
    gelu,
    relu,
    silu,
    swiglu,
)

# 129: odd rows; 272: one past a block's columns by one thread; (600, 3): more rows than one chunk;
# (1, 4096): fewer rows than a block takes at a time
SHAPES = {
    "one": (1, 1), "odd": (33, 129), "stacked": (2, 5, 64), "tall": (600, 3), "empty": (0, 8),
    "slab": (40, 272), "row": (1, 4096),
}  # fmt: skip
KINDS = {
    "gelu": (GELU, "gelu"), "gelu_exact": (GELU, "gelu_exact"), "relu": (RELU, "relu"),
    "silu": (SILU, "silu"), "swiglu": (SWIGLU, "swiglu"),
}  # fmt: skip
FUNCTIONS = {
    "gelu": gelu,
    "gelu_exact": lambda x, bias=None, **more: gelu(x, bias, approximate="none", **more),
    "relu": relu,
    "silu": silu,
    "swiglu": swiglu,
}


@pytest.mark.parametrize(
    "dtype, with_bias, p",
    [
        ("float32", False, 0.0), ("float32", True, 0.3), ("float16", True, 0.0),
        ("bfloat16", True, 0.0), ("bfloat16", False, 0.3),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name, where", implementations(GELU))
def test_implementations(rng, name, where, shape, dtype, kind, with_bias, p):
    if kind == "swiglu":
        shape = (*shape[:-1], 2 * shape[-1])
    x = 3 * rng.standard_normal(shape)
    bias = rng.standard_normal(shape[-1:]) if with_bias else None
    impls, activation = KINDS[kind]
    params = {"activation": activation, "p": p, "key": random.Key(7, 3, 5) if p else None}
    check_implementation(impls, name, where, [x, bias], dtype, **params)


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
@pytest.mark.parametrize("p", [0.0, 0.4])
def test_gradient(rng, function, p):
    def fun(*inputs):
        return function(*inputs, p=p, seed=5)

    check_gradient(fun, rng.standard_normal((4, 6)))
    check_gradient(fun, rng.standard_normal((2, 4, 6)), rng.standard_normal(6))


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
    swish = np.array([v / (1 + math.exp(-v)) for v in values])
    np.testing.assert_allclose(to_cpu(silu(x)), swish, atol=1e-13)
    np.testing.assert_allclose(to_cpu(swiglu(x)), swish[:250] * values[250:], atol=1e-13)


@pytest.mark.parametrize("cols", [64, 65])  # eight adjacent columns per thread, or not
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_dropout_depends_on_the_key_alone(xp, rng, function, cols):
    width = 2 * cols if function is swiglu else cols
    x = xp.asarray(1 + np.abs(rng.standard_normal((30, width))).astype(np.float32))
    key = random.Key(1, 2, 3)
    whole, once = (to_cpu(function(x, p=p, seed=key)) for p in (0.0, 0.25))
    keep = random.keep_mask(np, once.shape, 0.25, key)
    np.testing.assert_array_equal(once != 0, keep)
    np.testing.assert_allclose(once[keep], whole[keep] / 0.75, rtol=1e-6)
    assert not to_cpu(function(x, p=1.0, seed=1)).any()


@pytest.mark.parametrize("bias", [False, True])
def test_results_do_not_depend_on_the_block_size(monkeypatch, rng, bias):
    x = Tensor(rng.standard_normal((33, 129)).astype(np.float32).T, requires_grad=True)
    b = rng.standard_normal(33).astype(np.float32) if bias else None
    found = []
    for size in (1 << 20, 1000):
        monkeypatch.setattr(activations, "CPU_BLOCK", size)
        y = gelu(x, b)
        (dx,) = backward_pass.gradients([y], [np.ones_like(y.data)], [x])
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
    values = np.array([np.nan, 6e4, -6e4, 0.0])
    if function is swiglu:
        values = np.concatenate([values, np.ones(4)])
    x = xp.asarray(values.astype(dtype_of(dtype)))
    got = to_cpu(function(x)).astype(np.float64)
    assert np.isnan(got[0])
    assert got[1] == to_cpu(x)[1]
    assert got[2] == got[3] == 0


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_views_of_any_strides(xp, rng, function):
    whole = rng.standard_normal((6, 20)).astype(np.float32)
    bias = rng.standard_normal(20).astype(np.float32)
    # the last two have contiguous rows, aligned and not
    for cut in (np.s_[::2, ::-1], np.s_[1:2], np.s_[:, 4:12], np.s_[:, 3:13]):
        x, b = xp.asarray(whole)[cut], xp.asarray(bias)[cut[1] if isinstance(cut, tuple) else ...]
        want = function(to_cpu(x).copy(), to_cpu(b).copy())
        np.testing.assert_allclose(to_cpu(function(x, b)), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
@pytest.mark.parametrize("shape", [(5, 3, 32), (700, 40)])
def test_a_view_has_the_bits_of_its_copy(xp, rng, function, shape):
    """Rows of x and dy with gaps between them are read without a copy."""
    whole = rng.standard_normal((2, *shape[:-1], 2 * shape[-1])).astype(np.float32)
    whole[..., shape[-1] :] = np.nan
    x, dy = (xp.asarray(part)[..., : shape[-1]] for part in whole)
    if function is swiglu:
        dy = dy[..., : shape[-1] // 2]
    found = []
    for copy in (lambda a: a, lambda a: a.copy()):
        box = Tensor(copy(x), requires_grad=True)
        bias = Tensor(xp.ones(shape[-1], np.float32), requires_grad=True)
        y = function(box, bias, p=0.2, seed=3)
        found.append((y.data, *backward_pass.gradients([y], [copy(dy)], [box, bias])))
    for view, plain in zip(*found, strict=True):
        np.testing.assert_array_equal(to_cpu(view), to_cpu(plain))


def test_the_bias_gradient_is_written_to_its_slot(xp, rng):
    x = xp.asarray(rng.standard_normal((70, 5)).astype(np.float32))
    bias = Tensor(xp.zeros(5, np.float32), requires_grad=True)
    plain = Tensor(xp.zeros(5, np.float32), requires_grad=True)
    bias.grad_slot = xp.full(7, np.nan, np.float32)[1:6]
    ones = xp.ones((70, 5), np.float32)
    for _ in range(2):  # the second time it adds
        backward_pass.backward(gelu(Tensor(x), bias), ones)
        backward_pass.backward(gelu(Tensor(x), plain), ones)
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
    with pytest.raises(ValueError, match=r"swiglu: x.shape is \(2, 3\)"):
        swiglu(x)
    for p in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="gelu: p is"):
            gelu(x, p=p)


def test_no_fall_back_on_a_gpu(gpu, recwarn):
    gelu(gpu.ones((2, 3), np.float16))
    swiglu(gpu.ones((2, 4), np.float16), p=0.5)
    assert not recwarn.list


def test_lanes_leave_few_threads_idle():
    for rows in (1, 2, 100, 10**6):
        for packs in (1, 2, 3, 5, 17, 32, 33, 48, 96, 100, 384, 1000):
            lanes, slabs = bias_activation._lanes_and_slabs(rows, 8 * packs)
            assert lanes & (lanes - 1) == 0 and lanes <= bias_activation.BLOCK
            assert slabs * lanes >= packs > (slabs - 1) * lanes
            assert rows < 256 or 9 * packs >= 8 * slabs * lanes
