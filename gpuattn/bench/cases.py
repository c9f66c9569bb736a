"""The cells of the tables of attention, with the FLOPs and bytes of each.

FLOPs as FlashAttention counts them: 4 D for every visible pair of query and key forward (T * T / 2
when causal), 2.5 times that backward. What a kernel recomputes does not count.
"""

from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

WORK = {"forward": 1, "backward": 2.5, "forward+backward": 3.5}
FIRST_LENGTH = 5
CAPTIONS = (
    8, 34, 211, 783, 1748, 2475, 3084, 3372, 3243, 2872, 2517, 2107, 1548, 1294, 953, 761, 551,
    420, 285, 197, 158, 105, 82, 49, 42, 24, 18, 12, 11, 9, 5, 10, 3, 1, 4, 3, 1,
)  # fmt: skip
"""Counts of 29,000 English image captions with 5, 6, ... 41 tokens: words and an end mark."""


@dataclass(frozen=True)
class Attention:
    """A problem of attention. ``shape``: (B, T, H, D). ``keys``: number of keys, by default T.

    ``window``: the number of keys visible to the left of a query's own. ``bias``: (1, H, T, T),
    and backward its gradient. ``captions``: the T tokens are packed sequences with the lengths of
    captions, and B is 1.
    """

    shape: tuple[int, int, int, int]
    dtype: str = "bfloat16"
    causal: bool = False
    window: int | None = None
    kv_heads: int | None = None
    keys: int | None = None
    dropout: float = 0.0
    bias: bool = False
    deterministic: bool = False
    captions: bool = False

    @property
    def key_heads(self) -> int:
        """Number of heads of keys and values."""
        return self.kv_heads or self.shape[2]

    def lengths(self) -> list[int]:
        """Return the length of every sequence."""
        batch, tokens = self.shape[:2]
        return caption_lengths(tokens) if self.captions else [tokens] * batch

    def pairs(self) -> float:
        """Return the visible pairs (query, key) of one head in the whole batch."""
        if self.keys:
            return self.shape[0] * self.shape[1] * self.keys
        return sum(map(self._pairs, self.lengths()))

    def _pairs(self, length):
        if self.window is not None and self.window < length:
            seen = self.window + 1
            return seen * (seen + 1) // 2 + (length - seen) * seen
        return length * length / 2 if self.causal else length * length

    def flops(self, direction: str) -> float:
        """Return the FLOPs of one direction."""
        _, _, heads, head_dim = self.shape
        return WORK[direction] * 4 * head_dim * heads * self.pairs()

    def bytes(self, direction: str) -> int:
        """Return the bytes that must move: inputs and gradients in, results out, each once."""
        batch, tokens, heads, head_dim = self.shape
        width = 4 if self.dtype == "float32" else 2
        rows = tokens * heads + (self.keys or tokens) * self.key_heads
        bias = self.bias * heads * tokens**2 * width
        forward = 2 * batch * rows * head_dim * width + bias
        backward = 4 * batch * rows * head_dim * width + 2 * bias
        return {
            "forward": forward, "backward": backward, "forward+backward": forward + backward,
        }[direction]  # fmt: skip

    def set_bytes(self) -> int:
        """Return the bytes of one set of inputs and results."""
        return self.bytes("forward")

    def features(self) -> dict[str, Any]:
        """Return the fields other than shape, dtype and causal that are set."""
        plain = ("shape", "dtype", "causal")
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in plain}
        return {name: value for name, value in given.items() if value}

    def plain(self) -> "Attention | None":
        """Return the problem without its features; None if it has none, is packed or decodes."""
        if not self.features() or self.captions or self.keys:
            return None
        return Attention(self.shape, self.dtype, self.causal)

    def as_dict(self) -> dict[str, Any]:
        """Return the "case" of a row of results."""
        flags = {"causal": True} if self.causal else {}
        return {
            "shape": list(self.shape), "dtype": self.dtype, "flags": {**flags, **self.features()},
        }  # fmt: skip

    @classmethod
    def from_dict(cls, case: dict[str, Any]) -> "Attention":
        """Return the case of ``as_dict``."""
        return cls(tuple(case["shape"]), case["dtype"], **case["flags"])

    def __str__(self):
        """Return the mask and features, for tables."""
        words = ["causal" if self.causal else "full"]
        for name, value in self.features().items():
            words.append(name.replace("_", " ") if value is True else f"{name} {value}")
        return ", ".join(words).replace("kv_heads", "KV heads")


