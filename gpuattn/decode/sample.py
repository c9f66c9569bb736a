"""Sampling: temperature, the k most probable (top-k), the nucleus (top-p), a minimum probability
(min-p).

Top-p: Holtzman et al., "The curious case of neural text degeneration" (2020).
"""

from collections.abc import Iterable
from typing import Any

from gpuattn import rng
from gpuattn.decode.greedy import follow
from gpuattn.decode.stepper import Hypothesis, Limits, Stepper
from gpuattn.ops.sampling.sample_tokens import check_settings, sample_tokens


def sample(
    stepper: Stepper,
    *,
    bos: Any,
    eos: int | None,
    max_length: int,
    min_length: int = 0,
    banned: Iterable[int] = (),
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: Any = None,
) -> list[Hypothesis]:
    """Return, for each sentence, a Hypothesis drawn from the model's distribution.

    ``stepper`` to ``banned`` as in ``greedy``. ``temperature``: > 0; the logits are divided by it.
    ``top_k``: only the k most probable tokens are drawn from; None or more than V: all. ``top_p``:
    0 < p <= 1; of those, only the most probable ones that together reach p. ``min_p``: 0 to 1; of
    those, only what has p times the probability of the most probable. ``seed``: int or ``rng.Key``;
    None draws one. Step t of sentence b draws with the counter (b, t): the same number on every
    backend and in any batch.

    ``score`` is the model's own: temperature 1, all tokens that are not banned.
    """
    limits = Limits("sample", stepper, bos, eos, max_length, min_length, banned)
    check_settings("sample", temperature, top_k, top_p, min_p)
    key = rng.as_key(seed)

    settings = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}

    def draw(logits, step):
        hidden = limits.hidden(step, logits.shape[1])
        now = key._replace(step=key.step + step)
        return sample_tokens(logits, seed=now, banned=hidden, **settings)

    return follow(stepper, draw, limits)
