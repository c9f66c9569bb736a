"""What a function can reach in Python besides its arguments, to notice when it changes.

A CUDA graph repeats launches, and a fused kernel what was traced, not Python: they are right while
variables, attributes and arrays are the same objects as then.
"""

import functools
import sys
from collections.abc import Iterator
from operator import getitem, is_
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

from gpuattn.arrays import is_array, on_gpu
from gpuattn.autodiff.record import Box

MOST = 20_000  # things that are watched: the walk ends there
MOST_ITEMS = 4096  # of one list or dict: of longer ones only the length is watched
CONSTANT = (int, float, complex, str, bytes, type(None), type, ModuleType, np.dtype, np.generic)
LIBRARIES = {"numpy", "cupy", "cupyx", "ml_dtypes", *sys.stdlib_module_names}  # as good as constant
CODE = LIBRARIES | {"gpuattn"}  # its functions and classes are
TENSOR = ("data", "grad", "grad_started", "requires_grad")


class Watch:
    """Remembers what ``roots``, functions and other objects, reach by names, attributes and items.

    Watched are variables of enclosing functions, globals that the code names, and what it names in
    modules and classes, attributes of objects, items of lists and dicts, and of Tensors their
    array, ``grad`` and ``requires_grad``; not the values in arrays, nor what libraries hold inside.
    ``on_gpu``: whether an array on a GPU is among them. ``apart``: a class; its instances are
    collected in ``found``, not watched. ``of_tensors``: the attributes of Tensors to watch.
    """

    def __init__(
        self, *roots: Any, apart: type | tuple = (), of_tensors: tuple[str, ...] = TENSOR
    ) -> None:
        self._roots, self._apart, self._of_tensors, self.on_gpu = roots, apart, of_tensors, False
        self.found: list = []
        self._attributes: tuple[list, list, list] = [], [], []  # owners, names, values
        self._items: tuple[list, list, list] = [], [], []
        self._sizes: tuple[list, list] = [], []  # containers, lengths
        self._seen: dict[int, Any] = {}  # id -> object, kept alive so that ids stay unique
        waiting = list(roots)
        while waiting and len(self._attributes[0]) + len(self._items[0]) < MOST:
            waiting += self._look(waiting.pop())

    def same(self) -> bool:
        """Return whether all is as it was. Takes 0.1 us for each thing watched."""
        owners, names, values = self._attributes
        dicts, keys, items = self._items
        try:
            return (
                all(map(is_, map(getattr, owners, names), values))
                and all(map(is_, map(getitem, dicts, keys), items))
                and list(map(len, self._sizes[0])) == self._sizes[1]
            )
        except (AttributeError, KeyError, IndexError, ValueError):  # deleted; an empty cell
            return False

    def again(self) -> "Watch":
        """Return a Watch of the same roots as they are now."""
        return Watch(*self._roots, apart=self._apart, of_tensors=self._of_tensors)

    def change(self) -> str:
        """Return the name of the first thing that changed; "" where none did."""
        for owner, name, value in zip(*self._attributes, strict=True):
            if getattr(owner, name, self) is not value:
                return "a variable" if name == "cell_contents" else _described(owner, name)
        for owner, key, value in zip(*self._items, strict=True):
            try:
                same = owner[key] is value
            except (KeyError, IndexError):
                same = False
            if not same:
                return f"item {key} of a list" if isinstance(owner, list) else f"{key!r}"
        for container, size in zip(*self._sizes, strict=True):
            if len(container) != size:
                return f"the length of a {type(container).__name__}"
        return ""

    def _look(self, value: Any) -> Iterator[Any]:
        """Watch what belongs to ``value``; yield what to look at next."""
        if isinstance(value, CONSTANT) or id(value) in self._seen:
            return
        if is_array(value):
            self.on_gpu = self.on_gpu or on_gpu(value)
            return
        self._seen[id(value)] = value
        if isinstance(value, Box):
            yield from self._attribute(value, *self._of_tensors)
        elif isinstance(value, FunctionType):
            yield from self._function(value)
        elif isinstance(value, MethodType):
            yield from (value.__func__, value.__self__)
        elif isinstance(value, functools.partial):
            yield from (value.func, *value.args, *value.keywords.values())
        elif isinstance(value, tuple | frozenset):
            yield from value
        elif isinstance(value, dict):
            yield from self._container(value, list(value))
        elif isinstance(value, list):
            yield from self._container(value, range(len(value)))
        elif isinstance(value, set):
            yield from self._container(value, ())
        elif isinstance(value, self._apart):
            self.found.append(value)
        elif hasattr(value, "__dict__") and _root(type(value)) not in LIBRARIES:
            yield from self._container(vars(value), list(vars(value)))

    def _function(self, function):
        if _root(function) in CODE:
            return
        yield from function.__defaults__ or ()
        yield from (function.__kwdefaults__ or {}).values()
        for cell in function.__closure__ or ():
            if _is_filled(cell):
                yield from self._attribute(cell, "cell_contents")
        names, known = _names(function.__code__), function.__globals__
        for value in self._item(known, *sorted(names & known.keys())):
            yield value
            if isinstance(value, ModuleType | type) and _root(value) not in CODE:
                yield from self._item(vars(value), *sorted(names & vars(value).keys()))
        if "__wrapped__" in vars(function):
            yield function.__wrapped__

    def _container(self, container, keys):
        self._sizes[0].append(container)
        self._sizes[1].append(len(container))
        if len(container) <= MOST_ITEMS:
            yield from self._item(container, *keys)

    def _attribute(self, owner, *names):
        for name in names:
            value = getattr(owner, name)
            _add(self._attributes, owner, name, value)
            yield value

    def _item(self, owner, *keys):
        for key in keys:
            _add(self._items, owner, key, owner[key])
            yield owner[key]


def _add(columns, *row):
    for column, value in zip(columns, row, strict=True):
        column.append(value)


def _names(code):
    """Return the names of globals that code may use, and those of the functions inside it."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names(constant)
    return names


def _is_filled(cell):
    try:
        cell.cell_contents  # noqa: B018 raises for a variable that has no value yet
    except ValueError:
        return False
    return True


def _root(value):
    """Return the package that a function, class or module belongs to."""
    name = value.__name__ if isinstance(value, ModuleType) else value.__module__
    return (name or "").partition(".")[0]


def _described(owner, name):
    return f"{name!r} of a {type(owner).__name__}"
