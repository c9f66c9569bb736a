"""Greedy decoding, and the loop that greedy decoding and sampling share."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from gpuattn.arrays import to_cpu, wide
from gpuattn.decode.stepper import Hypothesis, Limits, Stepper, all_done
from gpuattn.ops.sampling.beam_step import beam_step


def greedy(
    stepper: Stepper,
    *,
    bos: Any,
    eos: int | None,
    max_length: int,
    min_length: int = 0,
    banned: Iterable[int] = (),
) -> list[Hypothesis]:
    """Return, for each sentence, the Hypothesis that takes the most probable token at every step.

    ``stepper``: see ``Stepper``. ``bos``: the token that begins each text, or an integer array
    (B,). ``eos``: the token that ends one, or None for texts without end. ``max_length``: the most
    tokens a text takes, the end mark included; 0 gives empty texts. ``min_length``: tokens before
    the end mark may come. ``banned``: tokens that never come. Ties go to the lowest token.
    ``normalised`` is the score per token, the end mark counted.
    """
    limits = Limits("greedy", stepper, bos, eos, max_length, min_length, banned)

    def most_probable(logits, step):
        hidden = limits.hidden(step, logits.shape[1])
        zeros = stepper.xp.zeros((len(logits), 1), wide(logits.dtype))
        scores, _, tokens = beam_step(logits, zeros, banned=hidden)
        return tokens[:, 0], scores[:, 0]

    return follow(stepper, most_probable, limits)


def follow(stepper: Stepper, choose: Callable[..., Any], limits: Limits) -> list[Hypothesis]:
    """Return a Hypothesis for each sentence: a text whose tokens ``choose`` picks.

    ``choose(logits (B, V), step)`` returns (tokens (B,) int32, their log-probabilities (B,)).
    """
    xp, sentences = stepper.xp, stepper.sentences
    if sentences == 0:
        return []
    done = xp.zeros(sentences, bool)
    lengths = xp.zeros(sentences, np.int32)
    scores = xp.zeros(sentences, np.float32)
    tokens, history = limits.first_tokens(1), []
    stepper.start(1)
    for step in range(limits.max_length):
        chosen, logprobs = choose(stepper.step(tokens, step), step)
        scores = xp.where(done, scores, scores + logprobs)
        tokens = xp.where(done, tokens, chosen)  # a finished text repeats its end mark
        done = tokens == limits.eos
        lengths += ~done
        history.append(tokens)
        if all_done(done, step):
            break
    texts = to_cpu(xp.stack(history, 1)) if history else np.zeros((sentences, 0), np.int32)
    done, lengths, scores = to_cpu(done), to_cpu(lengths), to_cpu(scores)
    return [
        Hypothesis(
            tokens=texts[b, : lengths[b]].tolist(),
            score=float(scores[b]),
            normalised=float(scores[b] / max(1, lengths[b] + done[b])),
            ended=bool(done[b]),
        )
        for b in range(sentences)
    ]
