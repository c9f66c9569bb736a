"""Sampling: temperature, the k most probable (top-k), and the nucleus (top-p).

Top-p: Holtzman et al., "The curious case of neural text degeneration" (2020).
"""

import math

import numpy as np

from gpuattn import rng
from gpuattn.arrays import wide
from gpuattn.decode.greedy import follow
from gpuattn.decode.stepper import Limits
from gpuattn.errors import problem
from gpuattn.ops.topk_logprobs import topk_logprobs


def sample(
    stepper,
    *,
    bos,
    eos,
    max_length,
    min_length=0,
    banned=(),
    temperature=1.0,
    top_k=None,
    top_p=1.0,
    seed=None,
):
    """Return, for each sentence, a Hypothesis drawn from the model's distribution.

    ``stepper`` to ``banned`` as in ``greedy``. ``temperature``: > 0; the logits are divided by it.
    ``top_k``: only the k most probable tokens are drawn from; None or more than V: all.
    ``top_p``: 0 < p <= 1; of those, only the most probable ones that together reach p.
    ``seed``: int or ``rng.Key``; None draws one. Step t of sentence b takes the number that the
    seed has for (b, t), on every backend and whatever else is in the batch.

    ``score`` is the model's own: temperature 1, all tokens that are not banned.
    """
    limits = Limits("sample", stepper, bos, eos, max_length, min_length, banned)
    if not 0 < temperature < math.inf:
        accepted = "a finite number above 0"
        advice = "Greedy decoding is what 0 would mean: gpuattn.decode.greedy."
        raise ValueError(problem("sample", "temperature", temperature, accepted, advice))
    if top_k is not None and top_k < 1:
        raise ValueError(problem("sample", "top_k", top_k, "None, or 1 or more"))
    if not 0 < top_p <= 1:
        raise ValueError(problem("sample", "top_p", top_p, "0 < top_p <= 1"))
    key = rng.as_key(seed)

    def draw(logits, step):
        xp, vocab = stepper.xp, logits.shape[1]
        hidden = limits.hidden(step, vocab)
        if hidden is not None:
            logits = logits.astype(wide(logits.dtype), copy=False)
            logits = xp.where(hidden, logits.dtype.type(-np.inf), logits)
        k = min(top_k or vocab, vocab)
        # a sort of all is the reference's work, and no reason to warn
        logprobs, ids = topk_logprobs(logits, k, impl="reference" if k == vocab else None)
        place = _draw(xp, logprobs, temperature, top_p, _uniform(xp, key, len(logits), step))
        return [xp.take_along_axis(a, place, -1)[:, 0] for a in (ids, logprobs)]

    return follow(stepper, draw, limits)


def _uniform(xp, key, count, step):
    """Return float64 (count,) in (0, 1): the first word of counter (row, 0, stream, step)."""
    rows = xp.arange(count, dtype=np.uint64)
    zero, stream, step = (xp.asarray(n, np.uint64) for n in (0, key.stream, key.step + step))
    word = rng.philox(key.seed, rows, zero, stream, step)[0]
    return (word.astype(np.float64) + 0.5) / 2**32


def _draw(xp, logprobs, temperature, top_p, uniform):
    """Return the places (B, 1) drawn from sorted log-probabilities (B, k).

    In float64: two backends that sum in another order must not draw another token.
    """
    weights = xp.exp((logprobs - logprobs[:, :1]).astype(np.float64) / temperature)
    reached = xp.cumsum(weights, axis=-1)
    before = reached - weights
    last = (before < top_p * reached[:, -1:]).sum(-1, keepdims=True) - 1
    last = xp.maximum(last, 0)  # a row of NaN: the first
    target = uniform[:, None] * xp.take_along_axis(reached, last, -1)
    return xp.minimum((reached <= target).sum(-1, keepdims=True), last)
