"""The encoder-decoder Transformer for translation, on packed sentences.

Vaswani et al., "Attention Is All You Need" (2017); pre-norm: Xiong et al., "On Layer Normalization
in the Transformer Architecture" (2020); tied embeddings: Press and Wolf (2017).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from gpuattn.arrays import as_array, get_xp, to_cpu
from gpuattn.autodiff.tape import raw
from gpuattn.autodiff.tensor import Tensor
from gpuattn.data.tokenizer import BOS, EOS
from gpuattn.errors import ConfigError, problem
from gpuattn.models import flops
from gpuattn.models.config import ModelConfig, check_config
from gpuattn.models.kinds import ModelKind, register
from gpuattn.models.loss import log_probabilities, loss_of_states
from gpuattn.models.translation_stepper import TranslationStepper
from gpuattn.nn.attention import MemoryProjection
from gpuattn.nn.dropout import RandomState, Streams
from gpuattn.nn.embedding import Embedding
from gpuattn.nn.linear import Linear
from gpuattn.nn.module import Module, constant
from gpuattn.nn.norm import LayerNorm
from gpuattn.nn.transformer import TransformerDecoderLayer, TransformerEncoderLayer, run_layers
from gpuattn.ops.linear.linear import linear
from gpuattn.typing import Array


@dataclass(frozen=True)
class TranslationConfig(ModelConfig):
    """The size and kind of a TranslationModel. Raises ConfigError for what does not fit together.

    ``vocab``: number of tokens. ``layers``: (encoder, decoder). ``ffn``: width inside the
    feed-forward networks. ``dropout``: of embeddings, branches and, without ``attention_dropout``,
    attention probabilities. ``norm``: "pre" or "post". ``positions``: "sinusoidal",
    "sinusoidal_halves", "learned", or "rotary" (in the self-attention of both sides).
    ``activation``: as of ``nn.FeedForward``. ``tied``: one table for source, target and output.
    ``max_length``: tokens of a sentence on either side, marks included. ``kv_heads``: heads of
    keys and values, which divide ``heads``; None: as many. ``pad_vocab``: tables have a multiple
    of 64 rows, which makes matmuls with them faster. ``output_bias``: whether a bias
    comes to the logits. ``layer_drop``: the probability with which training leaves a layer out for
    a batch (Fan et al., 2020). ``bos``: the token that the decoder's input begins with; ``eos``:
    the one that ends a sentence on either side.
    """

    vocab: int
    d_model: int = 256
    heads: int = 4
    layers: tuple[int, int] = (3, 3)
    ffn: int = 1024
    dropout: float = 0.1
    attention_dropout: float | None = None
    norm: str = "pre"
    positions: str = "sinusoidal"
    activation: str = "relu"
    tied: bool = True
    max_length: int = 256
    kv_heads: int | None = None
    pad_vocab: bool = True
    output_bias: bool = False
    layer_drop: float = 0.0
    bos: int = BOS
    eos: int = EOS

    def __post_init__(self):
        if isinstance(self.layers, list):  # as JSON and TOML have it
            object.__setattr__(self, "layers", tuple(self.layers))
        if not isinstance(self.layers, tuple) or len(self.layers) != 2:
            accepted = "two numbers, of encoder and decoder layers"
            raise ConfigError(problem("TranslationConfig", "layers", self.layers, accepted))
        sizes = {"vocab": self.vocab, "ffn": self.ffn, "max_length": self.max_length}
        check_config(self, encoder_layers=self.layers[0], decoder_layers=self.layers[1], **sizes)
        if self.positions.startswith("sinusoidal") and self.d_model % 2:
            accepted = "an even number for sinusoidal positions"
            raise ConfigError(problem("TranslationConfig", "d_model", self.d_model, accepted))

    @property
    def stacks(self) -> tuple[tuple[int, bool], ...]:
        return ((self.layers[0], False), (self.layers[1], True))

    def flops(self, *lengths: Array) -> float:
        source, target = lengths
        return flops.encoder_decoder_flops(self, source, target)

    def token_weights(self) -> int:
        return sum(flops.encoder_decoder_weights(self))


class Sources(NamedTuple):
    """The source side of a ``data.batching.Batch``, for translation."""

    source: Any
    source_positions: Any
    cu_source: Any
    max_source: int
    source_order: None = None


class TranslationModel(Module):
    """An encoder-decoder Transformer. ``seed`` decides the initial parameters and the dropout.

    One matmul, ``memory``, makes the keys and values of all cross-attention layers.
    ``random``: the RandomState that all dropout reads; move ``random.step`` on with each update.
    ``checkpoint``: one of ``models.config.CHECKPOINT``.
    """

    checkpoint = "none"

    def __init__(self, config: TranslationConfig, seed: int = 0) -> None:
        self.config = config
        self.random = RandomState(seed)
        rng, streams = np.random.Generator(np.random.Philox(seed)), Streams(self.random)
        c, rows, rotary = config, config.table_rows, config.positions == "rotary"
        table: dict[str, Any] = {
            "used": c.vocab, "positions": None if rotary else c.positions,
            "max_length": c.max_length,
            "scale": c.d_model**0.5, "dropout": c.dropout, "streams": streams, "rng": rng,
        }  # fmt: skip
        layer: dict[str, Any] = {
            "kv_heads": c.kv_heads, "rotary": rotary, "dropout": c.dropout,
            "attention_dropout": c.attention_dropout, "norm": c.norm, "activation": c.activation,
            "layer_drop": c.layer_drop, "streams": streams, "rng": rng,
        }  # fmt: skip
        sizes = (c.d_model, c.heads, c.ffn)
        self.source = Embedding(rows, c.d_model, **table)
        shared = self.source.weight if c.tied else None
        self.target = Embedding(rows, c.d_model, weight=shared, **table)
        self.encoder = [TransformerEncoderLayer(*sizes, **layer) for _ in range(c.layers[0])]
        self.encoder_norm = LayerNorm(c.d_model) if c.norm == "pre" else None
        self.memory = MemoryProjection(
            c.d_model, c.heads, c.layers[1], kv_heads=c.kv_heads, rng=rng
        )
        self.decoder = [
            TransformerDecoderLayer(*sizes, projects=False, **layer) for _ in range(c.layers[1])
        ]
        self.decoder_norm = LayerNorm(c.d_model) if c.norm == "pre" else None
        self.head = None if c.tied else Linear(c.d_model, rows, bias=False, rng=rng)
        self.output_bias = constant(0, rows) if c.output_bias else None

    def encode(self, batch: Any) -> Any:
        """Return the memory (source tokens, d_model) of a packed batch."""
        self._check_length("source", batch.max_source)
        x = self.source(batch.source, batch.source_positions, order=batch.source_order)
        return run_layers(
            self.encoder, self.encoder_norm, x, positions=batch.source_positions,
            cu_seqlens=batch.cu_source, max_seqlen=batch.max_source,
            recompute=self.checkpoint != "none",
        )  # fmt: skip

    def decode(self, x: Any, memory: Any, **context: Any) -> Any:
        """Return the decoder's last states for embedded targets; see TransformerDecoderLayer.

        ``memory``: from ``encode``, or what ``self.memory`` made of that. ``caches``: a
        KeyValueCache for each layer.
        """
        memories = memory if isinstance(memory, list) else self.memory(memory)
        return run_layers(
            self.decoder, self.decoder_norm, x, memories=memories,
            recompute=self.checkpoint != "none", **context,
        )  # fmt: skip

    def output(self, x: Any) -> Any:
        """Return the logits (..., padded vocabulary) of decoder states (..., d_model)."""
        return linear(x, self._head_weight(), self.output_bias)

    def logits(self, source: Array, target: Array, lengths: Array | None = None) -> Any:
        """Return the logits (B, T, padded vocabulary) of the tokens that follow each of a target.

        ``source``: int tokens (B, S), each row with its end mark. ``target``: (B, T), from ``bos``
        on. ``lengths`` (B,): int32, tokens of each source, its end mark included; what lies after
        them is not attended to. Raises ValueError for texts longer than ``max_length``.
        """
        source, target = (as_array(raw(x), "TranslationModel", "tokens") for x in (source, target))
        self._check_length("source", source.shape[-1])
        self._check_length("target", target.shape[-1])
        memory = run_layers(
            self.encoder, self.encoder_norm, self.source(source), key_lengths=lengths,
            positions=_places(source),
        )  # fmt: skip
        x = self.decode(
            self.target(target), memory, positions=_places(target), memory_lengths=lengths
        )
        return self.output(x)

    def _head_weight(self):
        return self.head.weight if self.head else self.source.weight

    def loss(self, batch: Any, label_smoothing: float = 0.1, dloss: Any = None) -> Tensor:
        """Return the mean cross-entropy per target token of a packed batch, as a Tensor.

        ``batch``: a ``data.batching.Batch``, or anything with its fields, on the model's device.
        ``dloss``: what backward will be called with, see ``cross_entropy``.
        Raises ValueError for a sentence longer than the model's ``max_length``.
        """
        return loss_of_states(
            self, self._target_states(batch), self._head_weight(), batch.labels,
            bias=self.output_bias, vocab_size=self.config.vocab, label_smoothing=label_smoothing,
            dloss=dloss,
        )  # fmt: skip

    def log_probabilities(self, batch: Any) -> Array:
        """Return the log-probability of each label of a packed batch, float32 (target tokens,).

        ``batch`` and errors: as of ``loss``.
        """
        with self.evaluating():
            states, weight = self._target_states(batch), self._head_weight()
            return log_probabilities(
                states, weight, batch.labels, self.config.vocab, self.output_bias
            )

    def _target_states(self, batch):
        """Return the decoder's last states (target tokens, d_model) of a packed batch."""
        self._check_length("target", batch.max_target)
        memory = self.encode(batch)
        x = self.target(batch.target_in, batch.target_positions, order=batch.target_order)
        return self.decode(
            x, memory, positions=batch.target_positions, cu_seqlens=batch.cu_target,
            max_seqlen=batch.max_target, cu_memory=batch.cu_source, max_memory=batch.max_source,
        )  # fmt: skip

    def pack(self, sources: Sequence[Sequence[int]]) -> Sources:
        """Return ``Sources`` of lists of token ids without marks, on the model's device."""
        xp = get_xp(self.source.weight.data)
        lengths = [len(source) + 1 for source in sources]
        flat = [token for source in sources for token in (*source, self.config.eos)]
        positions = [i for length in lengths for i in range(length)]
        bounds = np.cumsum([0, *lengths])
        tokens, places, cu = (xp.asarray(values, np.int32) for values in (flat, positions, bounds))
        return Sources(tokens, places, cu, max(lengths, default=0))

    def stepper(
        self, source_batch: Any, max_length: int, beam: int = 1, kv_cache: bool = True
    ) -> TranslationStepper:
        """Return a Stepper that decodes the sources of a batch, up to ``max_length`` tokens each.

        ``kv_cache=False`` recomputes the whole prefix at each step, for comparison.
        """
        self._check_length("target", max_length)
        return TranslationStepper(self, source_batch, max_length, beam, kv_cache)

    def attention_maps(
        self, source: Sequence[int], target: Sequence[int]
    ) -> dict[str, list[np.ndarray]]:
        """Return the attention probabilities of one sentence pair, for plots.

        ``source``, ``target``: token ids without marks. Rows of the maps are the queries
        (source + eos, or bos + target), columns the keys. Returns {"encoder": [(H, S, S) for each
        layer], "decoder": [(H, T, T)...], "cross": [(H, T, S)...]} as NumPy arrays.
        """
        stacks = {
            "encoder": [layer.attention for layer in self.encoder],
            "decoder": [layer.attention for layer in self.decoder],
            "cross": [layer.cross_attention for layer in self.decoder],
        }
        watched = [attention for stack in stacks.values() for attention in stack]
        xp = get_xp(self.source.weight.data)
        for attention in watched:
            attention.maps = []
        try:
            with self.evaluating():
                x = self.source(xp.asarray([[*source, self.config.eos]], np.int32))
                memory = run_layers(self.encoder, self.encoder_norm, x)
                target_in = xp.asarray([[self.config.bos, *target]], np.int32)
                self.decode(self.target(target_in), memory)
            return {
                name: [to_cpu(attention.maps[0][0]) for attention in stack]
                for name, stack in stacks.items()
            }
        finally:
            for attention in watched:
                attention.maps = None

    def _check_length(self, side, length):
        if length > self.config.max_length:
            accepted = f"up to max_length, {self.config.max_length}"
            advice = "Leave the sentence out, or train with a greater max_length."
            got = f"{length} tokens"
            raise ValueError(problem("TranslationModel", f"the {side}", got, accepted, advice))


