"""Packed batches: sentences end to end up to a budget of tokens, without padding; and padded ones,
for comparison.

Batches are a function of (seed, epoch, rank, world), so a run resumes exactly from the number of
batches it has used.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from gpuattn.data.tokenizer import BOS, EOS, PAD
from gpuattn.errors import ConfigError, DataError, problem

POOL_BATCHES = 64
IGNORED = -100  # the label that ``cross_entropy`` leaves out
BATCHING = ("packed", "bucketed", "padded")


class TokenOrder(NamedTuple):
    """The positions of each token id, for an embedding gradient without atomics.

    ``order`` (N,) is the stable argsort of the ids; the places of ``ids[u]`` are
    ``order[segments[u] : segments[u + 1]]``. ``ids`` (U,) ascend, ``segments`` (U,) begin with 0.
    All int32. Batches of a fixed shape have no ``segments`` and ``ids``: kernels need none.
    """

    order: np.ndarray
    segments: np.ndarray
    ids: np.ndarray


@dataclass(frozen=True)
class Batch:
    """B sentence pairs as int32 arrays, Ns source and Nt target tokens in all.

    ``source`` (Ns,) ends each sentence with ``eos``; ``target_in`` (Nt,) begins each with ``bos``
    and ``labels`` (Nt,) are the tokens that follow, ``eos`` last. Sentence i is the slice
    ``cu_source[i] : cu_source[i + 1]``, and likewise ``cu_target``; both are (B + 1,).
    ``sentences`` (B,) are indices into the loader's pairs. ``source_tokens``, ``target_tokens``:
    tokens without padding. A batch of a fixed shape also has padding, see ``fixed_shape``. In a
    padded batch each sentence is followed by a sentence of padding, which no other attends to: both
    offsets are (2B + 1,), and labels of padding are ``IGNORED``.
    """

    source: np.ndarray
    source_positions: np.ndarray
    cu_source: np.ndarray
    max_source: int
    source_order: TokenOrder
    target_in: np.ndarray
    target_positions: np.ndarray
    labels: np.ndarray
    cu_target: np.ndarray
    max_target: int
    target_order: TokenOrder
    sentences: np.ndarray
    source_tokens: int
    target_tokens: int

    @property
    def all_tokens(self) -> int:
        """Tokens without padding, on both sides."""
        return self.source_tokens + self.target_tokens

    @property
    def lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of each sentence, source (B,) and target (B,), as the loader made the batch.

        Padding between sentences is not among them.
        """
        step = (len(self.cu_source) - 1) // len(self.sentences)
        return np.diff(self.cu_source)[::step], np.diff(self.cu_target)[::step]

    @property
    def limits(self) -> Any:
        """What a step depends on besides the shapes of the arrays."""
        return self.max_source, self.max_target


