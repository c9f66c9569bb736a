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

from gpuattn import Tensor, explain, grad, manual_seed, rng
from gpuattn.arrays import to_cpu
from gpuattn.ops.dropout import IMPLS, dropout
from gpuattn.rng import Key

SHAPES = {"one": (1,), "odd": (3, 257), "batched": (2, 5, 31), "tail": (2, 1025), "scalar": ()}
HERE = implementations(IMPLS)
KEY = Key(0x123456789ABCDEF0, 3, 7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name, where", HERE)
def test_implementations_agree(name, where, rng, shape, dtype):
    x = np.asarray(rng.standard_normal(shape))
    check_implementation(IMPLS, name, where, [x], dtype, p=0.3, key=KEY)
    check_implementation(IMPLS, name, where, [x], dtype, p=0.0, key=None)


@pytest.mark.parametrize("key", [KEY, Key(2**64 - 1), Key(1, 2**32 - 1, 2**32 - 1)])
@pytest.mark.parametrize("p", [1e-4, 0.1, 0.5, 0.97])
@pytest.mark.parametrize("name, where", HERE)
def test_the_mask_equals_rng(name, where, p, key):
    """philox.cuh draws the same bits as rng.py, which is tested with the published vectors."""
    xp = module_named(where)
    y = to_cpu(dropout(xp.ones((5, 1003), "float32"), p, seed=key, impl=name))
    keep = rng.keep_mask(np, y.shape, p, key)
    np.testing.assert_array_equal(y, keep * np.float32(1 / (1 - p)))
    q = rng.threshold(p) / 65536
    assert abs((y != 0).mean() - q) <= 5 * np.sqrt(q * (1 - q) / y.size)


@pytest.mark.parametrize("name, where", HERE)
def test_backward_uses_the_mask_of_forward(name, where):
    xp = module_named(where)
    x = Tensor(xp.ones((7, 100), "float32"), requires_grad=True)
    y = dropout(x, 0.4, impl=name)
    y.backward(xp.ones_like(x.data))
    assert x.grad.tolist() == y.data.tolist()
    assert 0 < (to_cpu(y.data) == 0).mean() < 1


@pytest.mark.parametrize("name, where", HERE)
def test_views_have_the_mask_of_their_copies(name, where, rng):
    xp = module_named(where)
    base = xp.asarray(rng.standard_normal((6, 8, 10)), dtype_of("bfloat16"))
    wide = xp.broadcast_to(base[:1], base.shape)
    for x in (base.T, base[::2, 1:, 9:3:-1], base.ravel()[1:61].reshape(4, 15), wide):
        want = dropout(x.copy(), 0.5, seed=1, impl=name)
        assert dropout(x, 0.5, seed=1, impl=name).tolist() == want.tolist()


@pytest.mark.parametrize("name", [impl.name for impl in IMPLS])
def test_the_step_may_live_on_the_device(name, gpu):
    x = gpu.ones(1000, "float32")
    step = gpu.asarray([7], "uint32")
    got = dropout(x, 0.5, seed=Key(1, 2, step), impl=name)
    assert got.tolist() == dropout(x, 0.5, seed=Key(1, 2, 7)).tolist()


@pytest.mark.parametrize("name, where", HERE)
def test_p_zero_and_one(name, where, rng):
    xp = module_named(where)
    x = xp.asarray(rng.standard_normal((3, 50)), "float16")
    y = dropout(x, 0, impl=name)
    assert y.tolist() == x.tolist() and y is not x
    assert not dropout(x, 1, impl=name).any()


@pytest.mark.parametrize("name, where", HERE)
def test_nan_stays_in_its_element(name, where):
    xp = module_named(where)
    x = xp.ones(64, "float32")
    x[5] = np.nan
    y = to_cpu(dropout(x, 0.5, seed=1, impl=name))
    assert np.isnan(y).nonzero()[0].tolist() == [5]


@pytest.mark.parametrize("shape", [(0,), (3, 0)])
@pytest.mark.parametrize("name, where", HERE)
def test_empty(name, where, shape):
    xp, impl = module_named(where), find(IMPLS, name)
    y, saved = impl.forward(xp.zeros(shape, "float16"), needs=(True,), p=0.5, key=KEY)
    (dx,) = impl.backward(saved, y, needs=(True,), into=(None,), p=0.5, key=KEY)
    assert (y.shape, y.dtype, dx.shape) == (shape, np.float16, shape)


def test_gradient(rng):
    check_gradient(lambda x: dropout(x, 0.3, seed=5), rng.standard_normal((4, 9)))


def test_seeds(xp):
    x = xp.ones(200, "float32")
    assert dropout(x, 0.5).tolist() != dropout(x, 0.5).tolist(), "no seed: a fresh one each time"
    assert dropout(x, 0.5, seed=3).tolist() == dropout(x, 0.5, seed=Key(3)).tolist()
    results = []
    for _ in range(2):
        manual_seed(12)
        results.append(dropout(x, 0.5).tolist())
    assert results[0] == results[1]


def test_p_zero_draws_no_seed():
    manual_seed(4)
    want = rng.fresh_seed()
    manual_seed(4)
    dropout(np.ones(3), 0.0)
    assert rng.fresh_seed() == want


@pytest.mark.parametrize("p", [-0.1, 1.1, np.nan, np.inf])
def test_p_is_a_probability(xp, p):
    with pytest.raises(ValueError, match="dropout: p is .* 0 <= p <= 1"):
        dropout(xp.ones(3, "float32"), p)


@pytest.mark.parametrize("dtype", [int, bool, complex])
def test_dtypes(xp, dtype):
    with pytest.raises(TypeError, match="x.dtype is"):
        dropout(xp.ones(3, dtype), 0.5)


def test_lists_are_refused():
    with pytest.raises(TypeError, match="x is a list"):
        dropout([1.0], 0.5)


def test_functional_gradient():
    x = np.ones(100)
    got = grad(lambda x: np.sum(dropout(x, 0.5, seed=1)))(x)
    np.testing.assert_array_equal(got, dropout(x, 0.5, seed=1))


def test_raw_runs_on_a_gpu(gpu):
    for dtype in DTYPES:
        assert explain(dropout, gpu.ones((2, 3), dtype_of(dtype)), 0.5).chosen == "raw-simt"
