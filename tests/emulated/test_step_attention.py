"""One token's attention over slots and over pages, emulated on any CPU."""

import emulator
import numpy as np
import pytest
from checks import check_hopper_compiles, sampled
from seen_rows import list_rows

from gpuattn.arrays import BFLOAT16
from gpuattn.modes import with_mode
from gpuattn.ops.attention import step_attention as steps
from gpuattn.ops.attention.flash_attention import flash_attention

pytestmark = pytest.mark.usefixtures("host_compiler")
CASES = [  # rows, beam (0: pages), pages of a row, heads, kv_heads, head_dim, dtype
    (3, 0, 3, 2, 1, 64, BFLOAT16), (4, 2, 1, 2, 2, 64, np.float16), (2, 0, 2, 2, 2, 128, BFLOAT16),
    (3, 0, 2, 4, 2, 32, np.float16), (3, 3, 2, 2, 1, 128, BFLOAT16), (2, 1, 3, 2, 2, 64, BFLOAT16),
    (18, 9, 2, 4, 2, 32, np.float16), (8, 4, 1, 2, 2, 64, BFLOAT16),
    (5, 5, 1, 4, 1, 64, np.float16), (1, 1, 5, 2, 2, 64, BFLOAT16), (1, 0, 5, 1, 1, 32, np.float16),
    (8, 4, 1, 4, 4, 64, BFLOAT16), (9, 1, 2, 1, 1, 128, np.float16),
    (12, 2, 1, 4, 4, 32, np.float16),
]  # fmt: skip


