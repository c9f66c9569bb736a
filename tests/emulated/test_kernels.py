"""Hopper's attention kernels on any CPU, emulated instruction by instruction (``emulator``)."""

import emulator
import numpy as np
import pytest
from attention_formula import assert_close, gradients, judge
from attention_problems import Problem
from checks import find, sampled

from gpuattn.arrays import BFLOAT16
from gpuattn.cuda import tensor_maps
from gpuattn.impls import Impl
from gpuattn.ops.attention import hopper_backward
from gpuattn.ops.attention.flash_attention import IMPLS
from gpuattn.rng import Key

REFERENCE = find(IMPLS, "reference")
PROBLEMS = {  # of several tiles each, so that what lies in shared memory is used again
    1577: "a bias that TMA loads, and its gradient; causal from the top left",
    1285: "nearly all dropped at head size 64, packed, dq in a fixed order",
    3096: "a head size above 128, causal",
    1398: "a sink, NaN behind the keys' end, a window to the right, Dv != D, dq in a fixed order",
    332: "a bias that columns share, packed, a window, dq in a fixed order",
    1043: "causal with dropout at head size 128",
    2056: "packed and causal, dq in a fixed order",
    555: "a head size above 192, a window",
    1403: "a softcap beside a bias that wants no gradient",
    1460: "packed with empty sequences, a softcap",
}
WHOLE_HEADS = {  # several heads per thread block
    1456: "parts of one projection, with a gradient of lse",
    21552: "dropout, four blocks, the last not full",
    1952: "three blocks",
    6610: "four blocks",
    10142: "dropout, a window that hides blocks of keys, Dv != D, a gradient of lse alone",
    14306: "a window shorter than a block",
    10696: "two blocks, a window of a few keys",
    281: "dropout, one block",
}
CAUSAL_HEADS = {  # six heads per thread block: T, (D, Dv), dropout, dtype, scale of the last key
    "three blocks, smaller heads": (190, (40, 24), 0, np.float16, 1),
    "two blocks, logits that grow beyond 16 bits": (128, (64, 64), 0.2, np.float16, 30),
    "four blocks": (256, (64, 64), 0.3, BFLOAT16, 1),
    "logits that grow by a factor of 2^60": (250, (64, 64), 0.2, BFLOAT16, 300),
    "one block": (60, (64, 64), 0.5, BFLOAT16, 1),
}
# six heads per thread block: T, (D, Dv), dtype, what is added to the first number of each key
FULL_HEADS = {
    "four blocks, the last of five tokens": (197, (64, 64), BFLOAT16, 0),
    "four whole blocks, smaller heads": (256, (40, 24), np.float16, 0),
    "sums of exponentials near 2^-400": (200, (64, 64), BFLOAT16, -200),
}
MISTAKES = {
    1: "fewer bytes expected than copied",
    2: "no wait for the copies",
    3: "a wait for the wrong phase",
    4: "no fence between stores and wgmma",
    5: "no barrier between stores of other threads and wgmma",
    6: "no wgmma.fence",
    7: "an operand overwritten before the wait",
    8: "no wait for the product",
    9: "no wait for the last copy",
    10: "a barrier for more threads than there are",
}


pytestmark = pytest.mark.usefixtures("host_compiler")


@pytest.mark.parametrize("number", sampled(PROBLEMS, 3))
def test_attention(number):
    check(number, emulator.Machine(seed=number))


@pytest.mark.exhaustive
def test_attention_in_one_step():
    """One tile with dropout for a block, so there is no second step."""
    check(1173, emulator.Machine(seed=1, multiprocessors=32))


@pytest.mark.parametrize(
    "queries, heads, causal, p",
    sampled([(200, 4, False, 0.2), (200, 4, False, 0), (300, 2, True, 0)], 1),
)
def test_a_block_takes_all_tiles_of_a_head(monkeypatch, queries, heads, causal, p):
    """Two heads of keys on two multiprocessors: dq is stored first, not added to zeros."""
    machine, chains = emulator.Machine(seed=1), []
    choose = hopper_backward.tiles_in_turn

    def tiles_in_turn(*args, **params):
        chains.append(choose(*args, **params))
        return chains[-1]

    monkeypatch.setattr(hopper_backward, "tiles_in_turn", tiles_in_turn)
    shape = {"queries": queries, "keys": 330, "heads": heads, "kv_heads": 2, "causal": causal}
    shape["p"] = p
    found = gradients(Impl("emulated", machine.forward, machine.backward), np, **shape)
    assert chains[-1] == 3
    assert_close(found, gradients(REFERENCE, np, **shape))


def test_a_gradient_follows_the_forward_of_another_form():
    """All forms save the same arrays, whatever their strides."""
    machine = emulator.Machine(seed=1)
    shape = {"queries": 70, "keys": 130, "heads": 2, "kv_heads": 1, "causal": False}
    found = gradients(Impl("mixed", REFERENCE.forward, machine.backward), np, **shape)
    assert_close(found, gradients(REFERENCE, np, **shape))


