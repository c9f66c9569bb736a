"""What the configurations of the models have in common."""

import abc
from typing import Any, ClassVar

from gpuattn.errors import ConfigError, problem
from gpuattn.models import flops, memory

ROWS = 64  # tables of the vocabulary have a multiple of so many rows: matmuls are faster
CHOICES = {
    "norm": ("pre", "post"),
    "positions": ("sinusoidal", "learned", "rotary", "sinusoidal_halves"),
    "activation": ("relu", "gelu", "gelu_exact", "silu", "swiglu"),
}
# What is recomputed in the backward pass to save memory: nothing; the layers, of which only the
# inputs are kept; with "full", also the logits, of which a slice exists at a time.
CHECKPOINT = ("none", "block", "full")


def padded_rows(vocab: int) -> int:
    """Return how many rows a padded table for ``vocab`` tokens has."""
    return -(-vocab // ROWS) * ROWS


class ModelConfig(abc.ABC):
    """The size and kind of a Transformer, and the FLOPs and the memory of its training step.

    A frozen dataclass with ``vocab``, ``d_model``, ``heads``, ``kv_heads``, ``ffn``,
    ``activation`` and ``pad_vocab`` derives from it.
    """

    vocab: int
    d_model: int
    heads: int
    pad_vocab: bool
    head_dim: int | None = None  # d_model / heads
    output_bias: bool = False  # whether a bias comes to the logits
    predicted: float = 1.0  # the share of tokens that have logits in training
    units: ClassVar[str] = "tokens"  # what ``vocab`` counts

    @property
    def head_size(self) -> int:
        """The size of a head of attention."""
        return self.head_dim or self.d_model // self.heads

    @property
    @abc.abstractmethod
    def stacks(self) -> tuple[tuple[int, bool], ...]:
        """(number of layers, whether they have cross-attention) of each stack of layers."""

    @abc.abstractmethod
    def flops(self, *lengths: Any) -> float:
        """Return the FLOPs of a step on sequences of ``lengths``, (B,) for each side of a batch.

        How they are counted: ``models.flops``.
        """

    @abc.abstractmethod
    def token_weights(self) -> int:
        """Return how many weights of linear layers a token meets, on all sides together."""

    @property
    def table_rows(self) -> int:
        """Rows of the tables: one for each token of the vocabulary, or padded."""
        return padded_rows(self.vocab) if self.pad_vocab else self.vocab

    def layer_weights(self) -> int:
        """Return how many numbers the matrices in the layers hold."""
        return flops.layer_weights(self)

    def activation_bytes(self, tokens: int, itemsize: int, checkpoint: str) -> int:
        """Return the most that the activations of a training step take, in bytes.

        ``tokens``: of a batch. ``itemsize``: of the dtype that the step computes in.
        ``checkpoint``: one of ``CHECKPOINT``.
        """
        return memory.activation_bytes(self, tokens, itemsize, checkpoint)

    def evaluation_bytes(self, tokens: int, itemsize: int) -> int:
        """Return the bytes of a forward pass that keeps nothing. Arguments: see above."""
        return memory.evaluation_bytes(self, tokens, itemsize)


class DecoderConfig(ModelConfig):
    """The config of a model that is one stack of causal layers, without cross-attention."""

    layers: int

    @property
    def stacks(self) -> tuple[tuple[int, bool], ...]:
        return ((self.layers, False),)

    def flops(self, *lengths: Any) -> float:
        (rows,) = lengths
        return flops.decoder_flops(self, rows)

    def token_weights(self) -> int:
        return flops.decoder_weights(self)


def check_config(config: Any, choices: dict[str, tuple] = CHOICES, **sizes: Any) -> None:
    """Raise ConfigError unless sizes are positive, heads divide the width and choices are known.

    ``config``: a dataclass with ``d_model``, ``heads``, ``kv_heads``, ``positions``, ``dropout``,
    ``pad_vocab`` and any other of ``choices``.
    """
    name = type(config).__name__
    sizes |= {"d_model": config.d_model, "heads": config.heads}
    for field in ("kv_heads", "head_dim"):
        if getattr(config, field) is not None:
            sizes[field] = getattr(config, field)
    for field, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigError(problem(name, field, repr(size), "a whole number from 1 on"))
    if config.head_dim is None and config.d_model % config.heads:
        accepted = f"numbers that divide d_model, {config.d_model}"
        raise ConfigError(problem(name, "heads", config.heads, accepted))
    if config.heads % (config.kv_heads or config.heads):
        accepted = f"numbers that divide heads, {config.heads}"
        raise ConfigError(problem(name, "kv_heads", config.kv_heads, accepted))
    if config.positions == "rotary" and config.head_size % 2:
        accepted = "an even number for rotary positions"
        field = "head_dim" if config.head_dim else "d_model / heads"
        raise ConfigError(problem(name, field, config.head_size, accepted))
    if not isinstance(config.pad_vocab, bool):
        raise ConfigError(problem(name, "pad_vocab", repr(config.pad_vocab), "True or False"))
    if not 0 <= config.dropout < 1:
        raise ConfigError(problem(name, "dropout", config.dropout, "0 <= dropout < 1"))
    drop = getattr(config, "layer_drop", 0)
    if not 0 <= drop < 1:
        raise ConfigError(problem(name, "layer_drop", drop, "0 <= layer_drop < 1"))
    for field, values in choices.items():
        value = getattr(config, field, values[0])
        if value not in values:
            raise ConfigError(problem(name, field, repr(value), " or ".join(map(repr, values))))
