"""What the ranks of a run exchange, and the run of one process, which has no others."""

from typing import Any, Protocol

import numpy as np

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

    def all_reduce(self, array: Array) -> None:
        """Replace a flat float array by its sum over the ranks: the same bits on all of them."""

    def all_gather(self, piece: Array, whole: Array) -> None:
        """Write the flat ``piece`` of each rank into ``whole``, one after the other."""

    def broadcast(self, array: Array) -> None:
        """Replace an array by that of rank 0."""

    def barrier(self) -> None:
        """Wait until all ranks have called this."""

    def gather(self, value: Any) -> list[Any]:
        """Return the small Python values of all ranks, by rank, on each of them."""

    def note(self, update: int) -> None:
        """Note the number of the last update, for messages. Not collective."""

    def abort(self, code: int) -> None:
        """End all ranks at once, with an exit code. Does not return."""


class Single:
    """The Communicator of a run in one process. Nothing is copied."""

    rank, size, local_rank, local_size, waited = 0, 1, 0, 1, 0.0

    def all_reduce(self, array: Array) -> None:
        pass

    def all_gather(self, piece: Array, whole: Array) -> None:
        whole[...] = piece

    def broadcast(self, array: Array) -> None:
        pass

    def barrier(self) -> None:
        pass

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def note(self, update: int) -> None:
        pass

    def abort(self, code: int) -> None:
        raise SystemExit(code)


def add_in_pairs(parts: list[np.ndarray]) -> np.ndarray:
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