class PackedLoader:
    """Epochs of packed batches over pairs of token ids.

    ``pairs``: a list of (source ids, target ids), without ``bos`` and ``eos``. ``tokens``: the
    budget of a batch; neither its source nor its target side has more, marks included.
    ``world``: how many ranks share the batches; ``rank`` is this one. ``batching``: "packed" puts
    sentences of near-equal length together, in a random order of batches. The other two are
    rectangles, each side of a sentence filled with padding to the longest of the batch, which
    counts in the budget: "bucketed" ones of sorted sentences, "padded" ones in random order.

    Each epoch holds each pair once over all ranks, and every rank gets as many batches.
    Raises ConfigError when the budget is smaller than the longest sentence, DataError when there
    are fewer pairs than ranks.
    """

    def __init__(
        self,
        pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
        tokens: int,
        seed: int,
        rank: int = 0,
        world: int = 1,
        batching: str = "packed",
    ) -> None:
        if not 0 <= rank < world:
            raise ConfigError(f"PackedLoader: rank is {rank}; accepted: 0 to {world - 1}")
        if batching not in BATCHING:
            accepted = ", ".join(BATCHING)
            raise ConfigError(problem("PackedLoader", "batching", repr(batching), accepted))
        if len(pairs) < world:
            raise DataError(
                f"PackedLoader: {len(pairs)} pairs for {world} ranks; one each is needed"
            )
        self._source = _Rows([source for source, _ in pairs])
        self._target = _Rows([target for _, target in pairs])
        self._sizes = np.maximum(self._source.lengths, self._target.lengths)
        longest = int(np.argmax(self._sizes))
        if self._sizes[longest] > tokens:
            raise ConfigError(
                f"PackedLoader: tokens is {tokens}; pair {longest} alone has {self._sizes[longest]}"
                " with its end mark. Raise the budget or leave out longer sentences"
            )
        self.tokens = tokens
        self.seed = seed
        self.rank = rank
        self.world = world
        self.batching = batching
        self._planned = (None, None)

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """Yield this rank's batches of an epoch, from its batch ``start`` on."""
        for sentences in self._plan(number)[self.rank + start * self.world :: self.world]:
            yield self._batch(sentences)

    def batches(self, number: int) -> int:
        """Return how many batches each rank has in an epoch."""
        return len(self._plan(number)) // self.world

    def fill(self, number: int) -> float:
        """Return the share of the budget that the batches of an epoch use, on the fuller side."""
        plan = self._plan(number)
        sides = (self._source.lengths, self._target.lengths)
        used = sum(max(int(side[sentences].sum()) for side in sides) for sentences in plan)
        return used / (len(plan) * self.tokens)

    def _plan(self, number):
        """Return the epoch's batches of all ranks, as arrays of sentence indices."""
        if self._planned[0] != number:
            rng = np.random.Generator(np.random.Philox([self.seed, number]))
            waiting = rng.permutation(len(self._sizes))
            if self.batching == "bucketed":
                waiting = waiting[np.argsort(self._sizes[waiting], kind="stable")]
            packed = self.batching == "packed"
            plan = self._pack(waiting) if packed else self._rectangles(waiting)
            if self.batching != "padded":
                plan = [plan[i] for i in rng.permutation(len(plan))]
            self._planned = (number, _divide(plan, self.world))
        return self._planned[1]

    def _rectangles(self, waiting):
        """Return batches of consecutive sentences, as many as the budget has padded room for."""
        plan, begin, longest = [], 0, 0
        for i, size in enumerate(self._sizes[waiting].tolist()):
            longest = max(longest, size)
            if (i + 1 - begin) * longest > self.tokens:
                plan.append(waiting[begin:i])
                begin, longest = i, size
        return [*plan, waiting[begin:]]

    def _pack(self, waiting):
        """Return batches of near-equal lengths, pool by pool."""
        share = int(POOL_BATCHES * self.tokens / self._sizes.mean()) + 1
        plan, left = [], waiting[:0]
        for begin in range(0, len(waiting), share):
            pool = np.concatenate([left, waiting[begin : begin + share]])
            pool = pool[np.argsort(-self._sizes[pool], kind="stable")]
            packed = self._best_fit(pool)
            # The last batch of a pool is not full: its sentences go into the next pool.
            left = packed.pop()
            plan += packed
        return [*plan, left]

    def _best_fit(self, pool):
        """Put the sentences of ``pool``, longest first, into the fullest batch that can take them.

        Sentences of one size are placed together, so the loop runs over sizes.
        """
        ends = (np.flatnonzero(np.diff(self._sizes[pool], append=0)) + 1).tolist()
        totals = [np.cumsum(side.lengths[pool]) for side in (self._source, self._target)]
        batches = []
        # (room, batch) in ascending order; the room is that of the fuller side, so that what fits
        # it fits both. ``sides`` holds the room of both.
        rooms, sides, begin, done = [], [], 0, [0, 0]
        for end in ends:
            size = int(self._sizes[pool[begin]])
            while begin < end:
                at = bisect_left(rooms, (size,))
                if at == len(rooms):
                    batch = len(batches)
                    batches.append([])
                    sides.append([self.tokens, self.tokens])
                else:
                    batch = rooms.pop(at)[1]
                most = [a + b for a, b in zip(done, sides[batch], strict=True)]
                fit = [np.searchsorted(t, n, "right") for t, n in zip(totals, most, strict=True)]
                stop = min(end, *map(int, fit))
                batches[batch].append(pool[begin:stop])
                begin, done = stop, [int(total[stop - 1]) for total in totals]
                room = sides[batch] = [a - b for a, b in zip(most, done, strict=True)]
                insort(rooms, (min(room), batch))
        return [np.concatenate(parts) for parts in batches]

    def _batch(self, sentences):
        padded = self.batching != "packed"
        source, source_positions, cu_source = self._source.gather(sentences, PAD, padded)
        labels, target_positions, cu_target = self._target.gather(sentences, IGNORED, padded)
        target_in = np.empty_like(labels)
        target_in[1:] = labels[:-1]
        target_in[labels == IGNORED] = PAD
        target_in[cu_target[: -1 : 1 + padded]] = BOS
        return Batch(
            source=source,
            source_positions=source_positions,
            cu_source=cu_source,
            max_source=int(np.diff(cu_source).max()),
            source_order=token_order(source),
            target_in=target_in,
            target_positions=target_positions,
            labels=labels,
            cu_target=cu_target,
            max_target=int(np.diff(cu_target).max()),
            target_order=token_order(target_in),
            sentences=sentences.astype(np.int32),
            source_tokens=int(self._source.lengths[sentences].sum()),
            target_tokens=int(self._target.lengths[sentences].sum()),
        )


