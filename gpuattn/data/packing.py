"""Which rows of an epoch make up each batch, from their lengths alone.

Up to ``WHOLE`` pairs an epoch is shuffled and packed as one. Above it pairs are shuffled by a
permutation that needs no array, and packed window by window while the epoch is used.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np

from gpuattn.data.rows import Permutation, RowPairs
from gpuattn.errors import DataError

Mix = Sequence[tuple[int, int, float]]  # (begin, end, weight) of each part
WHOLE = 1_000_000  # pairs of an epoch that is planned as one; more are planned by windows
POOL_BATCHES = 64  # that are packed together: a window
SCAN = 1 << 18  # rows whose lengths are read at a time


class Packing:
    """The batches of an epoch for all ranks, each an array of indices of pairs.

    ``pairs``: RowPairs. ``tokens``: the budget of either side of a batch. ``longest``: pairs with
    more tokens on a side, marks included, are left out; None: there are none. ``world`` divides
    the number of batches. ``batching``: see ``batching.PackedLoader``.
    ``count``: pairs that are used; ``totals`` (2,) their tokens on each side. ``most``: tokens of
    the longest side of those, of the pair ``at``. ``mix``: see ``batching.PackedLoader``.
    """

    def __init__(
        self, pairs: RowPairs, tokens: int, seed: int, world: int, batching: str,
        longest: int | None = None, mix: Mix = (),
    ) -> None:  # fmt: skip
        self._pairs, self._tokens, self._seed = pairs, tokens, seed
        self._world, self._batching, self._longest, self._mix = world, batching, longest, mix
        self.count, self.most, self.at = 0, 0, 0
        self.totals = np.zeros(2, np.int64)
        kept: list[np.ndarray] = []  # of an epoch planned as one: rows, and their lengths
        known: list[np.ndarray] = []
        total = 0
        for begin in range(0, len(pairs.source), SCAN):
            rows, lengths = self._usable(np.arange(begin, min(begin + SCAN, len(pairs.source))))
            sizes = lengths.max(0)
            if len(sizes) and sizes.max() > self.most:
                self.most, self.at = int(sizes.max()), int(rows[np.argmax(sizes)])
            self.count += len(sizes)
            self.totals += lengths.sum(1)
            total += int(sizes.sum())
            if self.count <= WHOLE and not mix:
                kept.append(rows)
                known.append(lengths.astype(np.int32))
        self.is_whole = self.count <= WHOLE and not mix
        self._kept: Any = np.concatenate(kept) if kept and self.is_whole else None
        self._known: Any = np.concatenate(known, axis=1) if kept and self.is_whole else None
        self._window = int(POOL_BATCHES * tokens / (total / max(self.count, 1) or 1)) + 1
        self._planned = (None, None)

    def batches(self, number: int) -> Iterator[np.ndarray]:
        """Return the batches of an epoch, one after the other."""
        if not self.is_whole:
            return chain.from_iterable(self._plans(number))
        return (self._kept[places] for places in self._epoch(number))

    def size(self, number: int) -> int:
        """Return how many batches an epoch has; of one planned by windows about how many."""
        if self.is_whole:
            return len(self._epoch(number))
        return max(self._world, round(self.totals.max() / (self.fill(number) * self._tokens)))

    def fill(self, number: int) -> float:
        """Return the share of the budget that is used: of an epoch, or of a window as a sample."""
        if not self.is_whole:
            return self._fill_of_sample
        plan = self._epoch(number)
        return self._share([self._known.take(places, 1) for places in plan])

    def _share(self, lengths):
        """Return the share of the budget that batches of ``lengths``, (2, rows) each, use."""
        used = sum(int(some.sum(1).max()) for some in lengths)
        return used / (len(lengths) * self._tokens)

    def _lengths(self, rows):
        """Return the tokens of rows on each side, (2, rows)."""
        return np.stack([side.lengths(rows) for side in self._pairs])

    def _usable(self, rows):
        """Return those of ``rows`` that are not too long, and their lengths (2, rows)."""
        lengths = self._lengths(rows)
        if self._longest is None:
            return rows, lengths
        inside = np.flatnonzero(lengths.max(0) <= self._longest)
        if len(inside) == len(rows):
            return rows, lengths
        return rows[inside], lengths.take(inside, 1)

    # ---- an epoch as one ----

    def _epoch(self, number):
        """Return the batches of an epoch as indices of ``_kept``."""
        if self._planned[0] != number:
            rng = np.random.Generator(np.random.Philox([self._seed, number]))
            waiting = rng.permutation(self.count)
            if self._batching == "packed":
                plan, left = [], waiting[:0]
                for begin in range(0, len(waiting), self._window):
                    pool = np.concatenate([left, waiting[begin : begin + self._window]])
                    # The last batch of a pool is not full: its pairs go into the next pool.
                    *more, left = [pool[i] for i in self._cut(self._known.take(pool, 1))]
                    plan += more
                plan.append(left)
            else:
                plan = [waiting[i] for i in self._cut(self._known.take(waiting, 1))]
            if self._batching != "padded":
                plan = [plan[i] for i in rng.permutation(len(plan))]
            self._planned = (number, _divide(plan, self._world))
        return self._planned[1]

    # ---- an epoch by windows ----

    def _plans(self, number):
        """Yield the batches of each window, as many as ``world`` divides."""
        total, world = len(self._pairs.source), self._world
        left, known = np.empty(0, np.int64), np.empty((2, 0), np.int64)
        for begin in range(0, total, self._window):
            end = min(begin + self._window, total)
            rows, lengths = self._usable(self._order(number, begin, end))
            rows = np.concatenate([left, rows])
            lengths = np.concatenate([known, lengths], axis=1)
            cut = self._cut(lengths)
            plan, left, known = [rows[i] for i in cut], left[:0], known[:, :0]
            if end < total:
                whole = max(0, len(plan) - 1) // world * world  # the last one is not full
                if rest := cut[whole:]:
                    rest = np.concatenate(rest)
                    left, known = rows[rest], lengths.take(rest, 1)
                plan = plan[:whole]
            else:
                plan = _divide(plan, world)
            if self._batching != "padded":
                rng = np.random.Generator(np.random.Philox([self._seed, number, begin]))
                plan = [plan[i] for i in rng.permutation(len(plan))]
            if plan:
                yield plan

    def _order(self, number, begin, end):
        """Return the rows at the places ``begin`` to ``end`` of an epoch."""
        if not self._mix:
            total = len(self._pairs.source)
            return Permutation(total, [self._seed, number])(np.arange(begin, end))
        found = []
        for part, (first, last, weight) in enumerate(self._mix):
            size = last - first
            places = np.arange(int(begin * weight), int(end * weight))
            for turn in np.unique(places // size).tolist():  # each a new order of the part
                some = places[places // size == turn] % size
                seeds = [self._seed, number, part, turn]
                found.append(Permutation(size, seeds)(some) + first)
        return np.concatenate(found)

    @cached_property
    def _fill_of_sample(self):
        """The share of the budget that is used in the first window, by which all are judged."""
        return self._share([self._lengths(rows) for rows in next(self._plans(0))])

    # ---- batches of some rows ----

    def _cut(self, lengths):
        """Return batches of rows of ``lengths`` (2, rows), as their indices, the last not full."""
        sizes = lengths.max(0)
        if not len(sizes):
            return []
        if self._batching == "padded":
            return self._rectangles(np.arange(len(sizes)), sizes)
        if self._batching == "bucketed":
            order = np.argsort(sizes, kind="stable")
            return self._rectangles(order, sizes[order])
        order = np.argsort(-sizes, kind="stable")
        return self._best_fit(order, sizes[order], lengths.take(order, 1))

    def _rectangles(self, rows, sizes):
        """Return batches of consecutive rows, as many as the budget has padded room for."""
        plan, begin, longest = [], 0, 0
        for i, size in enumerate(sizes.tolist()):
            longest = max(longest, size)
            if (i + 1 - begin) * longest > self._tokens:
                plan.append(rows[begin:i])
                begin, longest = i, size
        return [*plan, rows[begin:]]

    def _best_fit(self, rows, sizes, lengths):
        """Put ``rows``, longest first, into the fullest batch that can take them.

        Rows of one size are placed together, so the loop runs over sizes.
        """
        ends = (np.flatnonzero(np.diff(sizes, append=0)) + 1).tolist()
        totals = [np.cumsum(side) for side in lengths]
        batches = []
        # (room, batch) in ascending order; the room is that of the fuller side, so that what fits
        # it fits both. ``sides`` holds the room of both.
        rooms, sides, begin, done = [], [], 0, [0, 0]
        for end in ends:
            size = int(sizes[begin])
            while begin < end:
                at = bisect_left(rooms, (size,))
                if at == len(rooms):
                    batch = len(batches)
                    batches.append([])
                    sides.append([self._tokens, self._tokens])
                else:
                    batch = rooms.pop(at)[1]
                most = [a + b for a, b in zip(done, sides[batch], strict=True)]
                fit = [np.searchsorted(t, n, "right") for t, n in zip(totals, most, strict=True)]
                stop = min(end, *map(int, fit))
                batches[batch].append(rows[begin:stop])
                begin, done = stop, [int(total[stop - 1]) for total in totals]
                room = sides[batch] = [a - b for a, b in zip(most, done, strict=True)]
                insort(rooms, (min(room), batch))
        return [np.concatenate(parts) for parts in batches]


def _divide(plan, world):
    """Halve the largest batches until the ranks have equally many."""
    plan = list(plan)
    for _ in range(-len(plan) % world):
        largest = max(range(len(plan)), key=lambda i: len(plan[i]))
        whole = plan[largest]
        if len(whole) == 1:
            raise DataError(
                f"PackedLoader: {len(plan)} batches of one pair each cannot be shared by {world} "
                "ranks. Raise the budget or use fewer ranks"
            )
        half = len(whole) // 2
        plan[largest] = whole[:half]
        plan.append(whole[half:])
    return plan
