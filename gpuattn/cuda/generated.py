"""Functions written as text: straight lines of code in place of loops over steps or arguments.

A call of an op takes microseconds, of which a loop over three lists that are mostly empty takes
some. Text is compiled once: functions that differ in their values alone share it.
"""

import functools
from collections.abc import Callable
from typing import Any

MOST = 1024  # texts that are kept compiled


class Code:
    """The body of a function: its ``lines``, and the ``values`` of the names in them."""

    def __init__(self, **values: Any) -> None:
        self.lines: list[str] = []
        self.values: dict[str, Any] = values

    def add(self, *lines: str) -> None:
        """Append lines."""
        self.lines += lines

    def name(self, kind: str, value: Any) -> str:
        """Return a new name that begins with ``kind`` and has this value."""
        name = f"{kind}_{len(self.values)}"
        self.values[name] = value
        return name

    def function(self, arguments: str) -> Callable:
        """Return the function of ``arguments``, such as "x, y"."""
        return _maker(arguments, tuple(self.lines), tuple(self.values))(*self.values.values())


@functools.lru_cache(MOST)
def _maker(arguments: str, lines: tuple[str, ...], names: tuple[str, ...]) -> Callable:
    """Return a function of the values of ``names`` that returns the function of ``arguments``."""
    text = [f"def make({', '.join(names)}):", f"    def run({arguments}):"]
    text += [f"        {line}" for line in lines]
    text.append("    return run")
    found: dict[str, Any] = {"__name__": __name__}  # a frame of the package: see ``errors``
    exec("\n".join(text), found)
    return found["make"]


def unpacked(kind: str, count: int) -> str:
    """Return the names "x0, x1, " that ``count`` values are assigned to."""
    return "".join(f"{kind}{i}, " for i in range(count))
