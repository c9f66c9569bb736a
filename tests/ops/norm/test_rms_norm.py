import numpy as np
import pytest
from checks import (
    DTYPES,
    check_gradient,
    check_implementation,
    dtype_of,
    find,
    implementations,
    module_named,
)

from gpuattn import Tensor, explain
from gpuattn.arrays import to_cpu
from gpuattn.ops.norm.rms_norm import IMPLS, rms_norm

SHAPES = {"one": (1, 1), "odd": (3, 257), "batched": (2, 5, 31), "tail": (2, 1025), "row": (64,)}
HERE = implementations(IMPLS)


def inputs(rng, shape):
    return [rng.standard_normal(shape), 1 + 0.1 * rng.standard_normal(shape[-1])]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name, where", HERE)
def test_implementations_agree(name, where, rng, shape, dtype):
    check_implementation(IMPLS, name, where, inputs(rng, shape), dtype, eps=1e-6)


@pytest.mark.parametrize("name, where", HERE)
def test_the_weight_may_be_missing(name, where, rng):
    x = rng.standard_normal((1030, 5))
    check_implementation(IMPLS, name, where, [x, None], "float32", eps=0.1)


def test_equals_the_formula(xp, rng):
    x, weight = (xp.asarray(a) for a in inputs(rng, (3, 40)))
    want = x / xp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight
    for dtype, tolerance in (("float64", 1e-14), ("float32", 1e-6)):
        got = rms_norm(x.astype(dtype), weight.astype(dtype))
        assert got.dtype == dtype
        np.testing.assert_allclose(to_cpu(got), to_cpu(want), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name, where", HERE)
def test_extreme_rows(name, where):
    """Zeros stay zeros, squares beyond the float16 range are exact, NaN stays in its row."""
    xp = module_named(where)
    x = xp.asarray([[0, 0], [6e4, 6e4], [np.nan, 1], [1, -1]], "float16")
    y = rms_norm(x, impl=name).tolist()
    assert y[0] == [0, 0] and y[1] == [1, 1] and y[3] == [1, -1]
    assert np.isnan(y[2]).all()


@pytest.mark.parametrize("name, where", HERE)
def test_strides(name, where, rng):
    xp = module_named(where)
    base = xp.asarray(rng.standard_normal((6, 8, 10)), dtype_of("bfloat16"))
    weight = xp.asarray(rng.standard_normal(40), base.dtype)
    for x in (base.T, base[::2, 1:, 9:3:-1], base.ravel()[1:61].reshape(4, 15)):
        w = weight[1 : 2 * x.shape[-1] : 2]
        want = rms_norm(x.copy(), w.copy(), impl=name)
        assert rms_norm(x, w, impl=name).tolist() == want.tolist()


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0,)])
@pytest.mark.parametrize("name, where", HERE)
def test_empty(name, where, shape):
    xp, impl = module_named(where), find(IMPLS, name)
    x, weight = xp.zeros(shape, "float32"), xp.ones(shape[-1:], "float32")
    y, saved = impl.forward(x, weight, needs=(True, True), eps=1e-6)
    assert y.shape == shape
    dx, dweight = impl.backward(saved, y, needs=(True, True), into=(None, None), eps=1e-6)
    assert dx.shape == shape and dweight.tolist() == [0] * shape[-1]


@pytest.mark.parametrize("name, where", HERE)
def test_the_weight_gradient_goes_to_its_slot(name, where, rng):
    xp = module_named(where)
    x, weight = (xp.asarray(a, "float32") for a in inputs(rng, (7, 40)))
    x, weight = Tensor(x, requires_grad=True), Tensor(weight, requires_grad=True)
    weight.grad_slot = xp.full(40, np.nan, "float32")
    for times in (1, 2):
        rms_norm(x, weight, impl=name).sum().backward()
        want = times * to_cpu(rms_norm(x.data)).sum(0)
        np.testing.assert_allclose(to_cpu(weight.grad_slot), want, atol=1e-5)


def test_gradient(rng):
    check_gradient(rms_norm, *inputs(rng, (2, 3, 7)))
    check_gradient(lambda x: rms_norm(x, eps=0.5), rng.standard_normal((3, 5)))


@pytest.mark.parametrize("bad, error, says", [
    (lambda xp, x, w: rms_norm(x.astype(int)), TypeError, "x.dtype is int64"),
    (lambda xp, x, w: rms_norm(x, w.astype("e")), TypeError, "weight is float16"),
    (lambda xp, x, w: rms_norm(x, w[:2]), ValueError, r"weight.shape is \(2,\)"),
    (lambda xp, x, w: rms_norm(x, eps=0), ValueError, "eps is 0"),
    (lambda xp, x, w: rms_norm(x, eps=np.nan), ValueError, "eps is nan"),
])  # fmt: skip
def test_bad_arguments(xp, bad, error, says):
    with pytest.raises(error, match=f"rms_norm: .*{says}"):
        bad(xp, xp.ones((2, 3), "f"), xp.ones(3, "f"))


def test_raw_runs_on_a_gpu(gpu):
    for dtype in DTYPES:
        assert explain(rms_norm, gpu.ones((2, 3), dtype_of(dtype))).chosen == "raw-simt"
