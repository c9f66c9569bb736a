"""step_attention: append one token per row to the cache and attend, with beams sharing slots."""

import numpy as np
import pytest

from gpuattn import explain
from gpuattn.arrays import get_xp, to_cpu
from gpuattn.bench.samples import DTYPES
from gpuattn.cuda.gpu import gpu as gpu_of
from gpuattn.modes import with_mode
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


def paged(xp, dtype, rows, room, heads, kv_heads, head_dim, shared=0, page=64, seed=0):
    """Return (arguments, {"page_table": ...}) of a step over pages in any order.

    The rows share the first ``shared`` pages, and have more than their keys. Page 0 is nobody's.
    """
    sizes = rows, 1, room, heads, kv_heads, head_dim
    q, k, v, *_, counts, _ = problem(xp, dtype, *sizes, seed=seed)
    rng, each = np.random.default_rng(seed), -(-room // page)
    table = rng.permutation(np.arange(1, rows * each + 1)).reshape(rows, each).astype(np.int32)
    table[:, :shared] = table[0, :shared]
    counts = xp.maximum(counts, np.int32(shared * page + 1))
    stores = [
        xp.asarray(rng.standard_normal((rows * each + 1, page, kv_heads, head_dim))) for _ in "kv"
    ]
    for store in stores:
        store[0] = np.nan
    stores = [store.astype(DTYPES[dtype]) for store in stores]
    behind = np.arange(each) >= -(-to_cpu(counts)[:, None] // page)
    table[behind] = 0
    return (q, k, v, *stores, counts), {"page_table": xp.asarray(table)}


def contiguous(given, page_table):
    """Return the same step with a cache of its own for each row, and slots."""
    *new, k_cache, v_cache, counts = given
    rows, room = len(page_table), page_table.shape[1] * k_cache.shape[1]
    xp = get_xp(counts)
    caches = [x[page_table].reshape(rows, room, *x.shape[2:]) for x in (k_cache, v_cache)]
    return *new, *caches, counts, xp.zeros((rows, 1, room), np.int16)


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
    (2, 2, 300, 2, 2, 64), (2, 3, 9, 2, 1, 24), (2, 1, 1000, 4, 2, 64), (140, 4, 20, 4, 4, 64),
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


PAGED = [  # rows, room, heads, kv_heads, head_dim, shared pages
    (5, 200, 4, 2, 64, 1), (1, 64, 2, 2, 32, 0), (4, 300, 3, 1, 128, 4), (3, 640, 2, 2, 64, 2),
    (2, 70, 2, 1, 24, 0),
]  # fmt: skip


def check_pages(given, table, before):
    """Check that the pages are those of ``before``, to the bit, but for the new keys and values."""
    last, pages = to_cpu(given[5]) - 1, to_cpu(table["page_table"])
    for new, store, known in zip(given[1:3], given[3:5], before, strict=True):
        known[pages[np.arange(len(last)), last // 64], last % 64] = to_cpu(new)[:, 0]
        assert to_cpu(store).tobytes() == known.tobytes()


@pytest.mark.parametrize("sizes", PAGED, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pages(xp, dtype, sizes):
    """They give what caches of a row's own give, and only the page of the new key is written."""
    given, table = paged(xp, dtype, *sizes)
    own, before = contiguous(given, table["page_table"]), [to_cpu(x).copy() for x in given[3:5]]
    out, *_ = expected(*own)
    got = step_attention(*given, **table)
    tolerance = {"float32": 1e-5, "bfloat16": 3e-2}[dtype]
    np.testing.assert_allclose(to_cpu(got).astype(np.float64), out, atol=tolerance, rtol=tolerance)
    check_pages(given, table, before)


def test_slots_or_pages(xp):
    given, table = paged(xp, "float32", 2, 64, 2, 2, 32)
    for more in ({}, {"slots": xp.zeros((2, 1, 64), np.int16)} | table):
        with pytest.raises(ValueError, match="one of the two"):
            step_attention(*given, **more)
    with pytest.raises(ValueError, match="page_table.shape is"):
        step_attention(*given, page_table=table["page_table"][:1])


def test_pages_have_the_bits_of_caches(gpu):
    """By TMA too, with as many warps for a head."""
    given, table = paged(gpu, "bfloat16", 6, 400, 4, 4, 64, shared=3)
    own = contiguous(given, table["page_table"])
    found = step_attention(*given, **table, impl="raw-ampere"), step_attention(*own)
    np.testing.assert_array_equal(*map(to_cpu, found))
    with with_mode("batch_invariant", True):
        found = step_attention(*given, **table), step_attention(*own)
    np.testing.assert_array_equal(*map(to_cpu, found))


@pytest.mark.parametrize("rows", [5, 30, 60, 140])
def test_pages_of_many_texts(gpu, rows):
    """Blocks of 8, 4 and 2 warps, and more than run at once."""
    given, table = paged(gpu, "bfloat16", rows, 1000, 6, 6, 64, shared=1)
    own = contiguous(given, table["page_table"])
    before = [to_cpu(x).copy() for x in given[3:5]]
    out, *_ = expected(*own)
    for _ in range(3):
        got = step_attention(*given, **table)
        np.testing.assert_allclose(to_cpu(got).astype(np.float64), out, atol=3e-2, rtol=3e-2)
    check_pages(given, table, before)


def test_the_same_bits_in_any_batch(gpu):
    given = problem(gpu, "bfloat16", 6, 4, 50, 8, 8, 64)
    alone = [x[4:8].copy() for x in given[:6]] + [given[6][1:2].copy()]
    with with_mode("batch_invariant", True):
        whole, part = step_attention(*given), step_attention(*alone)
    np.testing.assert_array_equal(to_cpu(whole[4:8]), to_cpu(part))


def test_explain_names_the_form(gpu):
    told = explain(step_attention, *problem(gpu, "bfloat16", 2, 2, 64, 2, 2, 64))
    assert told.chosen == "raw-ampere", str(told)
    given, table = paged(gpu, "bfloat16", 2, 200, 2, 2, 64)
    assert explain(step_attention, *given, **table).chosen == (
        "raw-hopper" if gpu_of(0).has_wgmma else "raw-ampere"
    )
    given, table = paged(gpu, "bfloat16", 2, 200, 2, 2, 32)
    told = explain(step_attention, *given, **table)
    assert told.chosen == "raw-ampere", str(told)
    told = explain(step_attention, *problem(gpu, "bfloat16", 2, 2, 600, 2, 2, 64))
    assert told.chosen == "two-ops" and "600 keys" in dict(told.reasons)["raw-ampere"]
