"""Sampling from a trained language model with its tokenizer."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from gpuattn import rng
from gpuattn.arrays import get_xp
from gpuattn.decode.sample import sample
from gpuattn.errors import ConfigError, problem

TEMPERATURE = 0.8


class Sampler:
    """Continues texts with a language model such as GPT2.

    ``config``: the run's TrainConfig. ``metrics``: what was saved with the weights: update, loss,
    scores.
    """

    task = "language"

    def __init__(
        self, config: Any, model: Any, tokenizer: Any, metrics: Mapping[str, Any] | None = None
    ) -> None:
        self.config, self.model, self.tokenizer = config, model, tokenizer
        self.metrics = metrics or {}

    def sample(
        self, prompt: str = "", *, tokens: int, count: int = 1, temperature: float = TEMPERATURE,
        top_k: int | None = None, top_p: float = 1.0, min_p: float = 0.0, seed: Any = None,
    ) -> list[str]:  # fmt: skip
        """Return ``count`` texts that begin with ``prompt`` and continue it by ``tokens`` tokens.

        Without a prompt a text begins like a line. ``temperature`` to ``seed``: see
        ``decode.sample.sample``; temperature 0 takes the most probable token each time. The context
        has ``block`` tokens: a longer text restarts with the last half of them as its prompt, so a
        step costs as much as in a short text. Raises DataError for a prompt with characters that
        the tokenizer lacks.
        """
        if count < 1 or tokens < 0:
            got = f"{count} and {tokens}"
            raise ConfigError(problem("sample", "count and tokens", got, "from 1, and from 0 on"))
        if temperature == 0:
            temperature, top_k = 1.0, 1
        begin = [] if prompt else [self.tokenizer.line_end]
        ids = begin + self.tokenizer.encode_text(prompt)
        texts = np.array([ids] * count, np.int32)
        settings = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        key, end = rng.as_key(seed), len(ids) + tokens
        while texts.shape[1] < end:
            step = texts.shape[1] - len(ids)
            texts = self._longer(texts, end, seed=key._replace(step=key.step + step), **settings)
        return [self.tokenizer.decode_text(text[len(begin) :].tolist()) for text in texts]

    def _longer(self, texts, end, **settings):
        """Return texts (count, T) with more tokens, up to ``end`` or to the end of the block."""
        block, xp = self.model.config.block, get_xp(self.model.parameters()[0].data)
        seen = texts[:, -max(1, block // 2, block + 1 - (end - texts.shape[1])) :]
        more = min(end - texts.shape[1], block + 1 - seen.shape[1])
        stepper = self.model.stepper(xp.asarray(seen), more)
        found = sample(
            stepper, bos=stepper.first_tokens, eos=None, max_length=more,
            banned=self.tokenizer.specials, **settings,
        )  # fmt: skip
        return np.hstack([texts, np.array([text.tokens for text in found], np.int32)])
