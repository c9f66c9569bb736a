"""What the ranks of a run exchange, and the run of one process, which has no others."""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from gpuattn.typing import Array


class Communicator(Protocol):
    """The ranks of a run, 0 to ``size`` - 1, as one of them sees them.

    Each method but the last two is collective: all ranks call the same ones in the same order, with
    arrays of the same shape and dtype, and wait for each other. ``local_rank``, ``local_size``:
    among the ranks of this host. ``waited``: seconds that this rank has waited for others so far.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    waited: float

    def all_reduce(self, array: Array, ordered: bool = False) -> None:
        """Replace a flat float array by its sum over the ranks: the same bits on all of them.

        ``ordered``: by the tree of ``add_in_pairs``, also where another order is faster.
        """

    def reduce_scatter(self, whole: Array, piece: Array, ordered: bool = False) -> None:
        """Write this rank's part of the sum of ``whole``, of ``size`` equal parts, to ``piece``.

        ``piece`` may be that part of ``whole``.
        """

    def all_gather(self, piece: Array, whole: Array) -> None:
        """Write the flat ``piece`` of each rank into ``whole``, one after the other.

        ``piece`` may be this rank's part of ``whole``.
        """

    def grouped(self) -> AbstractContextManager[Any]:
        """Return a context whose calls of ``all_gather`` may be made together at its end."""

    def broadcast(self, array: Array) -> None:
        """Replace an array by that of rank 0."""

    def split(self, color: int) -> "Communicator":
        """Return a communicator, for arrays alone, of the ranks that give the same ``color``.

        All ranks of this one call its methods at the same time, those of other colors too.
        """

    def barrier(self) -> None:
        """Wait until all ranks have called this."""

    def gather(self, value: Any) -> list[Any]:
        """Return the small Python values of all ranks, by rank, on each of them."""

    def note(self, update: int | None = None) -> None:
        """Note the number of the last update, for messages; None: that work goes on. Not
        collective."""

    def abort(self, code: int) -> None:
        """End all ranks at once, with an exit code. Does not return."""


class Noted:
    """What communicators of processes share. ``update``: the last one that was noted, or None;
    ``notes``: how many there were; ``on_update``: called after each; ``waited``: seconds."""

    def __init__(self) -> None:
        self.waited = 0.0
        self.update: int | None = None
        self.notes = 0
        self.on_update: Callable[[], None] = lambda: None

    def note(self, update: int | None = None) -> None:
        self.update = self.update if update is None else update
        self.notes += 1
        self.on_update()

    def grouped(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def split(self, color: int) -> "Part":
        return Part(self, color)


class Single:
    """The Communicator of a run in one process. Nothing is copied."""

    rank, size, local_rank, local_size, waited = 0, 1, 0, 1, 0.0

    def all_reduce(self, array: Array, ordered: bool = False) -> None:
        pass

    def reduce_scatter(self, whole: Array, piece: Array, ordered: bool = False) -> None:
        piece[...] = whole

    def all_gather(self, piece: Array, whole: Array) -> None:
        whole[...] = piece

    def grouped(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def broadcast(self, array: Array) -> None:
        pass

    def split(self, color: int) -> Communicator:
        return self

    def barrier(self) -> None:
        pass

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def note(self, update: int | None = None) -> None:
        pass

    def abort(self, code: int) -> None:
        raise SystemExit(code)


class Part:
    """The ranks of one ``color`` among those of a Communicator of the host, ``ranks``.

    All of these gather the arrays of all: for few ranks, or small arrays.
    """

    def __init__(self, ranks: Any, color: int) -> None:
        self._ranks = ranks
        colors = ranks.gather(color)
        self._members = [rank for rank, other in enumerate(colors) if other == color]
        self.rank, self.size = self._members.index(ranks.rank), len(self._members)

    def _gather(self, array):
        every = self._ranks.gather(array)
        return [every[rank] for rank in self._members]

    def all_reduce(self, array: Array, ordered: bool = False) -> None:
        array[...] = add_in_pairs([part.copy() for part in self._gather(array)])

    def reduce_scatter(self, whole: Array, piece: Array, ordered: bool = False) -> None:
        parts = [part.reshape(self.size, -1)[self.rank].copy() for part in self._gather(whole)]
        piece[...] = add_in_pairs(parts)

    def grouped(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def all_gather(self, piece: Array, whole: Array) -> None:
        for mine, theirs in zip(whole.reshape(self.size, -1), self._gather(piece), strict=True):
            mine[...] = theirs


def add_in_pairs(parts: list[Array]) -> Array:
    """Return the sum of arrays, added to neighbours in pairs, then pairs of pairs; overwrites them.

    A fixed binary tree: where the arrays are such sums of 2^n parts each, the bits are those of
    one sum over all parts.
    """
    while len(parts) > 1:
        pairs = [parts[i : i + 2] for i in range(0, len(parts), 2)]
        for first, *second in pairs:
            if second:
                first += second[0]
        parts = [first for first, *_ in pairs]
    return parts[0]
