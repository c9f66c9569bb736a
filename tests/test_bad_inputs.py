"""Thirty faults in a user's inputs, numbered, with what must happen on NumPy and CuPy.

Row 26 (beams) is in ``decode/test_beam.py``.
"""

import subprocess
import sys

import numpy as np
import pytest

import gpuattn
from gpuattn import Tensor, arrays, to_cpu
from gpuattn.errors import GradientError, UnsupportedError

INF = float("inf")


def draw(xp, *shape, dtype=np.float32, seed=0):
    return xp.asarray(np.random.default_rng(seed).standard_normal(shape).astype(dtype))


def attend(xp, *shapes, **kwargs):
    q, k, v = (draw(xp, *shape, seed=i) for i, shape in enumerate(shapes))
    return gpuattn.flash_attention(q, k, v, **kwargs)


def gradients_of_attention(xp, q, k, v, **kwargs):
    leaves = [Tensor(x, requires_grad=True) for x in (q, k, v)]
    out = gpuattn.flash_attention(*leaves, **kwargs)
    out.sum().backward()
    return to_cpu(out.data), [to_cpu(x.grad) for x in leaves]


@pytest.mark.parametrize("shape", [(0, 4, 2, 8), (2, 0, 2, 8), (2, 4, 0, 8)], ids=str)
def test_row_01_empty_arrays(xp, shape):
    out = attend(xp, shape, shape, shape)
    assert out.shape == shape
    for rows in ((0, 5), (5, 0)):
        assert gpuattn.softmax(draw(xp, *rows)).shape == rows
    assert gpuattn.layer_norm(draw(xp, 0, 5), draw(xp, 5), draw(xp, 5)).shape == (0, 5)
    assert gpuattn.linear(draw(xp, 0, 5), draw(xp, 3, 5)).shape == (0, 3)


def test_row_02_no_keys(xp):
    q, k = draw(xp, 1, 3, 2, 8), draw(xp, 1, 0, 2, 8)
    out, lse = gpuattn.flash_attention(q, k, k, return_lse=True)
    assert not to_cpu(out).any()
    assert (to_cpu(lse) == -INF).all()
    out, grads = gradients_of_attention(xp, q, k, k)
    assert not any(g.any() for g in grads)


def test_row_03_fully_masked_row(xp):
    q, k = draw(xp, 1, 5, 2, 8), draw(xp, 1, 3, 2, 8, seed=1)
    out, grads = gradients_of_attention(xp, q, k, k, causal=True)
    assert not out[0, :2].any()
    assert not grads[0][0, :2].any()
    assert np.isfinite(out).all()
    hidden = xp.zeros((4, 6), bool)
    assert not to_cpu(gpuattn.softmax(draw(xp, 4, 6), mask=hidden)).any()


@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 31, 33, 127, 128, 129])
def test_row_04_lengths_around_tiles(xp, tokens):
    shape = (1, tokens, 2, 8)
    q, k, v = (draw(xp, *shape, seed=i) for i in range(3))
    scores = np.einsum("bthd,bshd->bhts", to_cpu(q), to_cpu(k)) / np.sqrt(8)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    want = np.einsum("bhts,bshd->bthd", weights, to_cpu(v))
    np.testing.assert_allclose(to_cpu(gpuattn.flash_attention(q, k, v)), want, atol=2e-6)


@pytest.mark.parametrize("size", [0, 7, 257])
def test_row_05_head_sizes(xp, size):
    shape = (1, 4, 2, size)
    if size == 0:
        with pytest.raises(ValueError, match="head size"):
            attend(xp, shape, shape, shape)
    else:
        assert np.isfinite(to_cpu(attend(xp, shape, shape, shape))).all()


@pytest.mark.parametrize("shapes", [
    ((1, 4, 2, 8), (1, 4, 2, 16), (1, 4, 2, 16)), ((1, 4, 2, 8), (1, 4, 2, 8), (1, 5, 2, 8)),
    ((1, 4, 3, 8), (1, 4, 2, 8), (1, 4, 2, 8)), ((2, 4, 2, 8), (1, 4, 2, 8), (1, 4, 2, 8)),
], ids=["head size", "k and v length", "heads", "batch"])  # fmt: skip
def test_row_06_shapes_that_do_not_match(xp, shapes):
    with pytest.raises(ValueError, match="flash_attention"):
        attend(xp, *shapes)


