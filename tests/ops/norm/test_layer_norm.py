from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from checks import (
    DTYPES,
    check_gradient,
    check_implementation,
    check_no_float64,
    dtype_of,
    find,
    implementations,
    module_named,
)
from fake_gpu import GPUS

from gpuattn import Tensor, explain
from gpuattn.arrays import to_cpu
from gpuattn.cuda.gpu import gpu as gpu_of
from gpuattn.errors import UnsupportedError
from gpuattn.ops.norm import launch
from gpuattn.ops.norm import layer_norm as module
from gpuattn.ops.norm.launch import layout
from gpuattn.ops.norm.layer_norm import IMPLS, layer_norm

# 257 and 1025: one more than a team's threads; 31: less than a warp; 256: whole vectors
SHAPES = {
    "one": (1, 1), "odd": (3, 257), "batched": (2, 5, 31), "tail": (2, 1025), "row": (64,),
    "whole": (5, 256),
}  # fmt: skip
# widths for every kind of team: 16 lanes (full), a warp, two warps (not full), a block, and rows
# that exceed the registers (whole vectors or not)
WIDE = [(70, 512), (19, 768), (11, 1024), (9, 1000), (7, 2048), (5, 4096), (3, 8192), (2, 16392),
        (2, 16387)]  # fmt: skip
HERE = implementations(IMPLS)


def inputs(rng, shape):
    vectors = rng.standard_normal((2, shape[-1]))
    return [rng.standard_normal(shape), 1 + 0.1 * vectors[0], vectors[1]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name, where", HERE)
def test_implementations_agree(name, where, rng, shape, dtype):
    check_implementation(IMPLS, name, where, inputs(rng, shape), dtype, eps=1e-5)


@pytest.mark.parametrize("name, where", HERE)
def test_weight_and_bias_may_be_missing(name, where, rng):
    x, weight, bias = inputs(rng, (4, 33))
    for given in ([x, None, None], [x, weight, None], [x, None, bias]):
        check_implementation(IMPLS, name, where, given, "float32", eps=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", WIDE)
def test_wide_rows(gpu, rng, shape, dtype):
    check_implementation(IMPLS, "raw-simt", "cupy", inputs(rng, shape), dtype, eps=1e-5)


@pytest.mark.parametrize("cols", [33, 64])
@pytest.mark.parametrize("name, where", HERE)
def test_more_rows_than_blocks(name, where, rng, monkeypatch, cols):
    monkeypatch.setattr(module, "NUMBA_WARPS", 4)
    monkeypatch.setattr(launch, "gpu", lambda device: replace(gpu_of(device), multiprocessors=1))
    rows = 13 if name == "numba" else 203
    check_implementation(IMPLS, name, where, inputs(rng, (rows, cols)), "float32", eps=1e-5)


def test_two_rows_at_a_time(gpu, rng, monkeypatch):
    monkeypatch.setattr(launch, "gpu", lambda device: replace(gpu_of(device), multiprocessors=2))
    for rows in (1, 11):  # blocks with a pair, and with half of one
        given = inputs(rng, (rows, 8192))
        check_implementation(IMPLS, "raw-simt", "cupy", given, "bfloat16", eps=1e-5)


@pytest.mark.parametrize("shared, dtype, cols, rows", [
    (227, "bfloat16", 8192, 2), (227, "float32", 8192, 1), (227, "bfloat16", 8000, 1),
    (227, "bfloat16", 4096, 1), (99, "bfloat16", 8192, 1),
])  # fmt: skip
def test_rows_per_step(monkeypatch, shared, dtype, cols, rows):
    record = replace(GPUS["9.0"], shared_bytes=shared << 10)
    monkeypatch.setattr(launch, "gpu", lambda device: record)
    x = mock.Mock(shape=(999, cols), size=999 * cols, dtype=dtype_of(dtype))
    x.itemsize = x.dtype.itemsize
    constants, _, bytes = launch.backward_layout(x, 2, 2, pairs=True)
    assert constants["ROWS"] == rows and bytes <= shared << 10


def exact(x, eps=1e-5):
    x = to_cpu(x).astype(np.float64)
    x -= x.mean(-1, keepdims=True)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


@pytest.mark.parametrize("mean, deviation", [(1e4, 1), (-3e4, 1), (1e4, 1e-2), (1e-4, 1e-8)])
@pytest.mark.parametrize("name, where", HERE)
def test_a_mean_far_above_the_deviation(name, where, rng, mean, deviation):
    """Forward and backward are as exact as the float32 inputs allow."""
    xp = module_named(where)
    x = xp.asarray(mean + deviation * rng.standard_normal((5, 257)), "float32")
    dy = rng.standard_normal(x.shape).astype("float32")
    eps = 1e-12 * deviation
    y, saved = find(IMPLS, name).forward(x, None, None, needs=(True, False, False), eps=eps)
    want = exact(x, eps)
    np.testing.assert_allclose(to_cpu(y), want, atol=1e-5)
    (dx, *_) = find(IMPLS, name).backward(
        saved, xp.asarray(dy), needs=(True, False, False), into=(None,) * 3, eps=eps
    )
    x64 = to_cpu(x).astype(np.float64)
    rstd = 1 / np.sqrt(x64.var(-1, keepdims=True) + eps)
    centred = dy - dy.mean(-1, keepdims=True) - want * (dy * want).mean(-1, keepdims=True)
    np.testing.assert_allclose(to_cpu(dx) / rstd, centred, atol=2e-5)


@pytest.mark.parametrize("value", [0.0, 0.1, 1e4, -3e37])
@pytest.mark.parametrize("name, where", HERE)
def test_a_constant_row_is_the_bias(name, where, value):
    xp = module_named(where)
    bias = xp.asarray([1.0, -2.0, 3.0] * 11, "float32")
    x = xp.full((2, 33), value, "float32")
    y = layer_norm(x, xp.ones(33, "float32"), bias, impl=name)
    assert y.tolist() == [bias.tolist()] * 2
    assert layer_norm(x[:, :1], impl=name).tolist() == [[0], [0]]


@pytest.mark.parametrize("name, where", HERE)
def test_nonfinite_values_stay_in_their_row(name, where, rng):
    xp = module_named(where)
    x = rng.standard_normal((4, 40)).astype("float32")
    x[0, 0], x[1, 7], x[2, 39] = np.nan, np.inf, -np.inf
    with np.errstate(invalid="ignore"):
        y = to_cpu(layer_norm(xp.asarray(x), impl=name))
    assert np.isnan(y[:3]).any(axis=1).all()
    np.testing.assert_allclose(y[3], exact(x[3]), atol=1e-5)


def views(xp, rng, dtype):
    base = xp.asarray(rng.standard_normal((3, 4, 8)), dtype)
    yield "transposed", base.transpose(2, 0, 1)
    yield "sliced", base[::2, 1:, 3:7]
    yield "reversed", base[:, ::-1, ::-1]
    yield "broadcast", xp.broadcast_to(base[:1], base.shape)
    yield "offset by one", base.ravel()[1:61].reshape(4, 15)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name, where", HERE)
def test_strides(name, where, rng, dtype):
    xp, impl = module_named(where), find(IMPLS, name)
    needs, into = (True, True, True), (None,) * 3
    for view, x in views(xp, rng, dtype_of(dtype)):
        dy = xp.asarray(rng.standard_normal(x.shape[::-1]), x.dtype).T
        vectors = xp.asarray(rng.standard_normal((2, 2 * x.shape[-1])), x.dtype)[:, ::-2]
        got, saved = impl.forward(x, *vectors, needs=needs, eps=1e-5)
        gots = [got, *impl.backward(saved, dy, needs=needs, into=into, eps=1e-5)]
        want, saved = impl.forward(x.copy(), *vectors.copy(), needs=needs, eps=1e-5)
        wants = [want, *impl.backward(saved, dy.copy(), needs=needs, into=into, eps=1e-5)]
        for got, want in zip(gots, wants, strict=True):
            assert got.tolist() == want.tolist(), view


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (2, 0, 3), (0,)])
@pytest.mark.parametrize("name, where", HERE)
def test_empty(name, where, shape):
    xp, impl = module_named(where), find(IMPLS, name)
    x, vector = xp.zeros(shape, "float16"), xp.ones(shape[-1:], "float16")
    needs = (True, True, True)
    y, saved = impl.forward(x, vector, vector, needs=needs, eps=1e-5)
    assert (y.shape, y.dtype) == (shape, x.dtype)
    grads = impl.backward(saved, y, needs=needs, into=(None,) * 3, eps=1e-5)
    assert [g.tolist() for g in grads] == [x.tolist(), [0] * shape[-1], [0] * shape[-1]]


