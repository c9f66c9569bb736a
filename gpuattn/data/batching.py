"""Packed batches: sentences end to end up to a budget of tokens, without padding; and padded ones,
for comparison.

Batches are a function of (seed, epoch, rank, world), so a run resumes exactly from the number of
batches it has used.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from gpuattn.data.packing import Mix, Packing
from gpuattn.data.rows import RowPairs, Rows
from gpuattn.data.tokenizer import BOS, EOS, PAD
from gpuattn.errors import ConfigError, DataError, problem
from gpuattn.typing import Array

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

    ``pairs``: a list of (source ids, target ids), without ``bos`` and ``eos``; or RowPairs, whose
    rows may be memory maps. ``tokens``: the budget of a batch; neither its source nor its target
    side has more, marks included. ``longest``: pairs with more tokens on a side, marks included,
    are left out. ``bos``: begins the decoder's input. ``eos``: ends the rows of a list of pairs.
    ``world``: how many ranks share the batches; ``rank`` is this one. ``batching``: "packed" puts
    sentences of near-equal length together, in a random order of batches. The other two are
    rectangles, each side of a sentence filled with padding to the longest of the batch, which
    counts in the budget: "bucketed" ones of sorted sentences, "padded" ones in random order.

    Each epoch holds each pair once over all ranks, and every rank gets as many batches. ``mix``:
    (begin, end, weight) of parts of the pairs; an epoch then has as many pairs as before, of each
    part the share that its weight says, so that some come again and others not at all.
    Raises ConfigError when the budget is smaller than the longest sentence, DataError when there
    are fewer pairs than ranks.
    """

    def __init__(
        self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]] | RowPairs, tokens: int,
        seed: int, rank: int = 0, world: int = 1, batching: str = "packed",
        longest: int | None = None, mix: Mix = (), bos: int = BOS, eos: int = EOS,
    ) -> None:  # fmt: skip
        if not 0 <= rank < world:
            raise ConfigError(f"PackedLoader: rank is {rank}; accepted: 0 to {world - 1}")
        if batching not in BATCHING:
            accepted = ", ".join(BATCHING)
            raise ConfigError(problem("PackedLoader", "batching", repr(batching), accepted))
        if not isinstance(pairs, RowPairs):
            pairs = RowPairs(*(Rows.of([pair[side] for pair in pairs], eos) for side in (0, 1)))
        self.pairs = pairs
        self.packing = Packing(pairs, tokens, seed, world, batching, longest, mix)
        if self.packing.count < world:
            raise DataError(
                f"PackedLoader: {self.packing.count} pairs for {world} ranks; one each is needed"
            )
        most, at = self.packing.most, self.packing.at
        if most > tokens:
            raise ConfigError(
                f"PackedLoader: tokens is {tokens}; pair {at} alone has {most}"
                " with its end mark. Raise the budget or leave out longer sentences"
            )
        self.tokens = tokens
        self.seed = seed
        self.rank = rank
        self.world = world
        self.batching, self.bos = batching, bos

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """Yield this rank's batches of an epoch, from its batch ``start`` on."""
        batches, first = self.packing.batches(number), self.rank + start * self.world
        for sentences in islice(batches, first, None, self.world):
            yield self._batch(sentences)

    def batches(self, number: int) -> int:
        """Return how many batches each rank has in an epoch.

        Of more than ``packing.WHOLE`` pairs about how many: ``epoch`` ends when it ends.
        """
        return self.packing.size(number) // self.world

    def fill(self, number: int) -> float:
        """Return the share of the budget that the batches of an epoch use, on the fuller side.

        Of more than ``packing.WHOLE`` pairs that of a sample.
        """
        return self.packing.fill(number)

    def _batch(self, sentences):
        padded = self.batching != "packed"
        source, source_positions, cu_source = self.pairs.source.gather(sentences, PAD, padded)
        labels, target_positions, cu_target = self.pairs.target.gather(sentences, IGNORED, padded)
        target_in = np.empty_like(labels)
        target_in[1:] = labels[:-1]
        target_in[labels == IGNORED] = PAD
        target_in[cu_target[: -1 : 1 + padded]] = self.bos
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
            source_tokens=int(np.diff(cu_source)[:: 1 + padded].sum()),
            target_tokens=int(np.diff(cu_target)[:: 1 + padded].sum()),
        )


def of_rank(loader: Any, rank: int) -> Any:
    """Return a loader of the same epochs for another rank; both share the plan of an epoch."""
    other = copy.copy(loader)
    other.rank = rank
    return other


@dataclass(frozen=True)
class PackedTexts:
    """B texts end to end, T tokens in all; arrays are int32.

    Text i is the slice ``cu_seqlens[i] : cu_seqlens[i + 1]`` of ``tokens`` (T,), has up to
    ``max_seqlen`` tokens and ``positions`` (T,) that begin at 0. ``order``: of ``tokens``, for
    gradients.
    """

    tokens: Array
    positions: Array
    cu_seqlens: Array
    max_seqlen: int
    order: TokenOrder | None

    @property
    def limits(self) -> tuple[int, ...]:
        """What a step depends on besides the shapes of the arrays."""
        return (self.max_seqlen,)

    @property
    def packing(self) -> dict[str, Any]:
        """What a model takes besides tokens."""
        names = ("order", "positions", "cu_seqlens", "max_seqlen")
        return {name: getattr(self, name) for name in names}

    @property
    def lengths(self) -> np.ndarray:
        """The tokens of each text, (B,), as the loader made the batch."""
        return np.diff(self.cu_seqlens)


