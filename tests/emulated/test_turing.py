"""Forms of compute capability 7.5 on any CPU, emulated instruction by instruction."""

import emulator
import numpy as np
import pytest
from attention_formula import judge
from attention_problems import Problem
from checks import find, sampled

from gpuattn.arrays import BFLOAT16
from gpuattn.ops.attention import decode_attention as decoding
from gpuattn.ops.norm import dropout_add_norm as op
from gpuattn.rng import Key

pytestmark = pytest.mark.usefixtures("host_compiler")
TILES = {
    22: "head size 64, a window, a softcap and dropout, dq in a fixed order",
    2: "head sizes 64 and 72, causal, groups of queries",
    12: "head size 160, fewer queries than keys, a negative scale, dq in a fixed order",
    5: "head size 176, a window, a gradient of lse",
    6: "head size 128, causal, a softcap and a bias with its gradient, dq in a fixed order",
    8: "head size 192, causal, lengths of keys",
    20: "packed with an empty sequence, a mask",
}
SHORT = {
    141: "two blocks, dropout, lengths of keys",
    125: "a bias, ALiBi, dropout, lengths of keys",
    11: "a sink, dropout",
    2: "head sizes of different widths, groups of queries",
}
CUDA_CORES = {
    11: "head size 128, a sink, dropout",
    2: "head sizes 64 and 72",
    5: "head size 176, a window",
    21: "head sizes 80 and 200, a mask",
}


def check(form, number, dtype):
    problem = Problem(number, dtype=dtype)
    wrong = judge(problem, emulator.Machine(seed=number, card="7.5").form(form))
    assert not wrong, f"{problem}: {wrong}"


@pytest.mark.parametrize("number", sampled(TILES, 2))
def test_float16_on_tensor_cores(number):
    check("raw-ampere", number, "float16")


@pytest.mark.parametrize("number", sampled(SHORT, 2))
def test_short_sequences(number):
    check("raw-short", number, "float16")


@pytest.mark.parametrize("number", sampled(CUDA_CORES, 2))
def test_bfloat16_on_cuda_cores(number):
    check("raw-simt", number, "bfloat16")


@pytest.mark.parametrize("head_dim, value_dim, tokens, heads, splits", sampled([
    (256, 256, 1, 2, 1), (64, 64, 3, 8, 2), (128, 128, 16, 4, 3), (16, 136, 5, 8, 2),
    (256, 192, 12, 6, 1), (80, 128, 1, 1, 1),
], 2))  # fmt: skip
def test_decoding_in_stages(head_dim, value_dim, tokens, heads, splits):
    """Also with 48 rows and more, whose warps merge nothing, and keys of several stages."""
    rng, sequences, room, kv_heads = np.random.default_rng(head_dim + tokens), 2, 208, 1
    q = rng.standard_normal((sequences, tokens, heads, head_dim)).astype(np.float16)
    shape = sequences, room, kv_heads
    k, v = (rng.standard_normal((*shape, d)).astype(np.float16) for d in (head_dim, value_dim))
    inputs = q, k, v, np.array([room, 71], np.int32), None, None, None, None
    params = {
        "scale": head_dim**-0.5, "window": None, "softcap": None, "splits": splits,
        "batch_invariant": False, "needs": (False,) * 8,
    }  # fmt: skip
    exact = [x if x is None or x.dtype == np.int32 else x.astype(np.float32) for x in inputs]
    wanted, _ = find(decoding.IMPLS, "reference").forward(*exact, **params)
    with emulator.Machine(seed=tokens, card="7.5").in_place():
        run = find(decoding.IMPLS, "raw-ampere").forward
        found, _ = run(*map(emulator.as_array, inputs), **params)
    for mine, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(mine, np.float32), want, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("dtype, rows, cols, p, with_dh", sampled([
    (np.float16, 13, 512, 0.2, True), (np.float32, 7, 1000, 0.0, False),
    (BFLOAT16, 9, 1024, 0.5, True), (np.float16, 5, 4096, 0.0, True),
    (np.float32, 3, 8192, 0.0, False),
], 2))  # fmt: skip
def test_the_next_row_is_in_registers(monkeypatch, dtype, rows, cols, p, with_dh):
    """The gradient of a norm: of rows that a block prefetches, and of one too long for that."""
    machine, random = (
        emulator.Machine(seed=rows, multiprocessors=1, card="7.5"),
        (np.random.default_rng(cols)),
    )
    monkeypatch.setattr(
        op, "add_parts", lambda parts, *_: [p if p is None else p.sum(0) for p in parts]
    )
    h, dnormed, dh = random.standard_normal((3, rows, cols)).astype(dtype)
    weight = (1 + random.standard_normal(cols) / 9).astype(dtype)
    needs = (1, 1, 1, 1, 0)
    params = {"p": p, "key": Key(5, 3, 2) if p else None, "rms": False, "eps": 1e-5}
    reference, vectors = find(op.IMPLS, "reference"), (weight, None, None)
    zeros = np.zeros_like(h)
    _, saved = reference.forward(zeros, h, *vectors, needs=needs, **(params | {"p": 0.0}))
    mask = reference.forward(zeros, h, *vectors, needs=needs, **params)[1][3]
    normalized, rstd = saved[:2]
    grads = dnormed, dh if with_dh else None
    rest = dict(needs=needs, into=(None,) * 5, **params)
    want = reference.backward((normalized, rstd, weight, mask, h.dtype), *grads, **rest)
    exact = h.astype(np.float64)
    mean = (exact.mean(-1) - exact[:, 0]).astype("f")
    with machine.in_place():
        arrays = h, weight, mean, np.ascontiguousarray(rstd.astype("f").ravel()), *grads
        given = [emulator.as_array(a) for a in arrays]
        got = find(op.IMPLS, "raw-simt").backward(given[:4], *given[4:], **rest)
    unit = {np.float16: 2.0**-10, BFLOAT16: 2.0**-7}.get(dtype, 2.0**-18)
    for mine, other, needed in zip(got, want, needs, strict=True):
        assert (mine is None) == (not needed)
        if needed:
            mine, other = np.asarray(mine, np.float64), np.asarray(other, np.float64)
            np.testing.assert_allclose(mine, other, rtol=unit, atol=unit / 8 * max(1, rows**0.5))
