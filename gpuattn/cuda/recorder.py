"""Recorders: what a call does on the device, noted while it does it.

A ``Recorder`` is told of every array that a call allocates (``arrays.empty``, ``arrays.zeros``),
every kernel that it launches and every product that cuBLASLt computes. Of each address that these
take it notes which array it lies in. From that ``program`` makes what does the same work on
other arrays.

What the recorder does not see must not touch the device. An address that it cannot place, such as
that of an array that CuPy made, leaves the call without a program. Only a write by CuPy to an
array that was there before goes unnoticed; implementations that launch kernels say it by
``arrays.unrecorded_write``, and tests/autodiff/test_plans.py looks for it. In structs, fields of
uint64 are addresses.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from gpuattn.arrays import import_cupy, recorders
from gpuattn.cuda.addresses import WORD, Unplaced, addresses_in, extent
from gpuattn.cuda.driver_launch import DriverLaunch
from gpuattn.cuda.steps import Begin, Deferred, End, Launch, Offer, Product
from gpuattn.modes import without_plans
from gpuattn.typing import Array


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
            places = [None if x is None else self.place(x.data.ptr) for x in operands]
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
            targets = [self.place(x.data.ptr) for x in writes]
            touched.discard(-1)  # constant addresses
            self.beside |= touched
            self.steps.append(End(sorted(touched), targets))

    def deferred(
        self, side: Callable, given: tuple, arguments: tuple, targets: Sequence[Array]
    ) -> None:
        """Note what is launched later; see ``steps.Deferred``."""
        with self._refusing():
            places = [self.place(target.data.ptr) for target in targets]
            self.steps.append(Deferred(side, given, arguments, places))

    def offered(self, product: tuple) -> None:
        """Note ``fold(product)``, by which a caller may take over what is the first result then.

        ``product``: a ``pending_matmul.PendingMatmul``.
        """
        self.refused |= any(isinstance(step, Offer) for step in self.steps)
        self.steps.append(Offer(product))

    @contextlib.contextmanager
    def _refusing(self):
        try:
            yield
        except Unplaced:
            self.refused = True

    def complete(self) -> bool:
        """Return whether what was noted is all that the call did, on arrays of CuPy itself."""
        if self.refused or any(type(x) is not import_cupy().ndarray for x in self.arrays):
            return False
        for i, (shape, _, zeroed) in enumerate(self.allocations, self.inputs):
            if i not in self.used and not zeroed and math.prod(shape):
                return False  # something else wrote to it
        return all(id(x) in self.placed for x in self.numbers)

    # ---- addresses ----

    def place(self, address: int) -> tuple[int, int]:
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
                words.append((at, self.place(values[i])))
        for i in driver.structs:
            if id(args[i]) in self.maps:
                _, x, encode = self.maps[id(args[i])]
                maps.append((driver.offsets[i], *self.place(x.data.ptr), encode))
                continue
            for offset, address in addresses_in(args[i]):
                words.append(((driver.offsets[i] + offset) // WORD, self.place(address)))
        words = [(at, *place) for at, place in words if place[0] >= 0]
        given = grid, block, values, shared_bytes
        return Launch(len(self.steps), kernel, given, words, maps, counted, numbers)


def _takes_no_counters(step):
    return isinstance(step, Launch) and not step.counted


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
