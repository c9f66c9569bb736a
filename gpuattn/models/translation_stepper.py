"""Decoding a translation token by token, with or without a key-value cache."""

from typing import Any

import numpy as np

from gpuattn.arrays import get_xp
from gpuattn.autodiff.tape import raw
from gpuattn.models.stepping import CachedStepper
from gpuattn.nn.attention import HostMemory
from gpuattn.typing import Array


class TranslationStepper(CachedStepper):
    """Steps through the translations of B packed sources; see ``decode.stepper.Stepper``.

    The memory is laid out as a padded batch once. Its keys and values, one set for each sentence,
    serve all of its beams.
    """

    def __init__(self, model: Any, batch: Any, max_length: int, beam: int, kv_cache: bool) -> None:
        with model.evaluating():
            memory = raw(model.encode(batch))
        xp = get_xp(memory)
        first, lengths = batch.cu_source[:-1], batch.cu_source[1:] - batch.cu_source[:-1]
        rows = first[:, None] + xp.arange(batch.max_source)
        memory = memory[xp.minimum(rows, len(memory) - 1)]  # past the end of a sentence: never read
        with model.evaluating():
            self.whole_memory = model.memory(memory) if kv_cache else memory
        if kv_cache and xp is np:
            self.whole_memory = [HostMemory.of(k, v, lengths) for k, v in self.whole_memory]
        self.whole_lengths = lengths
        super().__init__(model, len(lengths), model.config.vocab, max_length, beam, kv_cache)

    def start(self, beam: int) -> None:
        super().start(beam)
        self.memory, self.lengths = self.whole_memory, self.whole_lengths

    def keep(self, sentences: Array) -> bool:
        self.lengths = self.lengths[sentences]
        if self.kv_cache:
            self.memory = [memory.kept(sentences) for memory in self.memory]
        else:
            self.memory = self.memory[sentences]
        return super().keep(sentences)

    def _new_caches(self, rows):
        return [layer.attention.new_cache(rows, self.max_length) for layer in self.model.decoder]

    def _logits(self, tokens, first, caches):
        positions = self._positions(tokens, first)
        x = self.model.decode(
            self.model.target(tokens, positions), self.memory, positions=positions,
            memory_lengths=self.lengths, caches=caches,
        )  # fmt: skip
        return self.model.logits(x[:, -1])
