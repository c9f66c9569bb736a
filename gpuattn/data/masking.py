"""Batches for masked tokens: texts end to end, of which a share is hidden, to be predicted.

Devlin et al., "BERT" (2019): of the chosen tokens 80 % become the mask, 10 % a random token, 10 %
stay. Batches are a function of (seed, epoch, number), and each epoch chooses anew.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from gpuattn import rng
from gpuattn.data.batching import PackedTexts, token_order
from gpuattn.data.packing import Mix, Packing
from gpuattn.data.rows import RowPairs
from gpuattn.errors import DataError

STREAM = 0x6D61736B  # of the random numbers, apart from those of dropout
HIDDEN, CHANGED = 0.8, 0.1  # shares of the chosen tokens that are masked, and that are exchanged
MARKS = 2  # tokens around a text
SCAN = 1 << 20  # ids that are read at a time


class Texts:
    """The texts between ``separators``, ids that end one, in ``flat`` (N,) ids of any integer type.

    What is longer than ``longest`` tokens is cut into parts of equal size; empty texts are left
    out. Only ``starts`` and ``sizes`` (texts,) are in memory where ``flat`` is a memory map.
    """

    def __init__(self, flat: Any, separators: Collection[int], longest: int) -> None:
        self.flat = np.asarray(flat)
        found = [
            np.flatnonzero(np.isin(self.flat[at : at + SCAN], list(separators))) + at
            for at in range(0, len(self.flat), SCAN)
        ]
        ends = np.concatenate([*found, [len(self.flat)]]).astype(np.int64)
        starts = np.concatenate([[0], ends[:-1] + 1])
        sizes = ends - starts
        parts = -(-sizes // longest)
        each = np.repeat(-(-sizes // np.maximum(parts, 1)), parts)
        first = np.repeat(np.cumsum(parts) - parts, parts)
        offsets = (np.arange(len(first)) - first) * each
        self.starts = np.repeat(starts, parts) + offsets
        self.sizes = np.minimum(each, np.repeat(sizes, parts) - offsets).astype(np.int32)

    def __len__(self):
        return len(self.starts)

    def lengths(self, rows: Any) -> np.ndarray:
        """Return the tokens (int64) of ``rows``, indices or a slice, with both marks."""
        return self.sizes[rows].astype(np.int64) + MARKS

    def gather(self, rows: np.ndarray, marks: tuple[int, int]) -> tuple[np.ndarray, ...]:
        """Return these texts end to end, each between the two ``marks``: ids, the position of each
        in its text, the bounds (texts + 1,), all int32, and the places (int64) of ids in ``flat``,
        which mean nothing for marks."""
        lengths = self.lengths(rows)
        bounds = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(lengths, out=bounds[1:])
        positions = np.arange(bounds[-1], dtype=np.int32)
        positions -= np.repeat(bounds[:-1], lengths)
        places = np.repeat(self.starts[rows] - 1, lengths) + positions
        ids = self.flat.take(places, mode="clip").astype(np.int32, copy=False)
        ids[bounds[:-1]], ids[bounds[1:] - 1] = marks
        return ids, positions, bounds, places


@dataclass(frozen=True)
class MaskedBatch(PackedTexts):
    """B texts, each between two marks, of whose T tokens M are to be predicted.

    ``rows`` (M,) ascend: the places in ``tokens`` of what ``labels`` (M,) says. ``all_tokens``,
    ``target_tokens``: T and M without what ``fixed_shape`` adds.
    """

    rows: np.ndarray
    labels: np.ndarray
    all_tokens: int
    target_tokens: int


def count_of(tokens: int, share: float) -> int:
    """Return how many of the tokens of a batch are predicted."""
    return max(1, round(share * tokens))


class MaskedLoader:
    """Epochs of MaskedBatch over ``texts``, each of which comes once an epoch.

    ``tokens``: the most of a batch. ``share``: of a batch's tokens, marks among them, that are
    predicted; marks never are. ``tokenizer``: has ``marks``, the ids around a text, the id ``mask``
    and ``specials``, ids that replace nothing. ``mix``: (begin, end, weight) of parts of
    ``texts``, see ``data.batching``. ``world``: the ranks that share the batches out; this loader
    is that of rank 0, see ``data.batching.of_rank``. DataError where there are fewer texts.
    """

    def __init__(
        self, texts: Texts, tokens: int, seed: int, share: float, tokenizer: Any, mix: Mix = (),
        world: int = 1,
    ) -> None:  # fmt: skip
        pairs: Any = RowPairs(texts, texts)  # type: ignore[arg-type]
        self.packing = Packing(pairs, tokens, seed, world, "packed", mix=mix)
        if self.packing.count < world:
            raise DataError(f"{self.packing.count} lines for {world} replicas; one each is needed")
        self.rank, self.world = 0, world
        self.texts, self.seed, self.share = texts, seed, share
        self._marks, self._mask = tokenizer.marks, tokenizer.mask
        self._others = np.setdiff1d(np.arange(len(tokenizer)), list(tokenizer.specials))

    def epoch(self, number: int, start: int = 0) -> Iterator[MaskedBatch]:
        """Yield this rank's batches of an epoch, from its batch ``start`` on."""
        batches, first = self.packing.batches(number), self.rank + start * self.world
        for rows in islice(batches, first, None, self.world):
            yield self._batch(rows, number)

    def batches(self, number: int) -> int:
        """Return how many batches each rank has in an epoch; of very many texts about how many."""
        return self.packing.size(number) // self.world

    def _batch(self, rows, epoch):
        tokens, positions, bounds, places = self.texts.gather(rows, self._marks)
        inside = np.ones(len(tokens), bool)
        inside[bounds[:-1]] = inside[bounds[1:] - 1] = False
        chosen, new = self._chosen(np.flatnonzero(inside), tokens, places, epoch)
        labels = tokens[chosen]
        tokens[chosen] = new
        return MaskedBatch(
            tokens, positions, bounds, int(np.diff(bounds).max()), token_order(tokens),
            chosen.astype(np.int32), labels, len(tokens), len(chosen),
        )  # fmt: skip

    def _chosen(self, inside, tokens, places, epoch):
        """Return which of ``inside`` are predicted, ascending, and what stands there instead.

        The random words of a token depend on its place in the text: those with the least are
        chosen.
        """
        at = places[inside].astype(np.uint64)
        low, high = at & np.uint64(0xFFFFFFFF), at >> np.uint64(32)
        counters = (low, high, np.uint64(STREAM), np.uint64(epoch))
        rank, kind, other, _ = rng.philox(self.seed, *counters)
        count = min(count_of(len(tokens), self.share), len(inside))
        keys = rank << np.uint64(32) | np.arange(len(inside), dtype=np.uint64)  # no two are equal
        least = np.sort(np.argpartition(keys, count - 1)[:count])
        rows, kind = inside[least], kind[least] / 2**32
        new = np.where(kind < HIDDEN, self._mask, tokens[rows])
        is_other = (kind >= HIDDEN) & (kind < HIDDEN + CHANGED)
        exchanged = self._others[other[least] % np.uint64(len(self._others))]
        return rows, np.where(is_other, exchanged, new)
