"""Rows of tokens end to end, in memory or in memory maps, and a shuffle without an array."""

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple, Self

import numpy as np

from gpuattn.data.tokenizer import EOS

ROUNDS = 6  # of the Feistel network; four make it pseudo-random (Luby and Rackoff, 1988)


class Rows:
    """Rows of token ids, each with ``eos`` at its end, one after the other.

    ``flat`` (tokens,) of any integer type and ``ends`` (rows,), the offset in ``flat`` at which
    each row ends. Either may be a memory map: only what is asked for is read.
    """

    def __init__(self, flat: Any, ends: Any) -> None:
        self.flat, self.ends = np.asarray(flat), np.asarray(ends)

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]], eos: int = EOS) -> Self:
        """Return rows of ids without ``eos`` as Rows."""
        lengths = np.fromiter(map(len, rows), np.int64, len(rows)) + 1
        flat = chain.from_iterable(chain(row, (eos,)) for row in rows)
        return cls(np.fromiter(flat, np.int32, int(lengths.sum())), np.cumsum(lengths))

    def __len__(self):
        return len(self.ends)

    def lengths(self, rows: Any) -> np.ndarray:
        """Return the tokens (int64) of ``rows``: indices, or a slice."""
        if isinstance(rows, slice):
            begin, end, _ = rows.indices(len(self))
            first = self.ends[begin - 1 : begin] if begin else np.zeros(1, self.ends.dtype)
            return np.diff(np.concatenate([first, self.ends[begin:end]])).astype(np.int64)
        return self.ends[rows].astype(np.int64) - self._starts(rows)

    def _starts(self, rows):
        starts = self.ends[np.maximum(rows, 1) - 1].astype(np.int64)
        starts[rows == 0] = 0
        return starts

    def gather(
        self, rows: np.ndarray, padding: int, padded: bool
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return these rows end to end, the position of each token in its row, and the bounds.

        All int32. ``padded``: behind each row comes one of the id ``padding``, so that every pair
        of rows has the length of the longest.
        """
        starts = self._starts(rows)
        lengths = self.ends[rows].astype(np.int64) - starts
        if padded:
            starts = np.stack([starts, np.zeros_like(starts)], 1).ravel()
            lengths = np.stack([lengths, lengths.max() - lengths], 1).ravel()
        bounds = np.zeros(len(lengths) + 1, np.int32)
        np.cumsum(lengths, out=bounds[1:])
        positions = np.arange(bounds[-1], dtype=np.int32)
        positions -= np.repeat(bounds[:-1], lengths)
        index = np.repeat(starts, lengths)
        index += positions
        flat = self.flat.take(index).astype(np.int32, copy=False)
        if padded:
            flat[np.repeat(np.arange(len(lengths)) % 2 == 1, lengths)] = padding
        return flat, positions, bounds


class RowPairs(NamedTuple):
    """Pairs as Rows: row i of ``target`` is the translation of row i of ``source``."""

    source: Rows
    target: Rows


class Permutation:
    """A permutation of 0 to ``count - 1`` that needs no array: index to index, by a key.

    A Feistel network over the least power of two that holds ``count``, walked on from indices that
    are none (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). ``seeds``: the key,
    integers from 0.
    """

    def __init__(self, count: int, seeds: Sequence[int]) -> None:
        self.count = count
        bits = max(2, (count - 1).bit_length())
        self._low, self._high = np.uint64(bits // 2), np.uint64(bits - bits // 2)
        self._keys = np.random.Philox(list(seeds)).random_raw((ROUNDS, 2)) | np.uint64(1)

    def __call__(self, indices: np.ndarray) -> np.ndarray:
        """Return what stands at ``indices`` (n,), as int64."""
        found = self._mixed(indices.astype(np.uint64))
        while (outside := np.flatnonzero(found >= self.count)).size:
            found[outside] = self._mixed(found[outside])
        return found.view(np.int64)

    def _mixed(self, x):
        low, high = self._low, self._high
        left, right = x >> low, x & ((np.uint64(1) << low) - np.uint64(1))
        # each round replaces the left part, of ``high`` bits, by a mix with the right one
        for add, factor in self._keys:
            mix = (right + add) * factor
            mix ^= mix >> np.uint64(29)
            mix *= factor
            mix >>= np.uint64(64) - high
            left, right, low, high = right, left ^ mix, high, low
        return left << low | right
