"""BERT, the encoder: post-norm, learned positions, token types, a pooler and a head for masks.

Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding"
(2019). Sentence embeddings: Reimers and Gurevych, "Sentence-BERT" (2019).
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np

from gpuattn.arrays import as_array, get_xp
from gpuattn.autodiff.tape import raw
from gpuattn.errors import ConfigError, problem
from gpuattn.models import flops
from gpuattn.models.config import CHOICES, ModelConfig, check_config
from gpuattn.nn.dropout import Dropout, RandomState, Streams
from gpuattn.nn.embedding import Embedding
from gpuattn.nn.linear import Linear
from gpuattn.nn.module import Module, constant, normal
from gpuattn.nn.norm import LayerNorm
from gpuattn.nn.transformer import TransformerEncoderLayer, run_layers
from gpuattn.ops.embedding import embedding
from gpuattn.ops.linear.bias_activation import gelu, relu
from gpuattn.ops.linear.linear import linear
from gpuattn.typing import Array

STD = 0.02  # of the initial weights
ACTIVATIONS: dict[str, Any] = {
    "gelu": gelu,
    "gelu_exact": partial(gelu, approximate="none"),
    "relu": relu,
}
POOLS = ("mean", "first")


@dataclass(frozen=True)
class BertConfig(ModelConfig):
    """The size of a Bert; the defaults are those of BERT-base (110 M parameters).

    ``max_length``: the most tokens of a text. ``types``: kinds of tokens, such as first and second
    sentence. ``activation``: "gelu_exact", "gelu" (tanh form) or "relu". ``eps``: of the norms.
    ``attention_dropout``: by default ``dropout``. ``pooler``: whether there is a layer over the
    first token. ``masked``: whether there is a head that predicts masked tokens, whose output
    layer is the table of the embedding where it is ``tied``. ``pad_vocab``: as of a
    TranslationConfig. Raises ConfigError for what does not fit together.
    """

    vocab: int = 30522
    d_model: int = 768
    heads: int = 12
    layers: int = 12
    ffn: int = 3072
    max_length: int = 512
    types: int = 2
    dropout: float = 0.1
    attention_dropout: float | None = None
    activation: str = "gelu_exact"
    eps: float = 1e-12
    pooler: bool = True
    masked: bool = False
    tied: bool = True
    pad_vocab: bool = True
    positions: ClassVar[str] = "learned"
    kv_heads: ClassVar[None] = None

    def __post_init__(self):
        sizes = {"vocab": self.vocab, "layers": self.layers, "ffn": self.ffn, "types": self.types}
        choices = CHOICES | {"activation": tuple(ACTIVATIONS)}
        check_config(self, choices, max_length=self.max_length, **sizes)

    @property
    def stacks(self) -> tuple[tuple[int, bool], ...]:
        return ((self.layers, False),)

    def flops(self, *lengths: Array) -> float:
        (rows,) = lengths
        return flops.encoder_flops(self, rows)

    def token_weights(self) -> int:
        head = self.d_model * (self.d_model + self.vocab) if self.masked else 0
        return self.layer_weights() + head


class Bert(Module):
    """An encoder of texts, (B, T) tokens. ``seed``: of initial parameters and dropout.

    ``random``: the RandomState that all dropout reads; move ``random.step`` on with each update.
    ``checkpoint``: one of ``models.config.CHECKPOINT``.
    """

    checkpoint = "none"

    def __init__(self, config: BertConfig, seed: int = 0) -> None:
        self.config = c = config
        self.random = RandomState(seed)
        rng, streams = np.random.Generator(np.random.Philox(seed)), Streams(self.random)
        self.embedding = Embedding(
            c.table_rows, c.d_model, used=c.vocab, positions="learned", max_length=c.max_length,
            streams=streams, rng=rng,
        )  # fmt: skip
        self.types = normal(rng, (c.types, c.d_model), STD)
        self.embedding_norm = LayerNorm(c.d_model, eps=c.eps)
        self.dropout = Dropout(c.dropout, streams)
        self.layers = [
            TransformerEncoderLayer(
                c.d_model, c.heads, c.ffn, dropout=c.dropout, norm="post", eps=c.eps,
                attention_dropout=c.attention_dropout, activation=c.activation, streams=streams,
                rng=rng,
            )
            for _ in range(c.layers)
        ]  # fmt: skip
        self.pooler = Linear(c.d_model, c.d_model, rng=rng) if c.pooler else None
        if c.masked:
            self.transform = Linear(c.d_model, c.d_model, rng=rng)
            self.transform_norm = LayerNorm(c.d_model, eps=c.eps)
            if c.tied:
                self.output_bias = constant(0, c.table_rows)
            else:
                self.output = Linear(c.d_model, c.table_rows, rng=rng)
        for _, p in self.named_parameters():
            if p.ndim == 2:
                p.data = normal(rng, p.shape, STD).data
        self.embedding.weight.data[c.vocab :] = 0
        if c.masked and not c.tied:
            self.output.weight.data[c.vocab :] = 0

    def states(
        self,
        tokens: Array,
        types: Array | None = None,
        lengths: Array | None = None,
        *,
        positions: Array | None = None,
        cu_seqlens: Array | None = None,
        max_seqlen: int | None = None,
    ) -> Any:
        """Return the last layer's states (B, T, d_model) for int tokens (B, T).

        ``types``: int, in the shape of ``tokens``; None: all 0. ``lengths`` (B,): int32, tokens of
        each text; what lies after them is not attended to, and the states there mean nothing.
        Texts end to end, (tokens,), take ``positions`` (tokens,), which begin at 0 in each text,
        ``cu_seqlens`` and ``max_seqlen``, and give (tokens, d_model).
        Raises ValueError for a text longer than ``max_length``.
        """
        tokens = as_array(raw(tokens), "Bert", "tokens")
        length, most = max_seqlen or tokens.shape[-1], self.config.max_length
        if length > most:
            accepted = f"up to max_length, {most}"
            raise ValueError(problem("Bert", "tokens", f"{length} tokens", accepted))
        kinds = get_xp(tokens).zeros_like(tokens) if types is None else types
        x = self.embedding(tokens, positions) + embedding(kinds, self.types)
        x = self.dropout(self.embedding_norm(x))
        return run_layers(
            self.layers, None, x, key_lengths=lengths, cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen, recompute=self.checkpoint != "none",
        )  # fmt: skip

    def pooled(self, states: Any) -> Any:
        """Return (B, d_model), tanh of a layer over the first of the states (B, T, d_model)."""
        if self.pooler is None:
            raise ConfigError(problem("Bert.pooled", "pooler", False, "a model that has one"))
        return np.tanh(self.pooler(states[:, 0]))

    def head(self, states: Any) -> Any:
        """Return the logits of masked tokens, (..., padded vocabulary), for states."""
        c = self.config
        if not c.masked:
            raise ConfigError(problem("Bert.head", "masked", False, "a model with such a head"))
        x = linear(states, self.transform.weight)
        x = self.transform_norm(ACTIVATIONS[c.activation](x, self.transform.bias))
        if c.tied:
            return linear(x, self.embedding.weight, self.output_bias)
        return self.output(x)

    def logits(
        self, tokens: Array, types: Array | None = None, lengths: Array | None = None
    ) -> Any:
        """Return the logits of masked tokens (B, T, padded vocabulary), see ``states``."""
        return self.head(self.states(tokens, types, lengths))

    def embed(
        self, tokens: Array, types: Array | None = None, lengths: Array | None = None, *,
        pool: str = "mean", normalised: bool = True,
    ) -> Array:  # fmt: skip
        """Return a vector of each text, (B, d_model) in the model's dtype, without gradients.

        ``pool``: "mean" of the text's states, or the "first" one. ``normalised``: to length 1, so
        that products of vectors are their cosines. Other arguments: as of ``states``.
        """
        if pool not in POOLS:
            raise ConfigError(problem("embed", "pool", repr(pool), " or ".join(map(repr, POOLS))))
        with self.evaluating():
            states = raw(self.states(tokens, types, lengths))
        xp, dtype = get_xp(states), states.dtype
        states = states.astype(np.float64 if dtype == np.float64 else np.float32, copy=False)
        if pool == "first":
            vectors = states[:, 0]
        else:
            each = xp.full(len(states), states.shape[1]) if lengths is None else lengths
            keep = xp.arange(states.shape[1]) < each[:, None]
            total = xp.where(keep[..., None], states, 0).sum(axis=1)
            vectors = total / xp.maximum(each, 1)[:, None].astype(states.dtype)
        if normalised:
            length = xp.sqrt((vectors * vectors).sum(axis=1, keepdims=True))
            vectors = vectors / xp.maximum(length, 1e-12)
        return vectors.astype(dtype, copy=False)
