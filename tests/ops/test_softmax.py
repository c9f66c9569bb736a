import contextlib
from unittest import mock

import emulator
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
    sampled,
)
from fake_gpu import GPUS

import gpuattn.ops.softmax as module
from gpuattn import Tensor, arrays, explain
from gpuattn import rng as random
from gpuattn.errors import GradientError, UnsupportedError
from gpuattn.impls import Impl, Impls
from gpuattn.numbakernels import reduce
from gpuattn.ops.softmax import IMPLS, ROW_THREADS, _lines, _mask_layout, row_threads, softmax

# 257 and 1025: one more than fewer threads hold; 31: less than a warp; 256: no partial vectors
SHAPES = {"one": (1, 1), "odd": (3, 257), "batched": (2, 5, 31), "tail": (2, 1025), "vector": (64,)}
SHAPES["whole"] = (5, 256)
PLAIN = {"scale": 1.0, "causal": False, "p": 0.0, "key": None, "donate": False}
HERE = implementations(IMPLS)
EVERYTHING = [
    case for case in HERE if "numba" not in case.id
]  # it supports neither lengths nor dropout


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name, where", HERE)
def test_implementations_agree(name, where, rng, shape, dtype):
    x = 3 * rng.standard_normal(shape)
    check_implementation(IMPLS, name, where, [x, None, None], dtype, **{**PLAIN, "scale": 0.7})


@pytest.mark.parametrize("mask_shape", [(2, 33), (1, 33), (2, 1), (33,), (3, 1, 33), (2, 3, 2, 33)])
@pytest.mark.parametrize("kind", ["keep", "add"])
@pytest.mark.parametrize("name, where", HERE)
def test_masks_agree(name, where, rng, mask_shape, kind):
    x = rng.standard_normal((2, 3, 2, 33))
    mask = rng.random(mask_shape) < 0.5 if kind == "keep" else rng.standard_normal(mask_shape)
    params, needs = {**PLAIN, "scale": 0.5, "causal": True}, (True, False, False)
    check_implementation(IMPLS, name, where, [x, mask, None], "float32", needs=needs, **params)


@pytest.mark.parametrize("queries, keys", [(5, 5), (3, 7), (7, 3), (1, 9)])
@pytest.mark.parametrize("name, where", HERE)
def test_causal_is_bottom_right(name, where, rng, queries, keys):
    x = rng.standard_normal((2, queries, keys))
    check_implementation(
        IMPLS, name, where, [x, None, None], "float32", **{**PLAIN, "causal": True}
    )
    xp = module_named(where)
    got = softmax(xp.asarray(x, "float32"), causal=True, impl=name)
    visible = np.tri(queries, keys, keys - queries, dtype=bool)
    np.testing.assert_array_equal(np.asarray(got.tolist()) > 0, np.broadcast_to(visible, x.shape))


@pytest.mark.parametrize("name, where", HERE)
def test_nonfinite_logits(name, where):
    xp, inf, nan = module_named(where), np.inf, np.nan
    x = xp.asarray([[-inf, -inf], [0, -inf], [nan, 1], [inf, 1], [nan, nan], [1, 1]], "float32")
    want = [[0, 0], [1, 0], [nan, nan], [nan, nan], [nan, nan], [0.5, 0.5]]
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(softmax(x, impl=name).tolist(), want)


@pytest.mark.parametrize("name, where", HERE)
def test_masked_values_have_no_effect(name, where):
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
    base = xp.asarray(rng.standard_normal((3, 4, 8)), dtype)
    yield "transposed", base.transpose(2, 0, 1)
    yield "sliced", base[::2, 1:, 3:7]
    yield "reversed", base[:, ::-1, ::-1]
    yield "broadcast", xp.broadcast_to(base[:1], base.shape)
    yield "offset by one", base.ravel()[1:61].reshape(4, 15)


