"""Beam search over all sentences of a batch at once.

K beams continue at each step; finished texts move to a pool of the K best (the rule of fairseq: an
end mark counts only among the first K of the 2K best continuations). Each step stores (token,
parent); the texts are traced back once, at the end.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

from gpuattn.arrays import to_cpu, wide
from gpuattn.decode.stepper import Hypothesis, Limits, Stepper, all_done, hypotheses_of
from gpuattn.errors import problem
from gpuattn.ops.sampling.beam_step import beam_step
from gpuattn.ops.sampling.topk_logprobs import largest

MAX_PENALTY = 10  # beyond it, powers of a length overflow a float
LENGTH_RULES = {
    "power": lambda length, penalty: max(length, 1) ** penalty,
    "gnmt": lambda length, penalty: ((5 + length) / 6) ** penalty,
}


def beam_search(
    stepper: Stepper,
    *,
    bos: Any,
    eos: int | None,
    max_length: int,
    beam: int = 5,
    nbest: int = 1,
    length_penalty: float = 1.0,
    length_rule: str = "power",
    min_length: int = 0,
    banned: Iterable[int] = (),
) -> list[list[Hypothesis]]:
    """Return, for each sentence, a list of up to ``nbest`` Hypotheses, the best first.

    ``stepper``, ``bos``, ``eos``, ``max_length``, ``min_length``, ``banned`` as in ``greedy``.
    ``beam``: K; it may be larger than the vocabulary. ``nbest``: 1 to K. Hypotheses are ordered by
    ``normalised`` = score / divisor; with ``length_rule`` "power" the divisor is
    length ** length_penalty, with "gnmt" ((5 + length) / 6) ** length_penalty (Wu et al., 2016).
    The length counts the end mark; a penalty of 0 compares plain scores. Of equal ones the one
    found first comes first.

    A sentence is done when K of its texts have ended, or when no beam can still get among the
    ``nbest`` best. Beams that reach ``max_length`` compete as they are, with ``ended`` False.
    There are fewer than ``nbest`` hypotheses where the model allows fewer texts (none, where it
    allows nothing). Logits with NaN give a sentence, and no other, scores of NaN.
    """
    limits = Limits("beam_search", stepper, bos, eos, max_length, min_length, banned)
    check_settings("beam_search", beam, nbest, length_penalty, length_rule)

    def divisor(length):
        return LENGTH_RULES[length_rule](length, length_penalty)

    xp, sentences = stepper.xp, stepper.sentences
    if sentences == 0:
        return []
    place = xp.arange(2 * beam)
    first_row = xp.arange(sentences, dtype=np.int32)[:, None] * np.int32(beam)
    scores = xp.full((sentences, beam), -np.inf, np.float32)
    scores[:, 0] = 0  # all beams of a sentence begin alike: only the first one counts
    pool = _Pool(xp, sentences, beam)
    tokens, history = limits.first_tokens(beam), []
    stepper.start(beam)
    for step in range(max_length):
        logits = stepper.step(tokens.ravel(), step)
        hidden = limits.hidden(step, logits.shape[1])
        scores = scores.astype(wide(logits.dtype), copy=False)
        scores, parents, tokens = beam_step(logits, scores, banned=hidden)
        nothing = scores.dtype.type(-np.inf)

        ends = tokens == limits.eos
        ending = xp.where(ends & (place < beam), scores, nothing)
        pool.add(ending, parents, step, divisor(step + 1))
        going_on = xp.argsort(ends * (2 * beam) + place, axis=-1)[:, :beam]
        scores, parents, tokens = (
            xp.take_along_axis(a, going_on, -1) for a in (scores, parents, tokens)
        )
        history.append((tokens, parents))

        to_come = divisor(min(step + 2, max_length)), divisor(max_length)
        done = pool.full() | pool.out_of_reach(scores[:, 0], to_come, nbest)
        if all_done(done, step):
            break
        scores = xp.where(done[:, None], nothing, scores)
        if beam > 1 and step + 1 < max_length:
            stepper.reorder((parents + first_row).ravel())
    else:
        cut = xp.broadcast_to(xp.arange(beam, dtype=np.int32), scores.shape)
        pool.add(scores, cut, max_length, divisor(max_length))
    return pool.hypotheses(history, nbest, max_length)


def check_settings(
    function: str, beam: int, nbest: int, length_penalty: float, length_rule: str
) -> None:
    """Raise ValueError for settings of a beam search that are out of range."""
    if beam < 1:
        raise ValueError(problem(function, "beam", beam, "1 or more"))
    if not 1 <= nbest <= beam:
        raise ValueError(problem(function, "nbest", nbest, f"1 to beam, {beam}"))
    if not -MAX_PENALTY <= length_penalty <= MAX_PENALTY:
        accepted = f"{-MAX_PENALTY} to {MAX_PENALTY}"
        raise ValueError(problem(function, "length_penalty", length_penalty, accepted))
    if length_rule not in LENGTH_RULES:
        accepted = ", ".join(LENGTH_RULES)
        raise ValueError(problem(function, "length_rule", repr(length_rule), accepted))


class _Pool:
    """The K best texts of each sentence that need no further step, best first.

    A text is the ``steps`` tokens that end in beam ``beams`` after that many steps, and, if there
    are fewer than ``max_length``, the end mark. Unused entries score -inf.
    """

    def __init__(self, xp, sentences, beam):
        shape = (sentences, beam)
        self.normalised = xp.full(shape, -np.inf, np.float32)
        self.scores = xp.full(shape, -np.inf, np.float32)
        self.beams = xp.zeros(shape, np.int32)
        self.steps = xp.zeros(shape, np.int32)
        self.xp = xp

    def add(self, scores, beams, steps, divisor):
        """Insert texts (B, n) into the pool; a score of -inf means no text, NaN ranks first."""
        xp, size = self.xp, self.normalised.shape[1]
        steps = xp.full(scores.shape, steps, np.int32)
        new = {"normalised": scores / divisor, "scores": scores, "beams": beams, "steps": steps}
        both = {name: xp.concatenate([getattr(self, name), new[name]], 1) for name in new}
        best = largest(both["normalised"], size)
        for name, array in both.items():
            setattr(self, name, xp.take_along_axis(array, best, -1))

    def full(self):
        """Return which sentences have a full pool."""
        return self.normalised[:, -1] != -np.inf

    def out_of_reach(self, best_running, divisors, nbest):
        """Return for which sentences no running text can still reach the ``nbest`` best.

        Scores only fall, so the bound is the current score with the divisor of the shortest or the
        longest possible text.
        """
        hope = self.xp.maximum(best_running / divisors[0], best_running / divisors[1])
        return hope <= self.normalised[:, nbest - 1]

    def hypotheses(self, history, nbest, max_length):
        """Return the lists of Hypotheses; ``history``: (tokens, parents), each (B, K), by step."""
        names = ("normalised", "scores", "beams", "steps")
        normalised, scores, beam, steps = (to_cpu(getattr(self, n))[:, :nbest] for n in names)
        texts = np.zeros((*steps.shape, len(history)), np.int32)
        if history:
            tokens, parents = (to_cpu(self.xp.stack(a)) for a in zip(*history, strict=True))
        for t in reversed(range(len(history))):
            texts[..., t] = np.take_along_axis(tokens[t], beam, -1)
            beam = np.where(t < steps, np.take_along_axis(parents[t], beam, -1), beam)
        limits = [max_length] * len(texts)
        return hypotheses_of(texts, steps, scores, normalised, limits)
