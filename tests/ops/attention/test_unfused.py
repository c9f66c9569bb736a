"""The formula that stores its tables: beside the reference, in a whole model, never chosen."""

import numpy as np
import pytest
from checks import dtype_of
from fake_gpu import GPUS
from fake_launches import as_array, launches_on

import gpuattn
from gpuattn import Tensor, explain, flash_attention, use_impl
from gpuattn.arrays import to_cpu
from gpuattn.errors import SlowPathWarning, UnsupportedError
from gpuattn.gemm import cublaslt
from gpuattn.ops.attention.flash_attention import IMPLS

CASES = {
    "full": {}, "causal": {"causal": True}, "fewer queries": {"causal": True, "T": 9},
    "more queries": {"causal": True, "T": 40}, "scale": {"scale": 0.3},
    "lengths": {"key_lengths": np.array([20, 0], np.int32)},
    "bias": {"bias": np.sin(np.arange(4.0 * 24 * 24)).reshape(1, 4, 24, 24)},
    "row bias": {"bias": np.sin(np.arange(24.0))},
    "mask": {"bias": np.arange(24) % 5 > np.arange(24)[:, None] % 3, "causal": True},
    "dropout": {"dropout_p": 0.3, "seed": 5, "causal": True},
    "groups": {"kv_heads": 2, "causal": True, "dropout_p": 0.2, "seed": 1},
    "one head of keys": {"kv_heads": 1}, "another size of values": {"Dv": 5},
    "no queries": {"T": 0}, "no keys": {"S": 0},
}  # fmt: skip
BOUND = {"float64": 1e-12, "float32": 2e-5, "float16": 4e-3, "bfloat16": 4e-2}


def run(rng, xp, impl, dtype, T=24, S=24, kv_heads=4, Dv=16, **given):
    """Return the output and the gradients of q, k, v and a float bias."""
    shapes = (2, T, 4, 16), (2, S, kv_heads, 16), (2, S, kv_heads, Dv)
    leaves = [Tensor(xp.asarray(rng.standard_normal(s)).astype(dtype), requires_grad=True)
              for s in shapes]  # fmt: skip
    bias = given.pop("bias", None)
    if bias is not None:
        bias = xp.asarray(bias) if bias.dtype == bool else xp.asarray(bias).astype(dtype)
        given["bias"] = bias = Tensor(bias, requires_grad=bias.dtype != bool)
    if "key_lengths" in given:
        given["key_lengths"] = xp.asarray(given["key_lengths"])
    out = flash_attention(*leaves, **given, impl=impl)
    out.backward(xp.asarray(rng.standard_normal(out.shape)).astype(dtype))
    wanted = [*leaves, bias] if bias is not None and bias.requires_grad else leaves
    return [to_cpu(x).astype(np.float64) for x in (out.data, *(leaf.grad for leaf in wanted))]


def run_packed(xp, impl, dtype, offsets, **given):
    """Return the output and the gradients of packed sequences."""
    rng = np.random.default_rng(0)
    cu = [xp.asarray(np.cumsum(lengths), np.int32) for lengths in offsets]
    shapes = [(int(cu[i][-1]), heads, 8) for i, heads in ((0, 4), (1, 2), (1, 2))]
    leaves = [Tensor(xp.asarray(rng.standard_normal(s)).astype(dtype), requires_grad=True)
              for s in shapes]  # fmt: skip
    longest = {
        f"max_seqlen_{side}": max(lengths) for side, lengths in zip("qk", offsets, strict=True)
    }
    both = {"cu_seqlens_q": cu[0]} if offsets[0] is offsets[1] else {
        "cu_seqlens_q": cu[0], "cu_seqlens_k": cu[1]}  # fmt: skip
    out = flash_attention(*leaves, **both, **longest, **given, impl=impl)
    out.backward(xp.asarray(rng.standard_normal(out.shape)).astype(dtype))
    return [to_cpu(x).astype(np.float64) for x in (out.data, *(leaf.grad for leaf in leaves))]


