"""Programs: the device work of a call, recorded once and run again on other arrays.

A ``Recorder`` is told of every array that a call allocates (``arrays.empty``, ``arrays.zeros``),
every kernel that it launches and every product that cuBLASLt computes. Of each address that these
take it notes which array it lies in. A ``Program`` then needs no Python of the op to do the same
work again: it allocates, writes addresses into launches that are packed already, and launches. So
it does with what goes to a side stream or is deferred there (``autodiff.side_stream``).

What the recorder does not see must not touch the device. An address that it cannot place, such as
that of an array that CuPy made, makes ``Recorder.program`` return None. Only a write by CuPy to an
array that was there before goes unnoticed; implementations that launch kernels say it by
``arrays.unrecorded_write``, and tests/autodiff/test_plans.py looks for it. In structs, fields of
uint64 are addresses.
"""

import collections
import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from gpuattn import arrays
from gpuattn.arrays import import_cupy, recorders, without_plans
from gpuattn.cuda.addresses import WORD, Unplaced, addresses_in, extent
from gpuattn.cuda.driver_launch import DriverLaunch
from gpuattn.cuda.generated import Code, short_dtype, unpacked, write_array
from gpuattn.cuda.steps import Begin, Deferred, End, Launch, Offer, Product
from gpuattn.typing import Array

CONSTANTS = type(None), bool, int, float, str, np.dtype
SMALL = 2 << 20  # bytes of the arrays of a call: a GPU of today reads them in a microsecond
ALIGNMENT = 512  # bytes: of the memory that CuPy allocates


class Drawn(int):
    """A number of the key of a call; ``part``: which one of ``rng.device_arguments``."""

    part: int

    def __new__(cls, value: int, part: int) -> "Drawn":
        self = super().__new__(cls, value)
        self.part = part
        return self


