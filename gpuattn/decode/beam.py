"""Beam search over all sentences of a batch at once.

K beams continue at each step; finished texts move to a pool of the K best (the rule of fairseq: an
end mark counts only among the first K of the 2K best continuations). Each step stores (token,
parent); the texts are traced back once, at the end.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpuattn.arrays import get_xp, to_cpu, wide
from gpuattn.decode.limits import Limits
from gpuattn.decode.options import BeamOptions
from gpuattn.decode.stepper import Hypothesis, Stepper, all_done, hypotheses_of
from gpuattn.ops.sampling.beam_step import beam_step
from gpuattn.ops.sampling.topk_logprobs import largest
from gpuattn.typing import Array


def beam_search(
    stepper: Stepper,
    *,
    bos: Any,
    max_length: Any,
    prefix: Sequence[Sequence[int]] | None = None,
    **settings: Any,
) -> list[list[Hypothesis]]:
    """Return, for each sentence, a list of up to ``nbest`` Hypotheses, the best first.

    ``stepper``, ``bos``, ``max_length``, ``prefix`` as in ``greedy``. ``settings``: those of
    ``options.BeamOptions``, which says what they mean; ``eos`` must be given. Of equal hypotheses
    the one found first comes first. Beams spread at the first step that a prefix leaves free.

    There are fewer than ``nbest`` hypotheses where the model allows fewer texts (none, where it
    allows nothing). Logits with NaN give a sentence, and no other, scores of NaN. Raises ValueError
    for settings out of range and for a prefix longer than ``max_length``.
    """
    options = BeamOptions.of(settings)
    limits = Limits(options, stepper, bos, max_length, prefix)
    beam, xp, sentences = options.beam, stepper.xp, stepper.sentences
    if sentences == 0:
        return []
    most, stopping = xp.asarray(limits.most), _Stopping(xp, options, limits)
    first_row = xp.arange(sentences, dtype=np.int32)[:, None] * np.int32(beam)
    scores = xp.full((sentences, beam), -np.inf, np.float32)
    scores[:, 0] = 0  # all beams of a sentence begin alike: only the first one counts
    own = xp.broadcast_to(xp.arange(beam, dtype=np.int32), scores.shape)
    pool, coverage = _Pool(xp, sentences, beam), _Coverage(options.coverage, stepper, beam)
    if (limits.most == 0).any():
        pool.add(xp.where(most[:, None] == 0, scores, -np.inf), own, 0, options.divisor(0))
        scores = xp.where(most[:, None] == 0, -np.inf, scores)
    tokens, history = limits.first_tokens(beam).reshape(sentences, beam), []
    texts = tokens[:, :, None]
    running, done = limits.running, most == 0
    stepper.start(beam)
    for step in range(limits.longest):
        held = running.sentences  # of all others there are no continuations
        logits = stepper.step(tokens[held].ravel(), step)
        coverage.add(running)
        scores = scores.astype(wide(logits.dtype), copy=False)
        found = continuations(logits, scores[held], texts[held], step, limits)
        nothing, place = scores.dtype.type(-np.inf), xp.arange(found[0].shape[1])
        fills = nothing, 0, 0
        scores, parents, tokens = (running.spread(x, f) for x, f in zip(found, fills, strict=True))

        ends = limits.ends(tokens)
        ending = xp.where(ends & (place < beam), scores, nothing)
        bonus = coverage.of(parents)
        pool.add(ending, parents, step, options.divisor(step, ended=True), bonus)
        going_on = xp.argsort(ends * len(place) + place, axis=-1)[:, :beam]
        scores, parents, tokens = (
            xp.take_along_axis(a, going_on, -1) for a in (scores, parents, tokens)
        )
        history.append((tokens, parents))
        coverage.reorder(parents)
        if options.by_text:
            texts = xp.take_along_axis(texts, parents[:, :, None], 1)
            texts = xp.concatenate([texts, tokens[:, :, None]], 2)

        done = done | stopping.done(pool, scores[:, 0], ending, ends, step)
        if (limits.most == step + 1).any():
            last = most == step + 1
            competes = last[:, None] & stopping.competes(done, going_on)
            cut, bonus = xp.where(competes, scores, nothing), coverage.of(own)
            pool.add(cut, own, step + 1, options.divisor(step + 1), bonus)
            done = done | last
        if all_done(done, step):
            break
        scores = xp.where(done[:, None], nothing, scores)
        running.leave(done)
        if beam > 1 and step + 1 < limits.longest:
            kept = parents[running.sentences]
            stepper.reorder((kept + first_row[: len(kept)]).ravel())
    return pool.hypotheses(history, options.nbest, limits.most.tolist())


def continuations(
    logits: Array, scores: Array, texts: Array, step: int, limits: Limits
) -> tuple[Array, Array, Array]:
    """Return (scores, parents, tokens) of each sentence's best continuations, as ``beam_step``.

    B: the sentences that the stepper holds. ``logits``: (B * K, V). ``scores``: (B, K). ``texts``:
    (B, K, T), read where bans or penalties depend on them. Of E end marks there are (1 + E) * K
    continuations, and at least 2 * K: of fewer, all could end.
    """
    if limits.plain:
        return beam_step(logits, scores, banned=limits.hidden(step, logits.shape[1]))
    xp, options, (sentences, beam) = get_xp(logits), limits.options, scores.shape
    vocab = logits.shape[1]
    x = logits.reshape(sentences, beam, vocab)
    x = limits.logprobs(x, texts, step) + scores[:, :, None]
    x = xp.where(scores[:, :, None] == -np.inf, scores[:, :, None], x)  # a dead beam may hold NaN
    flat = x.reshape(sentences, beam * vocab)
    best = largest(flat, min(max(2, 1 + len(options.eos)) * beam, beam * vocab))
    parents, tokens = (best // vocab).astype(np.int32), (best % vocab).astype(np.int32)
    return xp.take_along_axis(flat, best, -1), parents, tokens


class _Stopping:
    """When sentences are done, by ``options.stopping``."""

    def __init__(self, xp, options, limits):
        self.xp, self.options = xp, options
        longest = [options.divisor(length) for length in limits.most.tolist()]
        self.longest = xp.asarray(longest, np.float64)
        self.ended = xp.zeros(len(limits.most), np.int32)  # texts so far
        self.best_ended = xp.zeros(len(limits.most), bool)

    def done(self, pool, best, ending, ends, step):
        """Return which sentences (B,) are done after ``step``.

        ``best``: the scores (B,) of the best beams. ``ending``: those of the texts that ended now,
        or -inf, and ``ends``: which continuations end, both (B, n).
        """
        options, nothing = self.options, ending.dtype.type(-np.inf)
        self.ended += (ending != nothing).sum(1, dtype=np.int32)
        enough = self.ended >= options.enough
        if options.stopping == "fairseq":
            # scores only fall, and coverage takes from them: the bound has the divisor of the
            # shortest or longest possible text
            shortest = options.divisor(step + 1, ended=True)
            hope = self.xp.maximum(best / shortest, best / self.longest.astype(best.dtype))
            return enough | (hope <= pool.normalised[:, options.nbest - 1])
        dead = best == nothing
        if options.stopping == "hf-early" or (
            options.stopping == "ct2" and (options.length_penalty != 0 or options.coverage != 0)
        ):
            return dead | enough
        if options.stopping == "ct2":
            self.best_ended |= ends[:, 0]
            return dead | (self.best_ended & (self.ended >= options.nbest))
        if options.stopping == "hf-never" and options.length_penalty > 0:
            hope = best / self.longest.astype(best.dtype)
        else:
            hope = best / options.divisor(step + 1)
        return dead | (enough & (hope <= pool.normalised[:, -1]))

    def competes(self, done, places):
        """Return which beams compete as they are when their texts are cut.

        ``places``: (B, K), of the continuations that they are.
        """
        if self.options.stopping == "fairseq":
            return ~done[:, None]
        return places < self.options.beam


class _Coverage:
    """What the texts of beams have seen of their sources; ``weight`` 0: nothing is summed."""

    def __init__(self, weight, stepper, beam):
        self.weight, self.stepper, self.beam, self.seen = weight, stepper, beam, None
        if weight:
            stepper.watch()

    def add(self, running):
        """Add the attention of the step, of the sentences ``running``."""
        if self.weight:
            now = self.stepper.attention
            now = running.spread(now.reshape(-1, self.beam, now.shape[-1]))
            self.seen = now if self.seen is None else self.seen + now

    def of(self, beams):
        """Return what comes to the divided scores of texts that continue ``beams``, (B, n)."""
        if not self.weight:
            return 0
        xp = self.stepper.xp
        covered = xp.where(self.seen > 0, xp.minimum(self.seen, 1), 1)
        return xp.take_along_axis(self.weight * xp.log(covered).sum(-1), beams, 1)

    def reorder(self, parents):
        """Let each beam continue that of its parent, (B, K)."""
        if self.weight:
            self.seen = self.stepper.xp.take_along_axis(self.seen, parents[:, :, None], 1)


class _Pool:
    """The K best texts of each sentence that need no further step, best first.

    A text is the ``steps`` tokens that end in beam ``beams`` after that many steps, and, if there
    are fewer than its ``max_length``, the end mark. Unused entries score -inf.
    """

    def __init__(self, xp, sentences, beam):
        shape = (sentences, beam)
        self.normalised = xp.full(shape, -np.inf, np.float32)
        self.scores = xp.full(shape, -np.inf, np.float32)
        self.beams = xp.zeros(shape, np.int32)
        self.steps = xp.zeros(shape, np.int32)
        self.xp = xp

    def add(self, scores, beams, steps, divisor, bonus=0):
        """Insert texts (B, n) into the pool; a score of -inf means no text, NaN ranks first.

        ``bonus``: comes to the scores once they are divided.
        """
        xp, size = self.xp, self.normalised.shape[1]
        steps = xp.full(scores.shape, steps, np.int32)
        divided = scores / divisor + bonus
        new = {"normalised": divided, "scores": scores, "beams": beams, "steps": steps}
        both = {name: xp.concatenate([getattr(self, name), new[name]], 1) for name in new}
        best = largest(both["normalised"], size)
        for name, array in both.items():
            setattr(self, name, xp.take_along_axis(array, best, -1))

    def hypotheses(self, history, nbest, limits):
        """Return the lists of Hypotheses; ``history``: (tokens, parents), each (B, K), by step.

        ``limits``: the greatest length of each sentence.
        """
        names = ("normalised", "scores", "beams", "steps")
        normalised, scores, beam, steps = (to_cpu(getattr(self, n))[:, :nbest] for n in names)
        texts = np.zeros((*steps.shape, len(history)), np.int32)
        if history:
            tokens, parents = (to_cpu(self.xp.stack(a)) for a in zip(*history, strict=True))
        for t in reversed(range(len(history))):
            texts[..., t] = np.take_along_axis(tokens[t], beam, -1)
            beam = np.where(t < steps, np.take_along_axis(parents[t], beam, -1), beam)
        return hypotheses_of(texts, steps, scores, normalised, limits)
