import numpy as np
import pytest
from checks import (
    DTYPES,
    check_gradient,
    check_implementation,
    check_no_float64,
    dtype_of,
    implementations,
    module_named,
)

from gpuattn import Tensor, explain
from gpuattn.errors import UnsupportedError
from gpuattn.ops.softmax import BLOCKS, IMPLS, MAX_COLS, _block_for, _mask_layout, softmax

# 257 and 1025: one past a block; 31: less than a warp
SHAPES = {"one": (1, 1), "odd": (3, 257), "batched": (2, 5, 31), "tail": (2, 1025), "vector": (64,)}
HERE = implementations(IMPLS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name, where", HERE)
def test_implementations_agree(name, where, rng, shape, dtype):
    x = 3 * rng.standard_normal(shape)
    check_implementation(IMPLS, name, where, [x, None], dtype, scale=0.7, causal=False)


@pytest.mark.parametrize("mask_shape", [(9, 33), (1, 33), (9, 1), (33,), (3, 1, 33), (2, 3, 9, 33)])
@pytest.mark.parametrize("kind", ["keep", "add"])
@pytest.mark.parametrize("name, where", HERE)
def test_masks_agree(name, where, rng, mask_shape, kind):
    x = rng.standard_normal((2, 3, 9, 33))
    mask = rng.random(mask_shape) < 0.5 if kind == "keep" else rng.standard_normal(mask_shape)
    check_implementation(
        IMPLS, name, where, [x, mask], "float32", needs=(True, False), scale=0.5, causal=True
    )


@pytest.mark.parametrize("queries, keys", [(5, 5), (3, 7), (7, 3), (1, 9)])
@pytest.mark.parametrize("name, where", HERE)
def test_causal_is_bottom_right(name, where, rng, queries, keys):
    x = rng.standard_normal((2, queries, keys))
    check_implementation(IMPLS, name, where, [x, None], "float32", scale=1.0, causal=True)
    xp = module_named(where)
    got = softmax(xp.asarray(x, "float32"), causal=True, impl=name)
    visible = np.tri(queries, keys, keys - queries, dtype=bool)
    np.testing.assert_array_equal(np.asarray(got.tolist()) > 0, np.broadcast_to(visible, x.shape))


@pytest.mark.parametrize("name, where", HERE)
def test_what_is_not_finite(name, where):
    xp, inf, nan = module_named(where), np.inf, np.nan
    x = xp.asarray([[-inf, -inf], [0, -inf], [nan, 1], [inf, 1], [nan, nan], [1, 1]], "float32")
    want = [[0, 0], [1, 0], [nan, nan], [nan, nan], [nan, nan], [0.5, 0.5]]
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(softmax(x, impl=name).tolist(), want)


@pytest.mark.parametrize("name, where", HERE)
def test_what_is_masked_is_never_seen(name, where):
    xp = module_named(where)
    x = xp.asarray([[np.nan, 1, 1], [np.inf, 2, 2]], "float32")
    keep = xp.asarray([False, True, True])
    assert softmax(x, mask=keep, impl=name).tolist() == [[0, 0.5, 0.5]] * 2
    assert softmax(x, mask=xp.asarray([False]), impl=name).tolist() == [[0, 0, 0]] * 2


@pytest.mark.parametrize("dtype, big", [("float32", 1e4), ("float32", 3e38), ("float16", 65504)])
@pytest.mark.parametrize("name, where", HERE)
def test_big_logits_do_not_overflow(name, where, dtype, big):
    xp = module_named(where)
    x = xp.asarray([[big, big, -big]], dtype)
    with np.errstate(over="ignore"):
        assert softmax(x, impl=name).tolist() == [[0.5, 0.5, 0]]


@pytest.mark.parametrize("scale, want", [(0.0, [0.5, 0.5]), (-1.0, [1, 0])])
@pytest.mark.parametrize("name, where", HERE)
def test_scale_zero_and_negative(name, where, scale, want):
    xp = module_named(where)
    assert softmax(xp.asarray([-200, 200], "float32"), scale=scale, impl=name).tolist() == want


def views(xp, rng, dtype):
    base = xp.asarray(rng.standard_normal((6, 8, 10)), dtype)
    yield "transposed", base.transpose(2, 0, 1)
    yield "sliced", base[::2, 1:, 3:9]
    yield "reversed", base[:, ::-1, ::-1]
    yield "broadcast", xp.broadcast_to(base[:1], base.shape)
    yield "offset by one", base.ravel()[1:61].reshape(4, 15)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name, where", HERE)
def test_strides(name, where, rng, dtype):
    xp = module_named(where)
    for view, x in views(xp, rng, dtype_of(dtype)):
        got, want = softmax(x, impl=name), softmax(x.copy(), impl=name)
        assert got.tolist() == want.tolist(), view


@pytest.mark.parametrize("name, where", HERE)
def test_strided_masks(name, where, rng):
    xp = module_named(where)
    x = xp.asarray(rng.standard_normal((2, 3, 2, 3, 5)), "float32")
    full = xp.asarray(rng.random((3, 2, 3, 2, 10)) < 0.6).transpose(3, 0, 1, 2, 4)
    for mask in (full[..., ::-2], full[:, :1, :, ::-1, 5:], full[..., ::2, :5][:, :, :, :1]):
        want = softmax(x, mask=mask.copy(), impl=name)
        assert softmax(x, mask=mask, impl=name).tolist() == want.tolist()


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (2, 0, 3), (0,)])
@pytest.mark.parametrize("name, where", HERE)
def test_empty(name, where, shape):
    xp = module_named(where)
    x = xp.zeros(shape, "float16")
    for mask in (None, xp.ones(shape[-1:], bool)):
        y = softmax(x, mask=mask, impl=name)
        assert (y.shape, y.dtype) == (shape, x.dtype)
    impl = next(i for i in IMPLS if i.name == name)
    params = {"scale": 1.0, "causal": False}
    dx, _ = impl.backward((y,), y, needs=(True, False), into=(None, None), **params)
    assert dx.shape == shape


