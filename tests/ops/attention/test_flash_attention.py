import numpy as np
import pytest
from checks import (
    DTYPES,
    check_gradient,
    check_implementation,
    check_no_float64,
    implementations,
)

from gpuattn import Tensor
from gpuattn.autodiff import backward_pass
from gpuattn.ops.attention import grids, reference
from gpuattn.ops.attention.dropout import attention_keep_mask
from gpuattn.ops.attention.flash_attention import IMPLS, flash_attention
from gpuattn.rng import Key

INF = float("inf")
KEY = Key(seed=0x1234_5678_9ABC, stream=3, step=5)
# 15-17 and 31-33 are around tile sizes; 113 x 203 and 128 x 217 are from FlashAttention's tests
LENGTHS = [(1, 1), (15, 16), (16, 17), (33, 31), (64, 64), (113, 203), (128, 217), (217, 128)]


def naive(q, k, v, *, seen=True, added=0.0, scale=None, softcap=None, sink=None, keep=None):
    """Compute softmax(q k^T) v in float64 with the full T x S matrix; ``keep``: mask / (1 - p)."""
    q, k, v = (x.astype(np.float64).swapaxes(1, 2) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x, group, axis=1) for x in (k, v))
    s = q @ k.swapaxes(2, 3) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        s = softcap * np.tanh(s / softcap)
    s = np.where(seen, s + added, -INF)
    if sink is not None:
        extra = np.broadcast_to(sink[:, None, None], (*s.shape[:3], 1))
        s = np.concatenate((s, extra), -1)
    with np.errstate(all="ignore"):
        top = s.max(-1, keepdims=True, initial=-INF)
        p = np.exp(s - np.where(top == -INF, 0, top))
        total = p.sum(-1, keepdims=True)
        lse = (np.where(top == -INF, 0, top) + np.log(total))[..., 0]
        p = np.where(total > 0, p / total, 0)[..., : k.shape[2]]
    out = (p if keep is None else p * keep) @ v
    return out.swapaxes(1, 2), lse


def draw(rng, B=2, T=17, S=33, H=4, kv_heads=2, D=8, Dv=5, dtype=np.float64):
    shapes = (B, T, H, D), (B, S, kv_heads, D), (B, S, kv_heads, Dv)
    return tuple(rng.standard_normal(shape).astype(dtype) for shape in shapes)


def agrees(got, want, tol=1e-12):
    np.testing.assert_allclose(got[0], want[0], rtol=0, atol=tol)
    np.testing.assert_allclose(got[1], want[1], rtol=0, atol=tol)


def band(T, S, left, right, offset):
    i, j = np.arange(T)[:, None] + offset, np.arange(S)
    return (j <= i + right) & (j >= i - left)


# ---- the reference against the formula --------------------------------------------------------


@pytest.mark.parametrize(("T", "S"), [*LENGTHS, (300, 300)])
@pytest.mark.parametrize("align", ["bottom_right", "top_left"])
@pytest.mark.parametrize(
    ("causal", "window"),
    [(False, None), (True, None), (False, (5, 3)), (True, 7), (False, (0, None))],
)
def test_masks(rng, T, S, align, causal, window):
    q, k, v = draw(rng, T=T, S=S)
    left, right = window if isinstance(window, tuple) else (window, window)
    right = 0 if causal else right
    limits = (INF if side is None else side for side in (left, right))
    seen = band(T, S, *limits, S - T if align == "bottom_right" else 0)
    got = flash_attention(q, k, v, causal=causal, window=window, align=align, return_lse=True)
    agrees(got, naive(q, k, v, seen=seen))


@pytest.mark.parametrize("shape", [(2, 4, 17, 33), (1, 4, 17, 33), (2, 1, 1, 33), (17, 33), (1,)])
def test_bias_broadcasts(rng, shape):
    q, k, v = draw(rng)
    bias = rng.standard_normal(shape)
    agrees(flash_attention(q, k, v, bias=bias, return_lse=True), naive(q, k, v, added=bias))
    mask = rng.random(shape) < 0.5
    agrees(flash_attention(q, k, v, bias=mask, return_lse=True), naive(q, k, v, seen=mask))


