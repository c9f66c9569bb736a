"""Types that annotations of this package share. They say what is meant; nothing is checked here.

``Array``: a NumPy or CuPy array. Type checkers take it as ``Any``: the two libraries have no common
base class, and CuPy ships no types.
"""

import os
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

StrPath: TypeAlias = str | os.PathLike[str]
Shape: TypeAlias = tuple[int, ...]
DType: TypeAlias = np.dtype | type | str  # what np.dtype() accepts and we use

if TYPE_CHECKING:
    Array: TypeAlias = Any
    Xp: TypeAlias = Any
else:

    class Array:
        """A NumPy or CuPy array; in ops, a ``Tensor`` where an argument is one."""

    class Xp:
        """The module ``numpy`` or ``cupy``."""


class ArrayLike(Protocol):
    """What public ops accept: a NumPy or CuPy array, a ``Tensor``, or an array of another library
    with DLPack or ``__cuda_array_interface__``. Lists and numbers are none."""

    @property
    def shape(self) -> Shape:
        """The length of each axis."""

    @property
    def dtype(self) -> Any:
        """The type of the elements."""
