"""The interface between decoding and models, and the results."""

import abc
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from gpuattn.arrays import to_cpu
from gpuattn.errors import problem, type_of
from gpuattn.typing import Array, Xp

CHECK_EVERY = 8  # steps between two device reads of whether all sentences are done
MANY_TOKENS = 4096  # from which on lists share their integers, see ``token_lists``
LEAVING_SHARE = 1 / 8  # of the sentences that a stepper holds: if fewer are done, none leaves


class Stepper(abc.ABC):
    """A model in the middle of B texts: all that decoding needs of a model. Any object with these
    members works.

    ``sentences``: B, also after ``keep``. ``xp``: ``numpy`` or ``cupy``, where tokens and logits
    live. With a beam of K, row b * K + i is beam i of sentence b.
    """

    sentences: int
    xp: Xp
    attention: Array  # of the latest step, see ``watch``

    @abc.abstractmethod
    def start(self, beam: int) -> None:
        """Reset, and begin with ``beam`` rows for each of the B sentences."""

    @abc.abstractmethod
    def step(self, tokens: Array, position: int) -> Array:
        """Append a token to each row and return the logits of the next one.

        ``tokens``: int32 (rows,). ``position``: 0 for the tokens that begin the texts, then 1, 2...
        Returns logits (rows, V), of any float dtype.
        """

    @abc.abstractmethod
    def reorder(self, parents: Array) -> None:
        """Let each row continue the text of row ``parents[row]``; int32 (rows,)."""

    def keep(self, sentences: Array) -> bool:
        """Go on with these ``sentences`` alone, until ``start``, and return True.

        ``sentences``: integers in ascending order. Rows are then those of the sentences kept, as if
        the batch had no others. A stepper that cannot do it returns False and keeps all.
        """
        return False

    def watch(self) -> None:
        """Keep the cross-attention of each step in ``attention``, from the next ``start`` on.

        ``attention``: float (rows, S), the probabilities of the S source tokens, 0 past the end of
        a source. Raises ValueError for a stepper that has none.
        """
        got = f"{type_of(self)}, without cross-attention"
        raise ValueError(problem("beam_search", "coverage", got, "0 for it"))


class Running:
    """Which sentences of a batch a stepper still computes. On NumPy finished ones leave it.

    ``sentences``: an index, all of them or int (n,). On a GPU none leaves: the host would have to
    read which are done. What is found for a sentence is the same whenever others leave, but for
    BLAS, which may round a product of fewer rows otherwise.
    """

    def __init__(self, stepper: Stepper) -> None:
        self.stepper = stepper
        self.sentences: Any = slice(None)

    def leave(self, done: Array) -> None:
        """Let the sentences that are ``done``, bool (B,), leave the stepper if they are many."""
        if not isinstance(done, np.ndarray):
            return
        going = ~done[self.sentences]
        going_on = np.flatnonzero(going)
        few = 0 < len(going_on) <= (1 - LEAVING_SHARE) * len(going)
        if few and self.stepper.keep(going_on):
            self.sentences = np.arange(len(done))[self.sentences][going_on]

    def spread(self, x: Array, fill: Any = 0) -> Array:
        """Return ``x`` (n, ...) of the sentences held as (B, ...), with ``fill`` for others."""
        if isinstance(self.sentences, slice):
            return x
        whole = np.full((self.stepper.sentences, *x.shape[1:]), fill, x.dtype)
        whole[self.sentences] = x
        return whole


class Hypothesis(NamedTuple):
    """One text that a model found: its tokens, without the mark at either end.

    ``score``: the sum of the tokens' log-probabilities, the end mark's included. ``normalised``:
    that score with the penalties of length and coverage. ``ended``: whether the model set the end
    mark; otherwise ``max_length`` cut the text.
    """

    tokens: list[int]
    score: float
    normalised: float
    ended: bool


# makes a Hypothesis of its four fields in a third less time: that of a NamedTuple is a Python call
_hypothesis = functools.partial(tuple.__new__, Hypothesis)


@functools.lru_cache(4)
def _integers(count):
    return np.array(range(count), object)


def token_lists(texts: np.ndarray, vocab: int | None = None) -> list[Any]:
    """Return ``texts.tolist()``; ``vocab`` makes it faster for MANY_TOKENS or more.

    The lists then share integers from a table of the vocabulary, which takes less time than an
    integer for each token. Numbers outside of 0 .. vocab - 1 may come out as other ones.
    """
    if vocab is None or texts.size < MANY_TOKENS:
        return texts.tolist()
    return _integers(vocab).take(texts, mode="clip").tolist()


def hypotheses_of(
    texts: np.ndarray, lengths: np.ndarray, scores: np.ndarray, normalised: np.ndarray,
    limits: Sequence[int], *, vocab: int | None = None,
) -> list[list[Hypothesis]]:  # fmt: skip
    """Return the Hypotheses of each sentence, in order, without those that score -inf.

    ``texts``: (B, n, T) tokens, of which the first ``lengths`` (B, n) count. ``scores``,
    ``normalised``: (B, n). ``limits``: the most tokens of a text, for each sentence; a shorter text
    has ended. ``vocab``: see ``token_lists``. All on the host; sentences beyond ``limits`` are left
    out.
    """
    count, (_, n, room) = len(limits), texts.shape
    ended = lengths[:count] < np.asarray(limits, np.int64)[:, None]
    known = lengths[:count], scores[:count], normalised[:count], ended
    counts, *others = (x.ravel().tolist() for x in known)  # one call each
    longest = max(counts, default=0)
    tokens = token_lists(texts[:count].reshape(count * n, room)[:, :longest], vocab)
    if min(counts, default=0) < longest:
        for text, length in zip(tokens, counts, strict=True):
            del text[length:]
    found = list(map(_hypothesis, zip(tokens, *others, strict=True)))
    groups = [found[i : i + n] for i in range(0, count * n, n)]
    if -math.inf in others[0]:
        return [[text for text in group if text.score != -math.inf] for group in groups]
    return groups


def all_done(done: Array, step: int) -> bool:
    """Return whether all of ``done`` is true; a GPU array is read only every CHECK_EVERY-th
    step."""
    if not isinstance(done, np.ndarray) and (step + 1) % CHECK_EVERY:
        return False
    return bool(to_cpu(done.all()))