@pytest.mark.parametrize("per_sequence", [False, True])
def test_alibi_softcap_sink_scale(rng, per_sequence):
    q, k, v = draw(rng, T=150, S=170)
    slopes = rng.random((2, 4) if per_sequence else 4)
    distance = abs(np.arange(150)[:, None] + 20 - np.arange(170))
    added = -slopes[..., None, None] * distance
    sink = rng.standard_normal(4)
    got = flash_attention(
        q, k, v, alibi_slopes=slopes, softcap=2.0, sink=sink, scale=-0.7, return_lse=True
    )
    agrees(got, naive(q, k, v, added=added, softcap=2.0, sink=sink, scale=-0.7))


def test_key_lengths_mask_nan(rng):
    q, k, v = draw(rng, B=4)
    lengths = np.array([33, 7, 0, 50], np.int32)
    seen = (np.arange(33) < lengths[:, None])[:, None, None]
    want = naive(q, k, v, seen=seen)
    for b in (1, 2):
        k[b, lengths[b] :] = v[b, lengths[b] :] = np.nan
    boxes = [Tensor(x, requires_grad=True) for x in (q, k, v)]
    out, lse = flash_attention(*boxes, key_lengths=lengths, return_lse=True)
    agrees((out.data, lse.data), want)
    grads = backward_pass.gradients([out], [np.ones(out.shape)], boxes)
    assert all(np.isfinite(g).all() for g in grads)
    assert not grads[1][1, 7:].any() and not grads[0][2].any()


def test_dropout_applies_the_mask(rng):
    q, k, v = draw(rng, T=40, S=150)
    keep = attention_keep_mask(np, (2, 4, 40, 150), 0.3, KEY)
    got = flash_attention(q, k, v, dropout_p=0.3, seed=KEY, return_lse=True)
    agrees(got, naive(q, k, v, keep=keep / 0.7))
    assert abs(keep.mean() - 0.7) < 4 * (0.21 / keep.size) ** 0.5
    other = flash_attention(q, k, v, dropout_p=0.3)
    assert (other != got[0]).any()


@pytest.mark.parametrize("features", ["plain", "causal", "cross", "all"])
def test_packed_equals_each_sequence_alone(rng, features):
    lengths_q = [5, 0, 1, 17, 40, 3, 130]
    lengths_k = [9, 4, 0, 17, 33, 2, 150] if features in ("cross", "all") else lengths_q
    cu_q, cu_k = (np.cumsum([0, *n]).astype(np.int32) for n in (lengths_q, lengths_k))
    q, k, v = draw(rng, B=1, T=cu_q[-1], S=cu_k[-1])
    params, own = {"causal": features != "plain"}, {}
    if features == "all":
        params |= {"window": (20, None), "softcap": 3.0, "sink": rng.standard_normal(4)}
        params |= {"dropout_p": 0.2, "seed": KEY}
        bias, slopes = rng.standard_normal((7, 1, 130, 150)), rng.random((7, 4))
        lengths = np.array([9, 4, 0, 10, 20, 2, 149])
        own = {"bias": bias, "alibi_slopes": slopes, "key_lengths": lengths}
        own |= {"max_seqlen_q": 130, "max_seqlen_k": 150}
    boxes = [Tensor(x[0], requires_grad=True) for x in (q, k, v)]
    out, lse = flash_attention(
        *boxes, **params, **own, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, return_lse=True
    )
    dout, dlse = rng.standard_normal(out.shape), rng.standard_normal(lse.shape)
    grads = backward_pass.gradients([out, lse], [dout, dlse], boxes)
    for b, (T, S) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        alone = [
            Tensor(x[:, at], requires_grad=True)
            for x, at in zip((q, k, v), (rows, keys, keys), strict=True)
        ]
        here = dict(params)
        if features == "all":
            keep = attention_keep_mask(np, (7, 4, T, S), 0.2, KEY)[b]
            here |= {"bias": bias[b, :, :T, :S], "alibi_slopes": slopes[b]}
            here |= {"key_lengths": lengths[b : b + 1], "dropout_p": 0}
            want = naive(
                *(x.data for x in alone), keep=keep / 0.8, softcap=3.0, sink=params["sink"],
                seen=band(T, S, 20, 0, S - T) & (np.arange(S) < lengths[b]),
                added=bias[b, :, :T, :S] - slopes[b, :, None, None]
                * abs(np.arange(T)[:, None] + S - T - np.arange(S)),
            )  # fmt: skip
            agrees((out.data[None, rows], lse.data[None, :, rows]), want)
            continue
        o, m = flash_attention(*alone, **here, return_lse=True)
        agrees((out.data[None, rows], lse.data[None, :, rows]), (o.data, m.data))
        each = backward_pass.gradients([o, m], [dout[None, rows], dlse[None, :, rows]], alone)
        for g, at, e in zip(grads, (rows, keys, keys), each, strict=True):
            np.testing.assert_allclose(g[at], e[0], atol=1e-12)