@pytest.mark.parametrize("view", ["transposed", "sliced", "negative", "broadcast"])
def test_row_07_any_strides(xp, view):
    base = draw(xp, 12, 16)
    x = {
        "transposed": base.T, "sliced": base[::2, 3:11], "negative": base[::-1, ::-1],
        "broadcast": xp.broadcast_to(base[:1], (5, 16)),
    }[view]  # fmt: skip
    copy = xp.ascontiguousarray(x)
    for op in (gpuattn.softmax, gpuattn.layer_norm, gpuattn.rms_norm, gpuattn.gelu, gpuattn.relu):
        # on a GPU another alignment splits a row over threads differently: another order of sums
        np.testing.assert_allclose(to_cpu(op(x)), to_cpu(op(copy)), 2e-6, 1e-6, err_msg=op.__name__)
    q = xp.broadcast_to(x[None, :, None, :], (1, x.shape[0], 2, x.shape[1]))
    want = gpuattn.flash_attention(*[xp.ascontiguousarray(q)] * 3)
    np.testing.assert_allclose(to_cpu(gpuattn.flash_attention(q, q, q)), to_cpu(want), atol=1e-6)


def test_row_08_misaligned_views(xp):
    x = draw(xp, 8 * 64 + 1).astype(np.float16)[1:].reshape(8, 64)
    for op in (gpuattn.softmax, gpuattn.layer_norm, gpuattn.gelu):
        np.testing.assert_allclose(to_cpu(op(x)), to_cpu(op(x.copy())), 1e-3, 1e-3)
    q = x.reshape(1, 8, 4, 16)
    got, want = (to_cpu(gpuattn.flash_attention(x, x, x)) for x in (q, q.copy()))
    np.testing.assert_allclose(got, want, rtol=2e-3, atol=2e-3)  # on a GPU different kernels run


def test_row_09_more_than_65535_rows(xp):
    x = draw(xp, 70_000, 2)
    out = gpuattn.softmax(x)
    np.testing.assert_allclose(to_cpu(out).sum(-1), 1, rtol=1e-6)
    q = draw(xp, 70_000, 1, 1, 4)
    np.testing.assert_allclose(to_cpu(gpuattn.flash_attention(q, q, q)), to_cpu(q), rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.int32, bool, np.complex64])
def test_row_10_unsupported_dtypes(xp, dtype):
    x = xp.ones((2, 4), dtype)
    for op in (gpuattn.softmax, gpuattn.layer_norm, gpuattn.gelu):
        with pytest.raises(TypeError, match=r"dtype"):
            op(x)
    assert gpuattn.softmax(xp.ones((2, 4)), impl="reference").dtype == np.float64


def test_row_11_mixed_dtypes(xp):
    q, k = draw(xp, 1, 4, 2, 8, dtype=np.float16), draw(xp, 1, 4, 2, 8, dtype=arrays.BFLOAT16)
    with pytest.raises(TypeError, match="float16.*bfloat16"):
        gpuattn.flash_attention(q, k, k)


def test_row_12_numpy_and_ml_dtypes_are_new_enough():
    assert tuple(map(int, np.__version__.split(".")[:2])) >= (2, 1)
    assert np.dtype("bfloat16") == arrays.BFLOAT16


def test_row_13_arrays_on_two_devices(gpu):
    q = draw(gpu, 1, 4, 2, 8)
    with pytest.raises(TypeError, match="on the GPU but"):
        gpuattn.flash_attention(q, to_cpu(q), to_cpu(q))
    with pytest.raises(TypeError, match="on the GPU but"):
        gpuattn.layer_norm(q, np.ones(8, np.float32))


def test_row_14_lists():
    with pytest.raises(TypeError, match=r"numpy\.asarray"):
        gpuattn.softmax([1.0, 2.0])


