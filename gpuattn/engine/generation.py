"""Sampling from a language model. A step is launches only, so a CUDA graph can hold it."""

import contextlib
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from gpuattn.arrays import get_xp, on_gpu
from gpuattn.autodiff.tape import raw
from gpuattn.decode.limits import check_tokens
from gpuattn.decode.options import SampleOptions
from gpuattn.decode.sample import sample
from gpuattn.decode.stepper import Hypothesis, token_lists
from gpuattn.engine.arguments import checked_lengths
from gpuattn.engine.cache import DeviceCache, PromptCache
from gpuattn.engine.inputs import (
    FIXED_TOKENS,
    Inputs,
    joined,
    parts,
    portions,
    rounded,
    token_mask,
)
from gpuattn.engine.lane import Request
from gpuattn.engine.steps.packed import Packed
from gpuattn.engine.steps.row_step import step_of
from gpuattn.errors import problem
from gpuattn.ops.attention.store_rows import store_rows
from gpuattn.ops.sampling.sample_tokens import sample_tokens
from gpuattn.ops.sampling.text_rules import TextRules, text_rules
from gpuattn.ops.sampling.text_update import Texts, text_update
from gpuattn.rng import Key

OPENING = 8192  # tokens of the prompts that begin first; with fewer products are slower
LEAST_OPENINGS = 4  # times as many tokens in all, or all prompts begin together
DRAWS = "temperature", "top_k", "top_p", "min_p"
RULES = "eos", "min_length", "no_repeat_ngram", "repetition_penalty"


def checked(
    model: Any, prompts: Sequence[Any], limits: Sequence[int], options: SampleOptions
) -> list[np.ndarray]:
    """Return the prompts as ``read_tokens`` does; raises what ``check_lengths`` does as well."""
    check_lengths(model, prompts, limits, options)
    return read_tokens(model, prompts)


def check_lengths(
    model: Any, prompts: Sequence[Any], limits: Sequence[int], options: SampleOptions
) -> list[int]:
    """Return the lengths of the prompts.

    Raises ValueError for texts that do not fit into the model, and for banned or end tokens that it
    lacks; TypeError for what is no list.
    """
    block = model.config.block
    lengths = checked_lengths("generate", "prompts", prompts, limits)
    for length, limit in zip(lengths, limits, strict=True):
        if length == 0 or limit < 0 or length - 1 + limit > block:
            got = f"{length} tokens, with a limit of {limit}"
            accepted = f"1 or more, together up to block + 1, {block + 1}"
            raise ValueError(problem("generate", "a prompt", got, accepted))
    check_tokens(options, model.config.vocab, "generate")
    return lengths


def read_tokens(model: Any, prompts: Sequence[Any]) -> list[np.ndarray]:
    """Return the prompts as int32 arrays, views of one.

    Raises IndexError for tokens that the model lacks; TypeError for what is no integer.
    """
    ids, vocab = _joined(prompts), model.config.vocab
    if ids.dtype.kind not in "iuO":
        raise TypeError(problem("generate", "the dtype of prompts", ids.dtype, "integers"))
    for token in (ids.min(initial=0), ids.max(initial=0)):
        if not 0 <= token < vocab:
            accepted = f"0 <= token < {vocab}"
            raise IndexError(problem("generate", "a prompt", f"holding {token}", accepted))
    ends = itertools.accumulate(map(len, prompts))
    ids = ids.astype(np.int32, copy=False)
    return [ids[end - len(one) : end] for one, end in zip(prompts, ends, strict=True)]


def read(model: Any, requests: Sequence[Request]) -> None:
    """Read the prompts of those requests that are not read yet; raises as ``read_tokens`` does."""
    unread = [request for request in requests if not request.read]
    if not unread:
        return
    found = read_tokens(model, [request.tokens for request in unread])
    for request, tokens in zip(unread, found, strict=True):
        request.tokens, request.read = tokens, True


