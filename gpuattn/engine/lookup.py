"""Speculation: greedy texts that repeat themselves take several tokens in a pass.

The tokens that followed the last n-gram where it came before, in the prompt or behind it, are
proposed to come again; one pass through the model says which tokens it would have taken at each
place, and those before the first difference are taken. So the text is that of single steps, but for
rounding. Saxena, "Prompt lookup decoding" (2023); verified as by Leviathan et al., "Fast inference
from Transformers via speculative decoding" (2023).
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from gpuattn import arrays
from gpuattn.arrays import get_xp
from gpuattn.autodiff.tape import raw
from gpuattn.decode.options import SampleOptions
from gpuattn.decode.stepper import Hypothesis
from gpuattn.engine.cache import PromptCache
from gpuattn.engine.inputs import Inputs, parts, rounded, token_mask
from gpuattn.engine.lane import Request
from gpuattn.errors import ConfigError, problem
from gpuattn.ops.arguments import integer
from gpuattn.ops.attention.append_kv import append_kv
from gpuattn.ops.attention.decode_attention import MAX_QUERIES, decode_attention
from gpuattn.ops.sampling.sample_tokens import sample_tokens
from gpuattn.runtime.readback import Reading

NGRAMS = 4, 3, 2  # lengths of what is looked up, the longest first
MOST_TEXTS = 8  # that run together
MOST_PROPOSED = MAX_QUERIES - 1  # tokens of a text in a pass; the first one is known
# A pass takes about two single steps (rawkernels/notes/engine.md), so fewer proposals that hold,
# for each text and pass, are not worth it.
WINDOW, LEAST_ACCEPTED = 8, 1


class Speculation:
    """How far ``Engine.generate`` looks ahead, and how often that was right.

    ``tokens``: proposed in a pass at most, 1 to 15. ``passes``: through the model so far, each for
    all texts that ran. ``proposed``, ``accepted``: tokens, of all texts. ``given_up``: calls that
    went on token by token since of the last 8 passes too few proposals held: 1 a pass and text.

    >>> import gpuattn
    >>> gpuattn.Speculation(8).acceptance
    0.0
    """

    def __init__(self, tokens: int = 8) -> None:
        accepted = f"1 to {MOST_PROPOSED}"
        self.tokens = integer("Speculation", "tokens", tokens, accepted, 1, MOST_PROPOSED)
        self.passes = self.proposed = self.accepted = self.given_up = 0

    @property
    def acceptance(self) -> float:
        """The share of the proposed tokens that were accepted, 0 of none."""
        return self.accepted / max(1, self.proposed)


def check(options: SampleOptions, temperature: float, batch_invariant: bool) -> None:
    """Raise ConfigError for what speculation does not take."""
    for name, value, accepted in (
        ("temperature", temperature, 0), ("batch_invariant", batch_invariant, False),
        ("min_length", options.min_length, 0), ("no_repeat_ngram", options.no_repeat_ngram, 0),
        ("repetition_penalty", options.repetition_penalty, 1),
    ):  # fmt: skip
        if value != accepted:
            raise ConfigError(problem("generate", name, value, f"{accepted} with speculate"))


class Lookup:
    """The tokens of a text, and where each of its n-grams came last."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # where the token behind an n-gram is
        for token in tokens:
            self.add(token)

    def add(self, token: int) -> None:
        """Append a token."""
        for n in NGRAMS:
            if len(self._tokens) >= n:
                self._after[tuple(self._tokens[-n:])] = len(self._tokens)
        self._tokens.append(int(token))

    def proposal(self, most: int) -> list[int]:
        """Return ``most`` tokens that followed the end of the text where it came before, or []."""
        known = self._tokens
        for n in NGRAMS:
            place = self._after.get(tuple(known[-n:]))
            if place is not None:
                period = len(known) - place
                return [known[place + i % period] for i in range(most)]
        return []


