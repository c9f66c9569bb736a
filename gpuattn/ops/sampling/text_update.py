"""Append a sampled token to each text, without the host.

``gpuattn.decode`` does the same with the host in the loop. Device code:
``rawkernels/sampling/text_update.cu``.
"""

from typing import Any

import numpy as np

from gpuattn.arrays import get_xp, on_gpu
from gpuattn.autodiff.tape import op
from gpuattn.cuda.kernels import kernel, kernel_refusal
from gpuattn.errors import problem
from gpuattn.impls import Call, Impl, Impls

NAME, FILE = "text_update", "sampling/text_update.cu"  # text_start does not depend on SETTLED
BLOCK = 128


class Texts:
    """The state of ``sentences`` texts that grow, on the device of ``like``.

    ``room``: the most keys of a text. The arrays, by name, for S texts: ``scores`` (S,) float32,
    sums of log-probabilities. ``tokens``, ``positions``, ``key_counts`` (S,) int32: the last token
    of each, its position, the keys that its query sees. ``keys`` (S, 4) uint32: seed (low, high),
    stream and step of the next draw, see ``sample_tokens``. ``lengths``, ``limits`` (S,) int32: new
    tokens so far, an end mark not counted, and at most. ``done``, ``ended`` (S,) bool: no more
    tokens come; an end mark came. ``live`` (1,) int32: texts that are not done. ``history``
    (S, room) int32: new tokens. ``slots`` (S, 1, room) int16, zeros: see ``step_attention``.
    """

    NAMES = (
        "scores", "tokens", "positions", "key_counts", "keys", "lengths", "limits", "done", "ended",
        "live", "history",
    )  # fmt: skip

    def __init__(self, like: Any, sentences: int, room: int) -> None:
        xp = get_xp(like)
        self.sentences, self.beam, self.room = sentences, 1, room
        self.scores = xp.zeros(sentences, np.float32)
        self.keys = xp.zeros((sentences, 4), np.uint32)
        self.tokens, self.positions, self.key_counts, self.lengths, self.limits = (
            xp.zeros(sentences, np.int32) for _ in range(5)
        )
        self.done, self.ended = xp.asarray(np.ones(sentences, bool)), xp.zeros(sentences, bool)
        self.live = xp.zeros(1, np.int32)
        self.history = xp.zeros((sentences, room), np.int32)
        self.slots = xp.zeros((sentences, 1, room), np.int16)

    def start(self, tokens: Any, positions: Any, limits: Any, keys: Any) -> None:
        """Begin with ``tokens`` at ``positions`` (S,), with ``keys`` (S, 4), of the state's dtypes.

        A text with limit 0 is done at once. One with limit -1 goes on as it is.
        """
        if on_gpu(self.scores):
            state = (getattr(self, name) for name in self.NAMES[:-1])
            kernel(FILE, "text_start", SETTLED=1)(
                (-(-self.sentences // BLOCK),), (BLOCK,), tokens, positions, limits, keys, *state,
                self.sentences,
            )  # fmt: skip
            return
        chosen = limits >= 0
        starts = {
            "tokens": tokens[chosen], "positions": positions[chosen],
            "key_counts": positions[chosen] + 1, "keys": keys[chosen], "limits": limits[chosen],
            "done": limits[chosen] == 0, "ended": False, "scores": 0, "lengths": 0,
        }  # fmt: skip
        for name, value in starts.items():
            getattr(self, name)[chosen] = value
        self.live[...] = (~self.done).sum()

    def arrays(self) -> tuple:
        """Return the arrays in the order of ``NAMES``."""
        return tuple(getattr(self, name) for name in self.NAMES)


@op
def text_update(
    chosen: Any, logprobs: Any, texts: Texts, *, eos: Any, settled: bool = False,
    impl: str | None = None,
) -> Call[None]:  # fmt: skip
    """Append ``chosen`` (S,) int32 to ``texts``, in place. Returns None.

    ``logprobs``: float32 (S,), of the tokens. A text is done with one of the tokens ``eos``, int32
    (E,), with a log-probability of -inf, and at its limit; then it stays as it is. Nothing is read
    back. ``settled``: that the launch before wrote nothing of ``texts``, so this one may read it
    beside that. Raises ValueError for shapes that do not fit.
    """
    for name, x in (("chosen", chosen), ("logprobs", logprobs)):
        if x.shape != (texts.sentences,):
            raise ValueError(problem(NAME, f"{name}.shape", x.shape, (texts.sentences,)))
    return Call(IMPLS, (chosen, logprobs, eos, *texts.arrays()), impl, settled=settled)


# ---- reference: NumPy or CuPy -------------------------------------------------------------------


def _reference(
    chosen, logprobs, eos, scores, tokens, positions, key_counts, keys, lengths, limits, done,
    ended, live, history, *, needs, settled,
):  # fmt: skip
    xp, going, ends = get_xp(scores), ~done, (chosen[:, None] == eos).any(-1)
    each, step = xp.arange(len(scores)), xp.minimum(lengths, history.shape[1] - 1)
    history[each, step] = xp.where(going, chosen, history[each, step])
    scores[...] = xp.where(going, scores + logprobs, scores)
    stays = going & ~ends & (logprobs != -np.inf)
    lengths += stays
    ended |= going & ends
    goes_on = stays & (lengths < limits)
    tokens[...] = xp.where(goes_on, chosen, tokens)
    for counter in (positions, key_counts, keys[:, 3]):
        counter += goes_on.astype(counter.dtype)
    done[...] = ~goes_on
    live[...] = goes_on.sum(dtype=np.int32)
    return None, None


# ---- raw: rawkernels/sampling/text_update.cu ----------------------------------------------------


def _refuse_raw(chosen, logprobs, *_, **__):
    return kernel_refusal(logprobs, "logprobs")


def _raw(chosen, logprobs, eos, *state, needs, settled):
    texts, room = state[-1].shape
    kernel(FILE, NAME, SETTLED=int(settled))(
        (-(-texts // BLOCK),), (BLOCK,), chosen, logprobs, eos, *state, texts, room, len(eos)
    )
    return None, None


IMPLS = Impls(NAME, Impl("raw-simt", _raw, refuse=_refuse_raw), Impl("reference", _reference))