def _places(tokens):
    """Return the positions of tokens (B, T), int32."""
    xp = get_xp(tokens)
    places = xp.arange(tokens.shape[-1], dtype=np.int32)
    return xp.ascontiguousarray(xp.broadcast_to(places, tokens.shape))


# ---- in a run -----------------------------------------------------------------------------------


def _configure(options, vocab):
    """Return the TranslationConfig of a TrainConfig."""
    return TranslationConfig(
        vocab=vocab, d_model=options.dim, heads=options.heads, layers=options.layers,
        ffn=options.ffn, dropout=options.dropout, layer_drop=options.layer_drop,
        attention_dropout=options.attention_dropout,
        norm=options.norm, positions=options.positions, activation=options.activation,
        max_length=options.max_len + 1, kv_heads=options.kv_heads, pad_vocab=options.pad_vocab,
    )  # fmt: skip


register(ModelKind(
    name="translation", tasks=("translation",), model=TranslationModel, configure=_configure,
    options=("ffn", "attention_dropout", "norm", "layer_drop"),
    defaults={"positions": "sinusoidal", "activation": "relu"},
    # Where an update of the default size takes seconds, smaller ones and fewer translations at an
    # evaluation let a run learn, and show it, within minutes.
    device_defaults={"numpy": {"batch": 2000, "warmup": 400, "score_pairs": 200}},
    # "tiny": as Wu et al., "Good for Misconceived Reasons" (ACL 2021), train on Multi30k.
    presets={
        "tiny": {
            "dim": 128, "heads": 4, "layers": (4, 4), "ffn": 256, "norm": "post", "dropout": 0.3,
            "lr": 5e-3, "schedule": "invsqrt", "warmup": 2000, "clip": 25.0, "ema": 0.999,
        },
        "small": {"dim": 256, "heads": 4, "layers": (4, 4), "ffn": 1024, "lr": 2e-3},
        "base": {"dim": 512, "heads": 8, "layers": (6, 6), "ffn": 2048, "lr": 7e-4, "warmup": 4000},
    },
))  # fmt: skip
