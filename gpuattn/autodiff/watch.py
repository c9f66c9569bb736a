"""What a function can reach in Python besides its arguments, to notice when it changes.

A CUDA graph repeats launches, and a fused kernel what was traced, not Python: they are right while
variables, attributes and arrays are the same objects as then.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from operator import getitem, is_
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

from gpuattn.arrays import is_array, on_gpu
from gpuattn.autodiff.record import Box, Counted, changed
from gpuattn.cuda.generated import Code
from gpuattn.errors import type_of

MOST = 20_000  # things that are watched: the walk ends there
MOST_ITEMS = 4096  # of one list or dict: of longer ones only the length is watched
CONSTANT = (int, float, complex, str, bytes, type(None), type, ModuleType, np.dtype, np.generic)
LIBRARIES = {"numpy", "cupy", "cupyx", "ml_dtypes", *sys.stdlib_module_names}  # as good as constant
CODE = LIBRARIES | {"gpuattn"}  # its functions and classes are
TRIALS = 6  # after so many looks at the same things, the code that looks is straight lines
MOST_STRAIGHT, AT_A_TIME = 4096, 128  # things for which there is such code, and in one function
TENSOR = ("data", "grad", "grad_started", "requires_grad")


class Watch:
    """Remembers what ``roots``, functions and other objects, reach by names, attributes and items.

    Watched are variables of enclosing functions, globals that the code names, and what it names in
    modules and classes, attributes of objects, items of lists and dicts, and of Tensors their
    array, ``grad`` and ``requires_grad``; not the values in arrays, nor what libraries hold inside.
    Attributes of modules are looked at only after one of any module was set or deleted, which
    a write to ``vars(module)`` is not.
    ``on_gpu``: whether an array on a GPU is among them. ``apart``: a class; its instances are
    collected in ``found``, not watched. ``of_tensors``: the attributes of Tensors to watch.
    """

    def __init__(
        self, *roots: Any, apart: type | tuple = (), of_tensors: tuple[str, ...] = TENSOR
    ) -> None:
        self._roots, self._apart, self._of_tensors, self.on_gpu = roots, apart, of_tensors, False
        self.found: list = []
        self._things, self._counted = _Things(), _Things()  # the latter: attributes of Counted
        self._change = changed.last
        self._seen: dict[int, Any] = {}  # id -> object, kept alive so that ids stay unique
        waiting = list(roots)
        while waiting and len(self._things) + len(self._counted) < MOST:
            waiting += self._look(waiting.pop())

    def same(self) -> bool:
        """Return whether all is as it was."""
        change = changed.last  # before the look: it may change meanwhile
        try:
            things = self._things
            if not (things.same() if things.straight is None else things.straight()):
                return False
            if change is not self._change:
                if not self._counted.same():
                    return False
                self._change = change
        except (AttributeError, KeyError, IndexError, ValueError):  # deleted; an empty cell
            return False
        return True

    def again(self) -> "Watch":
        """Return a Watch of the same roots as they are now."""
        return Watch(*self._roots, apart=self._apart, of_tensors=self._of_tensors)

    def change(self) -> str:
        """Return the name of the first thing that changed; "" where none did."""
        return self._things.change() or self._counted.change()

    def _look(self, value: Any) -> Iterator[Any]:
        """Watch what belongs to ``value``; yield what to look at next."""
        if isinstance(value, (CONSTANT, Watch)) or id(value) in self._seen:
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
            things = self._counted if isinstance(value, Counted) else None
            yield from self._container(vars(value), list(vars(value)), things)

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

    def _container(self, container, keys, things=None):
        things = self._things if things is None else things
        things.sizes.append((container, len(container)))
        if len(container) <= MOST_ITEMS:
            for key in keys:
                things.items.append((container, key, container[key]))
                yield container[key]

    def _attribute(self, owner, *names):
        for name in names:
            value = getattr(owner, name)
            self._things.attributes.append((owner, name, value))
            yield value

    def _item(self, owner, *keys):
        for key in keys:
            self._things.items.append((owner, key, owner[key]))
            yield owner[key]


class _Things:
    """``attributes``: (owner, name, value); ``items``: (container, key, value); ``sizes``:
    (container, length). ``straight``: None, or what ``same`` calls from now on."""

    def __init__(self) -> None:
        self.attributes: list[tuple] = []
        self.items: list[tuple] = []
        self.sizes: list[tuple] = []
        self._looks = 0
        self._columns: list | None = None
        self.straight: Callable[[], bool] | None = None

    def __len__(self) -> int:
        return len(self.attributes) + len(self.items)

    def same(self) -> bool:
        """Return whether all is as it was. Raises what a thing that is deleted raises.

        Things that are looked at again and again are compared by code of straight lines, which
        takes half the time of loops, and some 20 us for each thing to compile.
        """
        if self.straight is not None:
            return self.straight()
        self._looks += 1
        if self._looks > TRIALS and len(self) <= MOST_STRAIGHT:
            things: list[tuple] = [
                (owner, f".{name}", value) for owner, name, value in self.attributes
            ]
            things += [(owner, (key,), value) for owner, key, value in self.items]
            things += [(owner, None, size) for owner, size in self.sizes]
            more = None
            for i in reversed(range(0, max(1, len(things)), AT_A_TIME)):
                more = _function(things[i : i + AT_A_TIME], more)
            self.straight = more
            return self.same()
        if self._columns is None:
            groups = self.attributes, self.items, self.sizes
            self._columns = [list(zip(*rows, strict=True)) for rows in groups]
        attributes, items, sizes = self._columns
        return (
            (not attributes or all(map(is_, map(getattr, *attributes[:2]), attributes[2])))
            and (not items or all(map(is_, map(getitem, *items[:2]), items[2])))
            and (not sizes or tuple(map(len, sizes[0])) == sizes[1])
        )

    def change(self) -> str:
        """As ``Watch.change``."""
        for owner, name, value in self.attributes:
            if getattr(owner, name, self) is not value:
                return "a variable" if name == "cell_contents" else _described(owner, name)
        for owner, key, value in self.items:
            try:
                same = owner[key] is value
            except (KeyError, IndexError):
                same = False
            if not same:
                return f"item {key} of a list" if isinstance(owner, list) else f"{key!r}"
        for container, size in self.sizes:
            if len(container) != size:
                return f"the length of {type_of(container)}"
        return ""


def _function(things, more):
    """Return a function that compares things: (owner, what, value).

    ``what``: the text of an attribute, (key,) of an item, or None for the length. ``more``: None,
    or the function of others, to be called last.
    """
    code, owners, different = Code(more=more), {}, []
    for owner, what, value in things:
        if id(owner) not in owners:
            owners[id(owner)] = code.name("o", owner)
        name = owners[id(owner)]
        is_literal = value is None or value is True or value is False
        known = repr(value) if is_literal else code.name("v", value)
        if what is None:
            different.append(f"len({name}) != {known}")
        elif isinstance(what, str):
            different.append(f"{name}{what} is not {known}")
        else:
            (key,) = what
            key = repr(key) if type(key) in (str, int) else code.name("k", key)
            different.append(f"{name}[{key}] is not {known}")
    if different:
        # in CPython from 3.12 on a quarter sooner than ``return`` of comparisons joined by ``and``
        code.add(f"if {' or '.join(different)}:", "    return False")
    code.add("return True" if more is None else "return more()")
    return code.function("")


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
    return f"{name!r} of {type_of(owner)}"