class Recorder:
    """Notes the device work of a call on the GPU arrays ``inputs``, which differ in address, or
    are one array in later calls too.

    ``key``: of the call's random numbers, or None.
    """

    def __init__(self, inputs: Sequence[Array], key: Any) -> None:
        self.key = key
        self.numbers: list[Drawn] = []  # all that were drawn; ``placed``: by id, those launched
        self.placed: set[int] = set()
        self.arrays: list[Array] = list(inputs)  # and what is allocated: kept, so no address is
        self.inputs = len(self.arrays)  # given out twice
        self.starts = {x.data.ptr: i for i, x in enumerate(self.arrays)}
        self.extents = [extent(x) for x in self.arrays]
        self.allocations: list[tuple] = []
        self.steps: list[Launch | Product | Begin | End | Deferred | Offer] = []
        self.beside: set[int] = set()  # the arrays that work on a side stream touches
        self.together: set[int] = set()  # those that have no memory of their own
        self.constants: list[Array] = []
        self.counts: dict[int, tuple] = {}  # id of an address of counters -> it, how many
        self.maps: dict[int, tuple] = {}  # id of a tensor map -> it, its array, how to encode
        self.used: set[int] = set()  # the arrays whose addresses steps take
        self.refused = any(not x.size for x in self.arrays)

    # ---- what is told ----

    def allocated(self, array: Array, zeroed: bool = False) -> None:
        """Note a new array."""
        self.allocations.append((array.shape, array.dtype, zeroed))
        if array.size:
            self.starts[array.data.ptr] = len(self.arrays)
        self.extents.append((array.data.ptr, array.data.ptr + array.nbytes))
        self.arrays.append(array)

    def kept(self, array: Array) -> None:
        """Note an array of the process: it has the same address in every call."""
        self.constants.append(array)

    def counted(self, address: np.uint64, count: int) -> None:
        """Note the address of ``scratch.counters(count)``."""
        self.counts[id(address)] = address, count

    def mapped(self, encoded: np.ndarray, x: Array, encode: Callable) -> None:
        """Note a tensor map of ``x``; ``encode(address)`` returns that of an array like it."""
        self.maps[id(encoded)] = encoded, x, encode

    def drawn(self, key: Any, numbers: tuple[int, ...]) -> tuple[int, ...]:
        """Note the ``numbers`` of ``rng.device_arguments(key)`` and return them."""
        if key is self.key:
            drawn = tuple(Drawn(value, part) for part, value in enumerate(numbers))
            self.numbers += drawn
            return drawn
        self.refused = True
        return numbers

    def launched(
        self, kernel: Any, grid: tuple, block: tuple, args: Sequence[Any], shared_bytes: int
    ) -> None:
        """Note a launch of a ``kernels.Kernel``."""
        with self._refusing():
            self.steps.append(self._launch(kernel, grid, block, args, shared_bytes))

    def multiplied(self, plan: Any, operands: tuple) -> None:
        """Note a product by a ``cublaslt.MatmulPlan`` of (a, b, out, vector, aux)."""
        with self._refusing():
            if plan.copy_a or plan.copy_b:
                raise Unplaced
            places = [None if x is None else self._place(x.data.ptr) for x in operands]
            self.steps.append(Product(plan, places))

    def went_beside(self, side: Callable) -> None:
        """Note that launches go to a side stream from here on. ``side()``: see ``steps.Begin``."""
        self.steps.append(Begin(side))

    def came_back(self, writes: Sequence[Array]) -> None:
        """Note that they go to the current stream again; those beside it wrote to ``writes``."""
        with self._refusing():
            block: list[Any] = []
            while not isinstance(step := self.steps[-1 - len(block)], Begin):
                block.append(step)
            if not all(isinstance(step, Product) or _takes_no_counters(step) for step in block):
                raise Unplaced  # counters are those of the current stream
            touched = set().union(*(step.touched() for step in block))
            targets = [self._place(x.data.ptr) for x in writes]
            touched.discard(-1)  # constant addresses
            self.beside |= touched
            self.steps.append(End(sorted(touched), self._memory, targets))

    def deferred(self, side: Callable, given: tuple, arguments: tuple, target: Array) -> None:
        """Note what is launched later; see ``steps.Deferred``."""
        with self._refusing():
            expression = partial(self._expression, value=arguments)
            place = self._place(target.data.ptr)
            self.steps.append(Deferred(side, given, arguments, expression, place))

    def offered(self, product: tuple) -> None:
        """Note ``fold(product)``, by which a caller may take over what is the first result then.

        ``product``: a ``pending_matmul.PendingMatmul``.
        """
        self.refused |= any(isinstance(step, Offer) for step in self.steps)
        self.steps.append(Offer(product, partial(self._expression, value=product)))

    @contextlib.contextmanager
    def _refusing(self):
        try:
            yield
        except Unplaced:
            self.refused = True

    # ---- addresses ----

    def _place(self, address: int) -> tuple[int, int]:
        """Return (which array, offset in bytes) of an address; -1 for a constant address."""
        i = self.starts.get(address, -1)
        if i < 0:
            found = [i for i, (lo, hi) in enumerate(self.extents) if lo <= address < hi]
            i = found[0] if len(found) == 1 else -1
        if i >= 0:
            self.used.add(i)
            return i, address - self.arrays[i].data.ptr
        if not address or any(lo <= address < hi for lo, hi in map(extent, self.constants)):
            return -1, address
        raise Unplaced

    def _launch(self, kernel, grid, block, args, shared_bytes):
        driver: DriverLaunch = kernel.driver_launch
        values = driver.values([to(x) for to, x in zip(kernel.casts, args, strict=True)])
        driver.pack(grid, block, values, shared_bytes, 0)  # lays the parameters out
        words, maps, counted, numbers = [], [], [], []
        for i, x in enumerate(args):
            if type(x) is Drawn and driver.kinds[i] == "unsigned int":
                self.placed.add(id(x))
                numbers.append((driver.offsets[i] // 4, x.part))
        for i in driver.pointers:
            at = driver.offsets[i] // WORD
            if type(args[i]) is np.uint64:
                if id(args[i]) not in self.counts:
                    raise Unplaced
                counted.append((at, self.counts[id(args[i])][1]))
            elif values[i]:
                words.append((at, self._place(values[i])))
        for i in driver.structs:
            if id(args[i]) in self.maps:
                _, x, encode = self.maps[id(args[i])]
                maps.append((driver.offsets[i], *self._place(x.data.ptr), encode))
                continue
            for offset, address in addresses_in(args[i]):
                words.append(((driver.offsets[i] + offset) // WORD, self._place(address)))
        words = [(at, *place) for at, place in words if place[0] >= 0]
        given = grid, block, values, shared_bytes
        return Launch(len(self.steps), kernel, given, words, maps, counted, numbers)

    # ---- the program ----

    def program(
        self, result: Any, owned: Any = None, last: Callable[[Code, str], str] | None = None
    ) -> "Program | None":
        """Return the Program of the call that returned ``result``, or None if there is none.

        ``result``: arrays that were given, allocated, or are views of these; numbers, strings,
        dtypes and None; in tuples. ``owned``: a part of it without views of what was given, because
        the tape knows them by their ``base``. ``last(code, text)``: writes what the program
        makes of the result, whose text is given, and returns the text of that.
        """
        if self.refused or any(type(x) is not import_cupy().ndarray for x in self.arrays):
            return None
        for i, (shape, _, zeroed) in enumerate(self.allocations, self.inputs):
            if i not in self.used and not zeroed and math.prod(shape):
                return None  # something else wrote to it
        if any(id(x) not in self.placed for x in self.numbers):
            return None
        code = Code(current_stream=import_cupy().cuda.get_current_stream)
        try:
            self._expression(Code(), owned, self.inputs)
            for step in self.steps:
                step.check(code, False, self.inputs)
            self._allocate(code, result)
            for step in self.steps:
                step.check(code, True, self.inputs)
            self._run(code)
            found = self._returned(code, result)
            code.add(f"return {found if last is None else last(code, found)}")
        except Unplaced:
            return None
        given = unpacked("x", self.inputs) + unpacked("p", self.inputs)
        run = code.function(f"{given}drawn=None, fold=None")
        return Program(run, self._fresh(result), self.constants)

    def _allocate(self, code, result):
        """Name the arrays x0, x1, ..., those that were given first, and their addresses p0, ...

        Of what is allocated only arrays of ``result`` are made; m2, ... is the memory of others,
        and what has no view in ``result`` either lies together.
        """
        cupy, here = import_cupy(), set(self._found((result, *self._handed_on())))
        names = {"zeros": cupy.zeros, "alloc": cupy.cuda.alloc}
        code.values |= names | {"test": partial(arrays.allocate or len, cupy)}
        apart, size = [], 0
        for i, (shape, dtype, zeroed) in enumerate(self.allocations, self.inputs):
            of = f"{code.name('shape', shape)}, {code.name('dtype', short_dtype(dtype))}"
            count = math.prod(shape) * dtype.itemsize
            if zeroed or arrays.allocate:
                code.add(f"x{i} = {'zeros' if zeroed else 'test'}({of})", f"m{i} = x{i}.data")
            elif (i, True) in here or (i, False) in here:
                code.add(f"m{i} = alloc({code.name('size', count)})")
                if (i, True) in here:
                    write_array(code, f"x{i}", f"{of}, m{i}")
            else:
                apart.append(f"p{i} = together + {code.name('at', size)}")
                self.together.add(i)
                size += -(-count // ALIGNMENT) * ALIGNMENT
                continue
            code.add(f"p{i} = m{i}.ptr")
        if apart:
            code.add(f"memory = alloc({code.name('size', size)})", "together = memory.ptr", *apart)

    def _memory(self, i):
        """Return the name of what keeps the memory of an array alive."""
        if i < self.inputs:
            return f"x{i}"
        return "memory" if i in self.together else f"m{i}"

    def _found(self, result):
        """Yield (which array, whether it is the array itself or a view) of arrays in ``result``."""
        if isinstance(result, tuple):
            for one in result:
                yield from self._found(one)
        elif arrays.on_gpu(result):
            i = self._index(result)
            yield self._place(result.data.ptr)[0] if i is None else i, i is not None

    def _run(self, code):
        """Run the steps. What the launches read is in ``free`` while no thread uses it."""
        launched = [step for step in self.steps if isinstance(step, Launch)]
        if self.steps:
            code.add("stream = current_stream().ptr")
        if launched:
            pack = code.name(
                "pack", lambda: [memory for step in launched for memory in step.pack()]
            )
            free = code.name("free", [])
            names = "".join(step.names for step in launched)
            code.add(
                "try:", f"    one = {free}.pop()", "except IndexError:", f"    one = {pack}()",
                f"{names}= one",
            )  # fmt: skip
        small = sum(x.nbytes for x in self.arrays) <= SMALL
        for step in self.steps:
            step.run(code, small)
        if launched:
            code.add(f"{free}.append(one)")

    def _fresh(self, result):
        """Return the places, in a tuple, of arrays that were allocated and are there once."""
        values = result if isinstance(result, tuple) else ()
        new = {id(x) for x in self.arrays[self.inputs :]} - self._read_later()
        count = collections.Counter(map(id, values))
        return frozenset(i for i, x in enumerate(values) if id(x) in new and count[id(x)] == 1)

    def _handed_on(self):
        """Return what others get of the arrays, beside the caller."""
        return tuple(step.arguments for step in self.steps if isinstance(step, Deferred | Offer))

    def _read_later(self):
        """Return the ids of arrays that may be read once the call has ended."""
        found = {place for place, _ in self._found(self._handed_on())}
        return {id(self.arrays[i]) for i in found | self.beside}

    def _returned(self, code, result):
        """Return the text of the result."""
        if not any(isinstance(step, Offer) for step in self.steps):
            return self._expression(code, result)
        first, *rest = result
        own = "product.compute()" if first is None else self._expression(code, first)
        others = "".join(f"{self._expression(code, x)}, " for x in rest)
        return f"(None if taken else {own}, {others})"

    def _expression(self, code, value, first=0):
        """Return the text of what makes ``value`` of the arrays.

        ``first``: of the arrays that may have views in ``value``.
        """
        if value is None:
            return "None"
        if isinstance(value, CONSTANTS):
            return code.name("value", value)
        if isinstance(value, tuple):
            inside = "".join(f"{self._expression(code, one, first)}, " for one in value)
            return f"{'' if type(value) is tuple else code.name('kind', type(value))}({inside})"
        if not arrays.on_gpu(value):
            raise Unplaced
        i = self._index(value)
        if i is not None:
            return f"x{i}"
        place, offset = self._place(value.data.ptr)
        if place < first:
            raise Unplaced
        memory = f"m{place}" if place >= self.inputs else f"x{place}.data"
        given = [
            code.name("shape", value.shape), code.name("dtype", short_dtype(value.dtype)),
            f"{memory} + {offset}" if offset else memory,
        ]  # fmt: skip
        contiguous = import_cupy().ndarray(value.shape, value.dtype, value.data)
        if value.strides != contiguous.strides:
            given.append(code.name("strides", value.strides))
        view = f"v{len(code.lines)}"
        write_array(code, view, ", ".join(given))
        return view

    def _index(self, value):
        """Return the place of an array among those given and allocated, or None."""
        return next((i for i, x in enumerate(self.arrays) if x is value), None)


def _takes_no_counters(step):
    return isinstance(step, Launch) and not step.counted


class Program(NamedTuple):
    """What ``Recorder.program`` returns.

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


@contextlib.contextmanager
def recorded(inputs: Sequence[Array], key: Any = None) -> Iterator[Recorder]:
    """Note the device work of a block; yield the Recorder."""
    recorder = Recorder(inputs, key)
    token = recorders.set(recorder)
    try:
        with without_plans():
            yield recorder
    finally:
        recorders.reset(token)
