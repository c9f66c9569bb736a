"""Kinds of generated pairs: a table that is split into train, valid and test, and free slots.

Each kind has a table of cells (row, column), such as verb x object or hour x minute. Every
sixteenth diagonal of that table belongs to ``valid``, another one to ``test``, so that no pair of
those occurs in ``train`` while each row and each column does, in other combinations.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

SPLITS = ("train", "valid", "test")
DIAGONALS = 16
VALID, TEST = 7, 13


@dataclass(frozen=True)
class Kind:
    """One kind of pair.

    ``render(cell, *values)`` returns (source, target) for one of ``cells`` and one value of each
    of ``slots``. A cell or a value listed k times is drawn k times as often. ``share`` is the
    kind's share of the pairs.
    """

    name: str
    share: float
    cells: tuple
    slots: tuple
    render: Callable

    def draw(self, split: str, count: int, rng: np.random.Generator) -> list[tuple[str, str]]:
        """Return ``count`` independent (source, target) of ``split``."""
        cells = [cell for cell in self.cells if split_of(*cell) == split]
        columns = [
            [slot[i] for i in rng.integers(len(slot), size=count)] for slot in (cells, *self.slots)
        ]
        return list(map(self.render, *columns))


def split_of(row: int, column: int) -> str:
    """Return the split that owns this cell of a kind's table."""
    return {VALID: "valid", TEST: "test"}.get((row + 3 * column) % DIAGONALS, "train")
