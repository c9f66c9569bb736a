"""Ops composed of NumPy's functions, beside the op of each."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import gpuattn
from gpuattn.lecture.harness.say import Say


class Pair(NamedTuple):
    """Two forms of an op of one input, and the shape of that."""

    shape: tuple[int, int]
    composed: Callable[[Any], Any]
    one_op: Callable[[Any], Any]


def pairs(say: Say, N: int, D: int, V: int) -> dict[str, Pair]:
    """Return the Pairs by name, of N rows of D numbers or V logits."""
    xp = say.xp
    ids, wanted = (xp.asarray(say.rng.integers(0, V, N)) for _ in range(2))
    ones, zeros, places = say.array(np.ones(D)), say.array(np.zeros(D)), say.normal(N, D)
    draws, kept = xp.random.default_rng(0), say.array(say.rng.random((N, D)) < 0.9) / 0.9

    def logs(z):
        z = z - z.max(-1, keepdims=True)
        return z - np.log(np.exp(z).sum(-1, keepdims=True))

    def norm(x):
        d = x - x.mean(-1, keepdims=True)
        return d / np.sqrt((d * d).mean(-1, keepdims=True) + 1e-5) * ones + zeros

    def dropout(x):  # the mask is drawn by the generator of NumPy or CuPy
        return x * ((draws.random((N, D), dtype="float32") < 0.9) * np.float32(1 / 0.9))

    def embedding(w):
        return gpuattn.embedding(
            ids, w, scale=16.0, position_weight=places, p=0.1, seed=1, deterministic=False
        )

    return {
        "embedding": Pair((V, D), lambda w: (w[ids] * 16.0 + places) * kept, embedding),
        "loss": Pair((N, V), lambda z: -logs(z)[xp.arange(N), wanted].mean(),
                     lambda z: gpuattn.cross_entropy(z, wanted)),
        "layer norm": Pair((N, D), norm, lambda x: gpuattn.layer_norm(x, ones, zeros)),
        "softmax": Pair((N, D), lambda x: np.exp(logs(x)), gpuattn.softmax),
        "dropout": Pair((N, D), dropout, lambda x: gpuattn.dropout(x, 0.1, seed=1)),
    }  # fmt: skip