# ---- gradients --------------------------------------------------------------------------------

GRADIENTS = {
    "plain": {},
    "causal_long": {"causal": True, "T": 140, "S": 150},
    "unseen_rows": {"causal": True, "T": 33, "S": 17},
    "window_softcap": {"window": (9, 2), "softcap": 1.5, "scale": 0.9},
    "dropout": {"dropout_p": 0.4, "seed": KEY, "key_lengths": np.array([3, 33])},
    "alibi": {"alibi_slopes": np.array([0.1, 0.2, 0.3, 0.4]), "kv_heads": 4},
}


@pytest.mark.parametrize("case", GRADIENTS.values(), ids=GRADIENTS)
def test_gradient(rng, case):
    sizes = {name: case[name] for name in ("T", "S", "kv_heads") if name in case}
    params = {name: value for name, value in case.items() if name not in sizes}
    q, k, v = draw(rng, **sizes)
    check_gradient(lambda *a: flash_attention(*a, **params), q, k, v)
    if sizes.get("T", 17) <= sizes.get("S", 33):  # otherwise some lse are -inf
        check_gradient(lambda *a: flash_attention(*a, **params, return_lse=True), q, k, v)


@pytest.mark.parametrize("shape", [(2, 4, 17, 33), (1, 4, 1, 33), (17, 33), (2, 1, 17, 1)])
def test_gradient_of_bias_and_sink(rng, shape):
    def attend(q, k, v, bias, sink):
        return flash_attention(
            q, k, v, bias=bias, sink=sink, softcap=2.0, dropout_p=0.2, seed=KEY, return_lse=True
        )

    check_gradient(attend, *draw(rng), rng.standard_normal(shape), rng.standard_normal(4))


@pytest.mark.parametrize("packed", [False, True])
def test_results_do_not_depend_on_grids_and_threads(monkeypatch, rng, packed):
    q, k, v = (rng.standard_normal((6, 20, 2, 8)).astype(np.float32) for _ in range(3))
    lengths = {}
    if packed:
        q, k, v = (x.reshape(120, 2, 8) for x in (q, k, v))
        lengths = {"cu_seqlens_q": np.array([0, 17, 30, 50, 66, 101, 120], np.int32)}
    boxes = [Tensor(x, requires_grad=True) for x in (q, k, v)]
    found = []
    for grid_size, most in ((1 << 30, 0), (400, 1 << 18), (400, 0)):
        monkeypatch.setattr(grids, "GRID_SIZE", grid_size)
        monkeypatch.setattr(reference, "MAX_SINGLE_THREADED", most)
        out = flash_attention(*boxes, causal=True, dropout_p=0.2, seed=3, **lengths)
        grads = backward_pass.gradients([out], [np.ones_like(q)], boxes)
        found.append([out.numpy(), *grads])
    for one, threads, in_order in zip(*found, strict=True):
        np.testing.assert_array_equal(threads, in_order)
        np.testing.assert_allclose(threads, one, rtol=1e-5, atol=1e-6)  # the order of sums differs


