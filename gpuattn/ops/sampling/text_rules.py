"""What the texts of a search allow next, without the host: forced tokens, bans, penalties.

Tokens that a prefix forces, tokens that would repeat n tokens in a row (Paulus et al., 2018),
penalties of repeated tokens (Keskar et al., 2019), no end mark before a least length.
``gpuattn.decode`` has the same rules with the host in the loop. Device code:
``rawkernels/sampling/text_rules.cu``.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

from gpuattn import arrays
from gpuattn.arrays import check_floats, ctype, get_xp, wide
from gpuattn.autodiff.tape import op, raw
from gpuattn.cuda.kernels import kernel, kernel_refusal
from gpuattn.errors import problem
from gpuattn.impls import Call, Impl, Impls
from gpuattn.ops.sampling.topk_logprobs import checked_vocab_size, log_sum
from gpuattn.typing import Array

NAME = "text_rules"
BLOCK = 256


class TextRules:
    """The rules of a search over ``sentences`` sentences, on the device of ``like``.

    ``eos``: the end marks, which do not come before ``min_length`` tokens. ``banned``: tokens that
    never come. ``no_repeat_ngram``: n, or 0 for no such rule. ``repetition_penalty``: p; x of a
    token that has come becomes x / p if x > 0, else x * p. ``on_logits``: whether x is a logit,
    which changes the probabilities of all tokens, or a log-probability. ``prefix_room``: the most
    tokens of a prefix, to which no rule applies. ``first``: the token that begins the texts.

    Arrays, for S sentences: ``first`` (S,) int32, the token that begins each text. ``prefix``
    (S, prefix_room) int32, the tokens that follow, -1 past their end. ``eos``, ``banned`` int32.
    """

    def __init__(
        self, like: Any, sentences: int, *, eos: Iterable[int] = (), banned: Iterable[int] = (),
        min_length: int = 0, no_repeat_ngram: int = 0, repetition_penalty: float = 1.0,
        on_logits: bool = False, prefix_room: int = 0, first: int = 0,
    ) -> None:  # fmt: skip
        xp = get_xp(like)
        self.sentences, self.on_logits = sentences, on_logits
        self.min_length, self.no_repeat_ngram = min_length, no_repeat_ngram
        self.repetition_penalty = repetition_penalty
        self.first = xp.asarray(np.full(sentences, first, np.int32))
        self.prefix = xp.asarray(np.full((sentences, prefix_room), -1, np.int32))
        self.eos = xp.asarray(tuple(eos) if min_length else (), np.int32)
        self.banned = xp.asarray(tuple(banned), np.int32)

    @property
    def by_text(self) -> bool:
        """Whether bans or penalties depend on the tokens so far."""
        return self.no_repeat_ngram > 0 or self.repetition_penalty != 1

    @property
    def empty(self) -> bool:
        """Whether the rules change nothing."""
        return not (self.by_text or self.eos.size or self.banned.size or self.prefix.size)


@op
def text_rules(
    logits: Array, scores: Array, lengths: Array, history: Array, slots: Array, rules: TextRules,
    *, vocab_size: int | None = None, impl: str | None = None,
) -> Call[tuple[Array, Array] | None]:  # fmt: skip
    """Apply ``rules`` to a step. Returns the ``penalties`` of ``beam_step``, or None for none.

    ``logits``: (S * K, C), contiguous rows; row b * K + i belongs to beam i of sentence b.
    ``scores``: (S, K) float32, of the texts so far; where -inf, no rule applies. ``lengths``:
    (S, K) int32, their tokens after the first. ``history``: (S, room, K, n) int32: the token after
    j others is ``history[b, j, slots[b, i, j + 1], 0]``. ``slots``: (S, K, room) int16, see
    ``Beams``. With ``rules.on_logits`` the logits change in place, rounded to their dtype;
    otherwise tokens and amounts, (S * K, L) each, are returned. A row that a prefix forces becomes
    0 for its token and -inf for others, in place, and the log-probability is added to its score, in
    place. ``vocab_size``: V <= C; columns from V on are padding. Nothing is read back. Raises
    ValueError for shapes that do not fit.
    """
    logits = raw(logits)
    check_floats(NAME, logits=logits)
    sentences, beam, room = slots.shape
    shapes = {
        "logits": (logits, (sentences * beam, *logits.shape[1:])),
        "scores": (scores, (sentences, beam)), "lengths": (lengths, (sentences, beam)),
        "history": (history, (sentences, room, beam, *history.shape[3:])),
        "rules' first tokens": (rules.first, (sentences,)),
    }  # fmt: skip
    for name, (x, wanted) in shapes.items():
        if x.shape != wanted:
            raise ValueError(problem(NAME, f"{name}: shape", x.shape, wanted))
    if logits.ndim != 2 or logits.strides[1] != logits.itemsize:
        got, accepted = f"{logits.shape}, strides {logits.strides}", "(S * K, C), contiguous rows"
        raise ValueError(problem(NAME, "logits", got, accepted))
    vocab_size = checked_vocab_size(NAME, vocab_size, logits.shape[1])
    inputs = (
        logits, scores, lengths, history, slots, rules.first, rules.prefix, rules.eos, rules.banned,
    )  # fmt: skip
    return Call(
        IMPLS, inputs, impl, vocab_size=vocab_size, min_length=rules.min_length,
        ngram=rules.no_repeat_ngram, penalty=rules.repetition_penalty, on_logits=rules.on_logits,
    )  # fmt: skip


# ---- reference: NumPy or CuPy -------------------------------------------------------------------


def _reference(
    logits, scores, lengths, history, slots, first, prefix, eos, banned, *, needs, vocab_size,
    min_length, ngram, penalty, on_logits,
):  # fmt: skip
    xp, (sentences, beam, _) = get_xp(logits), slots.shape
    rows, dtype, nothing = sentences * beam, wide(logits.dtype), np.float32(-np.inf)
    x = logits[:, :vocab_size].astype(dtype)
    alive, lengths = scores.reshape(rows, 1) != nothing, lengths.reshape(rows, 1)
    forced = xp.full((rows, 1), -1, np.int32)
    if prefix.shape[1]:
        place = xp.minimum(lengths, prefix.shape[1] - 1)
        found = xp.take_along_axis(prefix.repeat(beam, axis=0), place, 1)
        forced = xp.where(alive & (lengths < prefix.shape[1]), found, forced)
    free = alive & (forced < 0)
    peak, log_total = log_sum(x)
    logprobs = x - peak - log_total
    listed = [  # tokens that may not come, (rows, n), and where that is so
        (xp.broadcast_to(eos, (rows, len(eos))), free & (lengths < min_length)),
        (xp.broadcast_to(banned, (rows, len(banned))), free),
    ]
    if ngram or penalty != 1:
        tokens, bans, repeated = _of_texts(xp, lengths, history, slots, first, ngram, penalty)
        listed.insert(0, (tokens, bans & free))
    listed = [(token, xp.broadcast_to(here, token.shape)) for token, here in listed]
    result = None
    if on_logits:
        if penalty != 1:
            changed = xp.where(x > 0, x / penalty, x * penalty)
            x = xp.where(_marked(xp, tokens, repeated & free, vocab_size), changed, x)
        for token, here in listed:
            x = xp.where(_marked(xp, token, here, vocab_size), nothing, x)
    elif any(token.shape[1] for token, _ in listed):
        every, here = (xp.concatenate(arrays, 1) for arrays in zip(*listed, strict=True))
        amounts = xp.full(every.shape, np.inf, dtype)
        if penalty != 1:
            values, width = xp.take_along_axis(logprobs, tokens, 1), tokens.shape[1]
            less = xp.where(values == nothing, 0, values - values * penalty)
            amounts[:, :width] = xp.where(bans, amounts[:, :width], less)
            here[:, :width] |= repeated & free
        result = xp.where(here, every, np.int32(-1)), amounts
    if prefix.shape[1]:
        only, token = xp.arange(vocab_size) == forced, xp.maximum(forced, 0)
        added = xp.where(forced >= 0, xp.take_along_axis(logprobs, token, 1), 0)
        scores += added.reshape(scores.shape).astype(scores.dtype)
        x = xp.where(forced < 0, x, xp.where(only, dtype.type(0), nothing))
    if on_logits or prefix.shape[1]:
        logits[:, :vocab_size] = x.astype(logits.dtype)
    return result, None


def _of_texts(xp, lengths, history, slots, first, ngram, penalty):
    """Return the tokens of the texts, (rows, room), and bool arrays: which of them may not come
    again next, and which are penalised, each token once."""
    sentences, beam, room = slots.shape
    rows, used = len(lengths), xp.arange(room) <= lengths
    each, before = xp.arange(sentences)[:, None, None], xp.maximum(xp.arange(room) - 1, 0)
    tokens = history[..., 0][each, before, slots]
    tokens[:, :, 0] = first[:, None]
    tokens = xp.where(used, tokens.reshape(rows, room), -1)
    bans = used & (xp.arange(room) >= ngram - 1) if ngram else xp.zeros_like(used)
    for m in range(1, ngram):
        latest = xp.take_along_axis(tokens, xp.maximum(lengths + 1 - m, 0), 1)
        earlier = xp.full_like(tokens, -1)
        earlier[:, m:] = tokens[:, :-m]
        bans &= earlier == latest
    repeated = xp.zeros_like(used)
    if penalty != 1:
        same = tokens[:, :, None] == tokens[:, None, :]
        repeated = used & (same.argmax(-1) == xp.arange(room))
    return xp.maximum(tokens, 0), bans, repeated


def _marked(xp, tokens, here, vocab):
    """Return bool (rows, V), true for the tokens (rows, n) where ``here`` is true."""
    marks = xp.zeros((len(tokens), vocab + 1), bool)  # the last column takes the others
    marks[xp.arange(len(tokens))[:, None], xp.where(here, tokens, vocab)] = True
    return marks[:, :vocab]


# ---- raw: rawkernels/sampling/text_rules.cu -----------------------------------------------------


def _refuse_raw(logits, *_, **__):
    return kernel_refusal(logits, "logits")


def _raw(
    logits, scores, lengths, history, slots, first, prefix, eos, banned, *, needs, vocab_size,
    min_length, ngram, penalty, on_logits,
):  # fmt: skip
    _, beam, room = slots.shape
    result, by_text = None, ngram > 0 or penalty != 1
    count = (room if by_text else 0) + len(eos) + len(banned)
    if count and not on_logits:
        shape = len(logits), count
        result = arrays.empty(logits, shape, np.int32), arrays.empty(logits, shape, np.float32)
    kernel("sampling/text_rules.cu", NAME, scalar=ctype(logits.dtype), ON_LOGITS=on_logits)(
        (len(logits),), (BLOCK,), logits, scores, lengths, history, slots, first, prefix, eos,
        banned, *(result or (None, None)), logits.strides[0] // logits.itemsize, vocab_size, room,
        beam, history.shape[3], prefix.shape[1], len(eos), len(banned), min_length, ngram,
        np.float32(penalty), shared_bytes=4 * room if by_text else 0,
    )  # fmt: skip
    return result, None


IMPLS = Impls(NAME, Impl("raw-simt", _raw, refuse=_refuse_raw), Impl("reference", _reference))
