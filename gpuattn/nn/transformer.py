"""Transformer layers, and how a stack of layers fuses their residual connections.

Every residual connection and the norm next to it are one fused op. In a pre-norm stack the last
sum of a layer is fused with the first norm of the next one, so ``step`` is given that norm.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from gpuattn.autodiff import tape
from gpuattn.autodiff.functional import checkpoint
from gpuattn.errors import problem
from gpuattn.nn.attention import MultiHeadAttention
from gpuattn.nn.dropout import Dropout, LayerDrop, StochasticDepth, Streams
from gpuattn.nn.linear import FeedForward
from gpuattn.nn.module import Module, generator
from gpuattn.nn.norm import LayerNorm, RMSNorm
from gpuattn.typing import Array


class _Layer(Module):
    """What encoder and decoder layers share: pre- or post-norm residual branches."""

    def __init__(self, norm):
        if norm not in ("pre", "post"):
            raise ValueError(problem("Transformer layer", "norm", repr(norm), "'pre' or 'post'"))
        self.pre_norm = norm == "pre"

    def _residuals(self, norms, dropout, streams, layer_drop, stochastic_depth=0.0):
        self.norms = norms
        self.dropouts = [Dropout(dropout, streams) for _ in norms]
        self.skips = [StochasticDepth(stochastic_depth, streams) if stochastic_depth else None
                      for _ in norms]  # fmt: skip
        self.drop = LayerDrop(layer_drop, streams) if layer_drop else None

    def enter(self, x):
        """Return (input of the first branch, residual stream) for the layer's input ``x``."""
        return self.norms[0].and_residual(x) if self.pre_norm else (x, x)

    def step(self, n, h, following, pick=None, donate=False, **context):
        """Run the branches; return (input of the next layer's first branch, residual stream).

        A branch returns the input of its last linear layer, and that layer.

        ``n``: the input of the first branch; ``h``: the residual stream; ``following``: the norm
        after a pre-norm layer, or None. ``pick``, ``donate``: see ``run_layers``.
        """
        if self.drop and self.drop.training:  # which reads h once more: it is not donated
            branched = self._branched(n, h, None, pick, False, context)[1]
            h = self.drop(pick(h) if pick else h, branched)
            return following.and_residual(h) if self.pre_norm and following else (h, h)
        return self._branched(n, h, following, pick, donate, context)

    def _branched(self, n, h, following, pick, donate, context):
        norms = [*self.norms[1:], following] if self.pre_norm else self.norms
        for (inner, out), norm, dropout, skip in zip(
            self._branches(**context), norms, self.dropouts, self.skips, strict=True
        ):
            x = inner(n)
            if pick:  # nothing after this attention reads the other rows
                x, h, pick = pick(x), pick(h), None
            if norm is None or (skip and skip.training):
                branch = dropout(out(x))
                n = h = h + (skip(branch) if skip else branch)
                if norm is not None:
                    n, h = norm.and_residual(h)
            else:  # one op from the branch's last layer to the next one's input
                n, h = norm.add(x, out, h, dropout, donate=donate)
            h = h if self.pre_norm else n
        return n, h

    def __call__(self, x, **context):
        return self.step(*self.enter(x), None, **context)[0]


class TransformerEncoderLayer(_Layer):
    """Self-attention and a feed-forward network: (tokens, width) or (B, T, width) to the same.

    ``norm``: "pre" (Xiong et al., 2020) or "post" (Vaswani et al., 2017). ``causal`` makes it the
    layer of a decoder-only model. ``dropout``: of both branches and, without
    ``attention_dropout``, of attention probabilities. ``norm_kind``: "layer" or "rms"; ``eps``: of
    the norms. ``stochastic_depth``: the probability with which a branch is left out for a sample of
    a batch, see StochasticDepth. ``layer_drop``: that with which the layer is left out for a batch,
    see LayerDrop. ``rotary_base``, ``rotary_frequencies``, ``rotary_scale``,
    ``qkv_bias``, ``head_size``, ``qk_norm`` (with ``eps``): see MultiHeadAttention. A call takes
    ``cu_seqlens``, ``max_seqlen`` for packed tokens, or ``key_lengths`` (B,), and ``positions``
    where attention is ``rotary``.
    """

    def __init__(
        self, width: int, heads: int, hidden: int, *, kv_heads: int | None = None,
        rotary: bool = False, rotary_base: float = 10_000.0,
        rotary_frequencies: Sequence[float] | None = None, rotary_scale: float = 1.0,
        causal: bool = False, dropout: float = 0.0, attention_dropout: float | None = None,
        norm: str = "pre", norm_kind: str = "layer", eps: float = 1e-5, activation: str = "relu",
        bias: bool = True, qkv_bias: bool | None = None, head_size: int | None = None,
        qk_norm: bool = False, stochastic_depth: float = 0.0, layer_drop: float = 0.0,
        streams: Streams | None = None, rng: np.random.Generator | None = None,
    ) -> None:  # fmt: skip
        super().__init__(norm)
        if norm_kind not in ("layer", "rms"):
            accepted = "'layer' or 'rms'"
            raise ValueError(problem("Transformer layer", "norm_kind", repr(norm_kind), accepted))
        rng, streams = generator(rng), streams or Streams()
        self.attention = MultiHeadAttention(
            width, heads, kv_heads=kv_heads, rotary=rotary, causal=causal,
            dropout=dropout if attention_dropout is None else attention_dropout, bias=bias,
            qkv_bias=qkv_bias, rotary_base=rotary_base, rotary_frequencies=rotary_frequencies,
            rotary_scale=rotary_scale, head_size=head_size, qk_norm=eps if qk_norm else None,
            streams=streams, rng=rng,
        )  # fmt: skip
        self.feed_forward = FeedForward(width, hidden, activation=activation, bias=bias, rng=rng)
        new_norm = partial(LayerNorm, bias=bias) if norm_kind == "layer" else RMSNorm
        norms = [new_norm(width, eps=eps) for _ in range(2)]
        self._residuals(norms, dropout, streams, layer_drop, stochastic_depth)

    def _branches(self, **context):
        return (
            (lambda n: self.attention.attend(n, **context), self.attention.out),
            (self.feed_forward.activated, self.feed_forward.out),
        )


