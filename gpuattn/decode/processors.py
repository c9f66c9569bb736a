"""Bans and penalties on the logits, or log-probabilities, of a step.

``x``: float (B, K, V), for K texts of each of B sentences. ``texts``: int32 (B, K, T), their tokens
so far with the one that begins them. All return a new array and compute on NumPy or CuPy.
"""

from typing import Any

import numpy as np

from gpuattn.arrays import get_xp
from gpuattn.ops.sampling.topk_logprobs import log_sum
from gpuattn.typing import Array


def ban(x: Array, tokens: Array) -> Array:
    """Set x to -inf where the bool array ``tokens``, (V,) or (B, K, V), is true."""
    return get_xp(x).where(tokens, x.dtype.type(-np.inf), x)


def ban_repeated_ngrams(x: Array, texts: Array, size: int) -> Array:
    """Ban each token that would repeat ``size`` tokens in a row (Paulus et al., 2018)."""
    xp, length = get_xp(x), texts.shape[2]
    if length < size:
        return x
    latest = texts[:, :, length - size + 1 :]
    seen = [texts[:, :, i : length - size + 1 + i] for i in range(size)]
    repeats = xp.ones(seen[-1].shape, bool)
    for i, token in enumerate(seen[:-1]):
        repeats &= token == latest[:, :, i : i + 1]
    return ban(x, _marked(xp, seen[-1], repeats, x.shape[2]))


def penalise_repetitions(x: Array, texts: Array, penalty: float) -> Array:
    """Divide x > 0 of tokens in their texts by ``penalty``, and multiply other x of them by it."""
    xp = get_xp(x)
    seen = _marked(xp, texts, xp.ones(texts.shape, bool), x.shape[2])
    return xp.where(seen, xp.where(x > 0, x / penalty, x * penalty), x)


def _marked(xp: Any, tokens: Array, here: Array, vocab: int) -> Array:
    """Return a bool array (B, K, V), true for the tokens (B, K, n) that are marked by ``here``."""
    sentences, beam, _ = tokens.shape
    marks = xp.zeros((sentences, beam, vocab + 1), bool)  # the last column takes the others
    rows = xp.arange(sentences)[:, None, None], xp.arange(beam)[None, :, None]
    marks[(*rows, xp.where(here, tokens, vocab))] = True
    return marks[:, :, :vocab]


def force(x: Array, logprobs: Array, forced: Array) -> Array:
    """Leave a sentence one token, ``forced`` (B,), with its log-probability; -1: leave x as is."""
    xp, wanted = get_xp(x), forced[:, None, None]
    only = xp.where(xp.arange(x.shape[2]) == wanted, logprobs, x.dtype.type(-np.inf))
    return xp.where(wanted >= 0, only, x)


def log_softmax(x: Array) -> Array:
    """Return log-probabilities; a row of -inf alone stays so."""
    rows = x.reshape(-1, x.shape[-1])
    peak, log_total = log_sum(rows)
    return (rows - peak - log_total).reshape(x.shape)
