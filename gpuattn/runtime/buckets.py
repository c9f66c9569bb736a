"""The flat gradients of a model in buckets, which ranks sum while the backward pass still runs.

Where a bucket ends depends on the model and the number of ranks alone, and so does the order in
which buckets are told of: all ranks sum the same ones in the same order, whatever the order in
which their gradients become final.
"""

from collections.abc import Callable, Collection, Mapping, Sequence

BUCKET = 1 << 24  # elements of a bucket, or a little less; 32 MiB in 16 bits


def buckets(slots: Mapping[str, tuple], size: int, unit: int) -> list[slice]:
    """Return slices of a flat buffer of ``size``, from its end on, where gradients are final first.

    ``slots``: {name: (start, stop, shape)} in flat order. Slices are multiples of ``unit`` and
    begin where a parameter does, or less than a unit behind. A parameter of BUCKET elements or more
    begins a bucket, unless the one before would be small: a table of embeddings is final last.
    """
    found: list[slice] = []
    end = size

    def cut(at):
        nonlocal end
        at = -(-at // unit) * unit
        if at < end:
            found.append(slice(at, end))
            end = at

    for start, stop, _ in reversed([*slots.values()]):
        if stop - start >= BUCKET and end - stop >= BUCKET // 4:
            cut(stop)
        if end - start >= BUCKET:
            cut(start)
    cut(0)
    return found


class Arrivals:
    """Tells in a backward pass, in order, which buckets are final.

    ``members``: the keys of the gradients in each bucket; one may be in two. ``full(i)``: called
    once for each bucket, after those before it.
    """

    def __init__(self, members: Sequence[Collection[int]], full: Callable[[int], None]) -> None:
        self._missing, self._full, self._next = [set(keys) for keys in members], full, 0

    def final(self, key: int) -> None:
        """Take note that nothing more is added to a gradient."""
        for missing in self._missing[self._next :]:
            missing.discard(key)
        while self._next < len(self._missing) and not self._missing[self._next]:
            self._tell()

    def end(self) -> None:
        """Take note that all gradients are final, also those that no loss reaches."""
        while self._next < len(self._missing):
            self._tell()

    def _tell(self):
        self._next += 1
        self._full(self._next - 1)
