"""Work in pieces that ranks share: each does some of them, and all get the results of all."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from gpuattn.parallel.agreement import check_same, together
from gpuattn.parallel.communicator import Communicator, Single

Piece = TypeVar("Piece")
Result = TypeVar("Result")


class Dealing:
    """Deals work out among the ranks of a Communicator, all of which call it with the same pieces.

    An error of one rank is raised on all. ``stop()``: called after each piece; once it returns
    true, a rank leaves out its other pieces. ``stopped``: whether one of the ranks has stopped, so
    that results are missing; the same on all of them. ``size``: ranks. ``is_first``: whether this
    is rank 0, which alone tells what was found.
    """

    def __init__(
        self, ranks: Communicator | None = None, stop: Callable[[], bool] = lambda: False
    ) -> None:
        self._ranks = ranks or Single()
        self.stop, self.stopped = stop, False
        self.size, self.is_first = self._ranks.size, self._ranks.rank == 0

    def read(self, work: Callable[[], Result]) -> Result:
        """Return ``work()`` of each rank, once rank 0 has done its own: others find what it has
        prepared."""
        if self.is_first:
            found = together(self._ranks, work)
            together(self._ranks, lambda: None)
            return found
        together(self._ranks, lambda: None)
        return together(self._ranks, work)

    def each(self, pieces: Iterable[Piece], work: Callable[[Piece], Result]) -> list[Result]:
        """Return ``work(piece)`` of each piece, in their order. Raises ConfigError where ranks have
        different numbers of pieces."""
        ranks, own, stopping = self._ranks, list[Result](), False

        def done():
            nonlocal stopping
            count = 0
            for count, piece in enumerate(pieces, 1):
                if (count - 1) % ranks.size == ranks.rank and not stopping:
                    own.append(work(piece))
                    self.note()
                    stopping = self.stop()
                if stopping and ranks.size == 1:
                    break
            return count

        count = together(ranks, done)
        check_same(ranks, {"amount of data to evaluate": count})
        parts = self._all(own, stopping)
        if self.stopped:
            return parts[0]
        return [parts[i % ranks.size][i // ranks.size] for i in range(count)]

    def lines(
        self, lines: Sequence[Any], work: Callable[[list[int]], Sequence[Result]]
    ) -> list[Result]:
        """Return the result of each line, in their order; the longest ones are dealt out first.

        ``work`` is given the indices of lines, and returns as many results. It calls ``note``, and
        stops by ``stop``.
        """
        size, every = self.size, range(len(lines))
        longest = list(every) if size == 1 else sorted(every, key=lambda i: -len(lines[i]))
        mine = longest[self._ranks.rank :: size]
        own = together(self._ranks, lambda: list(work(mine)) if mine else [])
        self.note()
        parts, found = self._all(own, self.stop()), dict[int, Result]()
        for rank, part in enumerate(parts):
            found |= zip(longest[rank::size], part, strict=True)
        return [found[i] for i in every]

    def note(self, count: int = 0) -> None:
        """Note that this rank gets on."""
        self._ranks.note()

    def _all(self, own, stopping):
        """Return the results of all ranks, by rank."""
        parts = self._ranks.gather((own, bool(stopping)))
        self.stopped = self.stopped or any(stopping for _, stopping in parts)
        return [part for part, _ in parts]


ALONE = Dealing()
