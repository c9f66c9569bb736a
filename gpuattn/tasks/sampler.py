"""Sampling from a trained language model with its tokenizer."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gpuattn import rng
from gpuattn.arrays import get_xp, to_cpu
from gpuattn.data.batching import IGNORED
from gpuattn.data.tokenizer import SPECIALS
from gpuattn.decode.sample import sample
from gpuattn.engine import SCORED_TOKENS
from gpuattn.errors import ConfigError, DataError, problem
from gpuattn.tasks.scored import Scored

TEMPERATURE = 0.8


class Sampler:
    """Continues texts with a language model such as GPT2.

    ``config``: the run's TrainConfig. ``metrics``: what was saved with the weights: update, loss,
    scores.
    """

    def __init__(
        self, config: Any, model: Any, tokenizer: Any, metrics: Mapping[str, Any] | None = None
    ) -> None:
        self.config, self.model, self.tokenizer = config, model, tokenizer
        self.metrics = metrics or {}

    def sample(
        self, prompt: str = "", *, tokens: int, count: int = 1, first: int = 0,
        temperature: float = TEMPERATURE, top_k: int | None = None, top_p: float = 1.0,
        min_p: float = 0.0, seed: Any = None,
    ) -> list[str]:  # fmt: skip
        """Return ``count`` texts that begin with ``prompt`` and continue it by ``tokens`` tokens.

        Without a prompt a text begins like a line. ``first``: the number of the first text: text n
        of a seed is the same, but for rounding, however many are drawn with it. ``temperature`` to
        ``seed``: see ``decode.sample.sample``; temperature 0 takes the most probable token each
        time. The context has ``block`` tokens: a longer text restarts with the last half of them as
        its prompt, so a step costs as much as in a short text. Raises DataError for a prompt with
        characters that the tokenizer lacks.
        """
        if count < 1 or tokens < 0 or first < 0:
            got, accepted = f"{count}, {tokens} and {first}", "from 1, from 0 and from 0 on"
            raise ConfigError(problem("sample", "count, tokens and first", got, accepted))
        if temperature == 0:
            temperature, top_k = 1.0, 1
        begin = [] if prompt else [self.tokenizer.line_end]
        ids = begin + self.tokenizer.encode_text(prompt)
        texts = np.array([ids] * count, np.int32)
        settings = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        numbers = np.arange(first, first + count, dtype=np.int32)
        key, end = rng.as_key(seed), len(ids) + tokens
        while texts.shape[1] < end:
            step = texts.shape[1] - len(ids)
            now = key._replace(step=key.step + step)
            texts = self._longer(texts, end, seed=now, numbers=numbers, **settings)
        return [self.tokenizer.decode_text(text[len(begin) :].tolist()) for text in texts]

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

    def _longer(self, texts, end, **settings):
        """Return texts (count, T) with more tokens, up to ``end`` or to the end of the block."""
        block, xp = self.model.config.block, get_xp(self.model.parameters()[0].data)
        seen = texts[:, -max(1, block // 2, block + 1 - (end - texts.shape[1])) :]
        more = min(end - texts.shape[1], block + 1 - seen.shape[1])
        stepper = self.model.stepper(xp.asarray(seen), more)
        found = sample(
            stepper, bos=stepper.first_tokens, eos=None, max_length=more,
            banned=range(SPECIALS), **settings,
        )  # fmt: skip
        return np.hstack([texts, np.array([text.tokens for text in found], np.int32)])


def _rectangles(lengths, most):
    """Yield indices of near-equal lengths, whose count times the greatest is up to ``most``."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    begin = 0
    while begin < len(order):
        count = max(1, most // lengths[order[begin]])
        yield order[begin : begin + count]
        begin += count
