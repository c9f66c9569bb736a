"""Programs: the device work of a call, recorded once and run again on other arrays.

A ``Recorder`` is told of every array that a call allocates (``arrays.empty``, ``arrays.zeros``),
every kernel that it launches and every product that cuBLASLt computes. Of each address that these
take it notes which array it lies in. A ``Program`` then needs no Python of the op to do the same
work again: it allocates, writes addresses into launches that are packed already, and launches.

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
from operator import itemgetter
from typing import Any

import numpy as np

from gpuattn import arrays
from gpuattn.arrays import import_cupy, recorders, without_plans
from gpuattn.cuda.driver_launch import STREAM_AT, DriverLaunch
from gpuattn.cuda.kernels import launches
from gpuattn.cuda.scratch import counters
from gpuattn.typing import Array

CONSTANTS = type(None), bool, int, float, str, np.dtype
NUMBERS = np.dtype(np.int32), np.dtype(np.int64), np.dtype(np.float32)
WORD = 8  # bytes of an address
STREAM_WORD = STREAM_AT // WORD
MAP_BYTES, MOST_MAPS = 128, 64  # of a tensor map; maps that a launch remembers for each array
Step = Callable[[list[int], int, Any], None]  # of addresses, a stream, numbers of a key


class Unplaced(Exception):
    """A call works with something that no later call can be given."""


class Drawn(int):
    """A number of the key of a call; ``part``: which one of ``rng.device_arguments``."""

    part: int

    def __new__(cls, value: int, part: int) -> "Drawn":
        self = super().__new__(cls, value)
        self.part = part
        return self


class Recorder:
    """Notes the device work of a call on the GPU arrays ``inputs``, which differ in address.

    ``key``: of the call's random numbers, or None.
    """

    def __init__(self, inputs: Sequence[Array], key: Any) -> None:
        self.key = key
        self.numbers: list[Drawn] = []  # all that were drawn; ``placed``: by id, those launched
        self.placed: set[int] = set()
        self.arrays: list[Array] = list(inputs)  # and what is allocated: kept, so no address is
        self.inputs = len(self.arrays)  # given out twice
        self.starts = {x.data.ptr: i for i, x in enumerate(self.arrays)}
        self.extents = [_extent(x) for x in self.arrays]
        self.allocations: list[tuple] = []
        self.steps: list[Step] = []
        self.checks: list[Callable] = []  # of addresses: whether all steps take them
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
            step, fits = _product(plan, places)
            self.steps.append(step)
            self.checks.append(fits)

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
        if not address or any(lo <= address < hi for lo, hi in map(_extent, self.constants)):
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
                maps.append((driver.offsets[i], self._place(x.data.ptr), encode, {}))
                continue
            for offset, address in _addresses(args[i]):
                words.append(((driver.offsets[i] + offset) // WORD, self._place(address)))
        words = [(at, *place) for at, place in words if place[0] >= 0]
        given = grid, block, values, shared_bytes
        return _launch(kernel, given, words, maps, counted, numbers)

    # ---- the program ----

    def program(self, result: Any, owned: Any = None) -> "Program | None":
        """Return the Program of the call that returned ``result``, or None if there is none.

        ``result``: arrays that were given, allocated, or are views of these; numbers, strings,
        dtypes and None; in tuples. ``owned``: a part of it without views of what was given, because
        the tape knows them by their ``base``.
        """
        if self.refused or any(type(x) is not import_cupy().ndarray for x in self.arrays):
            return None
        for i, (shape, _, zeroed) in enumerate(self.allocations, self.inputs):
            if i not in self.used and not zeroed and math.prod(shape):
                return None  # something else wrote to it
        if any(id(x) not in self.placed for x in self.numbers):
            return None
        try:
            self._maker(owned, self.inputs)
            make = self._maker(result)
        except Unplaced:
            return None
        return Program(self, make, self._fresh(result))

    def _fresh(self, result):
        """Return the places, in a tuple, of arrays that were allocated and are there once."""
        values = result if isinstance(result, tuple) else ()
        new = {id(x) for x in self.arrays[self.inputs :]}
        count = collections.Counter(map(id, values))
        return frozenset(i for i, x in enumerate(values) if id(x) in new and count[id(x)] == 1)

    def _maker(self, value, first=0):
        """Return a function that makes ``value`` of the list of all arrays.

        ``first``: of the arrays that may have views in ``value``.
        """
        if isinstance(value, CONSTANTS):
            return lambda arrays: value
        if isinstance(value, tuple):
            makers, kind = [self._maker(one, first) for one in value], type(value)
            places = [self._index(one) for one in value]
            if kind is tuple and len(places) > 1 and None not in places:
                return itemgetter(*places)
            if kind is tuple and len(makers) == 2:  # most often: the result, and what is saved
                one, other = makers
                return lambda arrays: (one(arrays), other(arrays))
            if kind is tuple:
                return lambda arrays: tuple([make(arrays) for make in makers])
            return lambda arrays: kind(*[make(arrays) for make in makers])
        if not arrays.on_gpu(value):
            raise Unplaced
        i = self._index(value)
        if i is not None:
            return itemgetter(i)
        place, offset = self._place(value.data.ptr)
        if place < first:
            raise Unplaced
        return _View(place, offset, value)

    def _index(self, value):
        """Return the place of an array among those given and allocated, or None."""
        return next((i for i, x in enumerate(self.arrays) if x is value), None)


def _extent(x):
    """Return the first address of an array, and the one behind its last byte."""
    low = high = x.data.ptr
    for n, step in zip(x.shape, x.strides, strict=True):
        if n:
            low, high = low + min(0, (n - 1) * step), high + max(0, (n - 1) * step)
    return low, high + x.itemsize


def _addresses(struct):
    """Return (offset, address) of every address in a struct that a kernel takes by value.

    ``struct``: a view, as bytes, of numbers, or of an array of one element with named fields.
    """
    fields = struct if struct.dtype.names else struct.base
    if fields is not None and fields.dtype in NUMBERS:
        return []
    if fields is None or not fields.dtype.names or fields.size != 1:
        raise Unplaced  # such as a tensor map that nobody told of
    found = []
    for dtype, at, *_ in fields.dtype.fields.values():
        if dtype.base != np.uint64:
            continue
        if at % WORD:
            raise Unplaced
        count = math.prod(dtype.shape)
        raw = np.frombuffer(fields.tobytes(), np.uint64, count, at)
        found += [(at + WORD * i, int(value)) for i, value in enumerate(raw) if value]
    return found


class _View:
    """A view of an array of a program: which one, from where, and its layout."""

    def __init__(self, place: int, offset: int, value: Array) -> None:
        self.place, self.offset = place, offset
        self.layout = value.shape, value.dtype
        self.strides = value.strides

    def __call__(self, arrays: list[Array]) -> Array:
        owner = arrays[self.place]
        return type(owner)(*self.layout, owner.data + self.offset, self.strides)


def _product(plan: Any, places: list[tuple[int, int] | None]) -> tuple[Step, Callable]:
    """Return the step that computes a product of cuBLASLt, and whether it fits addresses.

    ``plan``: the ``cublaslt.MatmulPlan``. ``places``: (which array, offset) of a, b, out, vector
    and aux, or None.
    """
    given = [place for place in places if place is not None]
    (a, _), (b, _), (out, _) = given[:3]
    plain = len(given) == 3 and not any(offset for _, offset in given)
    mask = plan.alignment - 1  # a power of two

    def fits(addresses):
        low = 0
        for place, offset in given[:3]:
            low |= addresses[place] + offset
        return not low & mask and plan.is_current()

    def run(addresses, stream, drawn):
        if plain:
            done = plan.run_at(stream, addresses[a], addresses[b], addresses[out])
        else:
            at = [0 if place is None else addresses[place[0]] + place[1] for place in places]
            done = plan.run_at(stream, *at)
        if not done:
            raise RuntimeError(f"matmul: cuBLASLt refuses a product that it computed: {plan.kind}")

    return run, fits


def _launch(
    kernel: Any, given: tuple, words: list[tuple], maps: list[tuple], counted: list[tuple],
    numbers: list[tuple],
) -> Step:  # fmt: skip
    """Return the step that launches a ``kernels.Kernel``, packed as the driver reads it.

    ``given``: grid, block, values and shared bytes of ``DriverLaunch.pack``. ``words``: (8-byte
    word, which array, offset). ``maps``: (offset of a tensor map, (which array, offset), encode,
    {address: map}). ``counted``: (8-byte word, how many counters). ``numbers``: (4-byte word, which
    number of the key).
    """
    driver, name = kernel.driver_launch, kernel.name
    call, function = driver.driver_launch, driver.function.ptr
    starts = [(at, place) for at, place, offset in words if not offset]
    inside = [word for word in words if word[2]]
    free: list[tuple] = []  # packed launches that no thread uses

    def run(addresses, stream, drawn):
        try:
            one = free.pop()
        except IndexError:
            one = _packed(driver.pack(*given, 0))
        packed, words, halves, (_, address, parameters, extra) = one
        words[STREAM_WORD] = stream
        for at, place in starts:
            words[at] = addresses[place]
        for at, place, offset in inside:
            words[at] = addresses[place] + offset
        for at, count in counted:
            words[at] = counters(count)
        for at, part in numbers:
            halves[at] = drawn[part]
        for at, (place, offset), encode, known in maps:
            start = addresses[place] + offset
            if start not in known:
                if len(known) == MOST_MAPS:
                    known.clear()
                known[start] = encode(start).tobytes()
            packed[at : at + MAP_BYTES] = known[start]
        if call(address, function, parameters, extra):
            driver.launch(one[3])  # makes the context current, or raises
        launches[name] += 1
        free.append(one)

    return run


def _packed(packed):
    """Return a Packed as (its bytes, its words of 8 bytes, those of 4, itself)."""
    view = memoryview(packed.memory).cast("B")
    return view, view.cast("Q"), view.cast("I"), packed


class Program:
    """What ``Recorder.program`` returns.

    ``constants``: arrays whose addresses are in launches. ``fresh``: the places, in the result, of
    arrays that a run allocates and that are there once.
    """

    __slots__ = ("allocations", "checks", "constants", "fresh", "make", "steps", "stream")

    def __init__(self, recorder: Recorder, make: Callable, fresh: frozenset[int]) -> None:
        cupy = import_cupy()
        empty = partial(arrays.allocate, cupy) if arrays.allocate else cupy.ndarray
        self.allocations = [
            partial(cupy.zeros if zeroed else empty, shape, dtype)
            for shape, dtype, zeroed in recorder.allocations
        ]
        self.steps, self.checks = recorder.steps, recorder.checks
        self.constants = recorder.constants
        self.make, self.fresh = make, fresh
        self.stream = cupy.cuda.get_current_stream

    def run(self, given: list[Array], addresses: list[int], drawn: Any = None) -> bool:
        """Do the work; return False, with nothing done, where a product does not take addresses.

        ``given``: arrays like those of the recorded call. ``addresses``: theirs. Both are extended
        by what is allocated; ``make(given)`` is then the call's result. ``drawn``: what
        ``rng.device_arguments`` returns for its key, if it has one.
        """
        for allocate in self.allocations:
            array = allocate()
            given.append(array)
            addresses.append(array.data.ptr)
        for fits in self.checks:
            if not fits(addresses):
                return False
        stream = self.stream().ptr
        for step in self.steps:
            step(addresses, stream, drawn)
        return True


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
