"""Decoding of a text token by token, with or without a key-value cache."""

from typing import Any

from gpuattn.errors import problem
from gpuattn.models.stepping import CachedStepper
from gpuattn.typing import Array


class GPT2Stepper(CachedStepper):
    """Continues B prompts of equal length; see ``decode.stepper.Stepper``.

    Decoding begins with the last token of each prompt: pass ``bos=first_tokens``. The tokens before
    it are computed in the same step, at position 0.
    """

    def __init__(
        self, model: Any, prompt: Array, max_length: int, beam: int, kv_cache: bool
    ) -> None:
        if prompt.ndim != 2 or prompt.shape[1] == 0:
            got = f"of shape {prompt.shape}"
            raise ValueError(problem("GPT2.stepper", "prompt", got, "(B, P) with P >= 1"))
        block, asked = model.config.block, prompt.shape[1] - 1 + max_length
        if asked > block:
            accepted = f"together up to block + 1, {block + 1}"
            got = f"{prompt.shape[1]} tokens and max_length {max_length}"
            raise ValueError(problem("GPT2.stepper", "prompt", got, accepted))
        self.prompt = prompt
        self.first_tokens = prompt[:, -1]
        super().__init__(model, len(prompt), model.config.vocab, max_length, beam, kv_cache)

    def _begin(self, tokens):
        before = self.prompt[:, :-1].repeat(self.beam, axis=0)
        return self.xp.concatenate([before, tokens], axis=1)

    def _new_caches(self, rows):
        length = self.prompt.shape[1] - 1 + self.max_length
        return [layer.attention.new_cache(rows, length) for layer in self.model.layers]

    def _logits(self, tokens, first, caches):
        positions = self._positions(tokens, first)
        return self.model.head(self.model.states(tokens, positions, caches=caches)[:, -1])
