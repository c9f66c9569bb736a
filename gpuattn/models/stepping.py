"""What the steppers of the models share: rows of beams, with or without key-value caches."""

import abc
from typing import Any

import numpy as np

from gpuattn.arrays import get_xp
from gpuattn.autodiff.tape import raw
from gpuattn.decode.stepper import Stepper
from gpuattn.errors import problem
from gpuattn.typing import Array


class CachedStepper(Stepper):
    """A Stepper over sentences * beam texts that grow by a token at a step.

    With ``kv_cache`` a step computes the new tokens only; without it the whole text.
    A model supplies ``_new_caches`` and ``_logits``.
    """

    def __init__(
        self, model: Any, sentences: int, vocab: int, max_length: int, beam: int, kv_cache: bool
    ) -> None:
        self.model, self.sentences, self.vocab = model, sentences, vocab
        self.xp = get_xp(model.parameters()[0].data)
        self.max_length, self.kv_cache = max_length, kv_cache
        self.start(beam)

    @abc.abstractmethod
    def _new_caches(self, rows: int) -> list[Any]:
        """Return an empty KeyValueCache for each layer, whose rows move with the beams."""

    @abc.abstractmethod
    def _logits(self, tokens: Array, first: int, caches: list[Any] | None) -> Any:
        """Return (rows, columns) for tokens (rows, T), the first of them at position ``first``."""

    def start(self, beam: int) -> None:
        self.beam, self.position = beam, 0
        self.text: Any = None
        self.caches: Any = None
        self.length = 0  # tokens in the caches

    def step(self, tokens: Array, position: int) -> Array:
        if position != self.position:
            accepted = f"the next one, {self.position}"
            raise ValueError(problem("step", "position", position, accepted))
        tokens = tokens[:, None]
        if position == 0:
            tokens = self._begin(tokens)
        elif not self.kv_cache:
            tokens = self.xp.concatenate([self.text, tokens], axis=1)
        with self.model.evaluating():
            if self.kv_cache and position == 0:
                self.caches = self._new_caches(len(tokens))
            logits = raw(self._logits(tokens, self.length, self.caches))
        if self.kv_cache:
            self.length += tokens.shape[1]
        else:
            self.text = tokens
        self.position += 1
        return logits[:, : self.vocab]

    def reorder(self, parents: Array) -> None:
        if self.kv_cache:
            for cache in self.caches:
                cache.reorder(parents)
        else:
            self.text = self.text[parents]

    def keep(self, sentences: Array) -> bool:
        rows = (sentences[:, None] * self.beam + self.xp.arange(self.beam)).ravel()
        if self.kv_cache:
            for cache in self.caches:
                cache.keep(rows)
        else:
            self.text = self.text[rows]
        return True

    def _positions(self, tokens, first):
        positions = self.xp.arange(first, first + tokens.shape[1], dtype=np.int32)
        return self.xp.ascontiguousarray(self.xp.broadcast_to(positions, tokens.shape))

    def _begin(self, tokens):
        """Return what is computed at position 0 for the ``tokens`` (rows, 1) given there."""
        return tokens