def test_row_15_nan_stays_in_its_row(xp):
    q, k = draw(xp, 1, 6, 2, 8), draw(xp, 1, 6, 2, 8, seed=1)
    q[0, 2] = np.nan
    out = to_cpu(gpuattn.flash_attention(q, k, k))
    assert np.isnan(out[0, 2]).all()
    assert np.isfinite(np.delete(out, 2, axis=1)).all()
    x = draw(xp, 4, 6)
    x[1, 3] = np.nan
    for op in (gpuattn.softmax, gpuattn.layer_norm, gpuattn.rms_norm):
        out = to_cpu(op(x))
        assert np.isnan(out[1]).all()
        assert np.isfinite(np.delete(out, 1, axis=0)).all()


def test_row_16_huge_logits(xp):
    x = xp.asarray([[1e4, 1e4, 0.0], [-1e4, -1e4, -INF], [-INF, -INF, -INF]], np.float32)
    np.testing.assert_array_equal(
        to_cpu(gpuattn.softmax(x)), [[0.5, 0.5, 0], [0.5, 0.5, 0], [0, 0, 0]]
    )
    half = xp.asarray([[65504.0, -65504.0]], np.float16)
    assert to_cpu(gpuattn.softmax(half)).tolist() == [[1.0, 0.0]]
    q = 1e3 * draw(xp, 1, 8, 1, 8)
    assert np.isfinite(to_cpu(gpuattn.flash_attention(q, q, q))).all()


def test_row_17_scales(xp):
    q, k, v = (draw(xp, 1, 5, 2, 8, seed=i) for i in range(3))
    mean = to_cpu(v).mean(1, keepdims=True)
    got = to_cpu(gpuattn.flash_attention(q, k, v, scale=0.0))
    np.testing.assert_allclose(got, np.broadcast_to(mean, got.shape), atol=1e-6)
    negative = gpuattn.flash_attention(q, k, v, scale=-0.3)
    np.testing.assert_allclose(
        to_cpu(negative), to_cpu(gpuattn.flash_attention(-q, k, v, scale=0.3)), atol=1e-6
    )
    for scale in (np.nan, INF):
        with pytest.raises(ValueError, match="scale"):
            gpuattn.flash_attention(q, k, v, scale=scale)
        with pytest.raises(ValueError, match="scale"):
            gpuattn.softmax(v, scale=scale)


@pytest.mark.parametrize("p", [-0.1, 1.1, np.nan])
def test_row_18_dropout_probabilities(xp, p):
    x = draw(xp, 2, 4, 2, 8)
    with pytest.raises(ValueError, match=r"accepted: .*0 <= p <= 1"):
        gpuattn.dropout(x, p)
    with pytest.raises(ValueError, match=r"dropout_p"):
        gpuattn.flash_attention(x, x, x, dropout_p=p)


def test_row_18_everything_dropped_and_no_seed(xp):
    x = draw(xp, 2, 4, 2, 8)
    assert not to_cpu(gpuattn.dropout(x, 1.0)).any()
    with pytest.raises(ValueError, match="dropout_p is 1.0; accepted: 0 <= p < 1"):
        gpuattn.flash_attention(x, x, x, dropout_p=1.0)  # 1 / (1 - p) is not finite
    leaf = Tensor(x, requires_grad=True)
    y = gpuattn.dropout(leaf, 0.5)
    y.sum().backward()
    np.testing.assert_array_equal(to_cpu(leaf.grad) != 0, to_cpu(y.data) != 0)


def test_row_19_out_is_not_an_argument(xp):
    x = Tensor(draw(xp, 2, 4), requires_grad=True)
    with pytest.raises(UnsupportedError, match="out="):
        np.exp(x, out=draw(xp, 2, 4))


def test_row_20_masks(xp):
    q = draw(xp, 2, 4, 2, 8)
    with pytest.raises(ValueError, match=r"bias\.shape"):
        gpuattn.flash_attention(q, q, q, bias=draw(xp, 3, 5))
    with pytest.raises(TypeError, match=r"bias\.dtype"):
        gpuattn.flash_attention(q, q, q, bias=xp.ones((4, 4), np.int32))
    with pytest.raises(ValueError, match="mask"):
        gpuattn.softmax(q, mask=xp.ones((3, 5), bool))
    with_nan = xp.zeros((4, 4), np.float32)
    with_nan[1, 2] = np.nan
    out = to_cpu(gpuattn.flash_attention(q, q, q, bias=with_nan))
    assert np.isnan(out[:, 1]).all()
    assert np.isfinite(out[:, [0, 2, 3]]).all()


