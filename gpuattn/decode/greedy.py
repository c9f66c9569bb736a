"""Greedy decoding, and the loop that greedy decoding and sampling share."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gpuattn.arrays import to_cpu, wide
from gpuattn.decode.limits import Limits
from gpuattn.decode.options import GreedyOptions
from gpuattn.decode.stepper import Hypothesis, Stepper, all_done
from gpuattn.ops.sampling.beam_step import beam_step
from gpuattn.ops.sampling.topk_logprobs import largest


def greedy(
    stepper: Stepper,
    *,
    bos: Any,
    max_length: Any,
    prefix: Sequence[Sequence[int]] | None = None,
    **settings: Any,
) -> list[Hypothesis]:
    """Return, for each sentence, the Hypothesis that takes the most probable token at every step.

    ``stepper``: see ``Stepper``. ``bos``: the token that begins each text, or an integer array
    (B,). ``max_length``: the most tokens a text takes, the end mark included, or an integer for
    each sentence; 0 gives empty texts. ``prefix``: for each sentence the tokens its text begins
    with, as long as it likes. ``settings``: those of ``options.GreedyOptions``, which says what
    they mean; ``eos`` must be given. Ties go to the lowest token. ``normalised`` is the score per
    token, the end mark counted.

    A text that no token may continue stops there, with ``ended`` False and a score of -inf. Logits
    with NaN give a sentence, and no other, a score of NaN. Raises ValueError for settings out of
    range and for a prefix longer than ``max_length``.
    """
    limits = Limits(GreedyOptions.of(settings), stepper, bos, max_length, prefix)

    def most_probable(logits, texts, step):
        if limits.plain:
            hidden = limits.hidden(step, logits.shape[1])
            zeros = stepper.xp.zeros((len(logits), 1), wide(logits.dtype))
            scores, _, tokens = beam_step(logits, zeros, banned=hidden)
            return tokens[:, 0], scores[:, 0]
        x = limits.logprobs(logits[:, None], texts[:, None], step)[:, 0]
        tokens = largest(x, 1)
        logprobs = stepper.xp.take_along_axis(x, tokens, -1)
        return tokens[:, 0].astype(np.int32), logprobs[:, 0]

    return follow(stepper, most_probable, limits)


def follow(stepper: Stepper, choose: Callable[..., Any], limits: Limits) -> list[Hypothesis]:
    """Return a Hypothesis for each sentence: a text whose tokens ``choose`` picks.

    ``choose(logits (n, V), texts (n, T) int32 with their first token, step)`` returns (tokens (n,)
    int32, their log-probabilities (n,)) of the sentences ``limits.running``.
    """
    xp, sentences = stepper.xp, stepper.sentences
    if sentences == 0:
        return []
    most = xp.asarray(limits.most)
    done, ended = most == 0, xp.zeros(sentences, bool)
    lengths = xp.zeros(sentences, np.int32)
    scores = xp.zeros(sentences, np.float32)
    tokens = limits.first_tokens(1)
    texts = tokens[:, None]
    stepper.start(1)
    running = limits.running
    for step in range(limits.longest):
        held = running.sentences
        found = choose(stepper.step(tokens[held], step), texts[held], step)
        chosen, logprobs = (running.spread(x) for x in found)
        scores = xp.where(done, scores, scores + logprobs)
        tokens = xp.where(done, tokens, chosen)  # a finished text repeats its last token
        texts = xp.concatenate([texts, tokens[:, None]], 1)
        ended |= ~done & limits.ends(tokens)
        nowhere = logprobs == -np.inf
        lengths += ~(done | ended | nowhere)
        done = done | ended | nowhere | (most == step + 1)
        if all_done(done, step):
            break
        running.leave(done)
    found, ended, lengths, scores = (to_cpu(x) for x in (texts[:, 1:], ended, lengths, scores))
    return [
        Hypothesis(
            tokens=found[b, : lengths[b]].tolist(),
            score=float(scores[b]),
            normalised=float(scores[b] / max(1, lengths[b] + ended[b])),
            ended=bool(ended[b]),
        )
        for b in range(sentences)
    ]
