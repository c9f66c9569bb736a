"""A beam search over translations. A step is launches only, so a CUDA graph can hold it."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpuattn import arrays
from gpuattn.arrays import get_xp, on_gpu
from gpuattn.autodiff.tape import raw
from gpuattn.decode.options import BeamOptions
from gpuattn.decode.stepper import Hypothesis, hypotheses_of
from gpuattn.engine.cache import DeviceCache, DeviceMemory
from gpuattn.engine.inputs import (
    FIXED_TOKENS,
    Inputs,
    joined,
    parts,
    portions,
    rounded,
    token_mask,
)
from gpuattn.engine.steps.packed import Packed
from gpuattn.engine.steps.row_step import step_of
from gpuattn.models.translation import Sources
from gpuattn.ops.attention.store_rows import store_rows
from gpuattn.ops.sampling.beam_step import MAX_LISTED, beam_step
from gpuattn.ops.sampling.beam_update import Beams, beam_update, packed_texts, unpacked_texts
from gpuattn.ops.sampling.text_rules import TextRules, text_rules

TOKEN_STEP = 512  # the tokens of sources that are encoded together are padded to a multiple of it
READ = "done", "steps", "scores", "pool_scores", "slots", "history"  # by ``stable_texts``
FIXED_LENGTH = 16  # tokens of a source on average, where sources are encoded in one shape


class TranslationSearch(Packed):
    """The state of a search in ``sentences`` slots, each of which translates source after source.

    ``room``, ``source_room``: the most tokens of a translation and of a source, marks included.
    ``bos``: the token that begins a translation. ``prefix_room``: the most tokens of a prefix.
    ``may_end``: whether a translation may be complete before its limit.
    ``batch_invariant``: sources are encoded in launches of one shape on a GPU, see ``Engine``.
    """

    pages: Any = None  # of a PagedGeneration

    def __init__(
        self, model: Any, sentences: int, beam: int, room: int, source_room: int, *,
        options: BeamOptions, bos: int, prefix_room: int = 0, batch_invariant: bool = False,
    ) -> None:  # fmt: skip
        self.model, self.sentences, self.source_room = model, sentences, source_room
        self.options, self.bos, self.ending = options, bos, ending(options)
        self.may_end = bool({*options.eos} - {*options.banned})
        config, like = model.config, model.parameters()[0].data
        xp = get_xp(like)
        self.beams = Beams(like, sentences, beam, room, options.divisor)
        self.beams.start(bos, xp.zeros(sentences, np.int32))
        heads, head_dim = config.kv_heads or config.heads, config.d_model // config.heads
        self.caches = [DeviceCache(like, self.beams, heads, head_dim) for _ in model.decoder]
        shape = (sentences, source_room, heads, head_dim)
        self.memory = [
            (arrays.zeros(like, shape), arrays.zeros(like, shape)) for _ in model.decoder
        ]
        self.memory_lengths = xp.asarray(np.ones(sentences, np.int32))
        self._fixed: tuple[int, int, int] | None = None
        if batch_invariant and on_gpu(like):
            tokens = max(FIXED_TOKENS, source_room)
            self._fixed = min(sentences, tokens // FIXED_LENGTH), tokens, source_room
        most = self._fixed or (sentences, _token_room(sentences * source_room), 1)
        # the bans of ``beam_step`` come after the normaliser, and before a prefix
        listed = options.renormalise or prefix_room > 0
        self.banned: Any = None
        if options.banned and not listed:
            self.banned = xp.asarray(options.banned, np.int32)
            if len(options.banned) > MAX_LISTED:
                self.banned = token_mask(like, options.banned, config.vocab)
        names = "eos", "min_length", "no_repeat_ngram", "repetition_penalty"
        self.rules = TextRules(
            like, sentences, banned=options.banned if listed else (), prefix_room=prefix_room,
            on_logits=options.renormalise, first=bos,
            **{name: getattr(options, name) for name in names},
        )  # fmt: skip
        self.eos = xp.asarray(options.eos, np.int32)
        self._inputs = Inputs(like, self._sizes(most))
        self._each = np.arange(most[1], dtype=np.int32)
        own = self.beams, self.caches, self.memory, self.memory_lengths
        self.decoder = step_of(model, *own, batch_invariant=batch_invariant)

    def portions(self, sources: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        """Return the indices of sources in lists, one for each call of ``load``."""
        if not self._fixed:
            return [range(len(sources))]
        most, tokens, _ = self._fixed
        return [*portions([len(source) + 1 for source in sources], most, tokens)]

    def load(
        self, sources: Sequence[Sequence[int]], limits: Sequence[int],
        prefixes: Sequence[Sequence[int]] = (), slots: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        """Copy token ids without marks to the device, where ``encode`` reads them.

        ``limits``: the most tokens of each translation, its end mark included. ``prefixes``: the
        tokens that each begins with, none by default. ``slots``: where
        they are translated; other slots go on as they are. None: in the first slots, and all
        others end. ``shape`` is then what the launches of ``encode`` depend on.
        """
        count, lengths = len(sources), [len(source) + 1 for source in sources]
        total, longest = sum(lengths), _longest(max(lengths), self.source_room)
        shape = rounded(count, self.sentences, 1), _token_room(total), longest
        self.shape = shape = self._fixed or shape
        entries, room, longest = shape
        most, known, forced, places, starts, bounds, tokens, positions = self._inputs.begin(
            self._sizes(shape)
        )
        most.fill(0 if slots is None else -1)
        known.fill(1)
        at = places[:count]
        at[:] = range(count) if slots is None else slots
        places[count:], starts[count:] = at[0], 0  # unused entries write the same as the first one
        most[at] = limits
        known[at] = own = np.array(lengths, np.int32)
        if forced.size:
            forced.fill(-1)
            for slot, prefix in zip(at, prefixes, strict=False):
                forced.reshape(self.rules.prefix.shape)[slot, : len(prefix)] = prefix
        bounds[0], bounds[count:] = 0, total
        own.cumsum(out=bounds[1 : count + 1])
        starts[:count] = bounds[:count]
        if room > total:  # sequences past the entries hold the padding
            ends = np.arange(1, len(bounds) - entries, dtype=np.int32)
            np.minimum(ends * longest + total, room, out=bounds[entries + 1 :])
            tokens[total:] = 0
        marked: list[int] = []
        mark = [self.model.config.eos]
        for source in sources:
            marked += source
            marked += mark
        tokens[:total] = joined([marked])
        begins = bounds[:-1]
        np.subtract(self._each[:room], begins.repeat(bounds[1:] - begins), out=positions)
        self._inputs.send()

    def _sizes(self, shape):
        """Return how many integers there are of: limits, source lengths and prefixes by slot; slots
        and first tokens by entry; offsets of the packed sequences; tokens and their positions."""
        entries, tokens, longest = shape
        padding = tokens if self._fixed else _padding(tokens)
        sequences = entries + -(-padding // longest)
        S = self.sentences
        return S, S, self.rules.prefix.size, entries, entries, sequences + 1, tokens, tokens

    def encode(self) -> None:
        """Encode the loaded sources and start their searches. Launches only, as in ``step``."""
        model, (*_, longest) = self.model, self.shape
        limits, lengths, forced, places, starts, bounds, tokens, positions = parts(
            self._inputs.device, self._sizes(self.shape)
        )
        with model.evaluating():
            batch = Sources(tokens, positions, bounds, longest)
            projected = model.memory(raw(model.encode(batch)))
        pairs = [
            (own, raw(found))
            for owns, founds in zip(self.memory, projected, strict=True)
            for own, found in zip(owns, founds, strict=True)
        ]
        store_rows(pairs, starts, places, longest, lengths)
        of_slots = [(self.memory_lengths[:, None], lengths)]
        if forced.size:
            prefix = self.rules.prefix
            of_slots.append((prefix[:, None], forced.reshape(prefix.shape)))
        store_rows(of_slots, places, places)
        self.beams.start(self.bos, limits)

    begin = encode

    def stop(self, slots: Sequence[int]) -> None:
        """End the translations in ``slots`` as they are."""
        limits = np.full(self.sentences, -1, np.int32)
        limits[list(slots)] = 0
        self.beams.start(self.bos, limits)

    def progress(self, texts: bool) -> tuple[Any, ...]:
        """Return arrays to read: which slots are done (S,), and if asked the texts so far.

        Those are what ``certain`` reads.
        """
        beams = self.beams
        return tuple(getattr(beams, name) for name in READ) if texts else (beams.done,)

    def certain(
        self, read: Sequence[np.ndarray], slots: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return (lengths (n,), tokens (n, m)) that are certain in ``slots``: see ``stable_texts``.

        ``read``: copies of ``progress``.
        """
        return stable_texts(*(x[list(slots)] for x in read))

    def results(self) -> tuple[Any, ...]:
        """Return the arrays that ``hypotheses`` reads: one, which is one copy to the host."""
        return (packed_texts(self.beams, self.options.nbest),)

    def hypotheses(
        self, read: Sequence[np.ndarray], slots: Sequence[int], limits: Sequence[int]
    ) -> list[list[Hypothesis]]:
        """Return what was found in ``slots``; ``read``: copies of ``results``."""
        (packed,) = read
        found = unpacked_texts(packed, self.sentences, self.options.nbest)
        if slots != list(range(len(slots))):
            rows = np.asarray(slots)
            found = tuple(x[rows] for x in found)
        texts, lengths, scores, normalised = found
        vocab = self.model.config.vocab
        return hypotheses_of(texts, lengths, scores, normalised, limits, vocab=vocab)

    def step(self) -> None:
        """Take the next token of every beam."""
        self.take(self.decoder() if self.decoder else self._logits())

    def _logits(self):
        """Return the logits of every beam, op by op."""
        model, beams = self.model, self.beams
        tokens, positions = beams.tokens.reshape(-1, 1), beams.positions.reshape(-1, 1)
        with model.evaluating():
            memories = [DeviceMemory(*own, self.memory_lengths) for own in self.memory]
            x = model.decode(
                model.target(tokens, positions), memories, positions=positions, caches=self.caches
            )
            return raw(model.output(x[:, -1]))

    def take(self, logits: Any) -> None:
        """Take the next token of every beam by ``logits`` (rows, V), which may change in place.

        A launch, such as what computes logits, must lie between two calls: scores are settled then.
        """
        beams = self.beams
        logits, penalties = self._ruled(logits)
        found = beam_step(
            logits, beams.scores, banned=self.banned, penalties=penalties,
            count=candidates(self.options), vocab_size=self.model.config.vocab, settled=True,
        )  # fmt: skip
        beam_update(*found, beams, eos=self.eos, settled=True, **self.ending)

    def _ruled(self, logits):
        """Apply the rules that depend on texts; return logits and penalties for ``beam_step``."""
        beams, rules = self.beams, self.rules
        if rules.empty:
            return logits, None
        if rules.on_logits and rules.repetition_penalty != 1:
            logits = logits.astype(np.float32, copy=False)  # changed logits would be rounded
        state = beams.scores, beams.positions, beams.history, beams.slots
        return logits, text_rules(logits, *state, rules, vocab_size=self.model.config.vocab)


