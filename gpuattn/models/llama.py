"""Llama, the decoder of many open models: RMSNorm, rotary positions, grouped queries, SwiGLU.

Touvron et al., "LLaMA: Open and Efficient Foundation Language Models" (2023). SmolLM has the same
layers; Qwen2 adds biases to queries, keys and values, Qwen3 norms to heads of queries and keys.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gpuattn.models.config import CHOICES, DecoderConfig, check_config
from gpuattn.models.gpt2 import GPT2
from gpuattn.nn.dropout import RandomState, Streams
from gpuattn.nn.embedding import Embedding
from gpuattn.nn.linear import Linear
from gpuattn.nn.norm import RMSNorm
from gpuattn.nn.transformer import TransformerEncoderLayer


@dataclass(frozen=True)
class LlamaConfig(DecoderConfig):
    """The size of a Llama.

    ``kv_heads``: heads of keys and values, which divide ``heads``; None: as many. ``block``: the
    longest context. ``base``: of the rotary positions, see ``gpuattn.rotary``. ``qkv_bias``:
    whether queries, keys and values have biases; nothing else has. ``head_dim``: the size of a
    head, d_model / heads by default. ``qk_norm``: whether an RMSNorm is over each head of queries
    and keys. ``tied``, ``pad_vocab``: as of a GPT2Config.
    Raises ConfigError for what does not fit together.
    """

    vocab: int
    d_model: int
    heads: int
    layers: int
    ffn: int
    block: int
    kv_heads: int | None = None
    base: float = 10_000.0
    eps: float = 1e-6
    dropout: float = 0.0
    qkv_bias: bool = False
    head_dim: int | None = None
    qk_norm: bool = False
    tied: bool = False
    pad_vocab: bool = True
    positions: ClassVar[str] = "rotary"
    activation: ClassVar[str] = "swiglu"

    def __post_init__(self):
        sizes = {"vocab": self.vocab, "layers": self.layers, "block": self.block, "ffn": self.ffn}
        check_config(self, CHOICES, **sizes)


class Llama(GPT2):
    """A causal Transformer over (B, T) tokens. ``seed``: of initial parameters and dropout.

    Only its layers differ from those of GPT2: states, logits, loss and decoding are the same.
    """

    def __init__(self, config: LlamaConfig, seed: int = 0) -> None:
        self.config = c = config  # type: ignore[assignment]
        self.random = RandomState(seed)
        rng, streams = np.random.Generator(np.random.Philox(seed)), Streams(self.random)
        self.embedding = Embedding(
            c.table_rows, c.d_model, used=c.vocab, dropout=c.dropout, streams=streams, rng=rng
        )
        self.layers = [
            TransformerEncoderLayer(
                c.d_model, c.heads, c.ffn, kv_heads=c.kv_heads, rotary=True, rotary_base=c.base,
                causal=True, dropout=c.dropout, norm_kind="rms", eps=c.eps, activation="swiglu",
                bias=False, qkv_bias=c.qkv_bias, head_size=c.head_dim, qk_norm=c.qk_norm,
                streams=streams, rng=rng,
            )
            for _ in range(c.layers)
        ]  # fmt: skip
        self.norm = RMSNorm(c.d_model, eps=c.eps)  # type: ignore[assignment]
        self.output = None if c.tied else Linear(c.d_model, c.table_rows, bias=False, rng=rng)
        self._initialise(rng)