def caption_lengths(tokens: int) -> list[int]:
    """Return lengths of sequences, distributed as those of captions, that add up to ``tokens``."""
    bounds = np.cumsum(CAPTIONS)
    lengths: list[int] = []
    while sum(lengths) < tokens:
        share = len(lengths) * 0.6180339887498949 % 1  # golden ratio: an even spread
        lengths.append(FIRST_LENGTH + int(np.searchsorted(bounds, share * bounds[-1], "right")))
    lengths[-1] -= sum(lengths) - tokens
    return lengths


class Cell(NamedTuple):
    """A cell of a table of results; its file needs the time of each peer, or a reason without.

    ``case``: an Attention, Fused, Step or Decoding. ``direction``: "forward", "backward",
    "forward+backward" or "step". ``impl``: an implementation, or None for the choice of the op.
    """

    op: str
    case: Any
    direction: str
    peers: tuple[str, ...]
    impl: str | None = None

    def is_of(self, row: dict[str, Any]) -> bool:
        """Return whether ``row`` holds this cell's results."""
        mine = self.op, self.case.as_dict(), self.direction, self.impl
        return mine == (row["op"], row["case"], row["direction"], row.get("asked"))


TOKENS, WIDTH = 16384, 2048
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
FASTEST = ("torch-cudnn", "flash-attn-4", "torch-fa2")


def _cells(case, peers, directions=("forward", "backward")):
    return [Cell("flash_attention", case, direction, peers) for direction in directions]


def _problem(head_dim, length, causal=False, **features):
    shape = TOKENS // length, length, WIDTH // head_dim, head_dim
    return Attention(shape, causal=causal, **features)


TABLE = [
    Cell("flash_attention", _problem(head_dim, length, causal), direction, FASTEST)
    for direction in ("forward", "backward")
    for head_dim in (64, 128)
    for causal in (False, True)
    for length in LENGTHS
]
"""Batch x length = 16,384 tokens, heads x head size = 2,048, as in the FlashAttention papers."""

WIDE = _cells(_problem(256, 16384), FASTEST)
_BIASED = _problem(128, 4096, bias=True)
_LONG = _problem(128, 16384, True)
_DROPPED = [
    cell
    for head_dim in (64, 128)
    for length in (4096, 16384)
    for cell in _cells(_problem(head_dim, length, dropout=0.1), ("torch-cudnn", "torch-fa2"))
]
FEATURES = [
    *_DROPPED,
    *_cells(_BIASED, ("torch-cudnn", "torch-efficient")),
    *_cells(replace(_LONG, window=1024), ("flash-attn-4", "torch-varlen")),
    *_cells(Attention((4, 4096, 32, 128), causal=True, kv_heads=8), FASTEST),
    *_cells(replace(_LONG, deterministic=True), FASTEST, ("backward",)),
    *_cells(
        Attention((1, 8192, 8, 64), captions=True),
        ("torch-padded", "torch-buckets", "torch-varlen", "flash-attn-4"),
    ),
    Cell(
        "decode_attention", Attention((64, 1, 32, 128), kv_heads=8, keys=8192), "forward", FASTEST
    ),
]

REQUIRED = [*TABLE, *WIDE, *FEATURES]

PUBLISHED = [
    Cell("flash_attention", Attention((1, length, 48, 64)), "forward+backward", peers)
    for length in (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
    for peers in [("torch-fa2", "torch-efficient", "torch-math")]
]
"""One sequence of 48 heads, up to lengths where storing all logits runs out of memory."""

SMALL = [
    Cell("flash_attention", Attention((2, 256, 4, head_dim), "float32", causal), direction, ())
    for direction in ("forward", "backward")
    for head_dim in (64, 128)
    for causal in (False, True)
]
"""Small cells for NumPy."""
