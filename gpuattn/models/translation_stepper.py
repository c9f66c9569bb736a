"""Decoding a translation token by token, with or without a key-value cache."""

from typing import Any

import numpy as np

from gpuattn.arrays import get_xp
from gpuattn.autodiff.tape import raw
from gpuattn.errors import problem
from gpuattn.models.stepping import CachedStepper
from gpuattn.nn.attention import HostMemory
from gpuattn.typing import Array


class WatchedMemory(HostMemory):
    """A HostMemory, on NumPy or CuPy, that keeps the probabilities of the latest queries."""

    latest: Any

    def attend(self, q: Any) -> Any:
        """Return the attention of queries (B * K, 1, H, D), K for each memory, in their shape.

        ``latest``: the probabilities of the first head, float32 (B * K, S).
        """
        xp, (rows, _, heads, head_dim) = get_xp(self.k), q.shape
        k, v, q = (raw(x).astype(np.float32) for x in (self.k, self.v, q))
        sentences, keys, kv_heads, _ = k.shape
        # (B, Hk, K * H / Hk, D)
        grouped = q.reshape(sentences, -1, kv_heads, heads // kv_heads, head_dim)
        grouped = grouped.transpose(0, 2, 1, 3, 4).reshape(sentences, kv_heads, -1, head_dim)
        p = xp.matmul(grouped * head_dim**-0.5, k.transpose(0, 2, 3, 1)) + self.bias
        p = xp.exp(p - p.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        out = xp.matmul(p, v.transpose(0, 2, 1, 3))
        out = out.reshape(sentences, kv_heads, -1, heads // kv_heads, head_dim)
        each = p.reshape(sentences, kv_heads, -1, heads // kv_heads, keys)
        object.__setattr__(self, "latest", each[:, 0, :, 0].reshape(rows, keys))
        return out.transpose(0, 2, 1, 3, 4).reshape(rows, 1, heads, head_dim).astype(self.k.dtype)

    def kept(self, memories: Any) -> "WatchedMemory":
        return WatchedMemory(self.k[memories], self.v[memories], self.bias[memories])


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

    def watch(self) -> None:
        """Keep the attention of the first head of the last layer; see ``decode.Stepper.watch``."""
        if not self.kv_cache:
            accepted = "a stepper with a key-value cache"
            raise ValueError(problem("beam_search", "coverage", "asked for", accepted))
        memory, lengths = self.whole_memory[-1], self.whole_lengths
        if isinstance(memory, WatchedMemory):
            return
        if isinstance(memory, HostMemory):
            self.whole_memory[-1] = WatchedMemory(memory.k, memory.v, memory.bias)
            return
        k, v = map(raw, memory)
        past = self.xp.arange(k.shape[1]) >= lengths[:, None]
        bias = self.xp.where(past, np.float32(-np.inf), np.float32(0))[:, None, None]
        self.whole_memory[-1] = WatchedMemory(k, v, bias)

    @property
    def attention(self) -> Array:
        return self.memory[-1].latest

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
        return self.model.output(x[:, -1])
