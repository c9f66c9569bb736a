"""Signatures of calls: functions, written as text, of the arguments of one form of calls.

Such a function makes the key of a call: its ``modes.Mode``, the shapes, strides, dtypes and
alignments of its arrays, and its other arguments by value. An object whose class has ``signed_by``
counts as its array of that name. It calls the ``Plan.direct`` of the key, with no other Python call
in between, or else ``Op.planned``.
"""

import functools
import itertools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from gpuattn import rng
from gpuattn.arrays import import_cupy, on_gpu
from gpuattn.autodiff.record import Box
from gpuattn.cuda.generated import Code, unpacked
from gpuattn.modes import mode
from gpuattn.typing import Array

PLAIN = type(None), bool, int, float, str
ALIGNMENT = 15  # address & ALIGNMENT: kernels read 16 bytes at a time
# (key, arrays, addresses, given, seed) of a call. ``arrays``: those of the arguments, in their
# order. ``addresses``: of those on a GPU. ``given``: ``arrays`` with their Boxes, None if there is
# none. ``seed``: the argument of that name; its value is no part of the key.
Found = tuple[tuple, tuple[Array, ...], tuple[int, ...], tuple | None, Any]
Caller = Callable[..., Any]  # makes a call: of (args, kwargs), or of the operands of an operator


