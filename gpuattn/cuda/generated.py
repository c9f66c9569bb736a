"""Functions written as text: straight lines of code in place of loops over steps or arguments.

A call of an op takes microseconds, of which a loop over three lists that are mostly empty takes
some. Text is compiled once: functions that differ in their values alone share it.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from gpuattn.arrays import import_cupy

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


def write_array(code: Code, name: str, given: str) -> None:
    """Write what makes a CuPy array ``name`` of the arguments ``given`` of ``cupy.ndarray``."""
    array = import_cupy().ndarray
    base = array.__mro__[1]
    code.values["ndarray"] = array
    if hasattr(base, "_init"):
        # what ndarray.__new__() does too, but that passes its arguments on by *args and
        # **kwargs, which takes 0.3 to 0.5 us. CuPy before 12 has no _init
        code.values["blank"] = base.__new__
        rest = ", None" * (4 - given.count(","))  # strides, order: "C" takes longer to read
        code.add(f"{name} = blank(ndarray)", f"{name}._init({given}{rest})")
    else:
        code.add(f"{name} = ndarray({given})")


def short_dtype(dtype: np.dtype) -> Any:
    """Return what CuPy finds a dtype by the soonest: NumPy's own ones by their letters."""
    return dtype.char if dtype.isbuiltin == 1 else dtype
