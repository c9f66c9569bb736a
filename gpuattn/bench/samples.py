"""Arguments of every op, for ``gpuattn kernels --why`` and ``gpuattn bench ops``."""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

import gpuattn
from gpuattn.arrays import BFLOAT16
from gpuattn.errors import ConfigError

DTYPES = {
    "bfloat16": BFLOAT16,
    "float16": np.dtype("float16"),
    "float32": np.dtype("float32"),
    "float64": np.dtype("float64"),
}


@dataclass(frozen=True)
class Sample:
    """How to draw the arguments of one op.

    ``shape``: the default; ``axes``: the names of its axes. ``draw(shape, floats, integers)``
    returns (positional, keyword) arguments. ``passes``: how often an ideal forward and backward
    pass reads or writes an array of ``shape``, for GB/s; None for ops that memory does not bound.
    """

    op: Callable
    axes: str
    shape: tuple[int, ...]
    draw: Callable
    passes: tuple[int, int] | None = None


def _rows(*extra):
    def draw(shape, floats, integers):
        return [floats(shape), *[floats(shape[-1:]) for _ in range(len(extra))]], {}

    return draw


def _dropout_add_norm(shape, floats, integers):
    x, residual, weight, bias = floats(shape), floats(shape), floats(shape[-1:]), floats(shape[-1:])
    return [x, residual, weight, bias], {"p": 0.1, "seed": 1}


def _linear(shape, floats, integers):
    rows, inputs, outputs = shape
    return [floats((rows, inputs)), floats((outputs, inputs)), floats((outputs,))], {}


def _embedding(shape, floats, integers):
    tokens, vocabulary, width = shape
    return [integers((tokens,), vocabulary), floats((vocabulary, width))], {}


def _cross_entropy(shape, floats, integers):
    rows, vocabulary = shape
    return [floats(shape), integers((rows,), vocabulary)], {"label_smoothing": 0.1}


def _topk(shape, floats, integers):
    return [floats(shape), 8], {}


def _attention(shape, floats, integers):
    return [floats(shape), floats(shape), floats(shape)], {"causal": True}


def _decode(shape, floats, integers):
    batch, keys, heads, kv_heads, size = shape
    caches = [floats((batch, keys, kv_heads, size)) for _ in "kv"]
    lengths = integers((batch,), 1) + np.int32(keys)
    return [floats((batch, 1, heads, size)), *caches, lengths], {}


SAMPLES = {
    "softmax": Sample(gpuattn.softmax, "rows x columns", (8192, 1024), _rows(), (2, 3)),
    "layer_norm": Sample(
        gpuattn.layer_norm, "rows x columns", (8192, 1024), _rows("weight", "bias"), (2, 3)
    ),
    "rms_norm": Sample(gpuattn.rms_norm, "rows x columns", (8192, 1024), _rows("w"), (2, 3)),
    "dropout": Sample(
        gpuattn.dropout, "rows x columns", (8192, 1024),
        lambda shape, floats, integers: ([floats(shape), 0.1], {"seed": 1}), (2, 2),
    ),
    "dropout_add_norm": Sample(
        gpuattn.dropout_add_norm, "rows x columns", (8192, 1024), _dropout_add_norm, (4, 5)
    ),
    "linear": Sample(gpuattn.linear, "rows x inputs x outputs", (8192, 512, 2048), _linear),
    "gelu": Sample(gpuattn.gelu, "rows x columns", (8192, 1024), _rows("b"), (2, 3)),
    "relu": Sample(gpuattn.relu, "rows x columns", (8192, 1024), _rows("b"), (2, 3)),
    "embedding": Sample(
        gpuattn.embedding, "tokens x vocabulary x width", (8192, 32768, 512), _embedding
    ),
    "cross_entropy": Sample(
        gpuattn.cross_entropy, "rows x vocabulary", (8192, 32000), _cross_entropy, (1, 2)
    ),
    "topk_logprobs": Sample(
        gpuattn.topk_logprobs, "rows x vocabulary", (256, 32000), _topk, (1, 0)
    ),
    "flash_attention": Sample(
        gpuattn.flash_attention, "batch x tokens x heads x head size", (8, 1024, 16, 64), _attention
    ),
    "decode_attention": Sample(
        gpuattn.decode_attention, "batch x keys x heads x KV heads x head size",
        (64, 8192, 32, 8, 128), _decode,
    ),
}  # fmt: skip


def sample(
    name: str, shape: tuple[int, ...] | None = None, dtype: str = "bfloat16", xp: ModuleType = np,
    seed: int = 0,
) -> tuple[Callable, list, dict[str, Any]]:  # fmt: skip
    """Return (op, positional arguments, keyword arguments) of the op ``name``, arrays of ``xp``.

    Raises ConfigError for an op without a sample or a shape with the wrong number of axes.
    """
    if name not in SAMPLES:
        raise ConfigError(f"no op {name!r}; ops: {', '.join(SAMPLES)}")
    entry = SAMPLES[name]
    shape = shape or entry.shape
    if len(shape) != len(entry.shape):
        example = "x".join(map(str, entry.shape))
        raise ConfigError(f"{name} takes a shape of {entry.axes}, such as {example}, got {shape}")
    rng = np.random.default_rng(seed)

    def floats(size):
        return xp.asarray(rng.standard_normal(size, dtype=np.float32).astype(DTYPES[dtype]))

    def integers(size, below):
        return xp.asarray(rng.integers(0, below, size, dtype=np.int32))

    return entry.op, *entry.draw(shape, floats, integers)