def test_mask_layout_finds_every_element(rng):
    """What the kernel reads by sizes and strides is the mask, for every way to broadcast."""
    shape = (2, 3, 4, 5, 6)
    base = rng.random(shape)
    masks = [base, base[:1], base[:, :1], base[0, :, :1], base[:, :, ::-1, :, ::2][..., :1]]
    masks += [base[:1, :, :1, :, :1], base[:1, :, :1, :, ::-1], base[0, 0, 0, 0]]
    masks += [rng.random((3, 5, 4, 2, 6)).transpose(3, 0, 2, 1, 4)]  # too many axes: copied
    for mask in masks:
        first, sizes, strides = _mask_layout(mask, shape)
        sizes = np.empty(shape).reshape(-1, *sizes, shape[-1]).shape
        found = np.lib.stride_tricks.as_strided(first, sizes, [8 * s for s in strides])
        want = np.broadcast_to(mask, shape)
        np.testing.assert_array_equal(found.ravel(), want.ravel())


def test_gradient(rng):
    x, keep = rng.standard_normal((2, 4, 7)), rng.random((4, 7)) < 0.7
    check_gradient(lambda x: softmax(x, scale=0.7, mask=keep, causal=True), x)
    check_gradient(lambda x: softmax(x, mask=rng.standard_normal(7) * 0 + 0.3), x)


def test_a_row_that_sees_nothing_has_no_gradient(xp):
    x = Tensor(xp.asarray([[1.0, 2.0], [3.0, 5.0]], "float32"), requires_grad=True)
    y = softmax(x, mask=xp.asarray([[False, False], [True, True]]))
    (y * xp.asarray([1.0, 2.0], "float32")).sum().backward()
    assert x.grad[0].tolist() == [0, 0]
    assert abs(x.grad[1]).min() > 0.05


def test_float64_in_float64_out():
    x = np.asarray([0.0, 1e-12])
    y = softmax(x)
    assert y.dtype == np.float64 and y[1] - y[0] == pytest.approx(5e-13, rel=1e-3)


@pytest.mark.parametrize("bad, error, says", [
    (lambda xp: softmax(xp.ones(3, int)), TypeError, "x.dtype is int64"),
    (lambda xp: softmax(xp.ones(3, bool)), TypeError, "x.dtype is bool"),
    (lambda xp: softmax(xp.ones(3, complex)), TypeError, "complex128"),
    (lambda xp: softmax([1.0, 2.0]), TypeError, "x is a list"),
    (lambda xp: softmax(xp.ones((), "f")), ValueError, "at least one axis"),
    (lambda xp: softmax(xp.ones(3, "f"), causal=True), ValueError, r"\(\.\.\., T, S\)"),
    (lambda xp: softmax(xp.ones(3, "f"), scale=np.nan), ValueError, "scale is nan"),
    (lambda xp: softmax(xp.ones(3, "f"), scale=-np.inf), ValueError, "scale is -inf"),
    (lambda xp: softmax(xp.ones(3, "f"), mask=xp.ones(2, bool)), ValueError, "mask.shape is"),
    (lambda xp: softmax(xp.ones(3, "f"), mask=xp.ones((2, 3), bool)), ValueError, "broadcasts"),
    (lambda xp: softmax(xp.ones(3, "f"), mask=xp.ones(3, int)), TypeError, "mask.dtype is int64"),
    (lambda xp: softmax(xp.ones(3, "f"), mask=xp.ones(3, "e")), TypeError, "bool or float32"),
])  # fmt: skip
def test_bad_arguments(xp, bad, error, says):
    with pytest.raises(error, match=says):
        bad(xp)


def test_arrays_in_two_places(gpu):
    with pytest.raises(TypeError, match="mask in host memory"):
        softmax(gpu.ones(3, "f"), mask=np.ones(3, bool))


def test_a_mask_takes_no_gradient():
    mask = Tensor(np.zeros(3), requires_grad=True)
    with pytest.raises(UnsupportedError, match=r"softmax\(x \+ mask\)"):
        softmax(np.ones(3), mask=mask)


def test_raw_says_why_not():
    with pytest.raises(UnsupportedError, match="raw-simt: x is a NumPy array"):
        softmax(np.zeros((1, 2)), impl="raw")


def test_raw_runs_on_a_gpu(gpu):
    for dtype in DTYPES:
        assert explain(softmax, gpu.ones((2, 3), dtype_of(dtype))).chosen == "raw-simt"
    with pytest.warns(UserWarning, match="float64"):
        softmax(gpu.ones((2, 3), "float64"))


def test_block_table():
    assert [_block_for(n) for n in (0, 1, 1024, 1025, MAX_COLS)] == [128, 128, 128, 512, 512]
    assert BLOCKS[-1][0] == MAX_COLS


def test_numba_kernels_compile_without_double_arithmetic(nvvm):
    from numba import float32, int64

    from gpuattn.numbakernels import softmax as kernels

    rows = float32[:, ::1]
    check_no_float64(kernels.softmax_forward, rows, rows, rows, int64, int64, float32)
    check_no_float64(kernels.softmax_backward, rows, rows, rows, float32)
