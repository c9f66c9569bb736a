"""The cells of whole training steps: models, batches, and model FLOPs."""

from dataclasses import asdict, dataclass, replace
from typing import Any

from gpuattn.bench.cases import Cell
from gpuattn.models import BertConfig, GPT2Config, TranslationConfig, ViTConfig


@dataclass(frozen=True)
class Step:
    """An update of ``model`` on ``shape`` = (sentences, tokens of each, on either side).

    Of a classifier of images ``shape`` is (images, tokens of each), ``vocab`` the classes, and
    ``image`` and ``patch`` are sides in pixels; ``image`` 0: a model of texts. ``masked``: the
    share of tokens that a BERT guesses, which alone have logits; 0: another model.
    ``layers``: (encoder, decoder) of a translation model, (L,) of others. ``hidden``:
    width inside the feed-forward networks. ``smoothing``: of labels. The optimizer is AdamW, with
    gradients clipped at the norm ``clip``. Activations and our gradients are ``dtype``, with
    float32 masters. ``pad_vocab``: whether our embedding table is padded to a multiple of 64 rows.
    """

    model: str
    shape: tuple[int, int]
    vocab: int
    width: int
    heads: int
    layers: tuple[int, ...]
    hidden: int
    dropout: float = 0.1
    smoothing: float = 0.1
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-9
    learning_rate: float = 3e-4
    clip: float = 1.0
    dtype: str = "bfloat16"
    pad_vocab: bool = True
    image: int = 0
    patch: int = 16
    masked: float = 0.0

    @property
    def translates(self) -> bool:
        """Whether the model is a translation model."""
        return len(self.layers) == 2

    @property
    def tokens(self) -> int:
        """Target tokens of a step; of a BERT all that it reads."""
        return self.shape[0] * self.shape[1]

    def config(self) -> Any:
        """Return the config of our model."""
        sizes = self.vocab, self.width, self.heads
        if self.translates:
            length = self.shape[1]
            return TranslationConfig(
                *sizes, (self.layers[0], self.layers[1]), self.hidden, self.dropout,
                max_length=length, pad_vocab=self.pad_vocab,
            )  # fmt: skip
        if self.image:
            return ViTConfig(
                self.vocab, self.image, self.patch, 3, self.width, self.heads, self.layers[0],
                self.hidden, self.dropout, eps=1e-5,
            )  # fmt: skip
        if self.masked:
            return BertConfig(
                *sizes, self.layers[0], self.hidden, self.shape[1], dropout=self.dropout,
                pooler=False, masked=True, predicted=self.masked, pad_vocab=self.pad_vocab,
            )  # fmt: skip
        return GPT2Config(
            *sizes, self.layers[0], self.shape[1], self.dropout, bias=False,
            pad_vocab=self.pad_vocab,
        )  # fmt: skip

    def weights(self) -> int:
        """Return the weights of linear layers per token, a source and a target token as one."""
        return self.config().token_weights()

    def flops(self, direction: str) -> float:
        """Return the model FLOPs, see ``models.flops``."""
        lengths = [self.shape[1]] * self.shape[0]
        return self.config().flops(*[lengths] * len(self.layers))

    def bytes(self, direction: str) -> int:
        """Return the bytes that a step moves for its parameters alone.

        For each, 6 in forward and backward and 30 in the update: see ``Fused.bytes`` of adamw.
        """
        config = self.config()
        if self.masked:  # the whole head is read and updated, though few tokens meet it
            config = replace(config, predicted=1.0)
        return 36 * config.token_weights()

    def as_dict(self) -> dict[str, Any]:
        """Return the "case" of a row of results."""
        flags = asdict(self) | {"layers": list(self.layers), "betas": list(self.betas)}
        if self.pad_vocab:  # the default, absent from recorded files
            flags.pop("pad_vocab")
        if not self.image:
            del flags["image"], flags["patch"]
        if not self.masked:
            del flags["masked"]
        return {"shape": list(flags.pop("shape")), "dtype": flags.pop("dtype"), "flags": flags}

    @classmethod
    def from_dict(cls, case: dict[str, Any]) -> "Step":
        """Return the case of ``as_dict``."""
        step = cls(shape=tuple(case["shape"]), dtype=case["dtype"], **case["flags"])
        return replace(step, layers=tuple(step.layers), betas=(step.betas[0], step.betas[1]))

    def __str__(self):
        """Return the model and its batch, for tables."""
        return f"{self.model}, {self.shape[0]} x {self.shape[1]}"


PEERS = ("torch-eager", "torch-compile", "torch-graph")


def _gpt(model, shape, vocab, width, heads, layers, **rest):
    rest = {"dropout": 0.0, "smoothing": 0.0, "weight_decay": 0.1, "betas": (0.9, 0.95), **rest}
    return Step(model, shape, vocab, width, heads, (layers,), 4 * width, **rest)


MODELS = {
    case.model: case
    for case in (
        Step("tiny", (256, 32), 9728, 128, 4, (4, 4), 256),
        Step("base", (128, 64), 32768, 512, 8, (6, 6), 2048),
        Step("big", (128, 64), 32768, 1024, 16, (6, 6), 4096),
        _gpt("gpt2-124m", (12, 1024), 50257, 768, 12, 12),
        _gpt("shakespeare", (64, 256), 65, 384, 6, 6, dropout=0.2),
    )
}
"""Vaswani et al.'s base and big, one for 29,000 captions, and two models of nanoGPT."""

TABLE = [Cell("train", case, "step", PEERS) for case in MODELS.values()]

UNPADDED = replace(MODELS["gpt2-124m"], model="gpt2-124m-unpadded", pad_vocab=False)
VIT = Step(
    "vit-b16", (128, 197), 1000, 768, 12, (12,), 3072, dropout=0.0, smoothing=0.0, image=224,
    weight_decay=0.1, betas=(0.9, 0.999),
)  # fmt: skip
BERT = Step(
    "bert-base", (32, 512), 30522, 768, 12, (12,), 3072, smoothing=0.0, weight_decay=0.01,
    betas=(0.9, 0.999), eps=1e-6, learning_rate=1e-4, masked=0.15,
)  # fmt: skip
ENCODERS = [
    VIT, replace(VIT, model="vit-b16-256", shape=(256, 197)),
    BERT, replace(BERT, model="bert-base-128", shape=(128, 512)),
]  # fmt: skip
LARGE = [
    _gpt("gpt2-large", (4, 1024), 50257, 1280, 20, 36),
    replace(MODELS["base"], model="deep", layers=(24, 24)),
]
BESIDE = [
    *(Cell("train", case, "step", (*PEERS, "hf-compile")) for case in ENCODERS),
    *(Cell("train", case, "step", PEERS) for case in LARGE),
]

CELLS = {cell.case.model: cell for cell in [
    *TABLE, Cell("train", UNPADDED, "step", ()), *BESIDE,
]}  # fmt: skip
"""{name of ``--model``: Cell}: the table, one to measure the cost of ``--no-pad-vocab``, and those
that no recorded file has to hold: ViT-B/16, BERT-base, GPT-2 large, a deep translation model."""


def small(case: Step) -> Step:
    """Return a small case of the same family, for NumPy."""
    sides = {"shape": (8, 5), "image": 8, "patch": 4} if case.image else {"shape": (8, 16)}
    return replace(
        case, **sides, vocab=min(case.vocab, 200), width=32, heads=2,
        layers=(1,) * len(case.layers), hidden=128, dtype="float32",
    )  # fmt: skip
