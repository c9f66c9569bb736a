"""Llama, the decoder of many open models: RMSNorm, rotary positions, grouped queries, SwiGLU.

Touvron et al., "LLaMA: Open and Efficient Foundation Language Models" (2023). SmolLM has the same
layers; Qwen2 adds biases to queries, keys and values, Qwen3 norms to heads of queries and keys.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from gpuattn.errors import ConfigError
from gpuattn.models.config import CHOICES, DecoderConfig, check_config
from gpuattn.models.gpt2 import GPT2
from gpuattn.models.kinds import MODELS, ModelKind, register
from gpuattn.models.rotary_scaling import RotaryScaling
from gpuattn.nn.dropout import RandomState, Streams
from gpuattn.nn.embedding import Embedding
from gpuattn.nn.linear import Linear
from gpuattn.nn.norm import RMSNorm
from gpuattn.nn.transformer import TransformerEncoderLayer
from gpuattn.units import shown


@dataclass(frozen=True)
class LlamaConfig(DecoderConfig):
    """The size of a Llama.

    ``kv_heads``: heads of keys and values, which divide ``heads``; None: as many. ``block``: the
    longest context. ``base``: of the rotary positions, see ``gpuattn.rotary``; ``scaling``: of
    their frequencies, or None. ``qkv_bias``: whether queries, keys and values have biases; nothing
    else has. ``head_dim``: the size of a head, d_model / heads by default. ``qk_norm``: whether an
    RMSNorm is over each head of queries and keys. ``tied``, ``pad_vocab``, ``layer_drop``: as of a
    GPT2Config.
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
    layer_drop: float = 0.0
    scaling: RotaryScaling | None = None
    positions: ClassVar[str] = "rotary"
    activation: ClassVar[str] = "swiglu"

    def __post_init__(self):
        sizes = {"vocab": self.vocab, "layers": self.layers, "block": self.block, "ffn": self.ffn}
        check_config(self, CHOICES, **sizes)
        if self.scaling:
            self.scaling.frequencies(self.base, self.head_size)


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
        scaling: dict[str, Any] = {}
        if c.scaling:
            scaling["rotary_frequencies"] = c.scaling.frequencies(c.base, c.head_size)
            scaling["rotary_scale"] = c.scaling.scale
        self.layers = [
            TransformerEncoderLayer(
                c.d_model, c.heads, c.ffn, kv_heads=c.kv_heads, rotary=True, rotary_base=c.base,
                causal=True, dropout=c.dropout, layer_drop=c.layer_drop,
                norm_kind="rms", eps=c.eps, activation="swiglu",
                bias=False, qkv_bias=c.qkv_bias, head_size=c.head_dim, qk_norm=c.qk_norm,
                streams=streams, rng=rng, **scaling,
            )
            for _ in range(c.layers)
        ]  # fmt: skip
        self.norm = RMSNorm(c.d_model, eps=c.eps)  # type: ignore[assignment]
        self.output = None if c.tied else Linear(c.d_model, c.table_rows, bias=False, rng=rng)
        self._initialise(rng)


# ---- in a run ---


def _configure(options, vocab):
    """Return the LlamaConfig of a TrainConfig."""
    return LlamaConfig(
        vocab=vocab, d_model=options.dim, heads=options.heads, layers=options.layers[0],
        ffn=options.ffn, block=options.block, kv_heads=options.kv_heads, dropout=options.dropout,
        layer_drop=options.layer_drop,
        pad_vocab=options.pad_vocab,
    )  # fmt: skip


def _check(options: Any) -> None:
    if options.layers[0] != options.layers[1]:
        raise ConfigError(
            f"layers is {shown(options.layers)}; accepted: one number, llama is a decoder only"
        )
    for name in ("positions", "activation"):
        value, own = getattr(options, name), getattr(LlamaConfig, name)
        if value not in (None, own):
            raise ConfigError(f"{name} is {value}; accepted: {own} for llama")


_OF_GPT2 = MODELS["gpt2"]
register(ModelKind(
    name="llama", tasks=("language",), model=Llama, configure=_configure, check=_check,
    options=("block", "ffn", "layer_drop"), notes={"positions": "rotary", "activation": "swiglu"},
    defaults={name: value for name, value in _OF_GPT2.defaults.items() if name != "bias"}
    | {"positions": "rotary", "activation": "swiglu", "ffn": 1024, "dropout": 0.0},
    device_defaults={"numpy": dict(_OF_GPT2.device_defaults["numpy"]) | {"ffn": 384}},
))  # fmt: skip