def opening(lengths: Sequence[int]) -> int:
    """Return how many prompts of these ``lengths`` a GPU computes while the host reads the others.

    0: all begin together, as they are short.
    """
    if sum(lengths) < LEAST_OPENINGS * OPENING:
        return 0
    return 1 << max(1, OPENING // max(lengths)).bit_length() - 1


def _joined(prompts):
    """Return the tokens of all prompts, one behind the other."""
    if all(type(prompt) is list for prompt in prompts):
        with contextlib.suppress(OverflowError):  # no token: ``checked`` says so
            return joined(prompts, np.int64)
    return np.concatenate([np.zeros(0, np.int32), *map(np.asarray, prompts)])


class Generation(Packed):
    """The state of a generation in ``sentences`` slots, each of which takes text after text.

    Each slot has a cache of its own; a ``PagedGeneration`` shares them.
    ``room``: the most keys of a text. ``draws``: temperature to min-p, see ``sample_tokens``.
    ``rules``: ``eos``, ``min_length``, ``no_repeat_ngram`` and ``repetition_penalty``, see
    ``TextRules``. ``banned``: tokens that never come. ``may_end``: whether a text may be complete
    before its limit. ``batch_invariant``: prompts are computed with others of similar lengths, in
    launches of one shape for each such length on a GPU, see ``Engine``.
    """

    pages: Any = None  # of a PagedGeneration

    def __init__(
        self, model: Any, sentences: int, room: int, *, draws: dict, rules: dict,
        banned: Sequence[int] = (), batch_invariant: bool = False,
    ) -> None:  # fmt: skip
        self.model, self.draws = model, draws
        self.may_end = bool({*rules["eos"]} - {*banned})
        like = model.parameters()[0].data
        xp = get_xp(like)
        self.texts = Texts(like, sentences, room)
        self.numbers = none = xp.zeros(sentences, np.int32)
        self.texts.start(none, none, none, self.texts.keys)
        self.eos = xp.asarray(rules["eos"], np.int32)
        self.rules = TextRules(like, sentences, on_logits=True, **rules)
        self._alike, self._fixed = batch_invariant, batch_invariant and on_gpu(like)
        self.caches = self._new_caches(like)
        self._inputs = Inputs(like, self._sizes(self._largest()))
        self.banned: Any = None
        if banned:
            self.banned = token_mask(like, banned, model.config.vocab)
        own, invariant = (model, self.texts, self.caches), batch_invariant
        self.decoder = step_of(*own, paged=self.pages is not None, batch_invariant=invariant)

    def _new_caches(self, like):
        """Return a cache for each layer."""
        own = [layer.attention for layer in self.model.layers]
        return [DeviceCache(like, self.texts, x.kv_heads, x.head_dim) for x in own]

    def portions(self, prompts: Sequence[Any]) -> list[Sequence[int]]:
        """Return the indices of prompts in lists, one for each call of ``load``."""
        if not self._alike:
            return [range(len(prompts))]
        widths: dict[int, list[int]] = {}
        for i, prompt in enumerate(prompts):
            widths.setdefault(self._width(len(prompt) - 1), []).append(i)
        return [
            [indices[i] for i in part]
            for width, indices in widths.items()
            for part in portions([width] * len(indices), self._most(width), FIXED_TOKENS)
        ]

    def _width(self, length):
        """Return how many tokens prompts of up to ``length``, but for their last, are padded to."""
        return rounded(length, self.texts.room) if length else 0

    def _most(self, width):
        """Return how many prompts of a width are computed together, where that is fixed."""
        return min(self.texts.sentences, max(1, FIXED_TOKENS // max(width, 1)))

    def load(
        self, prompts: Sequence[Any], limits: Sequence[int], numbers: Sequence[int],
        keys: Sequence[Key], slots: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        """Copy prompts, with the number and key of each one's draws, to the device for ``begin``.

        ``limits``: the most new tokens of each. ``slots`` and ``shape`` as in
        ``TranslationSearch.load``. ``begin`` computes equal prompts once.
        """
        S = self.texts.sentences
        at = np.arange(len(prompts)) if slots is None else np.asarray(slots)
        prompts = [np.asarray(prompt, np.int32) for prompt in prompts]
        self.shape = self._plan(prompts, limits, at)
        last, positions, most, own, words, chosen, *before = self._inputs.begin(
            self._sizes(self.shape)
        )
        most[:] = 0 if slots is None else -1
        for x in (last, positions, own):
            x[:] = 0
        last[at] = [prompt.item(-1) for prompt in prompts]
        positions[at] = [len(prompt) - 1 for prompt in prompts]
        most[at], own[at] = limits, numbers
        words = words.view(np.uint32).reshape(S, 4)
        words[:] = 0
        alike = all(key is keys[0] for key in keys)
        words[at] = [_words(key) for key in (keys[:1] if alike else keys)]
        chosen[:], chosen[: len(at)] = at[0], at
        self._write_prompts(prompts, at, before)
        self._inputs.send()

    def _sizes(self, shape):
        """Return how many integers there are of: last tokens, positions, limits, numbers and keys
        by slot; the slots that change; and what prompts need beside them."""
        S = self.texts.sentences
        return S, S, S, S, 4 * S, S, *self._prompt_sizes(shape)

    def begin(self) -> None:
        """Start the loaded texts: compute the keys of their prompts. Launches only."""
        last, positions, most, own, words, slots, *before = parts(
            self._inputs.device, self._sizes(self.shape)
        )
        keys = words.view(np.uint32).reshape(-1, 4)
        self.texts.start(last, positions, most, keys)
        of_slots = (self.numbers[:, None], own), (self.rules.first[:, None], last)
        store_rows(of_slots, slots, slots)
        self._compute_prompts(*before)

    # ---- prompts but for their last tokens ----

    def _plan(self, prompts, limits, at):
        """Return what launches for new texts in the slots ``at`` depend on: how many, how many
        different prompts, and their greatest length."""
        numbers: dict[bytes, int] = {}
        own = [numbers.setdefault(p[:-1].tobytes(), len(numbers)) for p in prompts]
        self._different, different = (own, list(numbers)), len(numbers)
        width, S = self._width(max(map(len, prompts)) - 1), self.texts.sentences
        if self._fixed:
            return self._most(width), self._most(width), width
        return rounded(len(prompts), S, 1), rounded(different, S, 1), width

    def _largest(self):
        """Return the largest shape."""
        return self.texts.sentences, self.texts.sentences, self.texts.room

    def _prompt_sizes(self, shape):
        """Return how many integers there are of the first tokens of prompts and of their slots, by
        entry, and of tokens."""
        entries, prompts, before = shape
        return entries, entries, prompts * before

    def _write_prompts(self, prompts, at, host):
        """Write to the ``host`` what ``_compute_prompts`` reads."""
        starts, places, before = host
        own, different = self._different
        starts[:], places[:] = 0, at[0]  # unused entries write the same as the first one: prompt 0
        places[: len(at)], before[:] = at, 0
        starts[: len(at)] = np.multiply(own, self.shape[2])
        rows = before.reshape(self.shape[1:])[: len(different)]
        lengths = np.array([len(prompt) for prompt in different]) // before.itemsize
        used = np.arange(self.shape[2]) < lengths[:, None]
        rows[used] = np.frombuffer(b"".join(different), np.int32)

    def _compute_prompts(self, starts, places, before):
        if before.size:  # keys past the end of a prompt are overwritten before they are read
            caches = [PromptCache(cache, starts, places) for cache in self.caches]
            with self.model.evaluating():
                self.model.fill(before.reshape(self.shape[1:]), caches=caches)

    def stop(self, slots: Sequence[int]) -> None:
        """End the texts in ``slots`` as they are."""
        texts, limits = self.texts, np.full(self.texts.sentences, -1, np.int32)
        limits[list(slots)] = 0
        limits = get_xp(texts.limits).asarray(limits)
        texts.start(texts.tokens, texts.positions, limits, texts.keys)

    def progress(self, texts: bool) -> tuple[Any, ...]:
        """Return arrays to read: as of ``TranslationSearch.progress``."""
        own = self.texts
        return (own.done, own.lengths, own.history) if texts else (own.done,)

    def certain(
        self, read: Sequence[np.ndarray], slots: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return (lengths (n,), tokens (n, room)) so far in ``slots``: all are certain.

        ``read``: copies of ``progress``.
        """
        _, lengths, history = (x[list(slots)] for x in read)
        return lengths, history

    def results(self) -> tuple[Any, ...]:
        """Return the arrays that ``hypotheses`` reads."""
        texts = self.texts
        return texts.history, texts.lengths, texts.scores, texts.ended

    def hypotheses(
        self, read: Sequence[np.ndarray], slots: Sequence[int], limits: Sequence[int] = ()
    ) -> list[list[Hypothesis]]:
        """Return the texts in ``slots``, a list of one each; ``read``: copies of ``results``."""
        at, (tokens, *others) = np.asarray(slots), read
        lengths, scores, ended = (x[at].tolist() for x in others)
        tokens = tokens[:, : max(lengths, default=0)][at]
        texts = token_lists(tokens, self.model.config.vocab)
        for text, length in zip(texts, lengths, strict=True):
            del text[length:]
        return [
            [Hypothesis(text, score, score / max(1, len(text) + over), over)]
            for text, score, over in zip(texts, scores, ended, strict=True)
        ]

    def step(self) -> None:
        """Draw the next token of every text. Launches only."""
        self.take(self.decoder() if self.decoder else self._logits())

    def _logits(self):
        """Return the logits of every text, op by op."""
        model, texts = self.model, self.texts
        tokens, positions = texts.tokens.reshape(-1, 1), texts.positions.reshape(-1, 1)
        with model.evaluating():
            states = model.states(tokens, positions, caches=self.caches)
            return raw(model.head(states[:, -1]))

    def take(self, logits: Any) -> None:
        """Draw the next token of every text from ``logits`` (S, V), which may change in place."""
        texts = self.texts
        drawn = sample_tokens(
            self._ruled(logits), keys=texts.keys, numbers=self.numbers, banned=self.banned,
            vocab_size=self.model.config.vocab, **self.draws,
        )  # fmt: skip
        text_update(*drawn, texts, eos=self.eos, settled=True)

    def _ruled(self, logits):
        """Return the logits with the bans and penalties that texts bring."""
        texts, rules = self.texts, self.rules
        if rules.empty:
            return logits
        if rules.repetition_penalty != 1:
            logits = logits.astype(np.float32, copy=False)  # changed logits would be rounded
        scores, lengths = texts.scores[:, None], texts.lengths[:, None]
        history = texts.history[:, :, None, None]
        vocab = self.model.config.vocab
        text_rules(logits, scores, lengths, history, texts.slots, rules, vocab_size=vocab)
        return logits


def _words(key):
    """Return a Key as four 32-bit words."""
    return key.seed & 0xFFFFFFFF, key.seed >> 32, key.stream, int(key.step)


def on_host(
    model: Any, prompts: Sequence[Any], limits: Sequence[int], numbers: Sequence[int], key: Key,
    settings: dict,
) -> list[Hypothesis]:  # fmt: skip
    """Return what ``Engine.generate`` does, by ``decode.sample``."""
    found: list[Any] = [None] * len(prompts)
    for length in sorted({len(prompt) for prompt in prompts}):
        chosen = [i for i, prompt in enumerate(prompts) if len(prompt) == length]
        most = np.array([limits[i] for i in chosen], np.int32)
        tokens = np.array([prompts[i] for i in chosen], np.int32)
        stepper = model.stepper(get_xp(model.parameters()[0].data).asarray(tokens), int(most.max()))
        texts = sample(
            stepper, bos=stepper.first_tokens, max_length=most, seed=key,
            numbers=[numbers[i] for i in chosen], **settings,
        )  # fmt: skip
        for i, text in zip(chosen, texts, strict=True):
            found[i] = text
    return found