class PassCache:
    """A cache for ``nn.MultiHeadAttention`` to which a pass adds several tokens of each text.

    ``starts``, ``counts``: int32 (texts,), the keys of each text before the pass and behind it, on
    the device.
    """

    def __init__(
        self, like: Any, starts: Any, counts: Any, room: int, kv_heads: int, head_dim: int
    ) -> None:
        shape = len(starts), room, kv_heads, head_dim
        self.k, self.v = arrays.zeros(like, shape), arrays.zeros(like, shape)
        self._starts, self._counts = starts, counts

    def decodes(self, q: Any) -> bool:
        """Return True: ``attend`` takes the queries of a pass."""
        return True

    def attend(self, q: Any, k: Any, v: Any) -> Any:
        """Store k and v (texts, T, Hk, D) behind the others; return the attention of ``q``."""
        append_kv(self.k, self.v, k, v, self._starts)
        return decode_attention(q, self.k, self.v, self._counts)


class LookupSearch:
    """Passes of up to ``tokens`` + 1 tokens of each of ``texts`` texts, of up to ``room`` keys.

    ``load``, then ``read`` for prompts or ``step`` for a pass: these are launches only.
    """

    def __init__(
        self, model: Any, texts: int, room: int, tokens: int, banned: Sequence[int]
    ) -> None:
        self.model, self.texts = model, texts
        like, block = model.parameters()[0].data, model.config.block
        xp, self._most = get_xp(like), block - 1
        width = max(tokens + 1, rounded(room, block))
        self._inputs = Inputs(like, self._sizes(width))
        starts, counts, *_ = parts(self._inputs.device, self._sizes(width))
        self._places = xp.asarray(np.arange(texts, dtype=np.int32))
        own = [layer.attention for layer in model.layers]
        self.caches = [
            PassCache(like, starts, counts, room + tokens + 1, x.kv_heads, x.head_dim) for x in own
        ]
        self._chosen = xp.zeros(texts * (tokens + 1), np.int32)
        self._logprobs = xp.zeros(texts * (tokens + 1), np.float32)
        self._banned: Any = None
        if banned:
            self._banned = token_mask(like, banned, model.config.vocab)

    def refresh(self, *, changed: bool) -> None:
        """Begin the work of another call: nothing of the weights is kept."""

    def load(self, rows: Sequence[Sequence[int]], starts: Sequence[int], width: int) -> None:
        """Copy the next tokens of texts, which begin at ``starts``, and zeros up to ``width``."""
        self.width = width
        begins, counts, rows_at, tokens, positions = self._inputs.begin(self._sizes(width))
        begins[:], tokens[:] = 0, 0
        begins[: len(starts)] = starts
        counts[:], rows_at[:] = begins + width, np.arange(self.texts) * width
        for to, row in zip(tokens.reshape(self.texts, width), rows, strict=False):
            to[: len(row)] = row
        # those past the block are of proposals that come too late: they are not taken
        places = np.minimum(begins[:, None] + np.arange(width), self._most)
        positions.reshape(places.shape)[:] = places
        self._inputs.send()

    def read(self) -> None:
        """Compute the keys of the loaded prompts."""
        rows_at = parts(self._inputs.device, self._sizes(self.width))[2]
        tokens, _ = self._loaded()
        prompts = [PromptCache(cache, rows_at, self._places) for cache in self.caches]
        with self.model.evaluating():
            self.model.fill(tokens, caches=prompts)

    def step(self) -> None:
        """Find the tokens that the model would take behind each of the loaded ones."""
        tokens, positions = self._loaded()
        with self.model.evaluating():
            states = self.model.states(tokens, positions, caches=self.caches)
            logits = raw(self.model.head(states))
        chosen, logprobs = sample_tokens(
            logits.reshape(tokens.size, -1), seed=0, banned=self._banned, top_k=1,
            vocab_size=self.model.config.vocab,
        )  # fmt: skip
        self._chosen[: tokens.size], self._logprobs[: tokens.size] = chosen, logprobs

    def found(self) -> list[np.ndarray]:
        """Return the tokens (texts, width) of ``step``, and their log-probabilities."""
        count = self.texts * self.width
        values = Reading(self._chosen[:count], self._logprobs[:count]).values()
        return [x.reshape(self.texts, self.width) for x in values]

    def _loaded(self):
        *_, tokens, positions = parts(self._inputs.device, self._sizes(self.width))
        return [x.reshape(self.texts, self.width) for x in (tokens, positions)]

    def _sizes(self, width):
        """Return how many integers there are of: keys before and behind a pass, and where a text's
        tokens begin among all; tokens and their positions."""
        texts = self.texts
        return texts, texts, texts, texts * width, texts * width


