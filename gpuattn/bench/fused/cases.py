"""The cells of the fused ops, with the FLOPs and bytes of each.

Bytes: each large array that must be read or written, once; vectors of a row's length are not
counted. FLOPs are those of the formula, an exponential as one.
"""

from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import numpy as np

from gpuattn.bench.cases import Cell

PARAMETERS = 124_000_000
ZIPF = 1.1  # the exponent of token frequencies


@dataclass(frozen=True)
class Fused:
    """A problem of ``op``. ``shape``: the sizes of the axes in ``AXES``.

    ``smoothing``: of labels. ``dropout``: the probability. ``rms``: RMSNorm in place of LayerNorm.
    """

    op: str
    shape: tuple[int, ...]
    dtype: str = "bfloat16"
    smoothing: float = 0.0
    dropout: float = 0.0
    rms: bool = False

    @property
    def width(self) -> int:
        """Bytes of an element."""
        return {"float64": 8, "float32": 4}.get(self.dtype, 2)

    def flops(self, direction: str) -> float:
        """Return the FLOPs of one direction."""
        return FLOPS[self.op][direction] * self.elements()

    def elements(self) -> int:
        """Return how many elements the op works on."""
        if self.op == "embedding":
            return self.shape[0] * self.shape[2]
        return int(np.prod(self.shape, dtype=np.int64))

    def bytes(self, direction: str) -> int:
        """Return the bytes that one direction must read and write."""
        if self.op == "adamw":  # gradients twice: for the norm, and for the update
            return self.elements() * (3 * 8 + (2 + 1) * self.width)
        if self.op == "embedding":
            tokens, vocabulary, dim = self.shape
            rows = vocabulary if direction == "backward" else distinct(tokens, vocabulary)
            return (rows + tokens) * dim * self.width
        passes = PASSES[self.op][direction]
        if self.op == "dropout_add_norm" and direction == "backward" and not self.dropout:
            passes -= 1  # x and the residual have the same gradient
        return passes * self.elements() * self.width

    def set_bytes(self) -> int:
        """Return the bytes of one set of inputs."""
        return self.elements() * self.width

    def features(self) -> dict[str, Any]:
        """Return the fields other than op, shape and dtype that are set."""
        plain = ("op", "shape", "dtype")
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in plain}
        return {name: value for name, value in given.items() if value}

    def plain(self) -> None:
        """Return None: there is no form without features to compare with."""

    def as_dict(self) -> dict[str, Any]:
        """Return the "case" of a row of results."""
        return {"shape": list(self.shape), "dtype": self.dtype, "flags": self.features()}

    @classmethod
    def from_dict(cls, op: str, case: dict[str, Any]) -> "Fused":
        """Return the case of ``as_dict``."""
        return cls(op, tuple(case["shape"]), case["dtype"], **case["flags"])

    def __str__(self):
        words = ["x".join(map(str, self.shape))]
        for name, value in self.features().items():
            words.append(name if value is True else f"{name} {value}")
        return ", ".join(words)


AXES = {
    "softmax": "rows x columns", "layer_norm": "rows x columns", "rms_norm": "rows x columns",
    "dropout_add_norm": "rows x columns", "cross_entropy": "rows x vocabulary",
    "embedding": "tokens x vocabulary x width", "adamw": "parameters",
    "beam_step": "sentences x beams x vocabulary", "gelu": "rows x columns",
    "topk_logprobs": "rows x vocabulary", "dropout": "rows x columns",
}  # fmt: skip
PASSES = {  # arrays of all elements read or written
    "softmax": {"forward": 2, "backward": 3},
    "layer_norm": {"forward": 2, "backward": 3},
    "rms_norm": {"forward": 2, "backward": 3},
    "dropout_add_norm": {"forward": 4, "backward": 5},
    "cross_entropy": {"forward+backward": 2},
    "beam_step": {"forward": 1},
    "gelu": {"forward": 2, "backward": 3},
    "topk_logprobs": {"forward": 1},
    "dropout": {"forward": 2, "backward": 2},
}
FLOPS = {  # of an element
    "softmax": {"forward": 5, "backward": 4},
    "layer_norm": {"forward": 7, "backward": 13},
    "rms_norm": {"forward": 4, "backward": 9},
    "dropout_add_norm": {"forward": 9, "backward": 15},
    "cross_entropy": {"forward+backward": 7},
    "embedding": {"forward": 1, "backward": 1},
    "adamw": {"step": 18},
    "beam_step": {"forward": 5},
    "gelu": {"forward": 9, "backward": 16},
    "topk_logprobs": {"forward": 4},
    "dropout": {"forward": 1, "backward": 1},
}