def close_to(got, want, name=""):
    """Rows with another alignment are summed in another order, so the last bit may differ."""
    tolerance = 1e-6 if want.dtype == np.float32 else 2.0**-7
    got, want = (arrays.to_cpu(x).astype("f") for x in (got, want))
    np.testing.assert_allclose(got, want, rtol=tolerance, err_msg=name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name, where", HERE)
def test_strides(name, where, rng, dtype):
    xp = module_named(where)
    for view, x in views(xp, rng, dtype_of(dtype)):
        got, want = softmax(x, impl=name), softmax(x.copy(), impl=name)
        close_to(got, want, view)


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
    y, saved = impl.forward(x, None, None, needs=(True, False, False), **PLAIN)
    dx, *_ = impl.backward(saved, y, needs=(True, False, False), into=(None,) * 3, **PLAIN)
    assert dx.shape == shape


def test_mask_layout_finds_every_element(rng):
    """Sizes and strides for the kernel address the right mask element for every broadcast."""
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


@pytest.mark.parametrize("kind, dtype", [
    ("plain", "float16"), ("keep", "bfloat16"), ("add", "float32"),
    ("odd", "bfloat16"), ("odd", "float32"),
])  # fmt: skip
@pytest.mark.parametrize("name, where", EVERYTHING)
def test_lengths_and_dropout(name, where, rng, kind, dtype):
    x, mask = rng.standard_normal((2, 3, 9, 45 if kind == "odd" else 40)), None
    if kind in ("keep", "add"):
        mask = rng.random((3, 1, 40)) < 0.5 if kind == "keep" else rng.standard_normal((3, 1, 40))
    lengths = np.asarray([[0, 40, 3], [50, -1, 9]] if kind == "odd" else [7, 40])
    params = {**PLAIN, "p": 0.3, "key": random.Key(5, 3, 2), "causal": kind == "odd"}
    needs = (True, False, False)
    check_implementation(IMPLS, name, where, [x, mask, lengths], dtype, needs=needs, **params)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name, where", EVERYTHING)
def test_dropout_equals_the_reference_mask(name, where, dtype):
    """The mask is NumPy's for the row-major index, for any strides; kept values are scaled."""
    xp = module_named(where)
    for shape in ((3, 64), (5, 77)):
        x = xp.ones((shape[0], shape[1] + 3), dtype_of(dtype))[:, 3:]
        got = arrays.to_cpu(softmax(x, dropout_p=0.4, seed=11, impl=name)).astype("f")
        keep = random.keep_mask(np, shape, 0.4, random.as_key(11))
        np.testing.assert_array_equal(got > 0, keep)
        np.testing.assert_allclose(got[keep], 1 / 0.6 / shape[1], rtol=1e-2)


def test_dropout_by_a_step_on_the_device(gpu):
    x, step = gpu.ones((4, 80), "f"), gpu.zeros(1, "uint32")
    for number in range(2):
        step.fill(number)
        got = softmax(x, dropout_p=0.5, seed=random.Key(3, 1, step)).get() > 0
        np.testing.assert_array_equal(
            got, random.keep_mask(np, x.shape, 0.5, random.Key(3, 1, number))
        )


@pytest.mark.parametrize("cols", [16385, 131_073, 300_001])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_long_rows(gpu, rng, cols, dtype):
    """Rows that fit a block, a cluster, or neither; the last of three rows is partly masked."""
    x = 3 * rng.standard_normal((3, cols))
    lengths = np.asarray([cols, cols - 9, 5])
    for given in (None, lengths):
        inputs, needs = [x, None, given], (True, False, False)
        check_implementation(IMPLS, "raw-simt", "cupy", inputs, dtype, needs=needs, **PLAIN)


def test_donated_memory_is_used(gpu, rng):
    for x in (gpu.ones((4, 64), "f"), gpu.ones((4, 99), "f")[:, 3:80]):
        want = softmax(x)
        y = softmax(x, donate=True)
        assert y.data.ptr == x.data.ptr
        close_to(y, want)
    leaf = Tensor(gpu.asarray(rng.standard_normal((4, 64)), "f"), requires_grad=True)
    grads = []
    for donate in (False, True):
        y = softmax(leaf * 2, dropout_p=0.2, seed=1, donate=donate)
        leaf.grad = None
        (y * y).sum().backward()
        grads.append(leaf.grad.get())
    np.testing.assert_array_equal(*grads)


def test_donating_a_saved_array_is_an_error(xp):
    x = Tensor(xp.ones((2, 3), "f"), requires_grad=True) * 1
    squares = (x * x).sum()
    softmax(x, donate=True)
    with pytest.raises(GradientError, match="edited in place"):
        squares.backward()


def test_nothing_is_written_outside_the_rows(gpu, rng):
    """Memory before, after and, in donated arrays, between the rows keeps its values."""
    for cols in (31, 64, 1000, 16389):
        room = gpu.full((3, cols + 16), 7, "float16")
        x = room[:, 5 : 5 + cols]
        x[...] = gpu.asarray(rng.standard_normal(x.shape))
        want = softmax(x.copy())
        y = softmax(x, donate=True)
        assert y.data.ptr == x.data.ptr
        close_to(y, want)
        assert (room[:, :5] == 7).all() and (room[:, 5 + cols :] == 7).all()


@contextlib.contextmanager
def emulated(staged):
    """Run the kernel source on the CPU emulator, without clusters; ``staged``: with TMA."""
    xp = emulator._Module()
    kernel, record = emulator.Machine(seed=1).kernel, GPUS["9.0" if staged else "8.0"]
    with (
        mock.patch.multiple(module, MAX_CLUSTER=1, get_xp=lambda *_: xp, kernel=kernel),
        mock.patch.object(module, "prefetch_rows", lambda x: 3),
        mock.patch.object(module, "gpu", lambda _: record),
        mock.patch.object(arrays, "get_xp", lambda *_: xp),
    ):
        yield


@pytest.mark.parametrize("shape, dtype, kind, p, staged", sampled([
    ((5, 256), "bfloat16", None, 0.0, True),
    ((5, 257), "float16", "lengths", 0.3, True),
    ((2, 3, 9, 45), "float32", "keep", 0.0, False),
    ((2, 3, 9, 40), "bfloat16", "add", 0.5, True),
    ((2, 12345), "bfloat16", None, 0.0, False),
    ((2, 9001), "float32", "keep", 0.2, True),
    ((2, 9001), "float32", None, 0.0, False),
], 4))  # fmt: skip
def test_the_kernel_in_the_emulator(rng, shape, dtype, kind, p, staged, host_compiler):
    def forward(*inputs, **params):
        with emulated(staged):
            return module._forward_raw(*map(emulator.as_array, inputs), **params)

    def backward(saved, dy, **params):
        with emulated(staged):
            return module._backward_raw(saved, emulator.as_array(dy), **params)

    x, needs = rng.standard_normal(shape), (True, False, False)
    mask = {"keep": rng.random(shape[-1]) < 0.5, "add": rng.standard_normal(shape[1:])}.get(kind)
    lengths = np.arange(shape[0]) if kind == "lengths" else None
    impls = Impls("emulated softmax", Impl("emulated", forward, backward), IMPLS[-1])
    params = {**PLAIN, "scale": -0.7, "p": p, "key": random.as_key(3) if p else None}
    inputs = [x, mask, lengths]
    check_implementation(impls, "emulated", "numpy", inputs, dtype, needs=needs, **params)


def test_strides_of_lines(rng):
    base = rng.standard_normal((4, 6, 8))
    for x, stride in ((base, 8), (base[:, :, 2:5], 8), (base[::2, 0], 96), (base[0, ::-1], -8)):
        same, found = _lines(x)
        assert same is x and found == stride
    for x in (base[:, :5], base[..., ::2], base.transpose(2, 0, 1)):
        copy, stride = _lines(x)
        np.testing.assert_array_equal(copy, x)
        assert copy.flags.c_contiguous and stride == x.shape[-1]


def test_gradient(rng):
    x, keep = rng.standard_normal((2, 4, 7)), rng.random((4, 7)) < 0.7
    check_gradient(lambda x: softmax(x, scale=0.7, mask=keep, causal=True), x)
    check_gradient(lambda x: softmax(x, mask=rng.standard_normal(7) * 0 + 0.3), x)


def test_a_fully_masked_row_has_no_gradient(xp):
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
    (lambda xp: softmax(xp.ones((2, 3), "f"), lengths=xp.ones(2)), TypeError, "lengths.dtype is"),
    (lambda xp: softmax(xp.ones((2, 3), "f"), lengths=xp.ones(3, int)), ValueError, "axes of"),
    (lambda xp: softmax(xp.ones(3, "f"), lengths=xp.ones(3, int)), ValueError, "lengths.shape"),
    (lambda xp: softmax(xp.ones(3, "f"), dropout_p=1.5), ValueError, "p is 1.5"),
])  # fmt: skip
def test_bad_arguments(xp, bad, error, says):
    with pytest.raises(error, match=says):
        bad(xp)