@pytest.mark.parametrize("offsets", [[0, 5, 3, 8], [0, 4], [1, 8], [0, 9]], ids=str)
def test_row_21_offsets_of_packed_sequences(offsets):
    q = draw(np, 8, 2, 8)
    with pytest.raises(ValueError, match="cu_seqlens_q"):
        gpuattn.flash_attention(q, q, q, cu_seqlens_q=np.asarray(offsets, np.int32))


def test_row_21_offsets_on_a_gpu(gpu):
    q = draw(gpu, 8, 2, 8)
    with pytest.raises(TypeError, match="int32"):
        gpuattn.flash_attention(q, q, q, cu_seqlens_q=gpu.asarray([0, 8]))
    with gpuattn.debug(), pytest.raises(ValueError, match="cu_seqlens_q"):
        gpuattn.flash_attention(q, q, q, cu_seqlens_q=gpu.asarray([0, 9], "int32"))


PAGE = 16  # keys


def paged_cache(xp, pages, table, dtype=np.float32):
    """A query, keys, values and a page table: sequences of up to two pages."""
    q, k, v = (draw(xp, *shape, dtype=dtype, seed=i) for i, shape in enumerate(
        ((2, 1, 2, 8), (pages, PAGE, 1, 8), (pages, PAGE, 1, 8))
    ))  # fmt: skip
    return q, k, v, xp.asarray(table, np.int32)


def test_row_22_a_paged_cache_that_is_full(xp):
    q, k, v, table = paged_cache(xp, 4, [[3, 0], [2, 1]])
    full = xp.asarray([2 * PAGE, 2 * PAGE], np.int32)
    out = gpuattn.decode_attention(q, k, v, full, page_table=table)
    dense = [x[table].reshape(2, 2 * PAGE, 1, 8) for x in (k, v)]
    np.testing.assert_allclose(to_cpu(out), to_cpu(gpuattn.flash_attention(q, *dense)), atol=2e-6)
    beyond = gpuattn.decode_attention(q, k, v, full + 1, page_table=table)
    np.testing.assert_array_equal(to_cpu(beyond), to_cpu(out), err_msg="lengths are clipped")
    with pytest.raises(IndexError, match="append_kv: lengths"):
        gpuattn.append_kv(k, v, k[:2, :1], v[:2, :1], full, page_table=table)
        to_cpu(k)
    with pytest.raises(ValueError, match="lengths.shape"):
        gpuattn.decode_attention(q, k, v, full[:1], page_table=table)


@pytest.mark.parametrize("page", [-1, 4])
def test_row_22_pages_outside_the_pool(xp, page):
    q, k, v, table = paged_cache(xp, 4, [[3, page], [2, 1]])
    with pytest.raises(IndexError, match="page_table"):
        to_cpu(gpuattn.decode_attention(q, k, v, xp.full(2, 2 * PAGE, np.int32), page_table=table))
    unread = gpuattn.decode_attention(q, k, v, xp.full(2, PAGE, np.int32), page_table=table)
    assert np.isfinite(to_cpu(unread)).all()
    before = to_cpu(k).copy()
    with pytest.raises(IndexError, match="page_table"):
        lengths = xp.asarray([PAGE, 0], np.int32)
        gpuattn.append_kv(k, v, k[:2, :1], v[:2, :1], lengths, page_table=table)
        to_cpu(k)
    changed = (to_cpu(k) != before).any((1, 2, 3))
    assert not changed[[0, 1, 3]].any(), "only the sequence whose page exists is written"


@pytest.mark.parametrize("token", [-1, 10])
def test_row_23_tokens_outside_the_vocabulary(xp, token):
    tokens, weight = xp.asarray([1, token, 2], np.int32), draw(xp, 10, 4)
    with pytest.raises(IndexError, match="embedding"):
        to_cpu(gpuattn.embedding(tokens, weight))