@pytest.mark.parametrize("slot_dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("name, where", HERE)
def test_weight_gradients_go_to_their_slots(name, where, rng, slot_dtype):
    """The first gradient overwrites, the next one is added, in the dtype of the buffer."""
    xp = module_named(where)
    x, weight, bias = (xp.asarray(a, dtype_of("bfloat16")) for a in inputs(rng, (7, 40)))
    leaves = [Tensor(a, requires_grad=True) for a in (x, weight, bias)]
    flat = xp.full(80, np.nan, dtype_of(slot_dtype))
    leaves[1].grad_slot, leaves[2].grad_slot = flat[:40], flat[40:]
    dy = xp.asarray(rng.standard_normal(x.shape), x.dtype)
    layer_norm(*leaves, impl=name).backward(dy)
    once = to_cpu(flat).astype(np.float64)
    dy64, normalized = to_cpu(dy).astype(np.float64), exact(x)
    want = np.concatenate([(dy64 * normalized).sum(0), dy64.sum(0)])
    np.testing.assert_allclose(once, want, atol=1e-5 if slot_dtype == "float32" else 0.05)
    layer_norm(*leaves, impl=name).backward(dy)
    tolerance = 0.05 if slot_dtype == "bfloat16" else 1e-5
    np.testing.assert_allclose(to_cpu(flat).astype(np.float64), 2 * once, atol=tolerance)
    assert leaves[1].grad is leaves[1].grad_slot


def test_gradient(rng):
    check_gradient(layer_norm, *inputs(rng, (2, 3, 7)))
    check_gradient(lambda x: layer_norm(x, eps=0.5), rng.standard_normal((3, 5)))


def test_float64_in_float64_out(rng):
    x = rng.standard_normal((3, 9))
    y = layer_norm(x)
    assert y.dtype == np.float64
    np.testing.assert_allclose(y, exact(x), atol=1e-14)


@pytest.mark.parametrize("bad, error, says", [
    (lambda xp, x, w: layer_norm(x.astype(int)), TypeError, "x.dtype is int64"),
    (lambda xp, x, w: layer_norm(x.astype(complex)), TypeError, "complex128"),
    (lambda xp, x, w: layer_norm([1.0]), TypeError, "x is a list"),
    (lambda xp, x, w: layer_norm(x, w.astype("e")), TypeError, "weight is float16"),
    (lambda xp, x, w: layer_norm(x[0, 0]), ValueError, "0-dimensional"),
    (lambda xp, x, w: layer_norm(x, w[:2]), ValueError, r"weight.shape is \(2,\)"),
    (lambda xp, x, w: layer_norm(x, w, x), ValueError, r"bias.shape is \(2, 3\)"),
    (lambda xp, x, w: layer_norm(x, eps=0), ValueError, "eps is 0"),
    (lambda xp, x, w: layer_norm(x, eps=-1e-5), ValueError, "eps is -1e-05"),
    (lambda xp, x, w: layer_norm(x, eps=np.nan), ValueError, "eps is nan"),
    (lambda xp, x, w: layer_norm(x, eps=np.inf), ValueError, "eps is inf"),
])  # fmt: skip
def test_bad_arguments(xp, bad, error, says):
    with pytest.raises(error, match=says):
        bad(xp, xp.ones((2, 3), "f"), xp.ones(3, "f"))


def test_object_arrays_are_refused():
    with pytest.raises(TypeError, match="object"):
        layer_norm(np.ones(3, object))


def test_arrays_in_two_places(gpu):
    with pytest.raises(TypeError, match="weight in host memory"):
        layer_norm(gpu.ones((2, 3), "f"), np.ones(3, "f"))


def test_raw_explains_its_refusal():
    with pytest.raises(UnsupportedError, match="raw-simt: x is a NumPy array"):
        layer_norm(np.zeros((1, 2)), impl="raw")


def test_raw_runs_on_a_gpu(gpu):
    for dtype in DTYPES:
        assert explain(layer_norm, gpu.ones((2, 3), dtype_of(dtype))).chosen == "raw-simt"


@pytest.mark.parametrize("cols, team, held, full", [
    (1, 8, 8, False), (64, 8, 8, True), (512, 16, 32, True), (768, 32, 24, True),
    (1000, 64, 16, False), (1024, 32, 32, True), (4096, 128, 32, True), (8192, 256, 32, True),
    (16384, 512, 32, True), (16392, 512, 0, False), (1001, 64, 16, False),
])  # fmt: skip
def test_layout(cols, team, held, full):
    constants, found = layout(cols, dtype_of("bfloat16"), 32, 32)
    assert (constants["TEAM"], found, constants["FULL"]) == (team, held, full)
    assert constants["PACKS"] * constants["VEC"] == found
    assert not found or team * found >= cols
    assert cols % constants["VEC"] == 0


@pytest.mark.parametrize("cols", [256, 1024])
def test_rows_with_gaps_are_not_copied(gpu, rng, cols):
    """Rows of a larger matrix give the same as their copies, with and without the tape."""
    x, dy = (gpu.asarray(rng.standard_normal((6, 2 * cols)), "float16")[:, cols:] for _ in range(2))
    assert launch.rows_of(x) == (x, 2 * cols)
    for a, b in zip(_both(x, dy), _both(x.copy(), dy.copy()), strict=True):
        assert a.tobytes() == b.tobytes()


def _both(x, dy):
    needs = True, True, True
    y, saved = find(IMPLS, "raw-simt").forward(x, None, None, needs=needs, eps=1e-5)
    return y, *find(IMPLS, "raw-simt").backward(saved, dy, needs=needs, into=(None,) * 3, eps=1e-5)


def test_numba_kernels_compile_without_double_arithmetic(nvvm):
    from numba.cuda.types import float16, float32, int64, uint16

    from gpuattn.numbakernels import layer_norm as numba_form

    v, sums = float32[::1], float32[:, ::1]
    for kind in (float32, float16, uint16):
        m, width = kind[:, ::1], 128 // kind.bitwidth
        for constants in ((32, 4, width, False), (256, 4, width, True)):
            forward = numba_form.layer_norm_forward(*constants)
            backward = numba_form.layer_norm_backward(*constants)
            for ptx in (
                check_no_float64(forward, m, m, m, m, v, v, int64, float32),
                check_no_float64(backward, m, m, m, v, v, m, sums, sums, int64),
            ):
                assert "ld.global.v4" in ptx and "st.global.v4" in ptx
                assert ".local" not in ptx, "a row was spilled from registers to local memory"
    check_no_float64(numba_form.column_sums, sums, sums)