EVEN = (0, 5, 0, 17, 1)
PACKED = {
    "causal": ((EVEN, EVEN), {"causal": True, "dropout_p": 0.3, "seed": 2}),
    "cross": ((EVEN, (0, 7, 3, 9, 4)), {}),
    "lengths": ((EVEN, EVEN), {"key_lengths": np.array([2, 9, 0, 1], np.int32)}),
}  # fmt: skip


def compare_packed(xp, dtype, name):
    offsets, given = PACKED[name]
    moved = {k: xp.asarray(x) if isinstance(x, np.ndarray) else x for k, x in given.items()}
    mine = run_packed(xp, "unfused", dtype, offsets, **moved)
    right = run_packed(np, "reference", "float64", offsets, **given)
    for got, want in zip(mine, right, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=BOUND[dtype] * max(1, abs(want).max()))


@pytest.mark.parametrize("name", PACKED)
def test_packed_sequences(name):
    compare_packed(np, "float64", name)


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_packed_sequences_on_the_gpu(gpu, name, dtype):
    compare_packed(gpu, dtype, name)


def compare(xp, dtype, case):
    mine = run(np.random.default_rng(0), xp, "unfused", dtype, **case)
    right = run(np.random.default_rng(0), np, "reference", "float64", **case)
    for got, want in zip(mine, right, strict=True):
        scale = max(1.0, abs(want).max(initial=0))
        np.testing.assert_allclose(got, want, rtol=0, atol=BOUND[dtype] * scale)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_the_formula_is_the_reference(case, dtype):
    compare(np, dtype, case)


@pytest.mark.parametrize("name", ["full", "groups", "bias", "lengths"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bits(name, dtype):
    compare(np, dtype, CASES[name])


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_on_the_gpu(gpu, case, dtype):
    compare(gpu, dtype, case)


def test_nan_past_the_lengths_stays_there():
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 8, 2, 4))
    k[0, 5:], v[0, 5:] = np.nan, np.nan
    lengths = np.array([5, 8], np.int32)
    out = flash_attention(q, k, v, key_lengths=lengths, impl="unfused")
    assert np.isfinite(out).all()


def test_the_gradient_may_be_written_into_a_given_array():
    layer = gpuattn.nn.MultiHeadAttention(8, 2, causal=True)
    x = np.random.default_rng(0).standard_normal((2, 6, 8)).astype(np.float32)
    found = []
    for name in ("reference", "unfused"):
        for parameter in layer.parameters():
            parameter.grad = None
        with use_impl(flash_attention=name):
            (layer(x) ** 2).sum().backward()
        found.append([parameter.grad.copy() for parameter in layer.parameters()])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


def test_it_is_never_chosen_by_itself():
    x = np.zeros((1, 4, 2, 8), np.float32)
    told = explain(flash_attention, x, x, x)
    assert told.chosen == told.gradient == "reference"
    assert "stores tables" in dict(told.reasons)["unfused"]
    told = explain(flash_attention, x, x, x, impl="unfused")
    assert told.chosen == told.gradient == "unfused"


@pytest.mark.parametrize("given, said", [
    ({"softcap": 3.0}, "softcap given"), ({"alibi_slopes": np.ones(2)}, "alibi_slopes given"),
    ({"window": 2}, r"the window is \(2, 2\)"),
    ({"causal": True, "align": "top_left"}, "as many queries as keys"),
    ({"return_lse": True}, "unfused returns no lse"),
])  # fmt: skip
def test_what_the_formula_lacks_is_refused(given, said):
    q, k = np.zeros((1, 3, 2, 8)), np.zeros((1, 4, 2, 8))
    with pytest.raises(UnsupportedError, match=said):
        flash_attention(q, k, k, **given, impl="unfused")
    with use_impl(flash_attention="unfused"), pytest.raises(UnsupportedError, match=said):
        flash_attention(q, k, k, **given)
    with pytest.raises(UnsupportedError, match="impl='raw'|raw"):
        flash_attention(q, k, k, impl="raw")


