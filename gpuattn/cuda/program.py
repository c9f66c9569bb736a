"""Programs: the device work of a call, recorded once and run again on other arrays.

A ``Program`` needs no Python of the op to do what a ``recorder.Recorder`` noted: it allocates,
writes addresses into launches that are packed already, and launches. So it does with what goes to a
side stream or is deferred there (``autodiff.side_stream``).
"""

import collections
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from gpuattn import arrays
from gpuattn.arrays import import_cupy
from gpuattn.cuda.addresses import Unplaced
from gpuattn.cuda.generated import Code, short_dtype, unpacked, write_array
from gpuattn.cuda.recorder import Recorder
from gpuattn.cuda.steps import Deferred, Launch, Offer, Text
from gpuattn.typing import Array

CONSTANTS = type(None), bool, int, float, str, np.dtype
ALIGNMENT = 512  # bytes: of the memory that CuPy allocates


class Program(NamedTuple):
    """What ``program_of`` returns.

    ``run(*arrays, *addresses, drawn=None, fold=None)`` does the work on arrays like those of the
    recorded call and returns the call's result; or None, with nothing done, where a product does
    not take their addresses. ``drawn``: what ``rng.device_arguments`` returns for the call's key,
    if it has one. ``fold``: see ``impls.Fusion``.
    ``fresh``: the places, in the result, of arrays that a run allocates and that are there once.
    ``constants``: arrays whose addresses are in launches.
    """

    run: Callable[..., Any]
    fresh: frozenset[int]
    constants: list[Array]


def program_of(
    recorder: Recorder,
    result: Any,
    owned: Any = None,
    last: Callable[[Code, str], str] | None = None,
) -> Program | None:
    """Return the Program of a call that returned ``result``, or None if there is none.

    ``recorder``: was told of the call. ``result``: arrays that were given, allocated, or are views
    of these; numbers, strings, dtypes and None; in tuples. ``owned``: a part of it without views of
    what was given, because the tape knows them by their ``base``. ``last(code, text)``: writes what
    the program makes of the result, whose text is given, and returns the text of that.
    """
    if not recorder.complete():
        return None
    inputs, text = recorder.inputs, _Text(recorder)
    try:
        _Text(recorder).expression(owned, inputs)
        for step in recorder.steps:
            step.check(text, False, inputs)
        text.allocate(result)
        for step in recorder.steps:
            step.check(text, True, inputs)
        text.run()
        found = text.returned(result)
        text.add(f"return {found if last is None else last(text, found)}")
    except Unplaced:
        return None
    run = text.function(f"{unpacked('x', inputs)}{unpacked('p', inputs)}drawn=None, fold=None")
    return Program(run, text.fresh(result), recorder.constants)


