"""ViT, the encoder of images: squares of pixels as tokens, a class token, learned positions.

Dosovitskiy et al., "An Image is Worth 16x16 Words: Transformers for Image Recognition at Scale"
(2021). Pre-norm; the classifier reads the class token behind the last norm.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from gpuattn import rng as random
from gpuattn.arrays import as_array, get_xp, zeros
from gpuattn.autodiff.tape import raw
from gpuattn.autodiff.tensor import Tensor
from gpuattn.errors import ConfigError, problem
from gpuattn.models import flops, memory
from gpuattn.models.config import CHOICES, ModelConfig, check_config
from gpuattn.models.kinds import ModelKind, register
from gpuattn.nn.dropout import Dropout, RandomState, Streams
from gpuattn.nn.linear import Linear
from gpuattn.nn.module import Module, truncated_normal
from gpuattn.nn.norm import LayerNorm
from gpuattn.nn.transformer import TransformerEncoderLayer, first_token, run_layers
from gpuattn.ops.image_patches import image_patches
from gpuattn.ops.linear.linear import linear
from gpuattn.ops.loss.cross_entropy import cross_entropy
from gpuattn.typing import Array
from gpuattn.units import AUTO, shown

STD = 0.02  # of the class token, the positions and the head; other weights are Xavier's
CHANNELS = (1, 3)
ACTIVATIONS = ("gelu_exact", "gelu", "relu")


@dataclass(frozen=True)
class ViTConfig(ModelConfig):
    """The size of a ViT; the defaults are those of ViT-B/16 (86 M parameters).

    ``classes``: of the classifier; 0: none. ``image``, ``patch``: sides in pixels; ``patch``
    divides ``image``. ``channels``: 1 or 3. ``attention_dropout``: by default ``dropout``.
    ``stochastic_depth``: the probability with which training leaves out a branch of the last layer
    for an image; it rises from 0 in the first layer. ``activation``: "gelu_exact", "gelu" (tanh
    form) or "relu". ``eps``: of the norms. ``qkv_bias``: of queries, keys and values. ``mean``,
    ``std``: of each channel, by which uint8 pixels / 255 are normalised; None: 0.5.
    Raises ConfigError for what does not fit together.
    """

    classes: int = 1000
    image: int = 224
    patch: int = 16
    channels: int = 3
    d_model: int = 768
    heads: int = 12
    layers: int = 12
    ffn: int = 3072
    dropout: float = 0.0
    attention_dropout: float | None = None
    stochastic_depth: float = 0.0
    activation: str = "gelu_exact"
    eps: float = 1e-12
    qkv_bias: bool = True
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    positions: ClassVar[str] = "learned"
    kv_heads: ClassVar[None] = None
    pad_vocab: ClassVar[bool] = False  # type: ignore[misc]
    units: ClassVar[str] = "classes"

    def __post_init__(self):
        sizes = {"image": self.image, "patch": self.patch, "layers": self.layers, "ffn": self.ffn}
        if self.classes:
            sizes["classes"] = self.classes
        choices = CHOICES | {"activation": ACTIVATIONS, "channels": CHANNELS}
        check_config(self, choices, **sizes)
        if self.image % self.patch:
            accepted = f"a divisor of image, {self.image}"
            raise ConfigError(problem("ViTConfig", "patch", self.patch, accepted))
        for field, value in (("mean", self.mean), ("std", self.std)):
            if value is not None and len(value) != self.channels:
                accepted = f"{self.channels} numbers, one for each channel"
                raise ConfigError(problem("ViTConfig", field, value, accepted))
        if not 0 <= self.stochastic_depth < 1:
            got, accepted = self.stochastic_depth, "0 <= stochastic_depth < 1"
            raise ConfigError(problem("ViTConfig", "stochastic_depth", got, accepted))

    @property
    def vocab(self) -> int:  # type: ignore[override]
        """What the last layer tells apart: the classes."""
        return self.classes

    @property
    def tokens(self) -> int:
        """The tokens of an image: its patches and the class token."""
        return (self.image // self.patch) ** 2 + 1

    @property
    def patch_width(self) -> int:
        """The numbers of a patch."""
        return self.patch**2 * self.channels

    @property
    def stacks(self) -> tuple[tuple[int, bool], ...]:
        return ((self.layers, False),)

    def flops(self, *lengths: Array) -> float:
        """Return the FLOPs of a step on images of ``lengths`` tokens, (B,): ``tokens`` each."""
        each = np.asarray(lengths[0], np.float64)
        ends = self.d_model * (self.patch_width * (self.tokens - 1) + self.classes)
        products = self.layer_weights() * each.sum() + ends * len(each)
        return float(6 * products + 12 * self.d_model * self.layers * (each @ each))

    def token_weights(self) -> int:
        return flops.layer_weights(self) + self.d_model * self.patch_width

    def activation_bytes(self, tokens: int, itemsize: int, checkpoint: str) -> int:
        """See ModelConfig; here ``tokens`` is the number of images."""
        return memory.activation_bytes(self, tokens * self.tokens, itemsize, checkpoint)

    def evaluation_bytes(self, tokens: int, itemsize: int) -> int:
        """See ModelConfig; here ``tokens`` is the number of images."""
        return memory.evaluation_bytes(self, tokens * self.tokens, itemsize)


class ViT(Module):
    """A classifier of images, or without classes an encoder. ``seed``: of parameters and dropout.

    ``random``: the RandomState of dropout and of the random windows of images; move ``random.step``
    on with each update. ``checkpoint``: one of ``models.config.CHECKPOINT``.
    """

    checkpoint = "none"

    def __init__(self, config: ViTConfig, seed: int = 0) -> None:
        self.config = c = config
        self.random = RandomState(seed)
        rng, streams = np.random.Generator(np.random.Philox(seed)), Streams(self.random)
        self.stream = streams.next()  # of the windows of images
        self.patch = Linear(c.patch_width, c.d_model, rng=rng)
        self.class_token = truncated_normal(rng, (c.d_model,), STD)
        self.positions = truncated_normal(rng, (c.tokens, c.d_model), STD)
        self.dropout = Dropout(c.dropout, streams)
        self.layers = [
            TransformerEncoderLayer(
                c.d_model, c.heads, c.ffn, dropout=c.dropout, eps=c.eps,
                attention_dropout=c.attention_dropout, activation=c.activation,
                qkv_bias=c.qkv_bias, stochastic_depth=c.stochastic_depth * i / max(c.layers - 1, 1),
                streams=streams, rng=rng,
            )
            for i in range(c.layers)
        ]  # fmt: skip
        self.norm = LayerNorm(c.d_model, eps=c.eps)
        self.head = Linear(c.d_model, c.classes, rng=rng) if c.classes else None
        if self.head:
            self.head.weight.data = truncated_normal(rng, (c.classes, c.d_model), STD).data

    def with_classes(self, classes: int, seed: int = 0) -> "ViT":
        """Return a ViT with these parameters and a new head, drawn by ``seed``, in the place of
        another."""
        return self._with_parameters(replace(self.config, classes=classes), seed, "head")

    def with_image(self, image: int) -> "ViT":
        """Return a ViT with these parameters for images of another side, in pixels.

        The positions of patches are interpolated by cubic convolution (Keys, 1981); that of the
        class token stays. Raises ConfigError for a side that patches do not divide.
        """
        new = self._with_parameters(replace(self.config, image=image), 0, "positions")
        old, sides = (
            self.positions.data,
            [n // self.config.patch for n in (self.config.image, image)],
        )
        weights = get_xp(old).asarray(cubic(*sides), old.dtype)
        grid = old[1:].reshape(sides[0], sides[0], -1)
        grid = np.einsum("ia,jb,abd->ijd", weights, weights, grid)
        new.positions.data[:1], new.positions.data[1:] = old[:1], grid.reshape(-1, grid.shape[-1])
        return new

    def _with_parameters(self, config, seed, part):
        """Return a ViT with the parameters of this one but for those of a ``part``."""
        model, own = ViT(config, seed), dict(self.named_tensors())
        model.random.seed = self.random.seed
        for name, parameter in model.named_tensors():
            if name.partition(".")[0] != part:
                parameter.data = own[name].data
        return model.train(self.training)

    def states(self, images: Array) -> Any:
        """Return the last layer's states (B, tokens, d_model), that of the class token first.

        ``images``: (B, H, W, channels). uint8 are normalised by the config, and of larger ones the
        middle is seen; floats are as they should be: normalised, (B, image, image, channels), in
        the dtype of the model. Raises ValueError for other sizes, TypeError for other dtypes.
        """
        return self._states(images)

    def _states(self, images, pick=None):
        images = as_array(raw(images), "ViT", "images")
        cut = self._cut if images.dtype == np.uint8 else self._patches
        return self._states_of(cut(images), pick)

    def logits(self, images: Array) -> Any:
        """Return the logits (B, classes) for images, see ``states``."""
        return self._head(self._states(images, pick=first_token))

    def loss(
        self,
        images: Array,
        labels: Array,
        dloss: Any = None,
        *,
        label_smoothing: float = 0.0,
        pad: int = 0,
        flip: bool = False,
        mix: Array | None = None,
    ) -> Tensor:
        """Return the mean cross-entropy of int labels (B,) for uint8 images, a Tensor ().

        In training a random window of each image is seen, ``pad`` and ``flip`` as in
        ``ops.image_patches``, by random numbers of ``random.step``; else the middle. ``mix`` (B,):
        float32, the share of image i and its label beside image B - 1 - i and its own.
        ``dloss``, ``label_smoothing``: as in ``cross_entropy``.
        """
        window: dict[str, Any] = {}
        if self.training:
            key = random.Key(self.random.seed, self.stream, self.random.step)
            window = {"pad": pad, "flip": flip, "seed": key}
        logits = self._head(self._states_of(self._cut(images, mix=mix, **window), first_token))
        if mix is None:
            return cross_entropy(
                logits, labels, label_smoothing=label_smoothing, donate=True, dloss=dloss
            )
        each: dict[str, Any] = {"label_smoothing": label_smoothing, "reduction": "none"}
        others = get_xp(labels).ascontiguousarray(labels[::-1])
        own, other = (cross_entropy(logits, a, **each) for a in (labels, others))
        return np.mean(own * mix + other * (1 - mix))

    def _cut(self, images, **options):
        """Return the patches of uint8 images behind a row of zeros, for the class token."""
        c, half = self.config, (0.5,) * self.config.channels
        return image_patches(
            images, c.patch, size=c.image, mean=c.mean or half, std=c.std or half, before=1,
            dtype=self.patch.weight.dtype, **options,
        )  # fmt: skip

    def _patches(self, images):
        """Return the patches of normalised images behind a row of zeros."""
        c, dtype = self.config, self.patch.weight.dtype
        if images.dtype != dtype:
            raise TypeError(problem("ViT", "images.dtype", images.dtype, f"uint8, or {dtype}"))
        shape = (c.image, c.image, c.channels)
        if images.ndim != 4 or images.shape[1:] != shape:
            accepted = f"(B, {', '.join(map(str, shape))})"
            raise ValueError(problem("ViT", "images.shape", images.shape, accepted))
        across = c.image // c.patch
        x = images.reshape(-1, across, c.patch, across, c.patch, c.channels)
        found = zeros(images, (len(images), c.tokens, c.patch_width))
        found[:, 1:] = x.transpose(0, 1, 3, 2, 4, 5).reshape(len(images), -1, c.patch_width)
        return found

    def _states_of(self, patches, pick=None):
        """Return the states for (B, tokens, patch_width), the first row of each image zeros.

        ``pick``: see ``run_layers``.

        The product of that row is zero: its place is that of the class token, which has no bias.
        """
        c = self.config
        bias = np.broadcast_to(self.patch.bias, (c.tokens - 1, c.d_model))
        added = np.concatenate([np.reshape(self.class_token, (1, -1)), bias]) + self.positions
        x = self.dropout(linear(patches, self.patch.weight) + added)
        recompute = self.checkpoint != "none"
        return run_layers(self.layers, self.norm, x, recompute=recompute, pick=pick)

    def _head(self, states):
        if self.head is None:
            raise ConfigError(problem("ViT", "classes", 0, "a model that has some"))
        return self.head(states[:, 0])


def cubic(old: int, new: int) -> np.ndarray:
    """Return the (new, old) weights of ``old`` values for as many ``new`` by cubic convolution.

    Values lie in the middles of equal parts; beyond the ends they are those at the ends. The
    coefficient is -0.75, as in PyTorch's "bicubic" with ``align_corners=False``.
    """
    places = (np.arange(new) + 0.5) * old / new - 0.5
    found, rows = np.zeros((new, old)), np.arange(new)
    for step in range(-1, 3):
        cells = np.floor(places).astype(int) + step
        x, a = np.abs(places - cells), -0.75
        near = ((a + 2) * x - (a + 3)) * x * x + 1
        far = a * (((x - 5) * x + 8) * x - 4)
        np.add.at(found, (rows, cells.clip(0, old - 1)), np.where(x <= 1, near, far))
    return found


# ---- in a run -----------------------------------------------------------------------------------


def _configure(options, classes):
    """Return the ViTConfig of a TrainConfig."""
    return ViTConfig(
        classes=classes, image=options.image_size, patch=options.patch, channels=options.channels,
        d_model=options.dim, heads=options.heads, layers=options.layers[0], ffn=4 * options.dim,
        dropout=options.dropout, attention_dropout=options.attention_dropout,
        stochastic_depth=options.stochastic_depth, activation=options.activation,
    )  # fmt: skip


def _check(options):
    if options.layers[0] != options.layers[1]:
        raise ConfigError(
            f"layers is {shown(options.layers)}; accepted: one number, vit is an encoder only"
        )
    if options.image_size % options.patch:
        raise ConfigError(
            f"patch is {options.patch}; accepted: a divisor of image-size, {options.image_size}"
        )
    if options.positions != "learned":
        raise ConfigError(f"positions is {options.positions}; accepted: learned for vit")
    if options.activation not in ACTIVATIONS:
        accepted = ", ".join(ACTIVATIONS)
        raise ConfigError(f"activation is {options.activation}; accepted: {accepted} for vit")


register(ModelKind(
    name="vit", tasks=("images",), model=ViT, configure=_configure, check=_check,
    options=("image_size", "patch", "channels", "stochastic_depth"),
    notes={"ffn": "it is 4 * dim", "batch": "images"},
    # For some ten thousand images from scratch: Steiner et al., "How to train your ViT?" (2022).
    defaults={
        "positions": "learned", "activation": "gelu", "length": "100e", "dim": 192, "heads": 3,
        "layers": (12, 12), "dropout": 0.0, "batch": 256, "lr": 1e-3, "weight_decay": 0.05,
        "beta2": 0.999, "ema": 0.0,
    },
    device_defaults={"numpy": {"dim": 64, "heads": 4, "layers": (4, 4), "batch": 64,
                               "eval_every": AUTO}},
    presets={
        "tiny": {"dim": 192, "heads": 3, "layers": (12, 12)},
        "small": {"dim": 384, "heads": 6, "layers": (12, 12)},
        "base": {"dim": 768, "heads": 12, "layers": (12, 12)},
    },
))  # fmt: skip