def test_row_24_norms_of_constant_short_and_offset_rows(xp):
    for op in (gpuattn.layer_norm, gpuattn.rms_norm):
        constant = to_cpu(op(xp.full((2, 8), 3.0, np.float32)))
        assert np.isfinite(constant).all()
        assert np.isfinite(to_cpu(op(draw(xp, 4, 1)))).all()
        for eps in (0.0, -1e-5, np.nan):
            with pytest.raises(ValueError, match="eps"):
                op(draw(xp, 2, 8), eps=eps)
    x = 1e4 + 1e-2 * np.random.default_rng(0).standard_normal((4, 512))
    x = x.astype(np.float32)
    exact = x.astype(np.float64)
    want = (exact - exact.mean(-1, keepdims=True)) / np.sqrt(exact.var(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(to_cpu(gpuattn.layer_norm(xp.asarray(x))), want, atol=2e-2)


def test_row_25_top_k(xp):
    x = xp.asarray([[1.0, 3.0, 3.0, -0.0, 0.0]], np.float32)
    values, indices = gpuattn.topk_logprobs(x, 3)
    assert to_cpu(indices).tolist()[0][:2] == [1, 2], "ties go to the lowest index"
    equal = gpuattn.topk_logprobs(xp.zeros((1, 7), np.float32), 4)[1]
    assert to_cpu(equal).tolist() == [[0, 1, 2, 3]]
    assert gpuattn.topk_logprobs(x, 0)[0].shape == (1, 0)
    with pytest.raises(ValueError, match="k"):
        gpuattn.topk_logprobs(x, 6)


def test_row_27_cross_entropy_labels(xp):
    logits = Tensor(draw(xp, 3, 5), requires_grad=True)
    ignored = xp.full(3, -100, np.int32)
    loss = gpuattn.cross_entropy(logits, ignored)
    loss.backward()
    assert float(loss) == 0.0
    assert not to_cpu(logits.grad).any()
    some = gpuattn.cross_entropy(draw(xp, 3, 5), xp.asarray([1, -100, 2], np.int32))
    alone = gpuattn.cross_entropy(draw(xp, 3, 5)[::2], xp.asarray([1, 2], np.int32))
    assert float(some) == pytest.approx(float(alone), rel=1e-6)
    for label in (5, -1):
        with pytest.raises(IndexError, match="cross_entropy"):
            to_cpu(gpuattn.cross_entropy(draw(xp, 3, 5), xp.asarray([0, label, 1], np.int32)))


def test_row_28_misuse_of_the_tape(xp):
    x = Tensor(draw(xp, 3, 4), requires_grad=True)
    y = gpuattn.softmax(x)
    with pytest.raises(GradientError, match="not one number"):
        y.backward()
    loss = y.sum()
    loss.backward()
    with pytest.raises(GradientError, match="second time"):
        loss.backward()
    with pytest.raises(TypeError, match="cast"):
        Tensor(xp.arange(3), requires_grad=True)
    h = np.exp(x)
    z = (h * h).sum()
    x[0] = 1.0
    z.backward()  # the gradient of exp needs its output, not x
    z = (x * x).sum()
    x[0] = 2.0
    with pytest.raises(GradientError, match="edited in place"):
        z.backward()


def test_row_29_import_works_without_cupy():
    code = "import sys; sys.modules['cupy'] = None; import gpuattn, numpy as np; " \
           "print(gpuattn.softmax(np.zeros((1, 2), 'f')))"  # fmt: skip
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "0.5" in run.stdout


def test_row_30_compile_failures_name_the_line():
    from gpuattn.cuda import compiler
    from gpuattn.errors import KernelCompileError

    try:
        compiler.nvrtc()
    except KernelCompileError as error:
        assert "pip install" in str(error)
        return
    with pytest.raises(KernelCompileError, match=r"x\.cu\(1\): error"):
        compiler.compile_text('#line 1 "rawkernels/x.cu"\nnonsense', "sm_80", "x.cu")