class _Text(Text):
    """The text of the program of a recorded call."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(current_stream=import_cupy().cuda.get_current_stream)
        self.recorder = recorder
        self.together: set[int] = set()  # the arrays that have no memory of their own

    def allocate(self, result: Any) -> None:
        """Name the arrays x0, x1, ..., those that were given first, and their addresses p0, ...

        Of what is allocated only arrays of ``result`` are made; m2, ... is the memory of others,
        and what has no view in ``result`` either lies together.
        """
        cupy, here = import_cupy(), set(self._found((result, *self._handed_on())))
        names = {"zeros": cupy.zeros, "alloc": cupy.cuda.alloc}
        self.values |= names | {"test": partial(arrays.allocate or len, cupy)}
        apart, size = [], 0
        first = self.recorder.inputs
        for i, (shape, dtype, zeroed) in enumerate(self.recorder.allocations, first):
            of = f"{self.name('shape', shape)}, {self.name('dtype', short_dtype(dtype))}"
            count = math.prod(shape) * dtype.itemsize
            if zeroed or arrays.allocate:
                self.add(f"x{i} = {'zeros' if zeroed else 'test'}({of})", f"m{i} = x{i}.data")
            elif (i, True) in here or (i, False) in here:
                self.add(f"m{i} = alloc({self.name('size', count)})")
                if (i, True) in here:
                    write_array(self, f"x{i}", f"{of}, m{i}")
            else:
                apart.append(f"p{i} = together + {self.name('at', size)}")
                self.together.add(i)
                size += -(-count // ALIGNMENT) * ALIGNMENT
                continue
            self.add(f"p{i} = m{i}.ptr")
        if apart:
            self.add(f"memory = alloc({self.name('size', size)})", "together = memory.ptr", *apart)

    def memory(self, array: int) -> str:
        """Return the name of what keeps the memory of an array alive."""
        if array < self.recorder.inputs:
            return f"x{array}"
        return "memory" if array in self.together else f"m{array}"

    def _found(self, result):
        """Yield (which array, whether it is the array itself or a view) of arrays in ``result``."""
        if isinstance(result, tuple):
            for one in result:
                yield from self._found(one)
        elif arrays.on_gpu(result):
            i = self._index(result)
            yield self.recorder.place(result.data.ptr)[0] if i is None else i, i is not None

    def run(self) -> None:
        """Run the steps. What the launches read is in ``free`` while no thread uses it."""
        launched = [step for step in self.recorder.steps if isinstance(step, Launch)]
        if self.recorder.steps:
            self.add("stream = current_stream().ptr")
        if launched:
            pack = self.name(
                "pack", lambda: [memory for step in launched for memory in step.pack()]
            )
            free = self.name("free", [])
            names = "".join(step.names for step in launched)
            self.add(
                "try:", f"    one = {free}.pop()", "except IndexError:", f"    one = {pack}()",
                f"{names}= one",
            )  # fmt: skip
        for step in self.recorder.steps:
            step.run(self)
        if launched:
            self.add(f"{free}.append(one)")

    def returned(self, result: Any) -> str:
        """Return the text of the result."""
        if not any(isinstance(step, Offer) for step in self.recorder.steps):
            return self.expression(result)
        first, *rest = result
        own = "product.compute()" if first is None else self.expression(first)
        others = "".join(f"{self.expression(x)}, " for x in rest)
        return f"(None if taken else {own}, {others})"

    def expression(self, value: Any, first: int = 0) -> str:
        """Return the text of what makes ``value`` of the arrays.

        ``first``: of the arrays that may have views in ``value``.
        """
        if value is None:
            return "None"
        if isinstance(value, CONSTANTS):
            return self.name("value", value)
        if isinstance(value, tuple):
            inside = "".join(f"{self.expression(one, first)}, " for one in value)
            return f"{'' if type(value) is tuple else self.name('kind', type(value))}({inside})"
        if not arrays.on_gpu(value):
            raise Unplaced
        i = self._index(value)
        if i is not None:
            return f"x{i}"
        place, offset = self.recorder.place(value.data.ptr)
        if place < first:
            raise Unplaced
        memory = f"m{place}" if place >= self.recorder.inputs else f"x{place}.data"
        given = [
            self.name("shape", value.shape), self.name("dtype", short_dtype(value.dtype)),
            f"{memory} + {offset}" if offset else memory,
        ]  # fmt: skip
        contiguous = import_cupy().ndarray(value.shape, value.dtype, value.data)
        if value.strides != contiguous.strides:
            given.append(self.name("strides", value.strides))
        view = f"v{len(self.lines)}"
        write_array(self, view, ", ".join(given))
        return view

    def _index(self, value):
        """Return the place of an array among those given and allocated, or None."""
        return next((i for i, x in enumerate(self.recorder.arrays) if x is value), None)

    def fresh(self, result: Any) -> frozenset[int]:
        """Return the places, in a tuple, of arrays that were allocated and are there once."""
        values = result if isinstance(result, tuple) else ()
        new = {id(x) for x in self.recorder.arrays[self.recorder.inputs :]} - self._read_later()
        count = collections.Counter(map(id, values))
        return frozenset(i for i, x in enumerate(values) if id(x) in new and count[id(x)] == 1)

    def _handed_on(self):
        """Return what others get of the arrays, beside the caller."""
        steps = self.recorder.steps
        return tuple(step.arguments for step in steps if isinstance(step, Deferred | Offer))

    def _read_later(self):
        """Return the ids of arrays that may be read once the call has ended."""
        found = {place for place, _ in self._found(self._handed_on())}
        return {id(self.recorder.arrays[i]) for i in found | self.recorder.beside}