def test_numba_names_what_it_does_not_support(gpu):
    with pytest.raises(UnsupportedError, match="the readable form has neither"):
        softmax(gpu.ones((2, 3), "f"), dropout_p=0.1, impl="numba")


def test_arrays_in_two_places(gpu):
    with pytest.raises(TypeError, match="mask in host memory"):
        softmax(gpu.ones(3, "f"), mask=np.ones(3, bool))


def test_a_mask_takes_no_gradient():
    mask = Tensor(np.zeros(3), requires_grad=True)
    with pytest.raises(UnsupportedError, match=r"softmax\(x \+ mask\)"):
        softmax(np.ones(3), mask=mask)


def test_raw_explains_its_refusal():
    with pytest.raises(UnsupportedError, match="raw-simt: x is a NumPy array"):
        softmax(np.zeros((1, 2)), impl="raw")


def test_raw_runs_on_a_gpu(gpu):
    for dtype in DTYPES:
        assert explain(softmax, gpu.ones((2, 3), dtype_of(dtype))).chosen == "raw-simt"
    with pytest.warns(UserWarning, match="float64"):
        softmax(gpu.ones((2, 3), "float64"))


@pytest.mark.parametrize("verb", ["forward", "backward"])
@pytest.mark.parametrize("edges", [False, True])
def test_threads_hold_every_row(verb, edges):
    for vectors in [*range(1, 3000), 10**6]:
        held = row_threads(verb, vectors, edges)
        assert (held is None) == (vectors > 512 * 4)
        if held:
            lanes, each = held
            assert (
                lanes in ROW_THREADS
                and 1 <= each <= 4
                and lanes * (each - 1) < vectors <= lanes * each
            )
    # rows of the usual widths fill the vectors of their threads
    assert all(n % row_threads(verb, n, False)[0] == 0 for n in (64, 96, 128, 512, 1024))


