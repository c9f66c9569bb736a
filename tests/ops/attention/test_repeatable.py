"""Equal bits in repeated calls, in larger batches, with more heads, and in a CUDA graph."""

import numpy as np
import pytest
from checks import dtype_of

from gpuattn import Tensor
from gpuattn.autodiff import backward_pass
from gpuattn.ops.attention.flash_attention import IMPLS, flash_attention
from gpuattn.rng import Key

RAW = [i.name for i in IMPLS if i.name.startswith("raw-") and not i.specialized]
FORWARDS, BACKWARDS = 1000, 50
CASES = {
    "causal": {"T": 2048, "S": 2048, "causal": True},
    "grouped": {"T": 1000, "S": 1111, "H": 4, "D": 128, "dtype": "float16"},
    "packed": {"cu": [0, 700, 700, 701, 1034, 2048], "causal": True, "B": 5},
    "features": {
        "B": 2, "T": 300, "S": 331, "D": 80, "Dv": 96, "window": (100, 9), "softcap": 20.0,
        "dropout_p": 0.2, "seed": Key(5, 1, 2), "bias": (1, 4, 300, 331), "sink": 4, "slopes": 4,
        "key_lengths": [331, 200],
    },
}  # fmt: skip
SPECIALIZED = {"raw-short": {
    "causal": {"B": 9, "T": 256, "S": 256, "causal": True},
    "grouped": {"B": 3, "T": 50, "S": 111, "H": 4, "D": 128, "dtype": "float16"},
    "packed": {"cu": [*range(0, 2048, 190), 1901, 1901, 2048], "causal": True},
    "features": CASES["features"] | {
        "T": 200, "S": 231, "bias": (1, 4, 200, 231), "key_lengths": [231, 150],
    },
}, "raw-hopper-head": {
    "causal": {"B": 9, "T": 256, "S": 256, "Hk": 4, "causal": True},
    "dropout": {
        "B": 3, "T": 200, "S": 200, "Hk": 4, "D": 40, "Dv": 64, "dtype": "float16", "causal": True,
        "dropout_p": 0.2, "seed": Key(5, 1, 2),
    },
}, "raw-simt": CASES | {  # tiles of keys add to dq in turn
    "float32": {"T": 2048, "S": 2048, "causal": True, "dtype": "float32"},
    "float32, 128": {"T": 999, "S": 2048, "D": 128, "dtype": "float32"},
}}  # fmt: skip

pytestmark = pytest.mark.gpu
each_case = pytest.mark.parametrize("impl, case", [
    pytest.param(impl, case, id=f"{name}-{impl}")
    for impl, cases in (dict.fromkeys(RAW, CASES) | SPECIALIZED).items()
    for name, case in cases.items()
])  # fmt: skip


def draw(xp, *, B=1, T=2048, S=2048, H=4, Hk=2, D=64, Dv=None, dtype="bfloat16", cu=None,
         bias=None, sink=None, slopes=None, key_lengths=None, **params):  # fmt: skip
    """Return ([q, k, v], keyword arguments of flash_attention)."""
    rng = np.random.default_rng(0)
    leads = ((2048,), (2048,)) if cu else ((B, T), (B, S))
    shapes = (*leads[0], H, D), (*leads[1], Hk, D), (*leads[1], Hk, Dv or D)

    def numbers(shape, kind=dtype):
        return xp.asarray(rng.standard_normal(shape, np.float32).astype(dtype_of(kind)))

    if cu:
        longest = max(np.diff(cu))
        params |= {"cu_seqlens_q": xp.asarray(cu, np.int32)}
        params |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
    if bias:
        params["bias"] = numbers(bias)
    if sink:
        params["sink"] = numbers(sink, "float32")
    if slopes:
        params["alibi_slopes"] = abs(numbers(slopes, "float32"))
    if key_lengths:
        params["key_lengths"] = xp.asarray(key_lengths, np.int32)
    return [numbers(shape) for shape in shapes], params


def forward(qkv, params, impl):
    """Return (out, lse)."""
    return flash_attention(*qkv, **params, impl=impl, return_lse=True)


