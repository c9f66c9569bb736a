"""step_attention: append one token per row to the cache and attend, with beams sharing slots."""

import numpy as np
import pytest

from gpuattn import explain
from gpuattn.arrays import to_cpu
from gpuattn.bench.samples import DTYPES
from gpuattn.ops.attention.step_attention import step_attention


def problem(xp, dtype, sentences, beam, room, heads, kv_heads, head_dim, seed=0):
    """Return the arguments of a step, q, k and v as parts of one projection."""
    rng, rows = np.random.default_rng(seed), sentences * beam
    parts = rng.standard_normal((rows, 1, heads + 2 * kv_heads, head_dim))
    parts = xp.asarray(parts).astype(DTYPES[dtype])
    q, k, v = parts[:, :, :heads], parts[:, :, heads:-kv_heads], parts[:, :, -kv_heads:]
    caches = [
        xp.asarray(rng.standard_normal((rows, room, kv_heads, head_dim))).astype(DTYPES[dtype])
        for _ in range(2)
    ]
    counts = xp.asarray(rng.integers(1, room + 1, sentences).repeat(beam), np.int32)
    slots = rng.integers(0, beam, (sentences, beam, room))
    for b, count in enumerate(to_cpu(counts)[::beam]):
        slots[b, :, count - 1] = np.arange(beam)
    return q, k, v, *caches, counts, xp.asarray(slots, np.int16)


def expected(q, k, v, k_cache, v_cache, counts, slots):
    """Return (out, k_cache, v_cache) in float64, row by row."""
    q, k, v, k_cache, v_cache = (to_cpu(x).astype(np.float64) for x in (q, k, v, k_cache, v_cache))
    counts, slots, beam = to_cpu(counts), to_cpu(slots), slots.shape[1]
    group, out = q.shape[2] // k.shape[2], np.zeros(q.shape)
    for row, count in enumerate(counts):
        k_cache[row, count - 1], v_cache[row, count - 1] = k[row, 0], v[row, 0]
        first = row // beam * beam
        where = first + slots[row // beam, row % beam, : count - 1]
        where = np.append(where, row)
        keys, values = (c[where, np.arange(count)].repeat(group, 1) for c in (k_cache, v_cache))
        logits = np.einsum("hd,khd->hk", q[row, 0], keys) / np.sqrt(q.shape[-1])
        weights = np.exp(logits - logits.max(1, keepdims=True))
        out[row, 0] = np.einsum("hk,khd->hd", weights / weights.sum(1, keepdims=True), values)
    return out, k_cache, v_cache


@pytest.mark.parametrize("sizes", [
    (3, 4, 40, 8, 8, 64), (1, 1, 1, 2, 1, 64), (5, 3, 70, 4, 2, 32), (2, 5, 33, 3, 3, 128),
    (2, 2, 300, 2, 2, 64), (2, 3, 9, 2, 1, 24),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_against_float64(xp, dtype, sizes):
    given = problem(xp, dtype, *sizes)
    out, *caches = expected(*given)
    got = step_attention(*given)
    tolerance = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}[dtype]
    np.testing.assert_allclose(to_cpu(got).astype(np.float64), out, atol=tolerance, rtol=tolerance)
    for cache, want in zip(given[3:5], caches, strict=True):
        np.testing.assert_array_equal(to_cpu(cache).astype(np.float64), want)


def test_the_same_bits_in_any_batch(gpu):
    given = problem(gpu, "bfloat16", 6, 4, 50, 8, 8, 64)
    alone = [x[4:8].copy() for x in given[:6]] + [given[6][1:2].copy()]
    whole, part = step_attention(*given), step_attention(*alone)
    np.testing.assert_array_equal(to_cpu(whole[4:8]), to_cpu(part))


def test_explain_names_the_form(gpu):
    assert (
        explain(step_attention, *problem(gpu, "bfloat16", 2, 2, 64, 2, 2, 64)).chosen
        == "raw-ampere"
    )
    told = explain(step_attention, *problem(gpu, "bfloat16", 2, 2, 600, 2, 2, 64))
    assert told.chosen == "two-ops" and "600 keys" in dict(told.reasons)["raw-ampere"]
