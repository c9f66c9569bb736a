"""Rows in arrays of any kind, and the permutation without an array."""

import numpy as np
import pytest

from gpuattn.data.rows import Permutation, Rows
from gpuattn.data.tokenizer import EOS, PAD


@pytest.mark.parametrize("count", [1, 2, 3, 64, 65, 1000, 4097])
def test_a_permutation_has_each_index_once(count):
    order = Permutation(count, [3, 1])(np.arange(count))
    assert sorted(order.tolist()) == list(range(count))
    parts = [Permutation(count, [3, 1])(part) for part in np.array_split(np.arange(count), 3)]
    assert np.array_equal(np.concatenate(parts), order)


def test_a_permutation_looks_random():
    count = 20_000
    orders = [Permutation(count, seeds)(np.arange(count)) for seeds in ([0, 0], [0, 1], [1, 0])]
    places = np.arange(count)
    for order in orders:
        assert abs(np.corrcoef(places, order)[0, 1]) < 0.03
        assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.03
        # the first thousand come from everywhere: a hundred from each tenth, about
        tenths = np.bincount(order[:1000] * 10 // count, minlength=10)
        assert tenths.min() > 50 and tenths.max() < 160
    assert not np.array_equal(orders[0], orders[1]) and not np.array_equal(orders[0], orders[2])
    assert np.count_nonzero(orders[0] == places) < 10


def test_rows_of_lists_and_of_maps_are_the_same(rng, tmp_path):
    lists = [rng.integers(4, 900, size=n).tolist() for n in (3, 0, 7, 1, 12)]
    rows = Rows.of(lists)
    rows.flat.astype(np.uint16).tofile(tmp_path / "flat")
    rows.ends.astype(np.uint64).tofile(tmp_path / "ends")
    maps = (np.memmap(tmp_path / n, t, "r") for n, t in (("flat", "uint16"), ("ends", "uint64")))
    chosen = np.array([4, 0, 0, 2, 1])
    for each in (rows, Rows(*maps)):
        assert len(each) == 5
        assert each.lengths(chosen).tolist() == [13, 4, 4, 8, 1]
        assert each.lengths(slice(0, 9)).tolist() == [4, 1, 8, 2, 13]
        assert each.lengths(slice(2, 4)).tolist() == [8, 2]
        flat, positions, bounds = each.gather(chosen, PAD, False)
        assert flat.tolist() == [token for i in chosen for token in (*lists[i], EOS)]
        assert positions.tolist() == [p for n in (13, 4, 4, 8, 1) for p in range(n)]
        assert bounds.tolist() == [0, 13, 17, 21, 29, 30]
        assert {part.dtype.name for part in (flat, positions, bounds)} == {"int32"}