@cache
def zipf_tokens(tokens: int, vocabulary: int, seed: int = 0) -> np.ndarray:
    """Return (tokens,) int32 ids with the frequencies of words, by Zipf's law."""
    share = np.arange(1, vocabulary + 1) ** -ZIPF
    random = np.random.default_rng(seed)
    return random.choice(vocabulary, tokens, p=share / share.sum()).astype(np.int32)


def distinct(tokens: int, vocabulary: int) -> int:
    """Return how many different ids ``zipf_tokens`` has."""
    return len(np.unique(zipf_tokens(tokens, vocabulary)))


# ---- tables -------------------------------------------------------------------------------------

TORCH = ("torch", "torch-compile")
EVERY = (*TORCH, "quack", "liger")
TALL = [(32768, n) for n in (256, 512, 768, 1024, 4096)]


def _cells(op, shapes, peers, **features):
    cases = [Fused(op, shape, **features) for shape in shapes]
    return [Cell(op, case, direction, peers) for case in cases for direction in FLOPS[op]]


def _by_numba(op):
    return [cell._replace(impl="numba") for cell in _cells(op, [TALL[3], TALL[4]], ())]


TABLES = {
    "softmax": [*_cells("softmax", [*TALL, (16384, 8192)], EVERY), *_by_numba("softmax")],
    "layer_norm": [*_cells("layer_norm", [*TALL, (16384, 8192)], EVERY), *_by_numba("layer_norm")],
    "rms_norm": _cells("rms_norm", [TALL[1], TALL[3], (16384, 8192)], EVERY),
    "dropout_add_norm": [
        *_cells("dropout_add_norm", [TALL[1], TALL[3]], TORCH, dropout=0.1),
        *_cells("dropout_add_norm", [TALL[3]], EVERY, rms=True),
    ],
    "cross_entropy": [
        *_cells("cross_entropy", [(8192, 32000), (8192, 50304), (4096, 128256)], EVERY),
        *_cells(
            "cross_entropy", [(8192, 32000), (8192, 50304), (4096, 128256)],
            (*TORCH, "liger"), smoothing=0.1,
        ),
    ],
    "embedding": _cells("embedding", [(8192, 32768, 512)], TORCH),
    "adamw": _cells("adamw", [(PARAMETERS,)], (*TORCH, "torch-fused")),
    "beam_step": _cells("beam_step", [(64, 4, 32000), (8, 4, 128256), (64, 5, 50304)], TORCH),
    "dropout": _cells("dropout", [TALL[1], TALL[3]], TORCH, dropout=0.1),
}  # fmt: skip
"""op -> the cells of its table."""

REQUIRED = [cell for table in TABLES.values() for cell in table]

SMALL = [
    Cell(op, Fused(op, shape, "float32"), direction, ())
    for op, shape in {
        "softmax": (64, 256), "layer_norm": (64, 256), "rms_norm": (64, 256),
        "dropout_add_norm": (64, 256), "cross_entropy": (64, 1000), "embedding": (64, 1000, 32),
        "adamw": (16384,), "beam_step": (4, 4, 1000),
    }.items()
    for direction in FLOPS[op]
]  # fmt: skip
SMALL += [
    Cell("dropout", Fused("dropout", (64, 256), "float32", dropout=0.1), direction, ())
    for direction in FLOPS["dropout"]
]
"""Small cells for NumPy."""