class Op(NamedTuple):
    """How calls of an op are made.

    ``planned(args, kwargs, found)``: makes a call that may have a plan.
    ``unplanned(args, kwargs)``: one that has none. ``any(args, kwargs)``: a call of any form.
    ``operands``: how many an operator takes, by position alone; None: any arguments.
    """

    planned: Callable[[tuple, dict[str, Any], Found], Any]
    unplanned: Callable[[tuple, dict[str, Any]], Any]
    any: Callable[[tuple, dict[str, Any]], Any]
    operands: int | None

    def make(self, caller: Caller, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Make a call by its Caller, or by ``unplanned``."""
        if self.operands is None or caller is self.unplanned:
            return caller(args, kwargs)
        return caller(*args)


class Unsigned(Exception):
    """Calls with such arguments have no plans."""


def kinds_of(check: Callable, args: tuple, kwargs: dict[str, Any]) -> tuple:
    """Return what the form of a call is known by: its check, the types and names of arguments."""
    count = len(args)
    if kwargs:
        return (check, *kwargs, *[type(x) for x in args], *[type(x) for x in kwargs.values()])
    if count == 1:  # written out for few arguments, which takes a third of the time
        return check, type(args[0])
    if count == 2:
        return check, type(args[0]), type(args[1])
    if count == 3:
        return check, type(args[0]), type(args[1]), type(args[2])
    return (check, *[type(x) for x in args])


class Form:
    """Writes the Caller of calls whose values have the types and names of ``values``.

    It passes calls with other arguments on to ``op.any``. That of an operator takes its operands,
    which saves a tuple and a dict for each call.
    ``start``: what keys begin with. ``names``: of the last of ``values``. ``xp_array``: the class
    of all arrays. ``direct``: returns the ``Plan.direct`` of a key, or None.
    ``other(args, kwargs)``: makes the call if Boxes hold arrays of another class. Raises Unsigned.
    """

    def __init__(
        self, start: object, values: tuple, names: tuple[str, ...], xp_array: Any, op: Op,
        direct: Callable[[tuple], Callable | None], other: Callable[[tuple, dict[str, Any]], Any],
    ) -> None:  # fmt: skip
        cupy = sys.modules.get("cupy")
        self.on_gpu = cupy is not None and xp_array is cupy.ndarray
        if not self.on_gpu and xp_array is not np.ndarray:
            raise Unsigned
        self.code = Code(
            start=start, xp_array=xp_array, other=other, mode=mode.get, direct=direct,
            planned=op.planned, unplanned=op.unplanned, any=op.any,
        )  # fmt: skip
        self.takes = "args, kwargs"
        if op.operands is not None:
            self.takes = ", ".join(f"x{i}" for i in range(op.operands))
        self.call = self.takes if op.operands is None else f"({self.takes},), {{}}"
        self.key = ["start", "mode()"]
        self.arrays: list[str] = []
        self.given: list[str] = []
        self.seed = "None"
        self._expect(values, names)
        names = (*[""] * (len(values) - len(names)), *names)
        for i, (value, name) in enumerate(zip(values, names, strict=True)):
            sign = self._sign_seed if name == "seed" else self._sign
            sign(f"x{i}", type(value), xp_array)

    def _expect(self, values, names):
        """Name the values x0, x1, ..., if they are as many and of the same types and names."""
        if self.takes == "args, kwargs":
            kept = f"(*kwargs,) != {self.code.name('names', names)}" if names else "kwargs"
            self._pass_on_if(f"{kept} or len(args) != {len(values) - len(names)}")
            given = "(*args, *kwargs.values())" if names else "args"
            if values:
                self.code.add(f"{unpacked('x', len(values))}= {given}")
        if values:
            kinds = [self.code.name("kind", type(value)) for value in values]
            others = [f"type(x{i}) is not {kind}" for i, kind in enumerate(kinds)]
            self._pass_on_if(" or ".join(others))

    def _pass_on_if(self, condition, to="any"):
        self.code.add(f"if {condition}:", f"    return {to}({self.call})")

    def _sign(self, x, kind, xp_array):
        if kind is xp_array:
            self._sign_array(x, x)
        elif issubclass(kind, Box):
            data = x.replace("x", "data")
            self.code.add(f"{data} = {x}.data")
            self._pass_on_if(f"type({data}) is not xp_array", "other")
            self.key.append(f"{x}.requires_grad")
            self._sign_array(x, data)
        elif kind is float:
            self.key.append(f"{x} or str({x})")  # 0.0 and -0.0 are equal
        elif kind in (str, bool, int):
            self.key.append(x)
        elif kind is tuple:
            self._pass_on_if(f"not {self.code.name('plain', _all_plain)}({x})", "unplanned")
            self.key.append(f"repr({x})")
        elif hasattr(kind, "signed_by"):
            data = x.replace("x", "data")
            self.code.add(f"{data} = {x}.{kind.signed_by}")
            self._pass_on_if(f"type({data}) is not xp_array", "unplanned")
            self._sign_array(data, data)
        elif kind is not type(None):
            raise Unsigned

    def _sign_seed(self, x, kind, xp_array):
        self.seed = x
        if kind is rng.Key:
            step = f"type({x}.step)"
            self._pass_on_if(f"{step} is not int and {step} is not xp_array", "unplanned")
            self.key.append(f"{step} is int")
        elif kind in (int, type(None)):
            self.key.append("True")  # it shares the plans of a Key whose step is an int
        else:
            raise Unsigned

    def _sign_array(self, x, data):
        self.given.append(x)
        self.arrays.append(data)
        strides = f"{data}.strides"
        if self.on_gpu and hasattr(self.code.values["xp_array"], "_c_contiguous"):
            # a tenth of the tuple's time. Strides of axes of size 1, which it does not tell, say
            # nothing of where an element lies, nor does ``flags``, by which kernels are chosen
            strides = f"{data}._c_contiguous or {strides}"
        self.key += [f"{data}.shape", strides, f"{data}.dtype"]
        if self.on_gpu:
            address = f"p{len(self.arrays)}"
            self.code.add(f"{address} = {data}.data.ptr")
            self.key.append(f"{address} & {ALIGNMENT}")

    def function(self) -> Caller:
        """Return the Caller."""
        addresses = [f"p{i + 1}" for i in range(len(self.arrays))] if self.on_gpu else []
        pairs = itertools.combinations(addresses or self.arrays, 2)
        alike = [f"{one} {'==' if addresses else 'is'} {other}" for one, other in pairs]
        if alike:
            names = ", ".join(
                f"({one}, {other})" for one, other in zip(self.given, self.arrays, strict=True)
            )
            self.code.add("alike = None", f"if {' or '.join(alike)}:")
            self.code.add(f"    alike = {self.code.name('find', _alike)}({names})")
            self.code.add("    if alike is None:", f"        return unplanned({self.call})")
            self.key.append("alike")
        if self.on_gpu and _several_gpus():
            here = f"{self.code.name('here', import_cupy().cuda.runtime.getDevice)}()"
            self.code.add(f"here = {here}")
            elsewhere = " or ".join(f"{x}.data.device_id != here" for x in self.arrays)
            self._pass_on_if(elsewhere, "unplanned")
            self.key.append("here")
        key, arrays, at, given = (
            f"({''.join(f'{one}, ' for one in part)})"
            for part in (self.key, self.arrays, addresses, self.given)
        )
        if self.given == self.arrays:
            given = "None"
        self.code.add(f"key = {key}")
        if self.on_gpu:
            self.code.add(
                "run = direct(key)",
                "if run is not None:",
                f"    out = run({', '.join((*self.arrays, *addresses))})",
                "    if out is not None:",
                "        return out",
            )  # fmt: skip
        found = f"key, {arrays}, {at}, {given}, {self.seed}"
        self.code.add(f"return planned({self.call}, ({found}))")
        return self.code.function(self.takes)


def _alike(*pairs):
    """Return which of some arrays are one and the same, as pairs of places.

    ``pairs``: (Box or array, array). None: others have the same address, or Boxes the same array,
    and it does not tell which of both a launch reads.
    """
    found = []
    for (i, (a, x)), (j, (b, y)) in itertools.combinations(enumerate(pairs), 2):
        if x is y and a is x and b is y:
            found.append((i, j))
        elif x is y or (on_gpu(x) and x.data.ptr == y.data.ptr):
            return None
    return tuple(found)


def _all_plain(values):
    return all(type(one) in PLAIN for one in values)


@functools.cache
def _several_gpus() -> bool:
    return import_cupy().cuda.runtime.getDeviceCount() > 1