def hide_unread(caches, counts, slots, table):
    """Put NaN in all rows of the caches that no key of a text is in."""
    read = np.zeros(caches[0].shape[:2], bool)
    for row, count in enumerate(counts):
        keys = np.arange(count - 1)
        if table is None:
            beam = slots.shape[1]
            read[row // beam * beam + slots[row // beam, row % beam, keys], keys] = True
        else:
            read[table[row, keys // 64], keys % 64] = True
    for cache in caches:
        cache[~read] = np.nan


def page_table(rng, counts, pages):
    """Return pages in any order, the first one shared if it is full, and page 0 behind the keys."""
    rows = len(counts)
    table = rng.permutation(np.arange(1, rows * pages + 1)).astype(np.int32).reshape(rows, pages)
    if counts.min() > 64:
        table[:, 0] = table[0, 0]
    table[np.arange(pages) >= -(-counts[:, None] // 64)] = 0
    return table


@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("rows, beam, pages, heads, kv_heads, head_dim, dtype", sampled(CASES, 2))
def test_step_attention(
    rows, beam, pages, heads, kv_heads, head_dim, dtype, settled, monkeypatch
):  # fmt: skip
    monkeypatch.setattr(steps, "BEAM_WARPS", ((2 ** (rows % 3), 0),))
    rng, room = np.random.default_rng(rows), 64 * pages
    parts = rng.standard_normal((rows, 1, heads + 2 * kv_heads, head_dim)).astype(dtype)
    q, k, v = np.split(parts, [heads, heads + kv_heads], 2)
    counts = rng.integers(1, room + 1, rows // max(beam, 1)).astype(np.int32).repeat(max(beam, 1))
    slots = table = None
    if beam:
        shape = rows, room
        slots = rng.integers(0, beam, (rows // beam, beam, room)).astype(np.int16)
        slots[...] = np.arange(beam)[:, None]
        slots[:, :, : counts.min() // 2] = 0
        for own, count in zip(slots, counts[::beam], strict=True):
            own[:, count - 1] = np.arange(beam)
    else:
        shape = rows * pages + 1, 64
        table = page_table(rng, counts, pages)
    caches = [rng.standard_normal((*shape, kv_heads, head_dim)).astype(dtype) for _ in "kv"]
    hide_unread(caches, counts, slots, table)
    given = q, k, v, *caches, counts, slots, None, None, table
    again = [x.copy() for x in caches]
    want = given[:3] + tuple(x.astype(np.float32) for x in given[3:5]) + given[5:]
    want = [x.astype(np.float32) if i < 3 else x for i, x in enumerate(want)]
    expected, _ = steps._forward_by_two(*want, settled=settled, needs=())
    machine = emulator.Machine(seed=rows)
    with machine.in_place():
        found, _ = steps._forward_raw(*map(emulator.as_array, given), settled=settled, needs=())
    found = np.asarray(found).astype(np.float32)
    tolerance = 2e-2 if dtype == BFLOAT16 else 2e-3
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)
    for own, cache in zip(caches, want[3:5], strict=True):
        np.testing.assert_array_equal(own.astype(np.float32), cache)
    if 1 < beam <= 8:  # with the rows listed before: the same bits
        listed = list_rows(slots, counts[::beam] - 1)
        given = (*given[:3], *again, counts, slots, *listed, None)
        with machine.in_place():
            other, _ = steps._forward_raw(*map(emulator.as_array, given), settled=settled, needs=())
        np.testing.assert_array_equal(np.asarray(other).astype(np.float32), found)
        for own, cache in zip(again, caches, strict=True):
            assert own.tobytes() == cache.tobytes()


PAGES = [  # rows, pages of a row, heads, kv_heads, warps, dtype
    (3, 3, 2, 1, 2, BFLOAT16), (2, 2, 2, 2, 4, np.float16), (1, 9, 1, 1, 2, BFLOAT16),
    (2, 1, 9, 1, 8, BFLOAT16), (4, 5, 1, 1, 4, BFLOAT16), (1, 18, 1, 1, 2, np.float16),
]  # fmt: skip


@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("rows, pages, heads, kv_heads, warps, dtype", sampled(PAGES, 3))
def test_pages_by_tma(rows, pages, heads, kv_heads, warps, dtype, settled, monkeypatch):
    """The same bits as of the other kernel with as many warps; NaN behind a text is not seen."""
    monkeypatch.setattr(steps, "_warps", lambda *_: warps)
    monkeypatch.setattr(steps, "WARPS_OF_PAGES", ((1000, warps),))
    rng = np.random.default_rng(10 * rows + pages)
    parts = rng.standard_normal((rows, 1, heads + 2 * kv_heads, 64)).astype(dtype)
    q, k, v = np.split(parts, [heads, heads + kv_heads], 2)
    counts = rng.integers(1, 64 * pages + 1, rows).astype(np.int32)
    # the new key of the first text is the last one of a group of 16, or the first one
    counts[0] = 64 * pages - (15 if settled else 0)
    table = page_table(rng, counts, pages)
    shape = rows * pages + 1, 64, kv_heads, 64
    caches = [rng.standard_normal(shape).astype(dtype) for _ in "kv"]
    hide_unread(caches, counts, None, table)
    results = []
    for forward in (steps._forward_raw, steps._forward_hopper):
        own = [x.copy() for x in caches]
        given = q, k, v, *own, counts, None, None, None, table
        with emulator.Machine(seed=rows).in_place():
            found, _ = forward(*map(emulator.as_array, given), settled=settled, needs=())
        results.append([np.asarray(x).tobytes() for x in (found, *own)])
    assert np.isfinite(np.asarray(found).astype(np.float32)).all()
    assert results[0] == results[1]


@pytest.mark.parametrize("settled", [0, 1])
@pytest.mark.parametrize("warps", [2, 4, 8])
def test_the_host_knows_the_memory_of_blocks_over_pages(nvrtc, warps, settled):
    size = 1024 + warps * steps.RING + 256  # alignment, rings, the new key and value
    check_hopper_compiles(steps.HOPPER_FILE, size, WARPS=warps, SETTLED=settled)


def test_warps_over_pages():
    """Blocks are spread evenly: one more than a multiprocessor is to have does not fit."""
    for blocks, warps, at_once in ((64, 8, 1), (192, 4, 2), (384, 4, 3), (768, 2, 6), (1536, 2, 6)):
        found, shared = steps._spread(blocks, 132)
        assert found == warps
        assert at_once * (shared + 1024) <= steps.SHARED < (at_once + 1) * (shared + 1024)
    with with_mode("batch_invariant", True):
        assert {steps._spread(blocks, 132)[0] for blocks in (1, 500, 9999)} == {4}


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("warps, kv_heads, settled", [(2, 1, False), (1, 4, True), (4, 2, True)])
def test_values_of_one_beam(value, warps, kv_heads, settled, monkeypatch):
    """They are seen by that beam alone, old or new: the results of the others are the same bits."""
    monkeypatch.setattr(steps, "BEAM_WARPS", ((warps, 0),))
    rng, beam, room, count = np.random.default_rng(0), 4, 64, 38
    parts = rng.standard_normal((2 * beam, 1, 3 * kv_heads, 64)).astype(BFLOAT16)
    q, k, v = np.split(parts, 3, 2)
    slots = np.zeros((2, beam, room), np.int16)
    slots[:, :, 20:] = np.arange(beam)[:, None]
    shape = 2 * beam, room, kv_heads, 64
    caches = [rng.standard_normal(shape).astype(BFLOAT16) for _ in "kv"]
    counts = np.full(2 * beam, count, np.int32)
    listed = list_rows(slots, counts[::beam] - 1) if kv_heads == 4 else (None, None)
    results = []
    for place in None, (caches[1], 3, 30), (v, 5, 0):
        given = [x.copy() for x in (q, k, v, *caches)]
        given += [counts, slots, *listed, None]
        if place:
            values, row, key = place
            given[2 if values is v else 4][row, key] = value
        with emulator.Machine(seed=0).in_place():
            found, _ = steps._forward_raw(*map(emulator.as_array, given), settled=settled, needs=())
        results.append(np.asarray(found).astype(np.float32))
    for row, found in (3, results[1]), (5, results[2]):
        others = np.arange(2 * beam) != row
        np.testing.assert_array_equal(found[others], results[0][others])
        assert not np.isfinite(found[row]).any()


MEMORIES = [  # warps, sentences, beam, room, heads, kv_heads, head_dim, dtype
    (2, 3, 4, 32, 2, 2, 64, BFLOAT16), (1, 2, 4, 96, 2, 2, 64, BFLOAT16),
    (4, 2, 1, 96, 4, 2, 64, np.float16), (4, 2, 3, 40, 4, 1, 32, BFLOAT16),
    (2, 1, 9, 17, 2, 2, 128, np.float16), (2, 5, 2, 200, 1, 1, 64, BFLOAT16),
    (1, 2, 1, 33, 2, 2, 128, np.float16), (1, 3, 5, 20, 4, 2, 32, BFLOAT16),
]  # fmt: skip


@pytest.mark.parametrize(
    "warps, sentences, beam, room, heads, kv_heads, head_dim, dtype", sampled(MEMORIES, 3)
)
def test_memory_attention(
    warps, sentences, beam, room, heads, kv_heads, head_dim, dtype, monkeypatch
):
    """All beams of a sentence see its memory, and no key past its end."""
    monkeypatch.setattr(steps, "_warps_of_memory", lambda *_: warps)
    rng = np.random.default_rng(sentences)
    q = rng.standard_normal((sentences, beam, heads, head_dim)).astype(dtype)
    k, v = rng.standard_normal((2, sentences, room, kv_heads, head_dim)).astype(dtype)
    lengths = rng.integers(1, room + 1, sentences).astype(np.int32)
    lengths[0] = room
    for x in k, v:
        x[np.arange(room) >= lengths[:, None]] = np.nan
    wide = [np.nan_to_num(x.astype(np.float32)) for x in (q, k, v)]
    expected = flash_attention(*wide, key_lengths=lengths)
    monkeypatch.setattr(steps, "flash_attention", None)  # the kernel takes them all
    with emulator.Machine(seed=0).in_place():
        found = steps.memory_attention(*map(emulator.as_array, (q, k, v, lengths)))
    tolerance = 2e-2 if dtype == BFLOAT16 else 2e-3
    found = np.asarray(found).astype(np.float32)
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


def test_warps_of_memories():
    """Few where blocks fill the GPU many times, or have few keys."""
    assert [steps._warps_of_memory(4096, room, 132) for room in (32, 112)] == [1, 1]
    assert [steps._warps_of_memory(2048, room, 132) for room in (32, 96)] == [2, 2]
    assert [steps._warps_of_memory(1024, room, 132) for room in (32, 96)] == [2, 4]
