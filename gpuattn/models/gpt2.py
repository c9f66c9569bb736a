"""GPT-2, the decoder-only language model: pre-norm, learned or rotary positions, tied output.

Radford et al., "Language Models are Unsupervised Multitask Learners" (2019).
"""

from dataclasses import dataclass

import numpy as np

from gpuattn.arrays import as_array
from gpuattn.autodiff.tape import raw
from gpuattn.errors import problem
from gpuattn.models.config import CHOICES, check_config, table_rows
from gpuattn.models.gpt2_stepper import GPT2Stepper
from gpuattn.models.loss import loss_of_states
from gpuattn.nn.dropout import RandomState, Streams
from gpuattn.nn.embedding import Embedding
from gpuattn.nn.module import Module, normal
from gpuattn.nn.norm import LayerNorm
from gpuattn.nn.transformer import TransformerEncoderLayer, run_layers
from gpuattn.ops.linear.linear import linear

STD = 0.02  # of the initial weights
POSITIONS = "learned", "rotary"  # a sinusoidal table would drown embeddings of that size


@dataclass(frozen=True)
class GPT2Config:
    """The size of a GPT2; the defaults are the smallest one published (124 M parameters).

    ``block``: the longest context. ``bias``: whether linear layers and norms have biases.
    ``kv_heads``, ``positions``, ``activation``, ``pad_vocab``: as of a TranslationConfig.
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

    def __post_init__(self):
        choices = CHOICES | {"positions": POSITIONS}
        check_config(self, choices, vocab=self.vocab, layers=self.layers, block=self.block)


class GPT2(Module):
    """A causal Transformer over (B, T) tokens. ``seed``: of initial parameters and dropout.

    The embedding table has its rows padded to a multiple of 64, unless ``pad_vocab`` is False.
    ``random``: the RandomState that all dropout reads; move ``random.step`` on with each update.
    ``checkpoint``: one of ``models.config.CHECKPOINT``.
    """

    checkpoint = "none"

    def __init__(self, config, seed=0):
        self.config = c = config
        self.random = RandomState(seed)
        rng, streams = np.random.Generator(np.random.Philox(seed)), Streams(self.random)
        self.embedding = Embedding(
            table_rows(c), c.d_model, used=c.vocab,
            positions="learned" if c.positions == "learned" else None,
            max_length=c.block, dropout=c.dropout, streams=streams, rng=rng,
        )  # fmt: skip
        self.layers = [
            TransformerEncoderLayer(
                c.d_model, c.heads, 4 * c.d_model, kv_heads=c.kv_heads,
                rotary=c.positions == "rotary", causal=True, dropout=c.dropout,
                activation=c.activation, bias=c.bias, streams=streams, rng=rng,
            )
            for _ in range(c.layers)
        ]  # fmt: skip
        self.norm = LayerNorm(c.d_model, bias=c.bias)
        self._initialise(rng)

    def _initialise(self, rng):
        """Normal weights; what feeds the residual stream is smaller, for its 2 L branches."""
        for path, p in self.named_parameters():
            if p.ndim == 2:
                branch = path.endswith("out.weight")
                std = STD / (2 * self.config.layers) ** 0.5 if branch else STD
                p.data = normal(rng, p.shape, std).data
        self.embedding.weight.data[self.config.vocab :] = 0

    def states(self, tokens, positions=None, *, caches=None, order=None):
        """Return the last layer's states (B, T, d_model) for int tokens (B, T), T up to ``block``.

        ``positions`` (B, T) and ``caches``, a KeyValueCache for each layer, continue a text.
        ``order``: the loader's sorted token order, for the gradient of the embedding.
        """
        tokens = as_array(raw(tokens), "GPT2", "tokens")
        if tokens.shape[-1] > self.config.block:
            got, accepted = f"{tokens.shape[-1]} tokens", f"up to block, {self.config.block}"
            raise ValueError(problem("GPT2", "tokens", got, accepted, "Give the last ones only."))
        x = self.embedding(tokens, positions, order=order)
        return run_layers(
            self.layers, self.norm, x, caches=caches, positions=positions,
            recompute=self.checkpoint != "none",
        )  # fmt: skip

    def head(self, states):
        """Return (..., padded vocabulary) for states (..., d_model)."""
        return linear(states, self.embedding.weight)

    def logits(self, tokens):
        """Return (B, T, padded vocabulary) for int tokens (B, T): what may come after each."""
        return self.head(self.states(tokens))

    def loss(self, tokens, labels, dloss=None, *, label_smoothing=0.0, order=None):
        """Return the mean cross-entropy of labels (B, T), each the token after, as a Tensor.

        ``dloss``: what backward will be called with, see ``cross_entropy``. ``order``: as in
        ``states``; without it tokens are sorted on the spot, which no CUDA graph can do.
        """
        states = self.states(tokens, order=order)
        return loss_of_states(
            self, states, self.embedding.weight, labels, vocab_size=self.config.vocab,
            label_smoothing=label_smoothing, dloss=dloss,
        )  # fmt: skip

    def stepper(self, prompt, max_length, beam=1, kv_cache=True):
        """Return a Stepper that continues int prompts (B, P), P >= 1, by ``max_length`` tokens.

        ``kv_cache=False`` computes the whole text again at each step, to show what it saves.
        """
        return GPT2Stepper(self, prompt, max_length, beam, kv_cache)