class Text:
    """A request on its way: its new ``tokens`` and their ``score``."""

    def __init__(self, request: Request) -> None:
        self.request, self.tokens = request, list[int]()
        self.score, self.ended = np.float32(0), False
        self.over = request.limit == 0
        self._lookup = Lookup(request.tokens)
        self.last = int(request.tokens[-1])

    @property
    def most_keys(self) -> int:
        """The tokens before the last one that may come."""
        return len(self.request.tokens) - 1 + self.request.limit

    @property
    def keys(self) -> int:
        """The tokens before the last one."""
        return len(self.request.tokens) - 1 + len(self.tokens)

    def proposal(self, most: int) -> list[int]:
        """Return up to ``most`` tokens that may come next."""
        left = self.request.limit - len(self.tokens)
        return [] if self.over else self._lookup.proposal(min(most, left - 1))

    def take(self, proposed: Sequence[int], chosen: Any, logprobs: Any, eos: Sequence[int]) -> int:
        """Append tokens up to the first that was not proposed; return how many were."""
        accepted = 0
        for i, token in enumerate(chosen[: len(proposed) + 1].tolist()):
            right = i < len(proposed) and token == proposed[i]
            accepted += right
            self.score += logprobs[i]
            self.ended = token in eos
            self.over = self.ended or logprobs[i] == -np.inf
            if not self.over:
                self.tokens.append(token)
                self._lookup.add(token)
                self.last, self.over = token, len(self.tokens) == self.request.limit
            if self.over or not right:
                break
        return accepted

    def extend(self, rest: Hypothesis) -> None:
        """Append what follows."""
        self.tokens += rest.tokens
        self.score, self.ended = self.score + np.float32(rest.score), rest.ended

    def hypothesis(self) -> Hypothesis:
        """Return the text as a Hypothesis."""
        normalised = float(self.score / max(1, len(self.tokens) + self.ended))
        return Hypothesis(self.tokens, float(self.score), normalised, self.ended)


def passes(
    search: LookupSearch, texts: Sequence[Text], eos: Sequence[int], speculation: Speculation,
    run: Callable[[str, Callable[[], None]], None],
) -> Iterator[list[tuple[Text, list[int]]]]:  # fmt: skip
    """Continue texts; yield behind each pass (a text, its new tokens) of those that have some.

    It ends when all texts are over, or when too few proposals hold. ``run(name, step)``: calls a
    step of ``search``.
    """
    before = [text.request.tokens[:-1] for text in texts]
    if longest := max(map(len, before)):
        search.load(before, [0] * len(texts), rounded(longest, search.model.config.block))
        run("read", search.read)
    held = asked = 0
    for number in itertools.count(1):
        proposals = [text.proposal(speculation.tokens) for text in texts]
        rows = [[text.last, *proposed] for text, proposed in zip(texts, proposals, strict=True)]
        width = speculation.tokens + 1 if any(proposals) else 1
        search.load(rows, [text.keys for text in texts], width)
        run("step", search.step)
        found, new = search.found(), []
        speculation.passes += 1
        for text, proposed, *row in zip(texts, proposals, *found, strict=False):
            if not text.over:
                known = len(text.tokens)
                accepted = text.take(proposed, *row, eos)
                speculation.proposed += len(proposed)
                speculation.accepted += accepted
                held, asked = held + accepted, asked + LEAST_ACCEPTED
                new.append((text, text.tokens[known:]))
        yield [(text, tokens) for text, tokens in new if tokens]
        if all(text.over for text in texts):
            return
        if number % WINDOW == 0:
            if held < asked:
                speculation.given_up += 1
                return
            held = asked = 0
