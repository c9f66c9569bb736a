"""Decoding a translation token by token, with or without a key-value cache."""

import numpy as np

from gpuattn.arrays import get_xp
from gpuattn.autodiff.tape import raw
from gpuattn.models.stepping import CachedStepper


class TranslationStepper(CachedStepper):
    """Steps through the translations of B packed sources; see ``decode.stepper.Stepper``.

    The memory is laid out as a padded batch once. Its keys and values, one set for each sentence,
    serve all of its beams.
    """

    def __init__(self, model, batch, max_length, beam, kv_cache):
        with model.evaluating():
            memory = raw(model.encode(batch))
        xp = get_xp(memory)
        first, lengths = batch.cu_source[:-1], batch.cu_source[1:] - batch.cu_source[:-1]
        rows = first[:, None] + xp.arange(batch.max_source)
        self.memory = memory[xp.minimum(rows, len(memory) - 1)]  # behind a sentence: never read
        self.lengths = lengths
        super().__init__(model, len(lengths), model.config.vocab, max_length, beam, kv_cache)

    def _new_caches(self, rows):
        return [layer.new_cache(self.memory, rows, self.max_length) for layer in self.model.decoder]

    def _stores(self):
        return [cache.own for cache in self.caches]

    def _logits(self, tokens, first, caches):
        positions = self.xp.arange(first, first + tokens.shape[1], dtype=np.int32)
        x = self.model.target(tokens, self.xp.broadcast_to(positions, tokens.shape))
        x = self.model.decode(x, memory=self.memory, memory_lengths=self.lengths, caches=caches)
        return self.model.logits(x[:, -1])