def test_gradient_of_packed_bias(rng):
    cu_q, cu_k = np.array([0, 5, 17], np.int32), np.array([0, 30, 33], np.int32)
    q, k, v = (x[0] for x in draw(rng, B=1))

    def attend(q, k, v, bias):
        return flash_attention(
            q, k, v, bias=bias, causal=True, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k,
            max_seqlen_q=12, max_seqlen_k=30,
        )  # fmt: skip

    check_gradient(attend, q, k, v, rng.standard_normal((1, 4, 12, 30)))


# ---- every implementation against float64 -----------------------------------------------------


def call(impl, where, dtype, qkv, *, needs_bias=True, **given):
    """Call check_implementation with the arrays in the order of the op's inputs."""
    names = "bias", "key_lengths", "cu_q", "cu_k", "slopes", "sink"
    extras = [given.pop(name, None) for name in names]
    bias, _, cu_q, _, _, sink = extras
    q, k, _ = qkv
    params = {
        "window": (None, None), "align": "bottom_right", "scale": q.shape[-1] ** -0.5,
        "softcap": None, "dropout_p": 0.0, "key": None, "max_seqlen_q": q.shape[1],
        "max_seqlen_k": k.shape[1], "deterministic": False,
    }  # fmt: skip
    if cu_q is not None:
        params |= {"max_seqlen_q": 60, "max_seqlen_k": 60}
    wants_bias = bias is not None and bias.dtype != bool
    needs = (True, True, True, wants_bias, False, False, False, False, sink is not None)
    slack = 2 if impl == "numba" else 1  # it sums over the keys one by one
    params |= given
    check_implementation(
        IMPLS, impl, where, [*qkv, *extras], dtype, needs=needs, slack=slack, **params
    )


CASES = {
    **{f"{T}x{S}": {"T": T, "S": S} for T, S in LENGTHS},
    **{f"{T}x{S}-causal": {"T": T, "S": S, "window": (None, 0)} for T, S in LENGTHS},
    "one_dim": {"D": 1, "Dv": 1},
    "d96": {"D": 96, "Dv": 96, "B": 1},
    "d257_to_256": {"D": 256, "Dv": 17, "B": 1},
    "mqa": {"H": 6, "kv_heads": 1},
    "empty_queries": {"T": 0},
    "empty_keys": {"S": 0},
    "empty_batch": {"B": 0},
    "key_lengths": {"key_lengths": np.array([20, 0], np.int32), "window": (None, 0)},
    "key_lengths_in_tiles": {"T": 70, "S": 70, "key_lengths": np.array([50, 0], np.int32)},
    "scale_zero": {"scale": 0.0},
    "scale_negative": {"scale": -1.0},
}
RAW_CASES = {
    "top_left": {"align": "top_left", "window": (4, 3)},
    "softcap": {"softcap": 1.5},
    "dropout": {"dropout_p": 0.3, "key": KEY, "T": 70, "S": 70},
    "dropout_wide": {"dropout_p": 0.3, "key": KEY, "T": 40, "D": 200},
    "slopes": {"slopes": np.array([0.1, 0.2, 0.3, 0.4])},
    "sink": {"sink": np.array([0.1, -0.2, 0.3, 2.0])},
    "sink_unseen_rows": {"sink": np.ones(4), "window": (None, 0), "T": 40},
    "mask": {"bias": np.tri(17, 33, dtype=bool)[None, None]},
    "bias": {"bias": np.sin(np.arange(2 * 4 * 17 * 33.0)).reshape(2, 4, 17, 33)},
    "bias_of_keys": {"bias": np.cos(np.arange(66.0)).reshape(2, 1, 1, 33)},
    "packed": {"cu_q": np.array([0, 9, 9, 50, 51], np.int32), "packed": True},
    "packed_dropout": {
        "cu_q": np.array([0, 9, 9, 50, 51], np.int32), "packed": True, "dropout_p": 0.2, "key": KEY,
        "window": (None, 0), "bias": np.sin(np.arange(3600.0)).reshape(1, 1, 60, 60),
    },
}  # fmt: skip


