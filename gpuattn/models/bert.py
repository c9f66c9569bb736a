"""BERT, the encoder: post-norm, learned positions, token types, a pooler and a head for masks.

Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding"
(2019). Sentence embeddings: Reimers and Gurevych, "Sentence-BERT" (2019).
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np

from gpuattn.arrays import as_array, get_xp
from gpuattn.autodiff.tape import raw
from gpuattn.autodiff.tensor import Tensor
from gpuattn.errors import ConfigError, problem
from gpuattn.models import flops
from gpuattn.models.config import CHOICES, ModelConfig, check_config
from gpuattn.models.kinds import ModelKind, register
from gpuattn.nn.dropout import Dropout, RandomState, Streams
from gpuattn.nn.embedding import Embedding
from gpuattn.nn.linear import Linear
from gpuattn.nn.module import Module, constant, normal
from gpuattn.nn.norm import LayerNorm
from gpuattn.nn.transformer import TransformerEncoderLayer, first_token, run_layers
from gpuattn.ops.embedding import embedding
from gpuattn.ops.linear.bias_activation import gelu, relu
from gpuattn.ops.linear.linear import linear
from gpuattn.ops.loss.cross_entropy import cross_entropy
from gpuattn.typing import Array
from gpuattn.units import AUTO, shown

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
    TranslationConfig. ``predicted``: the share of tokens that this head sees in training, by which
    FLOPs and memory are counted. ``classes``: of a classifier of texts, which reads the pooler; 0:
    none. ``classifier_dropout``: before it, by default ``dropout``. ``layer_drop``: as of a
    TranslationConfig.
    Raises ConfigError for what does not fit together.
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
    predicted: float = 1.0
    classes: int = 0
    classifier_dropout: float | None = None
    layer_drop: float = 0.0
    positions: ClassVar[str] = "learned"
    kv_heads: ClassVar[None] = None
    output_bias: ClassVar[bool] = True  # type: ignore[misc]

    def __post_init__(self):
        sizes = {"vocab": self.vocab, "layers": self.layers, "ffn": self.ffn, "types": self.types}
        if self.classes:
            sizes["classes"] = self.classes
        choices = CHOICES | {"activation": tuple(ACTIVATIONS)}
        check_config(self, choices, max_length=self.max_length, **sizes)
        if self.classes and not self.pooler:
            accepted = "True for a classifier, which reads it"
            raise ConfigError(problem("BertConfig", "pooler", self.pooler, accepted))

    @property
    def stacks(self) -> tuple[tuple[int, bool], ...]:
        return ((self.layers, False),)

    def flops(self, *lengths: Array) -> float:
        (rows,) = lengths
        head = self.d_model * (self.d_model + self.classes) if self.classes else 0
        return flops.encoder_flops(self, rows) + 6 * head * len(rows)

    def token_weights(self) -> int:
        head = self.d_model * (self.d_model + self.vocab) if self.masked else 0
        return self.layer_weights() + round(self.predicted * head)


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
                attention_dropout=c.attention_dropout, activation=c.activation,
                layer_drop=c.layer_drop, streams=streams, rng=rng,
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
        if c.classes:
            own = c.classifier_dropout
            self.classifier_dropout = Dropout(c.dropout if own is None else own, streams)
            self.classifier = Linear(c.d_model, c.classes, rng=rng)
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
        order: Any = None,
        positions: Array | None = None,
        cu_seqlens: Array | None = None,
        max_seqlen: int | None = None,
    ) -> Any:
        """Return the last layer's states (B, T, d_model) for int tokens (B, T).

        ``types``: int, in the shape of ``tokens``; None: all 0. ``lengths`` (B,): int32, tokens of
        each text; what lies after them is not attended to, and the states there mean nothing.
        ``order``: the loader's sorted token order, for the gradient of the embedding.
        Texts end to end, (tokens,), take ``positions`` (tokens,), which begin at 0 in each text,
        ``cu_seqlens`` and ``max_seqlen``, and give (tokens, d_model).
        Raises ValueError for a text longer than ``max_length``.
        """
        packing = {"positions": positions, "cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}
        return self._states(tokens, types, lengths, order=order, **packing)

    def _states(
        self, tokens, types=None, lengths=None, *, order=None, positions=None, cu_seqlens=None,
        max_seqlen=None, pick=None,
    ):  # fmt: skip
        """Return what ``states`` does, or the rows of it that ``pick`` returns."""
        tokens = as_array(raw(tokens), "Bert", "tokens")
        texts = 0 if cu_seqlens is None else len(cu_seqlens) - 1
        if 0 < tokens.size == texts * (max_seqlen or 0):  # all are of one length: a batch
            whole = None if types is None else types.reshape(texts, -1)
            states = self._states(tokens.reshape(texts, -1), whole, order=order, pick=pick)
            return states if pick else np.reshape(states, (tokens.size, -1))
        length, most = max_seqlen or tokens.shape[-1], self.config.max_length
        if length > most:
            accepted = f"up to max_length, {most}"
            raise ValueError(problem("Bert", "tokens", f"{length} tokens", accepted))
        if types is None:  # added to a position's row instead of each token's
            x = self.embedding(tokens, positions, order=order, shift=self.types[0])
        else:
            x = self.embedding(tokens, positions, order=order) + embedding(types, self.types)
        x = self.dropout(self.embedding_norm(x))
        return run_layers(
            self.layers, None, x, key_lengths=lengths, cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen, recompute=self.checkpoint != "none", pick=pick,
        )  # fmt: skip

    def pooled(self, states: Any) -> Any:
        """Return (B, d_model), tanh of a layer over the first of the states (B, T, d_model)."""
        return self._pooled(states[:, 0])

    def _pooled(self, first):
        if self.pooler is None:
            raise ConfigError(problem("Bert.pooled", "pooler", False, "a model that has one"))
        return np.tanh(self.pooler(first))

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
        """Return the logits of the classes, (B, classes), where the model has some, else of masked
        tokens, (B, T, padded vocabulary). Arguments: as of ``states``."""
        if not self.config.classes:
            return self.head(self.states(tokens, types, lengths))
        return self._of_classes(self._states(tokens, types, lengths, pick=first_token)[:, 0])

    def _of_classes(self, first):
        """Return the logits of the classes for the states of first tokens, (B, d_model)."""
        return self.classifier(self.classifier_dropout(self._pooled(first)))

    def masked_loss(
        self,
        tokens: Array,
        rows: Array,
        labels: Array,
        dloss: Any = None,
        *,
        label_smoothing: float = 0.0,
        order: Any = None,
        positions: Array | None = None,
        cu_seqlens: Array | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:
        """Return the mean cross-entropy of ``labels``, the tokens at ``rows``, as a Tensor.

        ``tokens``: (B, T), some of them masked, or texts end to end, see ``states``. ``rows``,
        ``labels`` (M,): int, places in ``tokens.ravel()`` that ascend, and what stands there
        without a mask. Only these rows have logits, (M, padded vocabulary).
        ``dloss``, ``label_smoothing``: as in ``cross_entropy``. ``order``: as in ``states``;
        without it the tokens are sorted in the call, which a CUDA graph cannot hold.
        """
        logits = self.masked_logits(
            tokens, rows, order=order, positions=positions, cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen,
        )  # fmt: skip
        return cross_entropy(
            logits, labels, vocab_size=self.config.vocab, label_smoothing=label_smoothing,
            donate=True, dloss=dloss,
        )  # fmt: skip

    def masked_logits(self, tokens: Array, rows: Array, **packing: Any) -> Any:
        """Return the logits (M, padded vocabulary) of the tokens at ``rows``.

        Arguments: as of ``masked_loss``.
        """
        return self.head(self._states_at(rows, tokens, packing))

    def _states_at(self, rows, tokens, packing):
        """Return the states (M, d_model) at the sorted ``rows`` of ``tokens``."""
        # a lookup, whose gradient is a sum without atomics; the rows are sorted
        order = (get_xp(rows).arange(rows.size, dtype=np.int32), None, None)

        def pick(x):
            return embedding(rows, np.reshape(x, (-1, self.config.d_model)), order=order)

        return self._states(tokens, pick=pick, **packing)

    def class_loss(
        self,
        tokens: Array,
        rows: Array,
        labels: Array,
        dloss: Any = None,
        *,
        label_smoothing: float = 0.0,
        **packing: Any,
    ) -> Tensor:
        """Return the mean cross-entropy of the ``labels`` (B,) of texts, int, as a Tensor.

        ``rows`` (B,): int, the places in ``tokens.ravel()`` of the first token of each text, which
        ascend. Other arguments: as of ``masked_loss``.
        """
        logits = self.class_logits(tokens, rows, **packing)
        return cross_entropy(
            logits, labels, label_smoothing=label_smoothing, donate=True, dloss=dloss
        )

    def class_logits(self, tokens: Array, rows: Array, **packing: Any) -> Any:
        """Return the logits (B, classes) of texts. Arguments: as of ``class_loss``."""
        return self._of_classes(self._states_at(rows, tokens, packing))

    def with_classes(self, classes: int, seed: int = 0) -> "Bert":
        """Return a Bert with these parameters and a new classifier, drawn by ``seed``, in the place
        of other heads; the pooler is new where there was none."""
        config = replace(self.config, classes=classes, pooler=True, masked=False, predicted=0.0)
        model, own = Bert(config, seed), dict(self.named_tensors())
        model.random.seed = self.random.seed
        for name, parameter in model.named_tensors():
            if name in own and not name.startswith("classifier."):
                parameter.data = own[name].data
        return model

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
            pick = first_token if pool == "first" else None
            states = raw(self._states(tokens, types, lengths, pick=pick))
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


# ---- in a run -----------------------------------------------------------------------------------


def _configure(options, vocab):
    """Return the BertConfig of a TrainConfig, for the head that its data ask for."""
    masked = options.classify is None
    return BertConfig(
        vocab=vocab, d_model=options.dim, heads=options.heads, layers=options.layers[0],
        ffn=4 * options.dim, max_length=options.block, dropout=options.dropout,
        layer_drop=options.layer_drop,
        attention_dropout=options.attention_dropout, activation=options.activation,
        pooler=not masked, masked=masked, predicted=float(masked), pad_vocab=options.pad_vocab,
    )  # fmt: skip


def _check(options):
    if options.layers[0] != options.layers[1]:
        raise ConfigError(
            f"layers is {shown(options.layers)}; accepted: one number, bert is an encoder only"
        )
    if options.positions != "learned":
        raise ConfigError(f"positions is {options.positions}; accepted: learned for bert")
    if options.activation not in ACTIVATIONS:
        accepted = ", ".join(ACTIVATIONS)
        raise ConfigError(f"activation is {options.activation}; accepted: {accepted} for bert")


register(ModelKind(
    name="bert", tasks=("masked", "labels"), model=Bert, configure=_configure, check=_check,
    options=("block", "layer_drop"),
    notes={"ffn": "it is 4 * dim", "block": "the most tokens of a line, marks included",
           "batch": "1024 by default with --classify"},
    # For some million lines; the sizes of presets: Turc et al., "Well-Read Students Learn Better"
    # (2019).
    defaults={
        "positions": "learned", "activation": "gelu_exact", "length": "20e", "dim": 256,
        "heads": 4, "layers": (4, 4), "block": 128, "dropout": 0.1, "attention_dropout": 0.1,
        "batch": 32 * 512, "mask": 0.15, "lr": 1e-3, "schedule": "linear", "weight_decay": 0.01,
        "label_smoothing": 0.0, "ema": 0.0,
    },
    device_defaults={"numpy": {
        "dim": 64, "heads": 4, "layers": (2, 2), "dropout": 0.0, "attention_dropout": 0.0,
        "batch": 1024, "lr": 3e-3, "eval_every": AUTO,
    }},
    presets={
        "tiny": {"dim": 128, "heads": 2, "layers": (2, 2)},
        "mini": {"dim": 256, "heads": 4, "layers": (4, 4)},
        "small": {"dim": 512, "heads": 8, "layers": (4, 4)},
        "medium": {"dim": 512, "heads": 8, "layers": (8, 8)},
        "base": {"dim": 768, "heads": 12, "layers": (12, 12), "lr": 1e-4},
    },
))  # fmt: skip