def stable_texts(
    done: np.ndarray, steps: np.ndarray, scores: np.ndarray, pool_scores: np.ndarray,
    slots: np.ndarray, history: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Return (lengths (S,), tokens (S, n)): how every result of a sentence begins.

    That is what all its live beams share, as long as no text is in its pool, which may begin
    otherwise; then, and once it is done, the length is 0. Of copies of the arrays of ``Beams``, on
    the host; tokens past a length are undefined.
    """
    each, place = np.arange(len(done)), np.arange(steps.max(initial=0))
    live = scores != -np.inf
    rows = slots[:, :, 1 : len(place) + 1]
    texts = history[..., 0][each[:, None, None], place, rows]  # (S, K, n)
    first = texts[each, live.argmax(1)]
    differ = ((texts != first[:, None]) & live[:, :, None]).any(1)
    shared = ~differ & (place < steps[:, None])
    lengths = np.logical_and.accumulate(shared, 1).sum(1)
    certain = (pool_scores[:, 0] == -np.inf) & ~done
    return np.where(certain, lengths, 0), first


def candidates(options: BeamOptions) -> int:
    """Return how many continuations of a sentence a step looks at."""
    return max(2, 1 + len(options.eos)) * options.beam


def ending(options: BeamOptions) -> dict[str, Any]:
    """Return the settings of ``beam_update`` that say when a sentence is done."""
    names = {"fairseq": "fairseq", "hf": "present", "hf-early": "enough", "ct2": "enough"}
    stopping, enough = names.get(options.stopping, "greatest"), options.enough
    if options.stopping == "hf-never" and options.length_penalty <= 0:
        stopping = "present"
    if options.stopping == "ct2" and options.length_penalty == 0:
        stopping, enough = "best", options.nbest
    common = {"nbest": options.nbest, "end_counts": options.end_counts}
    return {"stopping": stopping, "enough": enough, **common}


# A first launch of a shape costs ten milliseconds, padding some microseconds: shapes are few.


def _padding(token_room):
    """Return more than what pads sources to ``token_room``: up to a third of it, or TOKEN_STEP."""
    return max(TOKEN_STEP, 1 << max(0, (token_room - 1).bit_length() - 2))


def _token_room(total):
    """Return ``total`` rounded up: 512, 1024, 1536, 2048, 3072, 4096, 6144, ..."""
    step = _padding(total)
    return -(-total // step) * step


def _longest(length, most):
    """Return ``length`` rounded up to 16, 64, 256, ... or to ``most``."""
    return min(most, 1 << max(4, ((length - 1).bit_length() + 1) // 2 * 2))