def run_case(rng, impl, where, dtype, case):
    case = dict(case)
    sizes = {n: case.pop(n) for n in ("B", "T", "S", "H", "kv_heads", "D", "Dv") if n in case}
    if case.pop("packed", False):
        qkv = tuple(x[0] for x in draw(rng, B=1, T=51, S=51))
        case["cu_k"] = case["cu_q"]
    else:
        qkv = draw(rng, **sizes)
    call(impl, where, dtype, qkv, **case)


# tensor cores round weights to 16 bits: test_random.py compares them with a formula that does too
IN_FLOAT32 = [impl for impl in IMPLS if impl.name in ("raw-simt", "numba", "reference")]
SIMPLE = [p for p in implementations(IN_FLOAT32) if "simulator" not in p.id]
FULL = [p for p in SIMPLE if not p.id.startswith("numba")]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize(("impl", "where"), SIMPLE)
def test_implementations(rng, impl, where, case):
    if impl == "numba" and case.get("D", 0) > 128:
        with pytest.raises(AssertionError, match="refused: .*128"):
            run_case(rng, impl, where, "float32", case)
    else:
        run_case(rng, impl, where, "float32", case)


@pytest.mark.parametrize("case", RAW_CASES.values(), ids=RAW_CASES)
@pytest.mark.parametrize(("impl", "where"), FULL)
def test_features(rng, impl, where, case):
    run_case(rng, impl, where, "float32", case)


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("name", ["113x203-causal", "d96", "packed_dropout", "bias", "sink"])
@pytest.mark.parametrize(("impl", "where"), FULL)
def test_16_bits(rng, impl, where, dtype, name):
    run_case(rng, impl, where, dtype, {**CASES, **RAW_CASES}[name])


# ---- the Numba kernels in the simulator -------------------------------------------------------

TINY = {
    "17x20": {"T": 17, "S": 20},
    "causal": {"T": 5, "S": 9, "window": (None, 0)},
    "unseen_rows": {"T": 9, "S": 5, "window": (None, 0)},
    "top_left": {"T": 5, "S": 9, "window": (None, 0), "align": "top_left"},
    "two_tiles": {
        "B": 1,
        "H": 1,
        "kv_heads": 1,
        "T": 34,
        "S": 33,
        "D": 2,
        "Dv": 3,
        "window": (None, 0),
    },
    "key_lengths": {"T": 4, "S": 9, "key_lengths": np.array([20, 0], np.int32)},
}


@pytest.mark.simulator
@pytest.mark.parametrize("case", TINY.values(), ids=TINY)
def test_numba_in_the_simulator(rng, case):
    run_case(rng, "numba", "numpy", "float32", {"D": 4, "Dv": 4, **case})


def test_numba_kernels_compile_without_float64(nvvm):
    from numba import float32, int32

    from gpuattn.numbakernels.flash_attention import kernels

    rows, lse, lengths = float32[:, :, :, :], float32[:, :, :], int32[::1]
    numbers = float32, int32
    forward, backward_q, backward_kv = kernels(8, 4)
    check_no_float64(forward, rows, rows, rows, lengths, rows, lse, *numbers)
    given = rows, rows, rows, lengths
    check_no_float64(backward_q, *given, rows, lse, rows, lse, rows, lse, *numbers)
    check_no_float64(backward_kv, *given, lse, lse, rows, rows, rows, *numbers)
