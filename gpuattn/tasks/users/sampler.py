"""Sampling from a trained language model with its tokenizer."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from gpuattn import rng
from gpuattn.arrays import get_xp, to_cpu
from gpuattn.data.batching import IGNORED
from gpuattn.data.tokenizer import EOS, TextStream
from gpuattn.decode.sample import sample
from gpuattn.decode.stepper import Stepper
from gpuattn.engine import SCORED_TOKENS, Engine, Speculation
from gpuattn.errors import ConfigError, DataError, problem
from gpuattn.tasks.users.engines import check_cache, engine_for
from gpuattn.tasks.users.scored import Scored

TEMPERATURE = 0.8


class Sample(NamedTuple):
    """A text with its prompt; the log-probability and the number of the tokens that follow it.

    ``score``: at temperature 1, whatever the draws were; padding and other marks cannot come.
    """

    text: str
    score: float
    tokens: int


class Sampler:
    """Continues texts with a language model such as GPT2.

    ``config``: the run's TrainConfig. ``metrics``: what was saved with the weights: update, loss,
    scores.
    """

    task = "language"
    by_line = {"score": ()}  # what ranks share, see ``dealt``

    def __init__(
        self, config: Any, model: Any, tokenizer: Any, metrics: Mapping[str, Any] | None = None
    ) -> None:
        self.config, self.model, self.tokenizer = config, model, tokenizer
        self.metrics = metrics or {}
        self._engine: Engine | None = None  # made when it is first needed

    def sample(self, prompt: str = "", **settings: Any) -> list[str]:
        """Return texts that begin with ``prompt``. Arguments and errors: those of ``generate``."""
        return [sample.text for sample in self.generate(prompt, **settings)]

    def generate(
        self, prompt: str = "", *, tokens: int, count: int = 1, first: int = 0,
        temperature: float = TEMPERATURE, top_k: int | None = None, top_p: float = 1.0,
        min_p: float = 0.0, seed: Any = None, kv_cache: bool = True, batch_invariant: bool = False,
        speculate: Speculation | None = None, stream: Callable[[str], None] | None = None,
    ) -> list[Sample]:  # fmt: skip
        """Return ``count`` Samples that begin with ``prompt`` and continue it by ``tokens`` tokens.

        Without a prompt a text begins like a line; of a run with ``documents`` every text begins
        like a document. ``first``: the number of the first text: text n of a seed is the same, but
        for rounding, however many are drawn with it. ``temperature`` to ``seed``: see
        ``decode.sample.sample``; temperature 0 takes the most probable token each time. The context
        has ``block`` tokens: a longer text restarts with the last half of them as its prompt, so a
        step costs as much as in a short text. ``kv_cache=False`` recomputes the context at each
        token. ``batch_invariant``: text n of a seed is the same bits however many are drawn, see
        ``Engine``. ``speculate``: with temperature 0, see ``Speculation``, which counts.
        ``stream``: called with the next part of the first text whenever there is one. Raises
        DataError for a prompt with characters that the tokenizer lacks.
        """
        if count < 1 or tokens < 0 or first < 0:
            got, accepted = f"{count}, {tokens} and {first}", "from 1, from 0 and from 0 on"
            raise ConfigError(problem("sample", "count, tokens and first", got, accepted))
        check_cache(kv_cache, batch_invariant)
        if speculate is not None and not kv_cache:
            accepted = "None without a key-value cache"
            raise ConfigError(problem("sample", "speculate", speculate.tokens, accepted))
        begin = [] if prompt else [self.tokenizer.line_end]
        if self.config and self.config.documents:  # a document's first token, see ``batching``
            begin = [EOS]
        ids = begin + self.tokenizer.encode_text(prompt)
        texts, scores = np.array([ids] * count, np.int32), np.zeros(count)
        settings: dict[str, Any] = {
            "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
            "kv_cache": kv_cache, "batch_invariant": batch_invariant, "speculate": speculate,
        }  # fmt: skip
        numbers = np.arange(first, first + count, dtype=np.int32)
        key, end = rng.as_key(seed), len(ids) + tokens
        said = TextStream(self.tokenizer, stream) if stream else None
        if said:
            said.add(ids[len(begin) :])
        while texts.shape[1] < end:
            step = texts.shape[1] - len(ids)
            now = key._replace(step=key.step + step)
            found = self._longer(texts, end, said, seed=now, numbers=numbers, **settings)
            texts = np.hstack([texts, np.array([text.tokens for text in found], np.int32)])
            scores += [text.score for text in found]
        if said:
            said.close()
        decoded = (self.tokenizer.decode_text(text[len(begin) :].tolist()) for text in texts)
        return [Sample(*row, tokens) for row in zip(decoded, scores.tolist(), strict=True)]

    def score(self, lines: Sequence[str], *, batch_tokens: int = SCORED_TOKENS) -> list[Scored]:
        """Return how probable each line is as a line of text: after a line end, its own at the end.

        ``batch_tokens``: of a batch of lines, the shorter ones padded. Raises DataError for a line
        longer than ``block``, its end included, and for characters that the tokenizer lacks.
        """
        ids = [self.check(line) for line in lines]
        found = [Scored([], []) for _ in lines]
        for chosen in _rectangles(list(map(len, ids)), batch_tokens):
            longest = max(len(ids[i]) for i in chosen)
            labels = np.full((len(chosen), longest), IGNORED, np.int32)
            for row, i in zip(labels, chosen, strict=True):
                row[: len(ids[i])] = ids[i]
            tokens = np.empty_like(labels)
            tokens[:, 0] = self.tokenizer.line_end
            tokens[:, 1:] = np.maximum(labels[:, :-1], 0)
            xp = get_xp(self.model.parameters()[0].data)
            scores = self.model.log_probabilities(xp.asarray(tokens), xp.asarray(labels))
            for i, row in zip(chosen, to_cpu(scores), strict=True):
                pieces = [self.tokenizer.piece(token) for token in ids[i]]
                found[i] = Scored(pieces, row[: len(ids[i])].tolist())
        return found

    def check(self, line: str) -> list[int]:
        """Return the token ids of a line to score, its end included. DataError: see ``score``."""
        ids, block = self.tokenizer.encode_text(f"{line}\n"), self.model.config.block
        if len(ids) > block:
            accepted = f"up to {block} (--block of the run)"
            got = f"{len(ids)} tokens long with its end"
            raise DataError(problem("score", "the line", got, accepted))
        return ids

    def _longer(self, texts, end, said, *, kv_cache, batch_invariant, speculate, **settings):
        """Return Hypotheses that continue texts (count, T) to ``end``, or to the block's end."""
        block, xp = self.model.config.block, get_xp(self.model.parameters()[0].data)
        seen = texts[:, -max(1, block // 2, block + 1 - (end - texts.shape[1])) :]
        more = min(end - texts.shape[1], block + 1 - seen.shape[1])
        settings["banned"] = self.tokenizer.specials
        if batch_invariant or speculate or (kv_cache and xp is not np):
            settings["limits"] = [more] * len(seen)
            self._engine = engine_for(
                self._engine, self.model, lambda engine: engine.generate(seen, **settings),
                batch_invariant=batch_invariant,
            )  # fmt: skip
            tell = (lambda i, tokens: i or said.add(tokens)) if said else None
            return self._engine.generate(seen, tell=tell, speculate=speculate, **settings)
        if settings["temperature"] == 0:
            settings |= {"temperature": 1.0, "top_k": 1}
        stepper = self.model.stepper(xp.asarray(seen), more, kv_cache=kv_cache)
        first = stepper.first_tokens
        found = sample(
            _Told(stepper, said) if said else stepper, bos=first, eos=None, max_length=more,
            **settings,
        )  # fmt: skip
        if said:
            said.add(found[0].tokens[-1:])  # no step follows the last one
        return found


class _Told(Stepper):
    """A Stepper that adds the tokens of its first text to a TextStream as they come."""

    def __init__(self, stepper, said):
        self._stepper, self._said = stepper, said
        self.sentences, self.xp = stepper.sentences, stepper.xp

    def start(self, beam):
        self._stepper.start(beam)

    def step(self, tokens, position):
        if position:
            self._said.add([int(tokens[0])])
        return self._stepper.step(tokens, position)

    def reorder(self, parents):
        self._stepper.reorder(parents)


def _rectangles(lengths, most):
    """Yield indices of near-equal lengths, whose count times the greatest is up to ``most``."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    begin = 0
    while begin < len(order):
        count = max(1, most // lengths[order[begin]])
        yield order[begin : begin + count]
        begin += count
