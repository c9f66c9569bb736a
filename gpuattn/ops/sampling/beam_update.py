"""Update a beam search by the candidates of one step, without the host.

Texts that end compete for a pool of the K best of their sentence, K beams continue, and a sentence
is done when its pool is full or when no beam can enter it any more. ``gpuattn.decode.beam`` is the
same search with the host in the loop. Device code: ``rawkernels/sampling/beam_update.cu``.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from gpuattn import arrays
from gpuattn.arrays import get_xp, on_gpu
from gpuattn.autodiff.tape import op
from gpuattn.cuda.kernels import kernel, kernel_refusal
from gpuattn.errors import problem
from gpuattn.impls import Call, Impl, Impls
from gpuattn.ops.sampling.beam_step import MAX_BEAM
from gpuattn.ops.sampling.topk_logprobs import largest

BLOCK, TEXT_BYTES = 128, 16
MAX_ROWS = np.iinfo(np.int16).max


class Beams:
    """The state of a search over ``sentences`` with ``beam`` beams each, on one device.

    ``room``: the most tokens of a text. ``divisor(length)``: what the score of a text of that many
    tokens, its end mark counted, is divided by. The arrays, by name, S sentences and K beams:

    ``scores`` (S, K) float32, log-probabilities of the beams, -inf for dead ones. ``tokens``
    (S, K) int32, the last of each beam; ``positions`` and ``key_counts`` (S, K) int32, its position
    and the keys that its query sees. ``steps`` (S,) int32, updates so far. ``limits`` (S,) int32,
    the most tokens of a text. ``done`` (S,) bool. ``live`` (1,) int32, sentences that are not done.
    ``pool_normalised``, ``pool_scores`` (S, K) float32, ``pool_beams``, ``pool_steps`` (S, K)
    int32: the best texts, best first; -inf where there is none. ``history`` (S, room, K, 2) int32:
    token and parent of each step. ``slots`` (S, K, room) int16: the beam in whose rows of a cache
    the keys of a text lie, see ``decode_attention``. ``divisors`` (room + 2,) float32.
    """

    NAMES = (
        "scores", "tokens", "positions", "key_counts", "steps", "limits", "done", "live",
        "pool_normalised", "pool_scores", "pool_beams", "pool_steps", "history", "slots",
        "divisors",
    )  # fmt: skip

    scores: Any
    tokens: Any
    positions: Any
    key_counts: Any
    pool_normalised: Any
    pool_scores: Any
    pool_beams: Any
    pool_steps: Any
    steps: Any
    limits: Any

    def __init__(
        self, like: Any, sentences: int, beam: int, room: int, divisor: Callable[[int], float]
    ) -> None:
        xp = get_xp(like)
        self.sentences, self.beam, self.room = sentences, beam, room
        table = (sentences, beam)
        floats = ("scores", "pool_normalised", "pool_scores")
        integers = ("tokens", "positions", "key_counts", "pool_beams", "pool_steps")
        for name in floats:
            setattr(self, name, xp.empty(table, np.float32))
        for name in integers:
            setattr(self, name, xp.empty(table, np.int32))
        for name in ("steps", "limits"):
            setattr(self, name, xp.empty(sentences, np.int32))
        self.done, self.live = xp.empty(sentences, bool), xp.empty(1, np.int32)
        self.history = xp.zeros((sentences, room, beam, 2), np.int32)
        self.slots = xp.empty((sentences, beam, room), np.int16)
        lengths = range(room + 2)
        self.divisors = xp.asarray([divisor(max(length, 1)) for length in lengths], np.float32)

    def start(self, bos: Any, limits: Any) -> None:
        """Begin with ``bos``, a token or one for each sentence; ``limits``: an array (S,).

        A sentence with limit 0 is done at once, and takes part in no step.
        """
        xp = get_xp(self.scores)
        self.scores.fill(-np.inf)
        self.scores[:, 0] = 0  # all beams of a sentence begin alike: one of them is enough
        self.tokens[...] = bos if np.ndim(bos) == 0 else xp.asarray(bos, np.int32)[:, None]
        self.positions.fill(0)
        self.key_counts.fill(1)
        self.steps.fill(0)
        self.limits[...] = xp.asarray(limits, np.int32)
        self.done[...] = self.limits == 0
        self.scores[...] = xp.where(self.done[:, None], np.float32(-np.inf), self.scores)
        self.live[...] = (~self.done).sum(dtype=np.int32)
        for name in ("pool_normalised", "pool_scores"):
            getattr(self, name).fill(-np.inf)
        for name in ("pool_beams", "pool_steps"):
            getattr(self, name).fill(0)
        self.slots[...] = xp.arange(self.beam, dtype=np.int16)[:, None]

    def arrays(self) -> tuple:
        """Return the arrays in the order of ``NAMES``."""
        return tuple(getattr(self, name) for name in self.NAMES)


@op
def beam_update(
    scores: Any, parents: Any, tokens: Any, beams: Beams, *, eos: int, nbest: int = 1,
    impl: str | None = None,
) -> Call[None]:  # fmt: skip
    """Update ``beams`` in place by what ``beam_step`` returned for its scores. Returns None.

    ``scores``, ``parents``, ``tokens``: (S, 2K), of ``beam_step``. ``eos``: the token that ends a
    text, -1 for none. ``nbest``: 1 to K; a sentence is done when no beam can get among the best so
    many. Nothing is read back, so a CUDA graph can hold the call. Sentences that are done stay as
    they are. Raises ValueError for shapes that do not fit.
    """
    shape = beams.sentences, 2 * beams.beam
    for name, x in (("scores", scores), ("parents", parents), ("tokens", tokens)):
        if x.shape != shape:
            raise ValueError(problem("beam_update", f"{name}.shape", x.shape, shape))
    if not 1 <= nbest <= beams.beam:
        raise ValueError(problem("beam_update", "nbest", nbest, f"1 to beam, {beams.beam}"))
    inputs = (scores, parents, tokens, *beams.arrays())
    return Call(IMPLS, inputs, impl, eos=eos, nbest=nbest)


# ---- reference: NumPy or CuPy -------------------------------------------------------------------


def _reference(
    found, parents, tokens, scores, last_tokens, positions, key_counts, steps, limits, done, live,
    pool_normalised, pool_scores, pool_beams, pool_steps, history, slots, divisors, *, needs, eos,
    nbest,
):  # fmt: skip
    xp, (sentences, beam) = get_xp(scores), scores.shape
    place, nothing = xp.arange(2 * beam), np.float32(-np.inf)
    going = ~done
    each, step = xp.arange(sentences)[:, None], xp.minimum(steps, limits - 1)[:, None]
    pool = [pool_normalised, pool_scores, pool_beams, pool_steps]

    def keep_best(found, beams, steps, divisor):
        new = found / divisor, found, beams, xp.broadcast_to(steps, found.shape)
        both = [xp.concatenate([old, x.astype(old.dtype)], 1) for old, x in zip(pool, new)]  # noqa: B905
        best = largest(both[0], beam)
        for old, x in zip(pool, both, strict=True):
            old[...] = xp.where(going[:, None], xp.take_along_axis(x, best, -1), old)

    ends = tokens == eos
    ending = xp.where(ends & (place < beam), found, nothing)
    keep_best(ending, parents, step, divisors[step + 1])
    going_on = xp.argsort(ends * (2 * beam) + place, axis=-1)[:, :beam]
    found, parents, tokens = (xp.take_along_axis(x, going_on, -1) for x in (found, parents, tokens))

    last = step[:, 0] + 1 == limits
    shortest, longest = divisors[xp.minimum(steps + 2, limits)], divisors[limits]
    hope = xp.maximum(found[:, 0] / shortest, found[:, 0] / longest)
    over = (pool_normalised[:, -1] != nothing) | (hope <= pool_normalised[:, nbest - 1])
    cut = xp.where((last & ~over)[:, None], found, nothing)
    keep_best(cut, xp.arange(beam)[None].repeat(sentences, 0), limits[:, None], longest[:, None])

    links = xp.stack([tokens, parents], -1)
    history[each, step] = xp.where(going[:, None, None, None], links[:, None], history[each, step])
    over = going & (over | last)
    stays = going & ~over
    here = stays[:, None]
    scores[...] = xp.where(here, found, nothing)
    last_tokens[...] = xp.where(here, tokens, last_tokens)
    positions[...] = xp.where(here, step + 1, positions)
    key_counts[...] = xp.where(here, step + 2, key_counts)
    used = here[:, :, None] & (xp.arange(slots.shape[2]) <= step[:, :, None])
    slots[...] = xp.where(used, xp.take_along_axis(slots, parents[:, :, None], 1), slots)
    steps += stays
    done |= over
    live -= over.sum(dtype=live.dtype)
    return None, None


# ---- raw: rawkernels/sampling/beam_update.cu ----------------------------------------------------


def _refuse_raw(scores, *others, needs, **_):
    if reason := kernel_refusal(scores, "scores"):
        return reason
    beam = scores.shape[1] // 2
    return f"the beam is {beam}, the kernel takes at most {MAX_BEAM}" if beam > MAX_BEAM else None


def _raw(scores, parents, tokens, *state, needs, eos, nbest):
    sentences, beam, room = state[Beams.NAMES.index("slots")].shape
    kernel("sampling/beam_update.cu", "beam_update")(
        (sentences,), (BLOCK,), scores, parents, tokens, *state, beam, room, eos, nbest,
        shared_bytes=3 * beam * TEXT_BYTES,
    )  # fmt: skip
    return None, None


IMPLS = Impls(
    "beam_update",
    Impl("raw-simt", _raw, refuse=_refuse_raw),
    Impl("reference", _reference),
)


def best_texts(beams: Beams, nbest: int = 1) -> tuple:
    """Return (tokens (S, nbest, room), lengths, scores, normalised (S, nbest)) of the pools.

    On the device of ``beams``; tokens past a length are undefined; where there is no text the
    score is -inf.
    """
    xp, chosen = get_xp(beams.scores), slice(0, nbest)
    lengths = beams.pool_steps[:, chosen]
    texts = arrays.empty(beams.scores, (beams.sentences, nbest, beams.room), np.int32)
    if on_gpu(texts) and beams.sentences:
        kernel("sampling/beam_update.cu", "beam_texts")(
            (math.ceil(beams.sentences * nbest / BLOCK),), (BLOCK,), beams.pool_beams,
            beams.pool_steps, beams.history, texts, beams.sentences, beams.beam, beams.room, nbest,
        )  # fmt: skip
    else:
        each, beam = xp.arange(beams.sentences)[:, None], beams.pool_beams[:, chosen]
        for step in reversed(range(beams.room)):
            links = beams.history[each, step, beam]
            texts[..., step] = links[..., 0]
            beam = xp.where(step < lengths, links[..., 1], beam)
    return texts, lengths, beams.pool_scores[:, chosen], beams.pool_normalised[:, chosen]