@pytest.mark.parametrize("number", sampled(WHOLE_HEADS, 2))
def test_gradient_by_whole_heads(number):
    """Also where another form is faster."""
    check(number, emulator.Machine(seed=number, backward_impl="raw-hopper-head"))


@pytest.mark.parametrize("case", sampled(CAUSAL_HEADS, 2))
def test_causal_attention_by_whole_heads(case):
    T, sizes, p, dtype, growth = CAUSAL_HEADS[case]
    rng = np.random.default_rng(T)
    q, k, v = (
        rng.standard_normal((3, T, 4, size), np.float32) for size in (*sizes[:1] * 2, sizes[1])
    )
    k *= np.linspace(1, growth, T, dtype=np.float32)[:, None, None]
    inputs = [x.astype(dtype) for x in (q, k, v)]
    params = {
        "window": (None, 0), "align": "top_left", "scale": sizes[0] ** -0.5, "softcap": None,
        "dropout_p": p, "key": Key(1, 2, 3) if p else None, "max_seqlen_q": T, "max_seqlen_k": T,
        "deterministic": False,
    }  # fmt: skip
    rest = dict(needs=[False], **params)
    machine = emulator.Machine(seed=T, forward_impl="raw-hopper-head")
    (out, lse), _ = machine.forward(*inputs, *[None] * 6, **rest)
    widened = [x.astype(np.float32) for x in inputs]
    (want, want_lse), _ = REFERENCE.forward(*widened, *[None] * 6, **rest)
    np.testing.assert_allclose(out.astype(np.float32), want, atol=2**-8 * abs(want).max())
    np.testing.assert_allclose(lse, want_lse, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("case", sampled(FULL_HEADS, 1))
def test_gradient_without_a_mask_by_whole_heads(case):
    T, (D, Dv), dtype, added = FULL_HEADS[case]
    rng = np.random.default_rng(T)
    q, k, v, dout = (rng.standard_normal((3, T, 4, size), np.float32) for size in (D, D, Dv, Dv))
    if added:
        q[..., 0], k[..., 0] = D**0.5, k[..., 0] + added
    q, k, v, dout = (x.astype(dtype) for x in (q, k, v, dout))
    params = {
        "window": (None, None), "align": "top_left", "scale": D**-0.5, "softcap": None,
        "dropout_p": 0.0, "key": None, "max_seqlen_q": T, "max_seqlen_k": T,
        "deterministic": False,
    }  # fmt: skip
    params["needs"] = [True] * 3 + [False] * 6
    (out, lse), saved = REFERENCE.forward(q, k, v, *[None] * 6, **params)
    assert added == 0 or lse.max() < -180
    machine, into = emulator.Machine(seed=T, backward_impl="raw-hopper-head"), [None] * 9
    found = machine.backward(saved, dout, None, into=into, **params)
    widened = [None if x is None else x.astype(np.float32) for x in saved]
    wanted = REFERENCE.backward(widened, dout.astype(np.float32), None, into=into, **params)
    for x, want in zip(found[:3], wanted[:3], strict=True):
        x, want = (y.astype(np.float32)[..., bool(added) :] for y in (x, want))  # first: roundings
        np.testing.assert_allclose(x, want, atol=2**-7 * abs(want).max())


def check(number, machine):
    problem = Problem(number)
    wrong = judge(problem, Impl("emulated", machine.forward, machine.backward))
    assert not wrong, f"{problem}: {wrong}"


@pytest.mark.parametrize("seen", ["all", "half", "one"])
@pytest.mark.parametrize("head_dim", sampled([64, 128], 1))
def test_huge_logits(head_dim, seen):
    """Equal largest logits must give equal weights although their exponents are rounded."""
    rng, huge = np.random.default_rng(head_dim), np.float16(65504)
    v = rng.standard_normal((1, 200, 1, head_dim)).astype(np.float16)
    q, k = np.full((1, 70, 1, head_dim), huge), np.full_like(v, huge)
    keys = {"all": slice(None), "half": slice(0, None, 2), "one": slice(150, 151)}[seen]
    if seen != "all":
        k[:] = rng.standard_normal(k.shape)
        k[:, keys] = huge
    params = {
        "window": (None, None), "align": "bottom_right", "scale": head_dim**-0.5, "softcap": None,
        "dropout_p": 0, "key": None, "max_seqlen_q": 70, "max_seqlen_k": 200, "deterministic": True,
    }  # fmt: skip
    (out, lse), _ = emulator.Machine(seed=1).forward(q, k, v, *[None] * 6, needs=[False], **params)
    want = v[:, keys].astype(np.float64).mean(1, keepdims=True)
    np.testing.assert_allclose(out.astype(np.float64), np.broadcast_to(want, out.shape), atol=2e-3)
    np.testing.assert_allclose(lse, float(huge) ** 2 * head_dim**0.5, rtol=1e-6)


@pytest.mark.parametrize("dtype", sampled([np.float16, BFLOAT16], 1))
@pytest.mark.parametrize("head_dim", sampled([64, 128], 1))
def test_dropout_of_more_blocks_than_fit_in_shared_memory(head_dim, dtype):
    rng = np.random.default_rng(head_dim)
    shapes = [(1, rows, 1, head_dim) for rows in (70, 900, 900)]
    q, k, v = (rng.standard_normal(shape, np.float32).astype(dtype) for shape in shapes)
    params = {
        "window": (None, None), "align": "bottom_right", "scale": head_dim**-0.5, "softcap": None,
        "dropout_p": 0.3, "key": Key(1), "max_seqlen_q": 70, "max_seqlen_k": 900,
        "deterministic": True,
    }  # fmt: skip
    rest = dict(needs=[False], **params)
    (out, _), _ = emulator.Machine(seed=1).forward(q, k, v, *[None] * 6, **rest)
    exact = (x.astype(np.float32) for x in (q, k, v))
    (want, _), _ = REFERENCE.forward(*exact, *[None] * 6, tf32=False, **rest)
    assert_close([out.astype(np.float32)], [want])


def product(mistake, seed):
    """Run ``product.cu`` with a mistake; return the error found, or ""."""
    numbers = np.random.default_rng(seed).integers(-4, 5, (2, 1, 64, 1, 64))
    a, b = (emulator.as_array(x.astype(np.float16)) for x in numbers)
    out, machine = emulator.as_array(np.full_like(a, np.nan)), emulator.Machine(seed)
    with machine.in_place():
        maps = [tensor_maps.tensor_map(x, 64) for x in (a, b, out)]
        run = machine.kernel(str(emulator.HERE / "product.cu"), "product_of_tiles", scalar="f16")
        try:
            run((1,), (128,), *maps, mistake, shared_bytes=2048 + 3 * 64 * 128)
        except AssertionError as error:
            return str(error)
    return "" if (out[0, :, 0] == a[0, :, 0] @ b[0, :, 0].T).all() else "wrong numbers"


def test_a_correct_kernel_passes_in_any_order():
    assert not any(product(mistake=0, seed=seed) for seed in range(20))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_found(mistake):
    """Each is found by at least one order of events."""
    found = {product(mistake, seed) for seed in range(20)} - {""}
    assert found, MISTAKES[mistake]


def test_a_deadlock_names_the_waiting_warps():
    assert "block 0 warp 3 waits: named barrier and threads (1, 160), 32 lanes" in product(10, 1)


@pytest.mark.parametrize(("alignment", "offset"), [(8, 0), (16, 1), (16, 0)])
def test_an_access_must_be_aligned(alignment, offset):
    """Shared memory lies where its declaration allows, and no better."""
    text = f"""
    struct alignas({alignment}) Pair {{ u64 first, second; }};
    extern "C" __global__ void last_pair(float4* out) {{
        __shared__ Pair pairs[32];
        pairs[threadIdx.x] = {{0, 0}};
        __syncthreads();
        if (threadIdx.x == 0) *out = ((const float4*)pairs)[31];
    }}"""
    run = emulator.Machine(seed=1).kernel_of(text, "last_pair", [("float4*", "out")])
    out = emulator.as_array(np.ones(8, np.float32))
    out = out[(-out.ctypes.data // 4) % 4 + offset :]
    if alignment == 16 and offset == 0:
        run((1,), (32,), out)
        assert (out[:4] == 0).all()
    else:
        with pytest.raises(
            AssertionError, match=f"float4' at an address that is {8 >> offset} mod"
        ):
            run((1,), (32,), out)


@pytest.mark.parametrize("where", ["dynamic", "fixed", "out"])
def test_instructions_for_global_memory_take_its_addresses_alone(where):
    text = f"""
    #include "common/global_memory.cuh"
    extern "C" __global__ void store(uint4* out) {{
        extern __shared__ uint4 dynamic[];
        __shared__ uint4 fixed[1];
        if (threadIdx.x == 0) {{
            fixed[0] = dynamic[0] = uint4{{0, 0, 0, 0}};
            store_16_bytes({where}, 1, 2, 3, 4);
        }}
    }}"""
    run = emulator.Machine(seed=1).kernel_of(text, "store", [("uint4*", "out")])
    out = emulator.as_array(np.zeros(16, np.uint32))
    out = out[-out.ctypes.data // 4 % 4 :][:4]
    if where == "out":
        run((1,), (32,), out, shared_bytes=16)
        assert out.tolist() == [1, 2, 3, 4]
    else:
        with pytest.raises(AssertionError, match="an address of shared memory"):
            run((1,), (32,), out, shared_bytes=16)
