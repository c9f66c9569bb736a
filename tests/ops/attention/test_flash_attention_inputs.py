"""Inputs of flash_attention: strides, NaN, extreme values, and invalid arguments."""

import re
import tracemalloc

import numpy as np
import pytest
from attention_formula import judge, refusal, repro
from attention_problems import AWKWARD, Problem

from gpuattn import Tensor, arrays, debug, explain
from gpuattn.cuda import kernels
from gpuattn.cuda.gpu import gpu as gpu_of
from gpuattn.errors import SlowPathWarning, UnsupportedError
from gpuattn.impls import WORDS
from gpuattn.ops.attention.flash_attention import IMPLS, flash_attention

RAW = [impl.name for impl in IMPLS if impl.name.startswith("raw-")]

INF = float("inf")


def draw(rng, T=17, S=33, Dv=5, dtype=np.float32):
    shapes = (2, T, 4, 8), (2, S, 2, 8), (2, S, 2, Dv)
    return tuple(rng.standard_normal(shape).astype(dtype) for shape in shapes)


def test_strides_and_misaligned_views(xp, rng):
    q, k, v = (xp.asarray(x) for x in draw(rng, Dv=8))
    want = arrays.to_cpu(flash_attention(q, k, v, causal=True))
    misaligned = xp.empty(q.size + 1, np.float32)[1:].reshape(q.shape)
    misaligned[...] = q
    by_heads = xp.ascontiguousarray(k.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    backwards = xp.ascontiguousarray(v[:, ::-1, :, ::-1])[:, ::-1, :, ::-1]
    got = flash_attention(misaligned, by_heads, backwards, causal=True)
    np.testing.assert_allclose(arrays.to_cpu(got), want, atol=1e-6)
    shared = xp.broadcast_to(k[:, :, :1], k.shape)
    repeated = xp.ascontiguousarray(shared)
    both = (flash_attention(q, x, v).tolist() for x in (shared, repeated))
    np.testing.assert_allclose(next(both), next(both), atol=1e-6)


@pytest.mark.parametrize("layout", AWKWARD)
def test_awkward_views_of_small_problems(layout):
    for number in range(40):
        problem = Problem(number, small=True, layout=layout)
        assert not judge(problem, IMPLS[-1]), repro(problem, IMPLS[-1])


@pytest.mark.parametrize("layout", AWKWARD)
def test_awkward_views_on_the_gpu(gpu, layout):
    """Columns from the second on, every other column, reversed, shifted by two bytes: some CUDA
    form accepts the view, and each form that accepts it computes the right result."""
    for number in range(8):
        problem = Problem(number, gpu, layout=layout)
        takers = [impl for impl in IMPLS if refusal(problem, impl) is None]
        takers = [impl for impl in takers if impl.name not in ("numba", "unfused")]  # no lse there
        assert takers[0].name.startswith("raw-")
        for impl in takers:
            assert not judge(problem, impl), repro(problem, impl)


@pytest.mark.parametrize("impl", [
    impl.name for impl in IMPLS if impl.name in RAW and not impl.specialized
])  # fmt: skip
@pytest.mark.parametrize("large", ["queries", "batch", "keys"])
def test_more_than_two_to_the_31_elements(gpu, impl, large):
    """In arrays with indices beyond 32 bits, the last rows give the same as those rows alone."""
    free, _ = gpu.cuda.runtime.memGetInfo()
    if free < 40 << 30:
        pytest.skip(f"{free >> 30} GiB of GPU memory are free, the test takes 40")
    H, D = 16, 128
    many = (1 << 31) // (H * D)  # rows
    B, T, S = {"queries": (1, many + 100, 17), "batch": (many // 64 + 2, 64, 17),
               "keys": (1, 3, many + 100)}[large]  # fmt: skip
    shapes = (B, T, H, D), (B, S, 1 if large != "keys" else H, D)
    q, k = (gpu.zeros(shape, np.float16) for shape in shapes)
    v = gpu.zeros_like(k)
    rng = np.random.default_rng(0)
    for x in (q, k, v):
        for end in (slice(0, 1), slice(x.shape[0] - 1, None)):
            for rows in (slice(0, 70), slice(max(x.shape[1] - 70, 0), None)):
                part = x[end, rows]
                part[...] = gpu.asarray(rng.standard_normal(part.shape, np.float32))
    window = (60, 0) if large == "keys" else None  # otherwise most keys are zeros
    out, lse = flash_attention(q, k, v, window=window, impl=impl, return_lse=True)
    near = slice(max(S - 70, 0), None)
    last = [gpu.ascontiguousarray(x) for x in (q[-1:, -5:], k[-1:, near], v[-1:, near])]
    want, want_lse = flash_attention(*last, window=window, impl="reference", return_lse=True)
    np.testing.assert_allclose(arrays.to_cpu(out[-1:, -5:]), arrays.to_cpu(want), atol=4e-3)
    got_lse = arrays.to_cpu(lse[-1:, :, -5:])
    np.testing.assert_allclose(got_lse, arrays.to_cpu(want_lse), atol=1e-5)
    assert gpu.isfinite(out[0, :70]).all() and gpu.isfinite(out[-1]).all()
    del q, k, v, x, part, out, lse, last
    gpu.get_default_memory_pool().free_all_blocks()


@pytest.mark.parametrize("dtype", ["int64", "uint64", "uint32", "int8"])
def test_key_lengths_of_any_integers(xp, rng, dtype):
    q, k, v = (xp.asarray(x) for x in draw(rng))
    lengths = np.array([np.iinfo(dtype).max, 7], dtype)
    want = flash_attention(q, k, v, key_lengths=xp.asarray([33, 7], np.int32))
    got = flash_attention(q, k, v, key_lengths=xp.asarray(lengths))
    assert (got == want).all()


def test_packed_on_this_backend(xp, rng):
    """Views into one packed projection, offsets on the device."""
    cu = np.array([0, 7, 7, 40, 64], np.int32)
    qkv = rng.standard_normal((64, 3, 4, 8)).astype(np.float32)
    there = xp.asarray(qkv)
    boxes = [Tensor(there[:, i], requires_grad=True) for i in range(3)]
    out = flash_attention(*boxes, causal=True, cu_seqlens_q=xp.asarray(cu), max_seqlen_q=33,
                          max_seqlen_k=33)  # fmt: skip
    out.backward(xp.ones(out.shape, np.float32))
    for first, last in zip(cu[:-1], cu[1:], strict=True):
        q, k, v = (qkv[None, first:last, i] for i in range(3))
        want = flash_attention(q, k, v, causal=True)
        np.testing.assert_allclose(arrays.to_cpu(out.data)[None, first:last], want, atol=1e-5)
    exact = [Tensor(qkv[:, i].astype(np.float64), requires_grad=True) for i in range(3)]
    flash_attention(*exact, causal=True, cu_seqlens_q=cu).backward(np.ones((64, 4, 8)))
    for box, want in zip(boxes, exact, strict=True):
        np.testing.assert_allclose(arrays.to_cpu(box.grad), want.grad, atol=2e-5)


def test_nan_stays_in_its_rows(xp, rng):
    q, k, v = draw(rng, T=150, S=150)
    spoiled_q, spoiled_k, spoiled_v = q.copy(), k.copy(), v.copy()
    spoiled_q[0, 3, 1, 0] = spoiled_k[0, 140, 1, 2] = spoiled_v[1, 7, 0, 0] = np.nan
    given = (xp.asarray(x) for x in (spoiled_q, spoiled_k, spoiled_v))
    nan = np.isnan(arrays.to_cpu(flash_attention(*given, causal=True)))
    want = np.zeros_like(nan)
    want[0, 3, 1] = True  # the query
    want[0, 140:, 2:] = True  # queries that see the key, heads 2 and 3 of its KV head 1
    if xp is not np:  # a masked value is multiplied by 0, because other queries see its tile
        np.testing.assert_array_equal(nan[1, :7, 2:], False)
        np.testing.assert_array_equal(nan[1, :7, :2, 1:], False)
        nan[1, :7, :2, 0] = False
    want[1, 7:, :2, 0] = True  # queries that see the value: its column alone
    np.testing.assert_array_equal(nan, want)


def test_extreme_logits_are_finite(xp, rng):
    q, k, v = (xp.asarray(x) for x in draw(rng))
    assert np.isfinite(arrays.to_cpu(flash_attention(q * 1e4, k, v, scale=1.0))).all()
    half = xp.full((1, 2, 1, 8), 65504, np.float16)
    assert flash_attention(half, half, half).tolist() == half.tolist()
    bias = xp.full((17, 33), -INF, np.float32)
    out, lse = flash_attention(q, k, v, bias=bias, return_lse=True)
    assert not out.any() and (lse == -INF).all()


def test_same_seed_same_bits(xp, rng):
    qkv = [xp.asarray(x) for x in draw(rng)]
    first, again, other = (flash_attention(*qkv, dropout_p=0.5, seed=seed) for seed in (7, 7, 8))
    assert (first == again).all() and (first != other).any()


def test_memory_grows_with_tokens():
    T = 4096
    q = np.ones((1, T, 1, 8), np.float32)
    tracemalloc.start()
    box = Tensor(q, requires_grad=True)
    flash_attention(box, q, q, causal=True).backward(q)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < T * T * 4 / 4, f"{peak} bytes"


@pytest.mark.parametrize("empty", ["batch", "queries", "keys", "heads", "tokens"])
def test_empty_inputs(xp, empty):
    sizes = {name: 0 if name == empty else 2 for name in ("batch", "queries", "keys", "heads")}
    B, T, S, H = sizes.values()
    shapes = [(B, T, H, 4), (B, S, H, 4), (B, S, H, 4)]
    offsets = xp.zeros(3, np.int32) if empty == "tokens" else None
    if offsets is not None:
        shapes = [(0, 2, 4)] * 3
    boxes = [Tensor(xp.ones(shape, np.float32), requires_grad=True) for shape in shapes]
    sink = Tensor(xp.ones(H, np.float32), requires_grad=True)
    out, lse = flash_attention(*boxes, cu_seqlens_q=offsets, sink=sink, return_lse=True)
    assert out.shape == shapes[0] and lse.size == out.size // 4
    assert not arrays.to_cpu(out.data).any()
    out.backward(xp.ones(out.shape, np.float32))
    assert all(not box.grad.any() for box in boxes)


# ---- what is refused --------------------------------------------------------------------------


def like(q, values):
    return arrays.get_xp(q).asarray(values)


BAD = {
    "3d": (lambda q, k, v: flash_attention(q[0], k[0], v[0]), "q.shape"),
    "batch": (lambda q, k, v: flash_attention(q[:1], k, v), "batch size 1"),
    "head_dim": (lambda q, k, v: flash_attention(q[..., :7], k, v), "head size.*7, 8"),
    "head_dim_zero": (lambda q, k, v: flash_attention(q[..., :0], k[..., :0], v), "0, 0"),
    "heads": (lambda q, k, v: flash_attention(q[:, :, :3], k, v), "multiple of the 2"),
    "keys": (lambda q, k, v: flash_attention(q, k, v[:, 1:]), "v.shape"),
    "align": (lambda q, k, v: flash_attention(q, k, v, align="left"), "bottom_right"),
    "window of three": (lambda q, k, v: flash_attention(q, k, v, window=(1, 2, 3)), "window"),
    "window": (lambda q, k, v: flash_attention(q, k, v, window=(-1, 0)), "window"),
    "scale_nan": (lambda q, k, v: flash_attention(q, k, v, scale=np.nan), "scale is nan"),
    "scale_inf": (lambda q, k, v: flash_attention(q, k, v, scale=INF), "scale is inf"),
    "dropout": (lambda q, k, v: flash_attention(q, k, v, dropout_p=1.1), "dropout_p is 1.1"),
    "dropout_all": (lambda q, k, v: flash_attention(q, k, v, dropout_p=1), "0 <= p < 1"),
    "dropout_nan": (lambda q, k, v: flash_attention(q, k, v, dropout_p=np.nan), "dropout_p"),
    "softcap": (lambda q, k, v: flash_attention(q, k, v, softcap=0), "softcap"),
    "bias": (lambda q, k, v: flash_attention(q, k, v, bias=q[..., :3]), "bias.shape"),
    "lengths": (
        lambda q, k, v: flash_attention(q, k, v, key_lengths=like(q, np.ones(3, int))),
        r"\(2,\)",
    ),
    "slopes": (
        lambda q, k, v: flash_attention(q, k, v, alibi_slopes=like(q, np.ones(3))),
        "alibi_slopes",
    ),
    "sink": (lambda q, k, v: flash_attention(q, k, v, sink=like(q, np.ones(3))), "sink.shape"),
    "max_seqlen": (lambda q, k, v: flash_attention(q, k, v, max_seqlen_q=3), "cu_seqlens_q"),
    "max_seqlen_k": (lambda q, k, v: flash_attention(q, k, v, max_seqlen_k=3), "max_seqlen_k is 3"),
    "packed": (
        lambda q, k, v: flash_attention(q, k, v, cu_seqlens_q=like(q, [0, 2]).astype("i")),
        r"q.shape is \(2, 17, 4, 8\); accepted: \(tokens, H, D\)",
    ),
    "cu_seqlens_k": (
        lambda q, k, v: flash_attention(
            *(x[0] for x in (q, k, v)), cu_seqlens_k=like(q, [0, 33]).astype("i")
        ),
        "cu_seqlens_k is given",
    ),
    "bias of 5 axes": (
        lambda q, k, v: flash_attention(q, k, v, bias=like(q, np.ones((1,) * 5, bool))),
        r"bias.shape is \(1, 1, 1, 1, 1\)",
    ),
}


FORM = r"(?s)^flash_attention: .+ is .+; accepted: .+"  # argument, what came, what is accepted


@pytest.mark.parametrize(("attend", "text"), BAD.values(), ids=BAD)
def test_bad_values(xp, rng, attend, text):
    before = kernels.launches.copy()
    with pytest.raises(ValueError, match=text) as info:
        attend(*(xp.asarray(x) for x in draw(rng)))
    assert re.match(FORM, str(info.value))
    assert kernels.launches.copy() == before


WRONG_TYPES = {
    "scale": {"scale": "0.1"},
    "softcap": {"softcap": np.ones(1)},
    "dropout_p": {"dropout_p": 1j},
    "window": {"window": (1.5, 0)},
    "bias.dtype": {"bias": np.ones((17, 33), np.int32)},
    "key_lengths.dtype": {"key_lengths": np.ones(2, np.float32)},
    "alibi_slopes.dtype": {"alibi_slopes": np.ones(4, np.int32)},
    "sink.dtype": {"sink": np.ones(4, np.int32)},
    "q.dtype": {},
}


@pytest.mark.parametrize(("argument", "given"), WRONG_TYPES.items(), ids=WRONG_TYPES)
def test_wrong_types(xp, rng, argument, given):
    kind = np.int32 if argument == "q.dtype" else np.float32
    qkv = [xp.asarray(x).astype(kind) for x in draw(rng)]
    own = "bias", "key_lengths", "alibi_slopes", "sink"
    given = {name: xp.asarray(x) if name in own else x for name, x in given.items()}
    with pytest.raises(TypeError, match=f"flash_attention: {re.escape(argument)} is .*accepted: "):
        flash_attention(*qkv, **given)


def test_two_places(gpu, rng):
    q, k, v = (gpu.asarray(x) for x in draw(rng))
    before = kernels.launches.copy()
    for name, x in {"key_lengths": np.ones(2, np.int32), "bias": np.ones((17, 33), bool)}.items():
        with pytest.raises(TypeError, match=f"q, k, v on the GPU but {name} in host memory"):
            flash_attention(q, k, v, **{name: x})
    assert kernels.launches.copy() == before


def test_sizes_without_a_kernel(gpu):
    x = gpu.ones((1, 2, 1, 320), np.float16)
    with pytest.raises(UnsupportedError, match="raw-simt: the head size is 320, the kernel takes"):
        flash_attention(x, x, x, impl="raw")
    with pytest.warns(SlowPathWarning, match="the head size is 320"):
        assert (flash_attention(x, x, x) == 1).all()


OFFSETS = {
    "start": ([1, 17], "start at 0"),
    "falling": ([0, 9, 8, 17], "never fall"),
    "end": ([0, 16], "17 tokens"),
    "empty": ([], r"cu_seqlens_q\.shape"),
}


@pytest.mark.parametrize(("offsets", "text"), OFFSETS.values(), ids=OFFSETS)
def test_bad_offsets(xp, offsets, text):
    x, cu = xp.ones((17, 2, 4), np.float32), xp.asarray(offsets, np.int32)
    with debug(), pytest.raises(ValueError, match=text):
        flash_attention(x, x, x, cu_seqlens_q=cu)
    with pytest.raises(TypeError, match="int32"):
        flash_attention(x, x, x, cu_seqlens_q=cu.astype(np.int64))
    good = xp.asarray([0, 10, 17], np.int32)
    with debug(), pytest.raises(ValueError, match="at least the longest length, 10"):
        flash_attention(x, x, x, cu_seqlens_q=good, max_seqlen_q=9)
    with pytest.raises(ValueError, match="max_seqlen_k is 8; .*17 tokens in 2 sequences"):
        flash_attention(x, x, x, cu_seqlens_q=good, max_seqlen_k=8)  # seen without the offsets
    for limit, error in ((-1, ValueError), (9.5, TypeError)):
        with pytest.raises(error, match="max_seqlen_q is .*; accepted: at least the longest"):
            flash_attention(x, x, x, cu_seqlens_q=good, max_seqlen_q=limit)
    with pytest.raises(ValueError, match="key sequences is 1; accepted: 2"):
        flash_attention(x, x, x, cu_seqlens_q=good, cu_seqlens_k=good[::2])


def test_bad_dtypes(xp):
    x = xp.ones((1, 2, 1, 8), np.float32)
    for wrong in (x.astype(np.int32), x.astype(bool), x.astype(np.complex64)):
        with pytest.raises(TypeError, match="dtype"):
            flash_attention(wrong, wrong, wrong)
    with pytest.raises(TypeError, match="share one dtype"):
        flash_attention(x.astype(np.float16), x, x)
    with pytest.raises(TypeError, match="bias.dtype"):
        flash_attention(x, x, x, bias=x.astype(np.int32))
    with pytest.raises(TypeError, match="numpy.asarray"):
        flash_attention(x.tolist(), x, x)


def test_explain_gives_reasons():
    x = np.ones((1, 2, 1, 8), np.float32)
    told = explain(flash_attention, x, x, x, softcap=2.0)
    assert told.chosen == "reference"
    reasons = dict(told.reasons)
    assert reasons["raw-simt"] == "q is a NumPy array; move it with gpuattn.to_gpu(x)"
    assert "softcap given; the kernel knows causal, scale and key_lengths" in reasons["numba"]
    with pytest.raises(UnsupportedError, match="raw-simt: q is a NumPy array"):
        flash_attention(x, x, x, impl="raw")


def test_explain_lists_the_kernel_resources(gpu):
    x = gpu.ones((2, 100, 3, 64), np.float32)
    told = explain(flash_attention, x, x, x)
    assert told.chosen == "raw-simt"
    details, roomy = told.details, 90 <= gpu_of(0).capability < 110
    tile = 128, 64 if roomy else 32
    assert (details["tile"], details["threads"], details["blocks"]) == (tile, 128, 6)
    most = 113 if roomy else 64  # KiB, of two blocks or three of a multiprocessor
    assert 16 <= details["registers"] <= 255 and 8 << 10 < details["shared_bytes"] < most << 10
    assert 0 < details["waves"] < 1 and "6 blocks for" in details["limit"]
    assert f"tile 128 x {tile[1]}, 128 threads, " in str(told)
    for impl in RAW:
        half = gpu.ones((2, 1000, 3, 64), np.float16)
        told = explain(flash_attention, half, half, half, impl=impl)
        if told.chosen:
            names = {"tile", "threads", "registers", "shared_bytes", "waves", "limit"}
            assert names <= set(told.details) <= set(WORDS), impl


def test_explain_names_the_gradient(gpu):
    x = gpu.ones((1, 700, 1, 192), np.float16)
    told = explain(flash_attention, x, x, x, softcap=3)
    if told.chosen != "raw-hopper":
        pytest.skip(f"{told.chosen} also computes this gradient")
    assert told.gradient == "raw-ampere"
    reason = dict(told.gradient_reasons)["raw-hopper"]
    assert reason.startswith("the head size is 192; above 128 the kernel takes no bias")
    assert "\nits gradient: raw-ampere\n" in str(told)
    assert explain(flash_attention, x, x, x).gradient == "raw-hopper"


def test_explain_on_the_gpu(gpu):
    x = gpu.ones((1, 2, 1, 320), np.float32)
    told = dict(explain(flash_attention, x, x, x).reasons)
    assert told["raw-simt"] == "the head size is 320, the kernel takes 1 to 256"
    x = gpu.ones((1, 2, 1, 8), np.float64)
    told = dict(explain(flash_attention, x, x, x).reasons)
    assert told["raw-simt"] == "q is float64, the kernel takes float32, float16 or bfloat16"