def test_a_whole_model_runs_it():
    config = gpuattn.models.GPT2Config(vocab=64, d_model=32, heads=4, layers=2, block=32)
    model = gpuattn.models.GPT2(config)
    tokens = np.random.default_rng(0).integers(0, 64, (3, 33))
    found = []
    for name in ("reference", "unfused"):
        for parameter in model.parameters():
            parameter.grad = None
        with use_impl(flash_attention=name):
            loss = model.loss(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
        gradients = np.concatenate([p.grad.ravel() for p in model.parameters()])
        found.append((float(loss.data), gradients))
    assert abs(found[0][0] - found[1][0]) < 1e-5
    np.testing.assert_allclose(found[0][1], found[1][1], atol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bits_on_a_gpu_without_cublaslt(dtype):
    """The fake CuPy multiplies stacks of no bfloat16, and launches no kernel."""
    with launches_on(GPUS["9.0"]) as noted:
        q, k, v = (as_array(np.ones((2, 24, 4, 16), dtype_of(dtype))) for _ in range(3))
        leaves = [Tensor(x, requires_grad=True) for x in (q, k, v)]
        with pytest.warns(SlowPathWarning, match="a fake GPU"):
            out = flash_attention(*leaves, causal=True, impl="unfused")
            out.backward(as_array(np.ones(out.shape, q.dtype)))
        assert {launch.file for launch in noted} == {"softmax.cu"}
    assert out.dtype == q.dtype
    assert all(leaf.grad.dtype == q.dtype and leaf.grad.shape == q.shape for leaf in leaves)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_product_on_a_gpu_goes_by_cublaslt(monkeypatch, recwarn, dtype, packed):
    """CuPy's products cannot be captured, so a step with one is no CUDA graph."""
    asked = []

    def multiply(a, b):
        asked.append((a.dtype, b.dtype))
        assert [cublaslt._matrix(x) for x in (a, b)].count(None) == 0  # nothing is copied
        return as_array((a.astype(np.float32) @ b.astype(np.float32)).astype(a.dtype))

    dtype = np.dtype(dtype_of(dtype))
    shape, given = (2, 24, 4, 16), {"scale": 0.3, "dropout_p": 0.2, "seed": 1}
    if packed:
        shape, given = (48, 4, 16), given | {
            "cu_seqlens_q": as_array(np.array([0, 24, 48], np.int32)), "max_seqlen_q": 24,
            "max_seqlen_k": 24}  # fmt: skip
    with launches_on(GPUS["9.0"]):
        monkeypatch.setattr(cublaslt, "multiply", multiply)
        leaves = [Tensor(as_array(np.ones(shape, dtype)), requires_grad=True) for _ in "qkv"]
        out = flash_attention(*leaves, causal=True, impl="unfused", **given)
        out.backward(as_array(np.ones(out.shape, dtype)))
    assert asked == [(dtype, dtype)] * 6  # 2 forward, 4 backward
    assert not recwarn


def test_packed_sequences_that_the_formula_lacks_are_refused():
    q, cu = np.zeros((8, 2, 4)), np.array([0, 3, 8], np.int32)
    with pytest.raises(UnsupportedError, match="the same cu_seqlens"):
        flash_attention(q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu.copy(), causal=True,
                        impl="unfused")  # fmt: skip
    with pytest.raises(UnsupportedError, match="bias given with cu_seqlens"):
        flash_attention(q, q, q, cu_seqlens_q=cu, bias=np.zeros(8), impl="unfused")


def test_the_list_of_forms_ends_with_it_and_the_reference():
    assert [impl.name for impl in IMPLS][-2:] == ["unfused", "reference"]
