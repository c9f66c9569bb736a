"""GPT-2, the decoder-only language model: pre-norm, learned or rotary positions, tied output.

Radford et al., "Language Models are Unsupervised Multitask Learners" (2019).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from gpuattn.arrays import as_array
from gpuattn.autodiff.tape import raw
from gpuattn.autodiff.tensor import Tensor
from gpuattn.errors import ConfigError, problem
from gpuattn.models.config import CHOICES, DecoderConfig, check_config
from gpuattn.models.gpt2_stepper import GPT2Stepper
from gpuattn.models.kinds import ModelKind, register
from gpuattn.models.loss import log_probabilities, loss_of_states
from gpuattn.nn.dropout import RandomState, Streams
from gpuattn.nn.embedding import Embedding
from gpuattn.nn.linear import Linear
from gpuattn.nn.module import Module, normal
from gpuattn.nn.norm import LayerNorm
from gpuattn.nn.transformer import TransformerEncoderLayer, fill_caches, run_layers
from gpuattn.ops.linear.linear import linear
from gpuattn.typing import Array
from gpuattn.units import AUTO, shown

STD = 0.02  # of the initial weights
POSITIONS = "learned", "rotary"  # sinusoidal values would be far larger than such embeddings


@dataclass(frozen=True)
class GPT2Config(DecoderConfig):
    """The size of a GPT2; the defaults are the smallest one published (124 M parameters).

    ``block``: the longest context. ``bias``: whether linear layers and norms have biases.
    ``kv_heads``, ``positions``, ``activation``, ``pad_vocab``: as of a TranslationConfig.
    ``inner``: width inside the feed-forward networks, 4 * d_model by default. ``eps``: of the
    norms. ``tied``: whether the output layer is the table of the embedding.
    ``layer_drop``: as of a TranslationConfig.
    Raises ConfigError for what does not fit together.
    """

    vocab: int = 50257
    d_model: int = 768
    heads: int = 12
    layers: int = 12
    block: int = 1024
    dropout: float = 0.0
    bias: bool = True
    kv_heads: int | None = None
    positions: str = "learned"
    activation: str = "gelu"
    pad_vocab: bool = True
    inner: int | None = None
    eps: float = 1e-5
    tied: bool = True
    layer_drop: float = 0.0

    def __post_init__(self):
        choices = CHOICES | {"positions": POSITIONS}
        sizes = {"vocab": self.vocab, "layers": self.layers, "block": self.block, "ffn": self.ffn}
        check_config(self, choices, **sizes)

    @property
    def ffn(self) -> int:
        """Width inside the feed-forward networks."""
        return 4 * self.d_model if self.inner is None else self.inner


class GPT2(Module):
    """A causal Transformer over (B, T) tokens. ``seed``: of initial parameters and dropout.

    The embedding table has its rows padded to a multiple of 64, unless ``pad_vocab`` is False.
    ``random``: the RandomState that all dropout reads; move ``random.step`` on with each update.
    ``checkpoint``: one of ``models.config.CHECKPOINT``.
    """

    checkpoint = "none"

    def __init__(self, config: GPT2Config, seed: int = 0) -> None:
        self.config = c = config
        self.random = RandomState(seed)
        rng, streams = np.random.Generator(np.random.Philox(seed)), Streams(self.random)
        self.embedding = Embedding(
            c.table_rows, c.d_model, used=c.vocab,
            positions="learned" if c.positions == "learned" else None,
            max_length=c.block, dropout=c.dropout, streams=streams, rng=rng,
        )  # fmt: skip
        self.layers = [
            TransformerEncoderLayer(
                c.d_model, c.heads, c.ffn, kv_heads=c.kv_heads,
                rotary=c.positions == "rotary", causal=True, dropout=c.dropout,
                activation=c.activation, bias=c.bias, eps=c.eps, layer_drop=c.layer_drop,
                streams=streams, rng=rng,
            )
            for _ in range(c.layers)
        ]  # fmt: skip
        self.norm = LayerNorm(c.d_model, bias=c.bias, eps=c.eps)
        self.output = None if c.tied else Linear(c.d_model, c.table_rows, bias=False, rng=rng)
        self._initialise(rng)

    def _initialise(self, rng):
        """Draw normal weights; the projections into the residual stream are scaled by its 2 L
        branches."""
        for path, p in self.named_parameters():
            if p.ndim == 2:
                branch = path.endswith("out.weight")
                std = STD / (2 * self.config.layers) ** 0.5 if branch else STD
                p.data = normal(rng, p.shape, std).data
        for table in (self.embedding.weight, self._output_weight()):
            table.data[self.config.vocab :] = 0

    def states(
        self,
        tokens: Array,
        positions: Array | None = None,
        *,
        caches: list[Any] | None = None,
        order: Any = None,
        cu_seqlens: Array | None = None,
        max_seqlen: int | None = None,
    ) -> Any:
        """Return the last layer's states (B, T, d_model) for int tokens (B, T), T up to ``block``.

        ``positions`` (B, T) and ``caches``, a KeyValueCache for each layer, continue a text.
        ``order``: the loader's sorted token order, for the gradient of the embedding.
        Texts end to end, (tokens,), take ``positions`` (tokens,), which begin at 0 in each text,
        ``cu_seqlens`` and ``max_seqlen``, up to ``block``, and give (tokens, d_model).
        Raises ValueError for a text longer than ``block``.
        """
        x = self._embedded(tokens, positions, order, max_seqlen)
        return run_layers(
            self.layers, self.norm, x, caches=caches, positions=positions, cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen, recompute=self.checkpoint != "none",
        )  # fmt: skip

    def fill(self, tokens: Array, positions: Array | None = None, *, caches: list[Any]) -> None:
        """Store the keys and values of int tokens (B, T) in ``caches``, one for each layer.

        Arguments and errors: those of ``states``, which stores the same, but for the rounding of
        one product: of the last layer only keys and values are computed here.
        """
        fill_caches(self.layers, self._embedded(tokens, positions), caches, positions)

    def _embedded(self, tokens, positions, order=None, max_seqlen=None):
        """Return the input of the first layer; arguments and errors: those of ``states``."""
        tokens = as_array(raw(tokens), "GPT2", "tokens")
        length = max_seqlen or tokens.shape[-1]
        if length > self.config.block:
            got, accepted = f"{length} tokens", f"up to block, {self.config.block}"
            raise ValueError(problem("GPT2", "tokens", got, accepted, "Give the last ones only."))
        return self.embedding(tokens, positions, order=order)

    def head(self, states: Array) -> Any:
        """Return (..., padded vocabulary) for states (..., d_model)."""
        return linear(states, self._output_weight())

    def _output_weight(self):
        return self.output.weight if self.output else self.embedding.weight

    def logits(self, tokens: Array) -> Any:
        """Return next-token logits (B, T, padded vocabulary) for int tokens (B, T)."""
        return self.head(self.states(tokens))

    def loss(
        self,
        tokens: Array,
        labels: Array,
        dloss: Any = None,
        *,
        label_smoothing: float = 0.0,
        order: Any = None,
        positions: Array | None = None,
        cu_seqlens: Array | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:
        """Return the mean cross-entropy of labels (B, T), the next tokens, as a Tensor.

        ``dloss``: what backward will be called with, see ``cross_entropy``. ``order``: as in
        ``states``; without it the tokens are sorted in the call, which a CUDA graph cannot hold.
        ``positions``, ``cu_seqlens``, ``max_seqlen``: of texts end to end, see ``states``; labels
        are (tokens,) then.
        """
        packing: dict[str, Any] = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}
        states = self.states(tokens, positions, order=order, **packing)
        return loss_of_states(
            self, states, self._output_weight(), labels, vocab_size=self.config.vocab,
            label_smoothing=label_smoothing, dloss=dloss,
        )  # fmt: skip

    def log_probabilities(self, tokens: Array, labels: Array) -> Array:
        """Return the log-probability of each label, the next token, float32 (B, T).

        ``tokens``, ``labels``: (B, T); 0 for labels to ignore.
        """
        with self.evaluating():
            x = raw(self.states(tokens)).reshape(-1, self.config.d_model)
            weight, vocab = self._output_weight(), self.config.vocab
            return log_probabilities(x, weight, labels.ravel(), vocab).reshape(labels.shape)

    def stepper(
        self, prompt: Array, max_length: int, beam: int = 1, kv_cache: bool = True
    ) -> GPT2Stepper:
        """Return a Stepper that continues int prompts (B, P), P >= 1, by ``max_length`` tokens.

        ``kv_cache=False`` recomputes the whole text at each step, for comparison.
        """
        return GPT2Stepper(self, prompt, max_length, beam, kv_cache)


# ---- in a run -----------------------------------------------------------------------------------


def _configure(options, vocab):
    """Return the GPT2Config of a TrainConfig."""
    return GPT2Config(
        vocab=vocab, d_model=options.dim, heads=options.heads, layers=options.layers[0],
        block=options.block, dropout=options.dropout,
        layer_drop=options.layer_drop, kv_heads=options.kv_heads,
        positions=options.positions, activation=options.activation, pad_vocab=options.pad_vocab,
        bias=options.bias,
    )  # fmt: skip


def _check(options):
    if options.layers[0] != options.layers[1]:
        raise ConfigError(
            f"layers is {shown(options.layers)}; accepted: one number, gpt2 is a decoder only"
        )
    if options.positions not in (None, *POSITIONS):
        raise ConfigError(f"positions is {options.positions}; accepted: learned or rotary for gpt2")


register(ModelKind(
    name="gpt2", tasks=("language",), model=GPT2, configure=_configure, check=_check,
    options=("block", "bias", "layer_drop"),
    notes={"ffn": "it is 4 * dim", "attention_dropout": "it is --dropout",
           "positions": "learned or rotary"},
    # For a text of a million characters, as in nanoGPT's train_shakespeare_char.py. Evaluations are
    # frequent, to keep the best weights of a model that begins to overfit.
    defaults={
        "positions": "learned", "activation": "gelu",
        "length": "5000u", "dim": 384, "heads": 6, "layers": (6, 6), "block": 256, "dropout": 0.2,
        "bias": False, "batch": 64 * 256, "beta2": 0.99, "lr": 1e-3, "lr_floor": 0.1, "warmup": 100,
        "weight_decay": 0.1, "label_smoothing": 0.0, "eval_every": "250u", "ema": 0.0,
    },
    # An update of the default size takes seconds there.
    device_defaults={"numpy": {
        "length": "2000u", "dim": 128, "heads": 4, "layers": (4, 4), "block": 64, "dropout": 0.0,
        "batch": 12 * 64, "eval_every": AUTO,
    }},
    presets={
        "tiny": {"dim": 128, "heads": 4, "layers": (4, 4)},
        "small": {"dim": 256, "heads": 4, "layers": (4, 4)},
        "base": {"dim": 512, "heads": 8, "layers": (6, 6)},
    },
))  # fmt: skip
