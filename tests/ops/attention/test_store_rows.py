"""store_rows against loops: any widths and dtypes, strided sources, ends of sources, many rows."""

import numpy as np
import pytest

from gpuattn.arrays import BFLOAT16, to_cpu
from gpuattn.ops.attention.store_rows import NAME, _rows_of_block, store_rows

CASES = {  # dtype, shape of a row, rooms of the tables, count, step of the source's rows
    "layers": ("float16", (3, 16), (9, 7, 8) * 9, 6, 2),
    "wide rows": ("float16", (8, 64), (9,) * 12, 7, 1),
    "keys": ("bfloat16", (2, 32), (9, 9), 7, 3), "float32": ("float32", (3, 5), (4, 6), 4, 2),
    "odd rows": ("float16", (1, 7), (5, 5), 5, 1), "numbers": ("int32", (), (1, 1), 1, 1),
    "tokens": ("int32", (19,), (1, 3), 1, 1), "long rows": ("float32", (40, 20), (3,) * 6, 3, 2),
    "many rows": ("bfloat16", (4, 24), (21, 23), 20, 3),
}  # fmt: skip


def problem(name, seed=0):
    """Return (tables, sources, starts, places, count) of NumPy arrays."""
    dtype, row, rooms, count, step = CASES[name]
    rng, dtype = np.random.default_rng(seed), np.dtype(BFLOAT16 if dtype == "bfloat16" else dtype)

    def draw(*shape):
        return (100 * rng.standard_normal(shape)).astype(dtype)

    sources = []
    for _ in rooms:
        whole = draw(20, step, *row)
        sources.append(whole[:, step - 1])
    starts, places = np.array([3, 0, 16, 3], np.int32), np.array([4, 1, 0, 4], np.int32)
    return [draw(6, room, *row) for room in rooms], sources, starts, places, count


def expected(tables, sources, starts, places, count, lengths=None):
    found = [table.copy() for table in tables]
    for table, source in zip(found, sources, strict=True):
        for start, place in zip(starts, places, strict=True):
            for t in range(count if lengths is None else min(count, lengths[place])):
                table[place, t] = source[min(start + t, len(source) - 1)]
    return found


LENGTHS = np.array([2, 0, 3, 3, 9, 1], np.int32)


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["whole", "lengths"])
@pytest.mark.parametrize("both", [True, False], ids=["all", "one"])
@pytest.mark.parametrize("name", CASES)
def test_against_loops(xp, name, both, lengths):
    tables, sources, starts, places, count = problem(name)
    want = expected(tables, sources, starts, places, count, lengths)
    there = list(map(xp.asarray, tables))
    steps = [source.base.shape[1] for source in sources]
    given = [
        xp.asarray(x.base)[:, step - 1]
        for x, step in zip(sources, steps, strict=True)
    ]  # fmt: skip
    pairs = list(zip(there, given, strict=True))
    where = (xp.asarray(x) for x in (starts, places))
    known = None if lengths is None else xp.asarray(lengths)
    store_rows(pairs[: None if both else 1], *where, count, known)
    want[1:] = want[1:] if both else tables[1:]
    for found, wanted in zip(there, want, strict=True):
        assert to_cpu(found).tobytes() == wanted.tobytes()


@pytest.mark.parametrize("known", [False, True], ids=["whole", "lengths"])
def test_blocks_with_several_rows(xp, known):
    """On an H200 a block has four rows of an entry, and the last one three."""
    rng, entries, count = np.random.default_rng(0), 400, 11
    tables, sources = (
        [rng.standard_normal((*shape, 2, 32)).astype(BFLOAT16) for _ in range(2)]
        for shape in ((entries, count + 1), (500,))
    )
    starts = rng.integers(0, 500, entries).astype(np.int32)
    places = rng.permutation(entries).astype(np.int32)
    lengths = rng.integers(0, count + 2, entries).astype(np.int32) if known else None
    want = expected(tables, sources, starts, places, count, lengths)
    there = list(map(xp.asarray, tables))
    pairs = list(zip(there, map(xp.asarray, sources), strict=True))
    more = xp.asarray(lengths) if known else None
    store_rows(pairs, xp.asarray(starts), xp.asarray(places), count, more)
    for found, wanted in zip(there, want, strict=True):
        assert to_cpu(found).tobytes() == wanted.tobytes()


@pytest.mark.parametrize("loads, count, entries, rows", [
    (192, 896, 64, 5),  # prompts of GPT-2: 7.5 loads of a thread
    (192, 6, 1000, 3), (16, 20, 1000, 10),  # not 5 and 1, nor 18 and 2
    (16, 9, 1000, 5), (16, 9, 5000, 9),
    (192, 896, 2, 1), (192, 896, 4, 3),  # a block for each of 1,056 places comes first
    (1025, 896, 64, 1), (0, 896, 64, 1), (2, 1, 5000, 1), (2, 0, 5000, 1),
])  # fmt: skip
def test_rows_of_a_block(loads, count, entries, rows):
    assert _rows_of_block(loads, count, entries, 1056) == rows


@pytest.mark.parametrize("table, source, count, said", [
    ((3, 4, 2), (5, 3), 1, "a source is int32 of shape"), ((3, 4, 2), (5, 2), 5, "count is 5"),
])  # fmt: skip
def test_what_does_not_fit(xp, table, source, count, said):
    starts = xp.zeros(1, np.int32)
    with pytest.raises(ValueError, match=f"{NAME}: {said}"):
        store_rows([(xp.zeros(table, np.int32), xp.zeros(source, np.int32))], starts, starts, count)
