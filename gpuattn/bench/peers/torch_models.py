"""Our models written in PyTorch, with the same parameter names.

All sentences of a batch have one length, so attention needs no mask.
"""

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpuattn.bench.train.cases import Step
from gpuattn.models.config import padded_rows
from gpuattn.nn.embedding import sinusoidal_positions

CHARACTERS = 1000  # vocabularies up to this size are not padded


def _all(x):
    return x


class Attention(nn.Module):
    """Multi-head self-attention, causal or not, or cross-attention to a memory."""

    def __init__(self, case: Step, bias: bool, causal: bool = False, cross: bool = False) -> None:
        super().__init__()
        width = case.width
        self.heads, self.dropout, self.causal = case.heads, case.dropout, causal
        if cross:
            self.q = nn.Linear(width, width, bias)
            self.kv = nn.Linear(width, 2 * width, bias)
        else:
            self.qkv = nn.Linear(width, 3 * width, bias)
        self.out = nn.Linear(width, width, bias)

    def forward(
        self, x: Tensor, memory: Tensor | None = None, pick: Callable[[Tensor], Tensor] = _all
    ) -> Tensor:
        if memory is None:
            q, k, v = self._split(self.qkv(x), 3)
        else:
            (q,), (k, v) = self._split(self.q(x), 1), self._split(self.kv(memory), 2)
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, dropout_p=p)
        return self.out(pick(y.transpose(1, 2).reshape(x.shape)))

    def _split(self, x, parts):
        """Return tensors (B, H, T, D)."""
        x = x.view(*x.shape[:2], parts, self.heads, -1)
        return [part.transpose(1, 2) for part in x.unbind(2)]


class FeedForward(nn.Module):
    """Two linear layers."""

    def __init__(self, case: Step, bias: bool, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = nn.Linear(case.width, case.hidden, bias)
        self.out = nn.Linear(case.hidden, case.width, bias)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.activation(self.inner(x)))


class Layer(nn.Module):
    """A pre-norm layer of an encoder, a decoder with a memory, or a language model.

    ``pick``: a function that returns the rows of an array that are read of the layer's result, for
    the last layer of an encoder; as ``pick`` of our ``run_layers``.
    """

    def __init__(
        self,
        case: Step,
        *,
        causal: bool = False,
        cross: bool = False,
        bias: bool = True,
        activation: Callable[[Tensor], Tensor] = F.relu,
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.attention = Attention(case, bias, causal=causal)
        if cross:
            self.cross_attention = Attention(case, bias, cross=True)
        self.feed_forward = FeedForward(case, bias, activation)
        self.norms = nn.ModuleList(
            nn.LayerNorm(case.width, eps, bias=bias) for _ in range(2 + cross)
        )
        self.dropout = nn.Dropout(case.dropout)

    def forward(
        self, x: Tensor, memory: Tensor | None = None, pick: Callable[[Tensor], Tensor] = _all
    ) -> Tensor:
        x = pick(x) + self.dropout(self.attention(self.norms[0](x), pick=pick))
        if memory is not None:
            x = x + self.dropout(self.cross_attention(self.norms[1](x), memory))
        return x + self.dropout(self.feed_forward(self.norms[-1](x)))


class PostNormLayer(Layer):
    """A layer of an encoder whose norms are behind the sums."""

    def forward(
        self, x: Tensor, memory: Tensor | None = None, pick: Callable[[Tensor], Tensor] = _all
    ) -> Tensor:
        x = self.norms[0](pick(x) + self.dropout(self.attention(x, pick=pick)))
        return self.norms[1](x + self.dropout(self.feed_forward(x)))


class Table(nn.Module):
    """The embedding of tokens; with ``positions`` > 0 also that of positions."""

    def __init__(self, rows: int, width: int, positions: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))
        if positions:
            self.position_weight = nn.Parameter(torch.empty(positions, width))


class Translator(nn.Module):
    """``models.TranslationModel``: sinusoidal positions, one table for both sides and output."""

    def __init__(self, case: Step) -> None:
        super().__init__()
        self.case = case
        self.source = Table(_rows(case.vocab), case.width)
        table = torch.as_tensor(sinusoidal_positions(case.shape[1], case.width))
        self.register_buffer("positions", table.to(self.source.weight.device), persistent=False)
        self.encoder = nn.ModuleList(Layer(case) for _ in range(case.layers[0]))
        self.encoder_norm = nn.LayerNorm(case.width)
        self.decoder = nn.ModuleList(
            Layer(case, causal=True, cross=True) for _ in range(case.layers[1])
        )
        self.decoder_norm = nn.LayerNorm(case.width)
        self.dropout = nn.Dropout(case.dropout)

    def forward(self, source: Tensor, target: Tensor, labels: Tensor) -> Tensor:
        memory = self._embed(source)
        for layer in self.encoder:
            memory = layer(memory)
        memory, x = self.encoder_norm(memory), self._embed(target)
        for layer in self.decoder:
            x = layer(x, memory)
        logits = F.linear(self.decoder_norm(x), self.source.weight)
        return _loss(logits, labels, self.case.smoothing)

    def _embed(self, tokens):
        x = F.embedding(tokens, self.source.weight) * self.case.width**0.5
        return self.dropout(x + self.positions.to(x.dtype))