class _Rows:
    """Rows of token ids, each with ``eos`` at its end, in one array."""

    def __init__(self, rows):
        self.lengths = np.fromiter(map(len, rows), np.int64, len(rows)) + 1
        self.starts = np.concatenate([[0], np.cumsum(self.lengths)[:-1]])
        total = int(self.lengths.sum())
        flat = chain.from_iterable(chain(row, (EOS,)) for row in rows)
        self.flat = np.fromiter(flat, np.int32, total)

    def gather(self, rows, padding, padded):
        """Return these rows end to end, the position of each token in its row, and the bounds.

        ``padded``: behind each row comes one of the id ``padding``, so that every pair of rows has
        the length of the longest.
        """
        starts, lengths = self.starts[rows], self.lengths[rows]
        if padded:
            starts = np.stack([starts, np.zeros_like(starts)], 1).ravel()
            lengths = np.stack([lengths, lengths.max() - lengths], 1).ravel()
        bounds = np.concatenate([[0], np.cumsum(lengths)])
        positions = np.arange(bounds[-1]) - np.repeat(bounds[:-1], lengths)
        flat = self.flat[np.repeat(starts, lengths) + positions]
        if padded:
            flat[np.repeat(np.arange(len(lengths)) % 2 == 1, lengths)] = padding
        return flat, positions.astype(np.int32), bounds.astype(np.int32)


def token_order(ids: np.ndarray) -> TokenOrder:
    """Return the ``TokenOrder`` of token ids (N,)."""
    # NumPy sorts 16-bit keys by radix sort: several times as fast, and stable.
    keys = ids.astype(np.uint16) if ids.max(initial=0) < 1 << 16 else ids
    order = np.argsort(keys, kind="stable").astype(np.int32)
    sorted_ids = ids[order]
    first = np.ones(len(ids), bool)
    np.not_equal(sorted_ids[1:], sorted_ids[:-1], out=first[1:])
    segments = np.flatnonzero(first).astype(np.int32)
    return TokenOrder(order, segments, sorted_ids[segments])


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


@dataclass(frozen=True)
class LanguageModelBatch:
    """``tokens`` (B, T) int32, ``labels`` (B, T), the ones that follow them, and the ``order`` of
    ``tokens.ravel()``. Batches for training have one shape."""

    tokens: np.ndarray
    labels: np.ndarray
    order: TokenOrder

    limits = ()

    @property
    def target_tokens(self) -> int:
        """Tokens without padding."""
        return self.labels.size

    all_tokens = target_tokens


class LanguageModelLoader:
    """Random crops of one long text for training, and its consecutive blocks for evaluation.

    ``ids``: the text's token ids (N,). ``block``: T, tokens of a row. ``batch``: B, rows of this
    rank. An epoch has about as many tokens as the text.
    Raises DataError when the text is shorter than ``block + 1`` tokens.
    """

    def __init__(
        self, ids: Sequence[int], block: int, batch: int, seed: int, rank: int = 0, world: int = 1
    ) -> None:
        if not 0 <= rank < world:
            raise ConfigError(f"LanguageModelLoader: rank is {rank}; accepted: 0 to {world - 1}")
        if block < 1 or batch < 1:
            raise ConfigError(
                f"LanguageModelLoader: block is {block}, batch is {batch}; accepted: 1 or more"
            )
        self.ids = np.asarray(ids, np.int32)
        if len(self.ids) <= block:
            raise DataError(
                f"LanguageModelLoader: the text has {len(self.ids)} tokens; a block of {block} "
                f"needs {block + 1}. Give more text or a smaller block"
            )
        self.block = block
        self.batch = batch
        self.seed = seed
        self.rank = rank
        self.world = world

    def epoch(self, number: int, start: int = 0) -> Iterator[LanguageModelBatch]:
        """Yield this rank's batches of an epoch, from its batch ``start`` on."""
        count = self.batches(number)
        for i in range(start, count):
            yield self.crops(number * count + i)

    def batches(self, number: int) -> int:
        """Return how many batches each rank has in an epoch."""
        return max(1, len(self.ids) // (self.block * self.batch * self.world))

    def crops(self, step: int) -> LanguageModelBatch:
        """Return the batch of an update: a function of (seed, step, rank, world)."""
        rng = np.random.Generator(np.random.Philox([self.seed, step]))
        starts = rng.integers(len(self.ids) - self.block, size=(self.world, self.batch))[self.rank]
        return self._rows(starts, self.block)

    def blocks(self) -> Iterator[LanguageModelBatch]:
        """Yield batches that hold each token but the first exactly once as a label.

        The last batches are smaller: fewer rows, then one shorter row.
        """
        predicted = len(self.ids) - 1
        starts = np.arange(0, predicted - self.block + 1, self.block)
        for begin in range(0, len(starts), self.batch):
            yield self._rows(starts[begin : begin + self.batch], self.block)
        done = len(starts) * self.block
        if done < predicted:
            yield self._rows(np.array([done]), predicted - done)

    def _rows(self, starts, length):
        rows = self.ids[starts[:, None] + np.arange(length + 1)]
        tokens, labels = (np.ascontiguousarray(part) for part in (rows[:, :-1], rows[:, 1:]))
        return LanguageModelBatch(tokens, labels, token_order(tokens.ravel()))