def token_order(ids: np.ndarray) -> TokenOrder:
    """Return the ``TokenOrder`` of token ids (N,)."""
    count, most = len(ids), int(ids.max(initial=0))
    bits = count.bit_length()
    if (most + 1) << bits <= 1 << 32:
        # Ids and places in one word sort faster than an argsort, by vector instructions.
        keys = ids.astype(np.uint32)
        keys <<= np.uint32(bits)
        keys |= np.arange(count, dtype=np.uint32)
        keys.sort()
        order = (keys & np.uint32((1 << bits) - 1)).astype(np.int32)
        keys >>= np.uint32(bits)
    else:
        # NumPy sorts 16-bit keys by radix sort: several times as fast, and stable.
        keys = ids.astype(np.uint16) if most < 1 << 16 else ids
        order = np.argsort(keys, kind="stable").astype(np.int32)
        keys = keys[order]
    first = np.ones(count, bool)
    np.not_equal(keys[1:], keys[:-1], out=first[1:])
    segments = np.flatnonzero(first)
    return TokenOrder(order, segments.astype(np.int32), keys[segments].astype(np.int32))


@dataclass(frozen=True)
class LanguageModelBatch:
    """``tokens`` (B, T) int32, ``labels`` (B, T), the ones that follow them, and the ``order`` of
    ``tokens.ravel()``. Batches for training have one shape.

    Of documents all rows are end to end, (B * T,), and no token attends to another document:
    parts of documents are the slices ``cu_seqlens[i] : cu_seqlens[i + 1]``, int32, of up to
    ``max_seqlen`` tokens, and ``positions`` begin at 0 in each. An end mark is the first token of
    the document that follows it, so each label is predicted from its own document alone.
    """

    tokens: np.ndarray
    labels: np.ndarray
    order: TokenOrder
    positions: np.ndarray | None = None
    cu_seqlens: np.ndarray | None = None
    max_seqlen: int | None = None

    @property
    def limits(self) -> Any:
        """What a step depends on besides the shapes of the arrays."""
        return () if self.max_seqlen is None else (self.max_seqlen,)

    @property
    def packing(self) -> dict[str, Any]:
        """What a model's ``loss`` takes besides tokens, labels and order."""
        if self.cu_seqlens is None:
            return {}
        return {name: getattr(self, name) for name in ("positions", "cu_seqlens", "max_seqlen")}

    @property
    def lengths(self) -> np.ndarray:
        """The tokens of each row, (B,), or of each part of a document."""
        if self.cu_seqlens is None:
            return np.full(len(self.tokens), self.tokens.shape[1])
        return np.diff(self.cu_seqlens)

    @property
    def target_tokens(self) -> int:
        """Tokens without padding."""
        return self.labels.size

    all_tokens = target_tokens


class LanguageModelLoader:
    """Random crops of one long text for training, and its consecutive blocks for evaluation.

    ``ids``: the text's token ids (N,), of any integer type: of a memory map only what a batch
    holds is read. ``block``: T, tokens of a row. ``batch``: B, rows of this
    rank. An epoch has about as many tokens as the text. ``mix``: (begin, end, weight) of parts of
    the text, from which crops are taken as often as the weights say, which add up to 1.
    ``documents``: whether batches are of documents, which end with ``eos`` in the text.
    Raises DataError when the text, or a part, is shorter than ``block + 1`` tokens.
    """

    def __init__(
        self, ids: Sequence[int], block: int, batch: int, seed: int, rank: int = 0, world: int = 1,
        mix: Mix = (), documents: bool = False,
    ) -> None:  # fmt: skip
        if not 0 <= rank < world:
            raise ConfigError(f"LanguageModelLoader: rank is {rank}; accepted: 0 to {world - 1}")
        if block < 1 or batch < 1:
            raise ConfigError(
                f"LanguageModelLoader: block is {block}, batch is {batch}; accepted: 1 or more"
            )
        self.ids = np.asarray(ids)
        if len(self.ids) <= block:
            raise DataError(
                f"LanguageModelLoader: the text has {len(self.ids)} tokens; a block of {block} "
                f"needs {block + 1}. Give more text or a smaller block"
            )
        self._parts = np.array([part[:2] for part in mix], np.int64).reshape(-1, 2).T
        total = sum(weight for _, _, weight in mix)  # 1, but for rounding
        self._weights = [weight / total for _, _, weight in mix]
        for begin, end in self._parts.T:
            if end - begin <= block:
                raise DataError(
                    f"LanguageModelLoader: a part of the mix has {end - begin} tokens; a block of "
                    f"{block} needs {block + 1}. Leave it out, or take a smaller block"
                )
        self.documents = documents
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
        size = self.world, self.batch
        if not self._weights:
            starts = rng.integers(len(self.ids) - self.block, size=size)[self.rank]
        else:
            which = rng.choice(len(self._weights), size=size, p=self._weights)[self.rank]
            begins, ends = self._parts[:, which]
            room = ends - begins - self.block
            starts = begins + (rng.random(size)[self.rank] * room).astype(np.int64)
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
        rows = sliding_window_view(self.ids, length + 1)[starts]
        tokens, labels = (part.astype(np.int32, order="C") for part in (rows[:, :-1], rows[:, 1:]))
        order = token_order(tokens.ravel())
        if not self.documents:
            return LanguageModelBatch(tokens, labels, order)
        first = tokens == EOS
        first[:, 0] = True
        bounds = np.append(np.flatnonzero(first), tokens.size).astype(np.int32)
        positions = np.arange(tokens.size, dtype=np.int32)
        positions -= np.repeat(bounds[:-1], np.diff(bounds))
        return LanguageModelBatch(
            tokens.ravel(), labels.ravel(), order, positions, bounds, max_seqlen=length
        )