class GPT(nn.Module):
    """``models.GPT2``."""

    def __init__(self, case: Step) -> None:
        super().__init__()
        self.embedding = Table(_rows(case.vocab), case.width, case.shape[1])
        self.layers = nn.ModuleList(
            Layer(case, causal=True, bias=False, activation=_gelu) for _ in range(*case.layers)
        )
        self.norm = nn.LayerNorm(case.width, bias=False)
        self.dropout = nn.Dropout(case.dropout)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        table = self.embedding
        x = self.dropout(F.embedding(tokens, table.weight) + table.position_weight)
        for layer in self.layers:
            x = layer(x)
        return _loss(F.linear(self.norm(x), table.weight), labels, 0.0)


class ViT(nn.Module):
    """``models.ViT`` for uint8 images (B, H, W, 3)."""

    def __init__(self, case: Step) -> None:
        super().__init__()
        self.case, sizes = case, case.config()
        self.patch = nn.Linear(sizes.patch_width, case.width)
        self.class_token = nn.Parameter(torch.empty(case.width))
        self.positions = nn.Parameter(torch.empty(sizes.tokens, case.width))
        self.layers = nn.ModuleList(Layer(case, activation=F.gelu) for _ in range(*case.layers))
        self.norm = nn.LayerNorm(case.width)
        self.head = nn.Linear(case.width, case.vocab)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        side, count = self.case.patch, len(images)
        across = self.case.image // side
        x = images.view(count, across, side, across, side, 3).permute(0, 1, 3, 2, 4, 5)
        x = x.reshape(count, across**2, -1) / 127.5 - 1
        x = self.patch(x.to(self.patch.weight.dtype))
        first = self.class_token.to(x.dtype).expand(count, 1, -1)
        x = torch.cat([first, x], 1) + self.positions
        for layer in self.layers[:-1]:
            x = layer(x)
        x = self.layers[-1](x, pick=lambda x: x[:, :1])
        logits = self.head(self.norm(x)[:, 0])
        return _loss(logits[:, None], labels[:, None], self.case.smoothing)


class Bert(nn.Module):
    """``models.Bert`` with a head for the tokens at ``rows`` (M,) of tokens (B, T), as one row."""

    def __init__(self, case: Step) -> None:
        super().__init__()
        self.case, width = case, case.width
        sizes = case.config()
        self.embedding = Table(_rows(case.vocab), width, case.shape[1])
        self.types = nn.Parameter(torch.empty(sizes.types, width))
        self.embedding_norm = nn.LayerNorm(width, sizes.eps)
        self.dropout = nn.Dropout(case.dropout)
        self.layers = nn.ModuleList(
            PostNormLayer(case, activation=F.gelu, eps=sizes.eps) for _ in range(*case.layers)
        )
        self.transform = nn.Linear(width, width)
        self.transform_norm = nn.LayerNorm(width, sizes.eps)
        self.output_bias = nn.Parameter(torch.empty(_rows(case.vocab)))

    def forward(self, tokens: Tensor, rows: Tensor, labels: Tensor) -> Tensor:
        table = self.embedding
        x = F.embedding(tokens, table.weight) + table.position_weight + self.types[0]
        x = self.dropout(self.embedding_norm(x))
        for layer in self.layers[:-1]:
            x = layer(x)
        x = self.layers[-1](x, pick=lambda x: x.flatten(0, 1).index_select(0, rows))
        x = self.transform_norm(F.gelu(self.transform(x)))
        logits = F.linear(x, table.weight, self.output_bias)
        return _loss(logits[None], labels[None], self.case.smoothing)


def new_model(case: Step) -> nn.Module:
    """Return the model of a case on PyTorch's default device, its parameters undefined."""
    if case.translates:
        return Translator(case)
    if case.image:
        return ViT(case)
    return Bert(case) if case.masked else GPT(case)


def first_weights(model: nn.Module, weights: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """Return the state_dict that a ``new_model`` begins with, on the host.

    ``weights``: of ``peers.train.by_layers``. Padding rows that only our tables have are left out.
    """
    return {
        name: torch.from_numpy(weights[name][: len(own)])
        for name, own in model.state_dict().items()
    }


def _rows(vocab):
    """Return the rows of a table as in nanoGPT: only large vocabularies are padded."""
    return padded_rows(vocab) if vocab > CHARACTERS else vocab


def _gelu(x):
    return F.gelu(x, approximate="tanh")


def _loss(logits, labels, smoothing):
    return F.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), label_smoothing=smoothing
    )
