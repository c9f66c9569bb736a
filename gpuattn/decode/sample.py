"""Sampling: temperature, the k most probable (top-k), the nucleus (top-p), a minimum probability
(min-p).

Top-p: Holtzman et al., "The curious case of neural text degeneration" (2020).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpuattn import rng
from gpuattn.arrays import get_xp
from gpuattn.decode import processors
from gpuattn.decode.greedy import follow
from gpuattn.decode.limits import Limits
from gpuattn.decode.options import SampleOptions
from gpuattn.decode.stepper import Hypothesis, Stepper
from gpuattn.ops.sampling.sample_tokens import sample_tokens
from gpuattn.typing import Array


def sample(
    stepper: Stepper,
    *,
    bos: Any,
    max_length: Any,
    prefix: Sequence[Sequence[int]] | None = None,
    seed: Any = None,
    numbers: Any = None,
    **settings: Any,
) -> list[Hypothesis]:
    """Return, for each sentence, a Hypothesis drawn from the model's distribution.

    ``stepper`` to ``prefix`` as in ``greedy``. ``seed``: int or ``rng.Key``; None draws one.
    ``numbers``: the number of each sentence's sample, integers (B,); None: 0, 1, 2... Step t of
    sample n draws with the counter (n, t): the same random number on every backend, in any batch
    and order. ``settings``: those of ``options.SampleOptions``. Of them ``temperature``: > 0; the
    logits are divided by it. ``top_k``: only the k most probable tokens are drawn from; None or
    more than V: all. ``top_p``: 0 < p <= 1; of those, only the most probable ones that together
    reach p. ``min_p``: 0 to 1; of those, only what has p times the probability of the most
    probable. Bans and penalties change the logits first.

    ``score`` is the model's own: temperature 1, all tokens that are not banned.
    """
    options = SampleOptions.of(settings)
    limits = Limits(options, stepper, bos, max_length, prefix)
    key = rng.as_key(seed)
    numbers = np.arange(stepper.sentences) if numbers is None else numbers
    numbers = stepper.xp.asarray(numbers, np.int32)
    draws = {name: getattr(options, name) for name in ("temperature", "top_k", "top_p", "min_p")}

    def draw(logits, texts, step):
        hidden, forced = limits.hidden(step, logits.shape[1]), limits.forced(step)
        changed = limits.penalised(logits[:, None], texts[:, None])[:, 0]
        now = key._replace(step=key.step + step)
        own = numbers[limits.running.sentences]
        chosen = sample_tokens(changed, seed=now, numbers=own, banned=hidden, **draws)
        return chosen if forced is None else _forced_instead(*chosen, logits, forced)

    return follow(stepper, draw, limits)


def _forced_instead(tokens: Array, logprobs: Array, logits: Array, forced: Array) -> tuple:
    """Return (tokens, log-probabilities) with those of ``forced`` where it is no -1; all (B,)."""
    xp, here = get_xp(logits), forced >= 0
    found = processors.log_softmax(logits.astype(logprobs.dtype))
    theirs = xp.take_along_axis(found, xp.maximum(forced, 0)[:, None], -1)[:, 0]
    return xp.where(here, forced, tokens), xp.where(here, theirs, logprobs)