@pytest.mark.parametrize("dtype", ["float32", "float16", "uint16"])
def test_numba_kernels_compile_for_registers(nvvm, dtype):
    """Loads are 16 bytes wide, without double arithmetic; uint16 stands for bfloat16."""
    from numba import boolean, float32, from_dtype, int64

    from gpuattn.numbakernels import softmax as kernels

    dtype = np.dtype(dtype)
    rows, width, count = from_dtype(dtype)[:, ::1], 16 // dtype.itemsize, int64
    for team, kind, edges, long in ((32, 0, False, False), (512, kernels.KEEP, True, True)):
        constants = team, 4, width
        mask = boolean[:, ::1] if kind else rows
        forward = kernels.softmax_forward(*constants, kind, edges, long)
        backward = kernels.softmax_backward(*constants, edges, long)
        for ptx in (
            check_no_float64(forward, rows, mask, rows, count, count, float32),
            check_no_float64(backward, rows, rows, rows, count, float32),
        ):
            assert "ld.global.v4" in ptx and "st.global.v4" in ptx and ".local" not in ptx


@pytest.mark.parametrize("name, where", [case for case in HERE if "numba" in case.id])
def test_numba_reads_long_rows_in_steps(name, where, rng, monkeypatch):
    monkeypatch.setattr(reduce, "TEAMS", (64,))
    x = 3 * rng.standard_normal((3, 2100))  # two whole steps of 1024 and a partial one
    check_implementation(
        IMPLS, name, where, [x, None, None], "float32", **{**PLAIN, "causal": True}
    )


def test_numba_teams_hold_every_row():
    for vectors in [*range(1, 2200), 10**6]:
        team, held = reduce.layout(vectors)
        assert team in reduce.TEAMS and 1 <= held <= reduce.MAX_VECTORS
        assert team * held >= min(vectors, 2048)
    # rows of the usual widths fill the vectors of their threads
    assert all(np.prod(reduce.layout(n)) == n for n in (32, 96, 128, 192, 512, 1024, 2048))
