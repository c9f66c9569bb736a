"""Epochs that are planned window by window keep the contracts of those planned as one."""

from itertools import islice

import numpy as np
import pytest

from gpuattn.data import packing
from gpuattn.data.batching import BATCHING, PackedLoader
from gpuattn.data.rows import RowPairs, Rows


@pytest.fixture
def by_windows(monkeypatch):
    monkeypatch.setattr(packing, "WHOLE", 500)
    monkeypatch.setattr(packing, "POOL_BATCHES", 6)


def some_rows(rng, count, longest=40):
    lengths = rng.integers(1, longest, size=(2, count))
    sides = (Rows(rng.integers(4, 99, size=n.sum(), dtype="uint16"), np.cumsum(n)) for n in lengths)
    return RowPairs(*sides), lengths.max(0)


@pytest.mark.parametrize("batching", BATCHING)
@pytest.mark.parametrize("world", [1, 5, 9])
def test_windows_hold_every_pair_once(by_windows, rng, batching, world):
    pairs, sizes = some_rows(rng, 2000)
    wanted = np.flatnonzero(sizes <= 35).tolist()
    plan = packing.Packing(pairs, 120, 3, world, batching, longest=35)
    assert not plan.is_whole and plan.count == len(wanted) and plan.most == 35
    for epoch in (0, 1):
        batches = list(plan.batches(epoch))
        assert sorted(np.concatenate(batches).tolist()) == wanted
        assert len(batches) % world == 0 and all(map(len, batches))
        for side in pairs:
            assert max(side.lengths(rows).sum() for rows in batches) <= 120
        assert 0.85 < plan.size(epoch) / len(batches) < 1.15
    assert plan.fill(0) > {"packed": 0.97, "bucketed": 0.6, "padded": 0.4}[batching]


def test_windows_resume_and_are_shuffled(by_windows, rng):
    pairs, _ = some_rows(rng, 2000)
    for rank in range(2):
        loader = PackedLoader(pairs, 120, 3, rank, 2)
        whole = [batch.sentences.tolist() for batch in loader.epoch(1)]
        rest = [batch.sentences.tolist() for batch in loader.epoch(1, 50)]
        assert rest == whole[50:] and rest
    sizes = [len(rows) for rows in islice(loader.packing.batches(0), 60)]
    assert sizes != sorted(sizes)
    first = np.concatenate(list(islice(loader.packing.batches(0), 4)))
    assert first.max() - first.min() > 1000  # from all of the corpus


def test_up_to_a_million_pairs_an_epoch_is_planned_as_one(rng):
    pairs, sizes = some_rows(rng, 400)
    assert packing.WHOLE == 1_000_000
    plan = packing.Packing(pairs, 120, 3, 1, "packed", longest=30)
    assert plan.is_whole and plan.size(0) == len(list(plan.batches(0)))
    kept = np.flatnonzero(sizes <= 30)
    lists = [tuple(side.gather(kept[i : i + 1], 0, False)[0][:-1] for side in pairs)
             for i in range(len(kept))]  # fmt: skip
    batches = zip(PackedLoader(lists, 120, 3).epoch(0), plan.batches(0), strict=True)
    for batch, rows in batches:
        assert kept[batch.sentences].tolist() == rows.tolist()


@pytest.mark.parametrize("whole", [True, False])
def test_the_lengths_of_an_epoch_are_read_once(rng, monkeypatch, whole):
    monkeypatch.setattr(packing, "WHOLE", 10_000 if whole else 500)
    monkeypatch.setattr(packing, "POOL_BATCHES", 6)
    pairs, _ = some_rows(rng, 2000)
    plan, read = packing.Packing(pairs, 120, 3, 1, "packed", longest=35), []
    monkeypatch.setattr(Rows, "lengths", lambda self, rows, inner=Rows.lengths:
                        (read.append(len(rows)), inner(self, rows))[1])  # fmt: skip
    list(plan.batches(1))
    assert sum(read) == (0 if whole else 2 * 2000)


def test_a_mix_has_the_shares_of_its_weights(rng):
    pairs, _ = some_rows(rng, 1000)
    mix = [(0, 900, 0.5), (900, 1000, 0.5)]
    plan = packing.Packing(pairs, 300, 3, 1, "packed", mix=mix)
    rows = np.concatenate(list(plan.batches(0)))
    first, second = rows[rows < 900], rows[rows >= 900]
    assert len(first) == len(second) == 500 and len(set(first.tolist())) == 500
    assert (np.bincount(second - 900, minlength=100) == 5).all()
    again = np.concatenate(list(plan.batches(1)))
    assert set(again[again < 900].tolist()) != set(first.tolist())
