"""Update a beam search by the candidates of one step, without the host.

Texts that end compete for a pool of the K best of their sentence, K beams continue, and a sentence
is done by one of several rules. ``gpuattn.decode.beam`` is the same search with the host in the
loop. Device code: ``rawkernels/sampling/beam_update.cu``.
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
from gpuattn.ops.arguments import integer
from gpuattn.ops.sampling.beam_step import MAX_COUNT
from gpuattn.ops.sampling.topk_logprobs import largest

NAME, FILE = "beam_update", "sampling/beam_update.cu"  # others in FILE do not depend on SETTLED
BLOCK, TEXT_BYTES = 128, 16
MAX_ROWS = np.iinfo(np.int16).max
STOPPING = ("fairseq", "enough", "best", "present", "greatest")  # a kernel's argument is the place


class Beams:
    """The state of a search over ``sentences`` with ``beam`` beams each, on one device.

    ``room``: the most tokens of a text. ``divisor(length)``: what the score of a text of that
    length is divided by. The arrays, by name, S sentences and K beams:

    ``scores`` (S, K) float32, log-probabilities of the beams, -inf for dead ones. ``tokens``
    (S, K) int32, the last of each beam; ``positions`` and ``key_counts`` (S, K) int32, its position
    and the keys that its query sees. ``steps`` (S,) int32, updates so far. ``limits`` (S,) int32,
    the most tokens of a text. ``done`` (S,) bool. ``live`` (1,) int32, sentences that are not done.
    ``ended`` (S,) int32, texts with an end mark so far. ``best_ended`` (S,) bool, whether such a
    text was ever the best continuation of a step.
    ``pool_normalised``, ``pool_scores`` (S, K) float32, ``pool_beams``, ``pool_steps`` (S, K)
    int32: the best texts, best first; -inf where there is none. ``history`` (S, room, K, 2) int32:
    token and parent of each step. ``slots`` (S, K, room) int16: the beam in whose rows of a cache
    the keys of a text lie, see ``decode_attention``. ``divisors`` (room + 2,) float32.
    """

    NAMES = (
        "scores", "tokens", "positions", "key_counts", "steps", "limits", "done", "live", "ended",
        "best_ended", "pool_normalised", "pool_scores", "pool_beams", "pool_steps", "history",
        "slots", "divisors",
    )  # fmt: skip
    STARTED = (*NAMES[:14], "slots")  # what ``start`` sets

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
        for name in ("steps", "limits", "ended"):
            setattr(self, name, xp.empty(sentences, np.int32))
        self.best_ended = xp.empty(sentences, bool)
        self.done, self.live = xp.asarray(np.ones(sentences, bool)), xp.zeros(1, np.int32)
        self.history = xp.zeros((sentences, room, beam, 2), np.int32)
        self.slots = xp.empty((sentences, beam, room), np.int16)
        self.divisors = xp.asarray([divisor(length) for length in range(room + 2)], np.float32)

    def start(self, bos: Any, limits: Any) -> None:
        """Begin with ``bos``, a token or one for each sentence; ``limits``: an array (S,).

        A sentence with limit 0 is done at once, and takes part in no step. One with limit -1 goes
        on as it is.
        """
        xp = get_xp(self.scores)
        limits = xp.asarray(limits, np.int32)
        each = None if np.ndim(bos) == 0 else xp.asarray(bos, np.int32)
        if on_gpu(self.scores):
            state = (getattr(self, name) for name in self.STARTED)
            kernel(FILE, "beam_start", SETTLED=1)(
                (self.sentences,), (BLOCK,), limits, each, *state, bos if each is None else 0,
                self.beam, self.room,
            )  # fmt: skip
            return
        chosen = limits >= 0
        limits = limits[chosen]
        starts = {
            "tokens": bos if each is None else each[chosen, None], "positions": 0,
            "key_counts": 1, "steps": 0, "ended": 0, "best_ended": False, "limits": limits,
            "done": limits == 0, "scores": -np.inf, "pool_normalised": -np.inf,
            "pool_scores": -np.inf, "pool_beams": 0, "pool_steps": 0,
            "slots": np.arange(self.beam)[:, None],
        }  # fmt: skip
        for name, value in starts.items():
            getattr(self, name)[chosen] = value
        # all beams of a sentence begin alike: one of them is enough
        self.scores[chosen, 0] = np.where(limits == 0, -np.inf, 0)
        self.live[...] = (~self.done).sum()

    def arrays(self) -> tuple:
        """Return the arrays in the order of ``NAMES``."""
        return tuple(getattr(self, name) for name in self.NAMES)


@op
def beam_update(
    scores: Any, parents: Any, tokens: Any, beams: Beams, *, eos: Any, nbest: int = 1,
    stopping: str = "fairseq", enough: int | None = None, end_counts: bool = True,
    settled: bool = False, impl: str | None = None,
) -> Call[None]:  # fmt: skip
    """Update ``beams`` in place by what ``beam_step`` returned for its scores. Returns None.

    ``scores``, ``parents``, ``tokens``: (S, n), of ``beam_step``; of E end marks n is (1 + E) * K,
    and at least 2 * K. ``eos``: int32 (E,), the tokens that end a text. ``nbest``: 1 to K.
    ``end_counts``: whether an end mark counts in the length of its text. ``enough``: texts that
    ended; None: K. ``stopping``: when a sentence is done.

    - "fairseq": when enough texts have ended, or no beam can get among the ``nbest`` best.
    - "enough": when enough texts have ended.
    - "best": when they have, and the best continuation of a step was an end mark.
    - "present", "greatest": when they have, and the best beam, divided for its present length or
      for the limit, is no better than the worst of the pool.

    With the last four it is also done when all beams are dead; at a limit not all beams compete for
    the pool, but those among the first K continuations. Nothing is read back, so a CUDA graph can
    hold the call. Sentences that are done stay as they are. ``settled``: that the launch before
    this one writes nothing of ``beams``; they are then loaded while it still runs. Raises
    ValueError for shapes and settings that do not fit.
    """
    beam, count = beams.beam, scores.shape[-1]
    shape = beams.sentences, max(count, max(2, 1 + len(eos)) * beam)
    for name, x in (("scores", scores), ("parents", parents), ("tokens", tokens)):
        if x.shape != shape:
            raise ValueError(problem(NAME, f"{name}.shape", x.shape, shape))
    integer(NAME, "nbest", nbest, f"1 to beam, {beam}", 1, beam)
    if stopping not in STOPPING:
        raise ValueError(problem(NAME, "stopping", repr(stopping), ", ".join(STOPPING)))
    inputs = (scores, parents, tokens, eos, *beams.arrays())
    return Call(
        IMPLS, inputs, impl, nbest=nbest, stopping=stopping,
        enough=beam if enough is None else enough, end_counts=bool(end_counts), settled=settled,
    )  # fmt: skip


# ---- reference: NumPy or CuPy -------------------------------------------------------------------


def _reference(
    found, parents, tokens, eos, scores, last_tokens, positions, key_counts, steps, limits, done,
    live, texts_ended, best_ended, pool_normalised, pool_scores, pool_beams, pool_steps, history,
    slots, divisors, *, needs, nbest, stopping, enough, end_counts, settled,
):  # fmt: skip
    xp, (sentences, beam) = get_xp(scores), scores.shape
    place, nothing = xp.arange(found.shape[1]), np.float32(-np.inf)
    going = ~done
    each, step = xp.arange(sentences)[:, None], xp.minimum(steps, limits - 1)[:, None]
    pool = [pool_normalised, pool_scores, pool_beams, pool_steps]

    def keep_best(found, beams, steps, divisor):
        new = found / divisor, found, beams, xp.broadcast_to(steps, found.shape)
        both = [xp.concatenate([old, x.astype(old.dtype)], 1) for old, x in zip(pool, new)]  # noqa: B905
        best = largest(both[0], beam)
        for old, x in zip(pool, both, strict=True):
            old[...] = xp.where(going[:, None], xp.take_along_axis(x, best, -1), old)

    ends = (tokens[:, :, None] == eos).any(-1)
    ending = xp.where(ends & (place < beam), found, nothing)
    keep_best(ending, parents, step, divisors[step + end_counts])
    texts_ended += going * (ending != nothing).sum(1, dtype=np.int32)
    best_ended |= going & ends[:, 0]
    going_on = xp.argsort(ends * len(place) + place, axis=-1)[:, :beam]
    found, parents, tokens = (xp.take_along_axis(x, going_on, -1) for x in (found, parents, tokens))

    last, best, now = step[:, 0] + 1 == limits, found[:, 0], step[:, 0] + 1
    over, longest = texts_ended >= enough, divisors[limits]
    if stopping == "fairseq":
        shortest = divisors[xp.minimum(now + end_counts, limits)]
        over |= xp.maximum(best / shortest, best / longest) <= pool_normalised[:, nbest - 1]
    elif stopping == "best":
        over &= best_ended
    elif stopping != "enough":
        over &= best / (longest if stopping == "greatest" else divisors[now]) <= pool[0][:, -1]
    competes = ~over[:, None] if stopping == "fairseq" else going_on < beam
    over |= best == nothing
    cut = xp.where(last[:, None] & competes, found, nothing)
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
    count = scores.shape[1]
    if count > MAX_COUNT:
        return f"there are {count} continuations, the kernel takes at most {MAX_COUNT}"
    return None


def _raw(
    scores, parents, tokens, eos, *state, needs, nbest, stopping, enough, end_counts, settled
):  # fmt: skip
    sentences, beam, room = state[Beams.NAMES.index("slots")].shape
    count = scores.shape[1]
    kernel(FILE, NAME, SETTLED=int(settled))(
        (sentences,), (BLOCK,), scores, parents, tokens, eos, *state, beam, room, count, len(eos),
        nbest, STOPPING.index(stopping), enough, end_counts,
        shared_bytes=(beam + count) * TEXT_BYTES,
    )  # fmt: skip
    return None, None


IMPLS = Impls(
    NAME,
    Impl("raw-simt", _raw, refuse=_refuse_raw),
    Impl("reference", _reference),
)


def best_texts(beams: Beams, nbest: int = 1) -> tuple:
    """Return (tokens (S, nbest, room), lengths, scores, normalised (S, nbest)) of the pools.

    On the device of ``beams``; tokens past a length are undefined; where there is no text the
    score is -inf.
    """
    return unpacked_texts(packed_texts(beams, nbest), beams.sentences, nbest)


def packed_texts(beams: Beams, nbest: int = 1) -> Any:
    """Return what ``best_texts`` does as one array, int32 (S * nbest * (room + 3),)."""
    shape = beams.sentences, nbest
    packed = arrays.empty(beams.scores, math.prod(shape) * (beams.room + 3), np.int32)
    texts, lengths, scores, normalised = unpacked_texts(packed, *shape)
    pools = beams.pool_normalised, beams.pool_scores, beams.pool_beams, beams.pool_steps
    if on_gpu(packed):
        kernel(FILE, "beam_texts", SETTLED=1)(
            (beams.sentences,), (BLOCK,), *pools, beams.history, texts, lengths, scores, normalised,
            beams.beam, beams.room, nbest,
        )  # fmt: skip
        return packed
    normalised[...], scores[...], beam, lengths[...] = (pool[:, :nbest] for pool in pools)
    each = np.arange(beams.sentences)[:, None]
    for step in reversed(range(beams.room)):
        links = beams.history[each, step, beam]
        texts[..., step] = links[..., 0]
        beam = np.where(step < lengths, links[..., 1], beam)
    return packed


def unpacked_texts(packed: Any, sentences: int, nbest: int) -> tuple:
    """Return views of the parts of ``packed_texts``, on any device: as of ``best_texts``."""
    shape = sentences, nbest
    tokens = len(packed) - 3 * math.prod(shape)
    lengths, scores, normalised = packed[tokens:].reshape(3, *shape)
    figures = lengths, scores.view(np.float32), normalised.view(np.float32)
    return packed[:tokens].reshape(*shape, -1), *figures