class TransformerDecoderLayer(_Layer):
    """Causal self-attention, attention to a memory, a feed-forward network; see the encoder's.

    A call takes the memory (``projects=False``: as a MemoryProjection gives it to each layer), and
    for packed tokens ``cu_seqlens``, ``max_seqlen``, ``cu_memory``, ``max_memory``; for batches
    ``memory_lengths`` (B,). ``cache``: a KeyValueCache of ``attention``.
    """

    def __init__(
        self, width: int, heads: int, hidden: int, *, kv_heads: int | None = None,
        projects: bool = True, rotary: bool = False, dropout: float = 0.0,
        attention_dropout: float | None = None, norm: str = "pre", activation: str = "relu",
        bias: bool = True, eps: float = 1e-5, layer_drop: float = 0.0,
        streams: Streams | None = None, rng: np.random.Generator | None = None,
    ) -> None:  # fmt: skip
        super().__init__(norm)
        rng, streams = generator(rng), streams or Streams()
        shared: dict[str, Any] = {
            "kv_heads": kv_heads, "bias": bias, "streams": streams, "rng": rng,
            "dropout": dropout if attention_dropout is None else attention_dropout,
        }  # fmt: skip
        self.attention = MultiHeadAttention(width, heads, rotary=rotary, causal=True, **shared)
        self.cross_attention = MultiHeadAttention(
            width, heads, cross=True, projects=projects, **shared
        )
        self.feed_forward = FeedForward(width, hidden, activation=activation, bias=bias, rng=rng)
        norms = [LayerNorm(width, bias=bias, eps=eps) for _ in range(3)]
        self._residuals(norms, dropout, streams, layer_drop)

    def __call__(self, x: Any, memory: Any, **context: Any) -> Any:  # type: ignore[override]
        return super().__call__(x, memory=memory, **context)

    def _branches(
        self, *, memory, memory_lengths=None, positions=None, cu_seqlens=None, max_seqlen=None,
        cu_memory=None, max_memory=None, cache=None,
    ):  # fmt: skip
        packing = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}
        return (
            (
                lambda n: self.attention.attend(n, positions=positions, cache=cache, **packing),
                self.attention.out,
            ),
            (
                lambda n: self.cross_attention.attend(
                    n, memory, key_lengths=memory_lengths, cu_memory=cu_memory,
                    max_memory=max_memory, **packing,
                ),
                self.cross_attention.out,
            ),
            (self.feed_forward.activated, self.feed_forward.out),
        )  # fmt: skip


def run_layers(
    layers: Sequence[Any],
    norm: Any,
    x: Array,
    *,
    caches: list[Any] | None = None,
    memories: list[Any] | None = None,
    recompute: bool = False,
    pick: Callable[[Any], Any] | None = None,
    donate: bool = False,
    **context: Any,
) -> Any:
    """Return ``x`` after a stack of layers and the ``norm`` at its end (None for post-norm).

    ``caches``, ``memories``: one for each layer, or None. ``recompute``: keep only the inputs of a
    layer, and run it again in the backward pass. ``pick``: a function that returns, of an array
    like ``x``, the rows that the caller reads of the result, or None for all. The last layer
    computes only these rows after its first attention, and only they are returned. ``donate``:
    whether residual sums may be made in place, the first one in ``x``, see
    ``linear_dropout_add_norm``.
    """
    recompute = recompute and tape.is_recording()
    following = [layer.norms[0] for layer in layers[1:]] + [norm]
    n, h = layers[0].enter(x)
    for i, layer in enumerate(layers):
        own = {} if caches is None else {"cache": caches[i]}
        own |= {} if memories is None else {"memory": memories[i]}
        own |= {"pick": pick} if layer is layers[-1] else {}
        step = partial(layer.step, following=following[i], donate=donate, **own, **context)
        n, h = checkpoint(step, n, h) if recompute else step(n, h)
    return n


def first_token(x: Any) -> Any:
    """Return (B, 1, width) of x (B, T, width): the ``pick`` of a classifier of sequences."""
    return x[:, :1]


def fill_caches(
    layers: Sequence[Any], x: Array, caches: list[Any], positions: Array | None = None
) -> None:
    """Store the keys and values in ``caches``, one for each layer, that ``run_layers`` would.

    Of the last layer nothing else is computed: nobody reads its output. ``x`` may be overwritten.
    """
    *before, last = layers
    if before:
        norm = last.norms[0] if last.pre_norm else None
        n = run_layers(before, norm, x, caches=caches[:-1], positions=positions, donate=True)
    else:
        n, _ = last.enter(x)
    last.attention.store(n, caches[-1], positions)