def gradients(qkv, params, impl, deterministic=True):
    """Return the gradients of out and lse by q, k, v and, where given, bias and sink."""
    boxes = [Tensor(x, requires_grad=True) for x in qkv]
    others = {name: Tensor(params[name], requires_grad=True)
              for name in ("bias", "sink") if name in params}  # fmt: skip
    params = params | others | {"deterministic": deterministic}
    out, lse = forward(boxes, params, impl)
    weights = out.data[..., ::-1] * 3, lse.data * 0 + 1  # arbitrary, but the same in every call
    return backward_pass.gradients([out, lse], weights, [*boxes, *others.values()])


def bits(x):
    return x.view(f"u{x.itemsize}")


@each_case
def test_forward(gpu, impl, case):
    qkv, params = draw(gpu, **case)
    first = forward(qkv, params, impl)
    differs = gpu.zeros((), bool)
    for _ in range(FORWARDS - 1):
        for x, want in zip(forward(qkv, params, impl), first, strict=True):
            differs |= (bits(x) != bits(want)).any()
    assert not differs
    assert all(gpu.isfinite(x).all() for x in first)


@each_case
def test_deterministic_backward(gpu, impl, case):
    qkv, params = draw(gpu, **case)
    first = gradients(qkv, params, impl)
    differs = gpu.zeros((), bool)
    for _ in range(BACKWARDS - 1):
        for x, want in zip(gradients(qkv, params, impl), first, strict=True):
            differs |= (bits(x) != bits(want)).any()
    assert not differs
    for x, want in zip(gradients(qkv, params, impl, False), first, strict=True):
        x, want = x.astype(np.float32), want.astype(np.float32)
        assert abs(x - want).max() <= 2**-7 * abs(want).max(), (
            "differs by more than rounding of the largest value"
        )


@pytest.mark.parametrize("impl, T, S", [
    *[(name, *sides) for name in RAW for sides in [(1, 2048), (129, 129), (300, 1000)]],
    ("raw-short", 1, 256), ("raw-short", 129, 129), ("raw-hopper-head", 129, 129),
])  # fmt: skip
@pytest.mark.parametrize("features", [{}, {"causal": True, "dropout_p": 0.1, "seed": 3}])
def test_a_row_does_not_depend_on_its_batch(gpu, impl, T, S, features):
    """Sequence 0 with the heads of KV head 0 gives equal bits alone and in a large batch."""
    heads, kv_heads = (2, 1, 1), 6
    if impl == "raw-hopper-head":
        heads, kv_heads, features = (2, 2, 2), 12, features | {"causal": True}
    many, params = draw(gpu, B=40, T=T, S=S, H=12, Hk=kv_heads, **features)
    few = [gpu.ascontiguousarray(x[:1, :, :n]) for x, n in zip(many, heads, strict=True)]
    out, lse = forward(many, params, impl)
    alone, lse_alone = forward(few, params, impl)
    assert (bits(out[:1, :, :2]) == bits(alone)).all()
    assert (bits(lse[:1, :2]) == bits(lse_alone)).all()


@pytest.mark.parametrize("impl", RAW)
def test_a_packed_row_does_not_depend_on_its_batch(gpu, impl):
    (q, k, v), params = draw(gpu, cu=[0, 500, 1500, 2048], causal=True)
    first = params | {"cu_seqlens_q": gpu.asarray([0, 500], np.int32), "max_seqlen_q": 500,
                      "max_seqlen_k": 500}  # fmt: skip
    out, lse = forward((q, k, v), params, impl)
    alone, lse_alone = forward((q[:500], k[:500], v[:500]), first, impl)
    assert (bits(out[:500]) == bits(alone)).all()
    assert (bits(gpu.ascontiguousarray(lse[:, :500])) == bits(lse_alone)).all()


@each_case
def test_in_a_graph(gpu, impl, case):
    """A replay gives the bits of an eager call, also after the inputs changed."""
    qkv, params = draw(gpu, **case)
    stream = gpu.cuda.Stream(non_blocking=True)
    gpu.cuda.Device().synchronize()
    with stream:
        gradients(qkv, params, impl)  # compiles, and fills the memory pool
        forward(qkv, params, impl)
        stream.synchronize()
        stream.begin_capture()
        captured = [*forward(qkv, params, impl), *gradients(qkv, params, impl)]
        graph = stream.end_capture()
        for places, x in enumerate(qkv):
            x[...] = gpu.roll(x, places, -1)
        graph.launch(stream)
        want = [*forward(qkv, params, impl), *gradients(qkv, params, impl)]
        stream.synchronize()
    for x, y in zip(captured, want, strict=True):
        assert (bits(x) == bits(y)).all()
