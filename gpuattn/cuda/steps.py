"""The steps of a program: launches of kernels and products of cuBLASLt, written as code.

The code calls arrays x0, x1, ... and their addresses p0, p1, ...
"""

from collections.abc import Callable, Sequence
from typing import Any

from gpuattn.cuda.addresses import WORD
from gpuattn.cuda.driver_launch import STREAM_AT
from gpuattn.cuda.generated import Code
from gpuattn.cuda.kernels import launches
from gpuattn.cuda.scratch import counters

STREAM_WORD = STREAM_AT // WORD
MAP_BYTES, MOST_MAPS = 128, 64  # of a tensor map; maps that a launch remembers for each array


class Text(Code):
    """The code of a program, which names the arrays of the call that was recorded."""

    def memory(self, array: int) -> str:
        """Return the name of what keeps the memory of an array alive."""
        raise NotImplementedError

    def expression(self, value: Any) -> str:
        """Return the text of what makes ``value`` of the arrays."""
        raise NotImplementedError


class Launch:
    """A launch of a ``kernels.Kernel``, packed as the driver reads it.

    ``given``: grid, block, values and shared bytes of ``DriverLaunch.pack``. ``words``: (8-byte
    word, which array, offset). ``maps``: (offset of a tensor map, which array, offset, encode).
    ``counted``: (8-byte word, how many counters). ``numbers``: (4-byte word, which number of the
    key).
    """

    def __init__(
        self, place: int, kernel: Any, given: tuple, words: list[tuple], maps: list[tuple],
        counted: list[tuple], numbers: list[tuple],
    ) -> None:  # fmt: skip
        self.kernel, self.driver, self.given = kernel, kernel.driver_launch, given
        self.words, self.maps, self.counted, self.numbers = words, maps, counted, numbers
        self.place = place
        self.names = f"packed{place}, words{place}, config{place}, places{place}, "
        self.names += f"halves{place}, " * bool(numbers) + f"bytes{place}, " * bool(maps)

    def pack(self) -> list:
        """Return the memory of one launch, by its ``names``."""
        packed = self.driver.pack(*self.given, 0)
        view = memoryview(packed.memory).cast("B")
        more = [view.cast("I")] * bool(self.numbers) + [view] * bool(self.maps)
        return [packed, view.cast("Q"), packed.config, packed.places, *more]

    def touched(self) -> set[int]:
        """Return which arrays the launch reads or writes."""
        return {place for _, place, *_ in (*self.words, *self.maps)}

    def check(self, code: Code, allocated: bool, inputs: int) -> None:
        """A launch takes any addresses."""

    def run(self, code: Code) -> None:
        """Write the launch."""
        i = self.place
        for at, place, offset in self.words:
            code.add(f"words{i}[{at}] = {_address(place, offset)}")
        for at, count in self.counted:
            code.add(f"words{i}[{at}] = {code.name('counters', counters)}({count})")
        for at, part in self.numbers:
            code.add(f"halves{i}[{at}] = drawn[{part}]")
        for at, place, offset, encode in self.maps:
            maps = code.name("maps", _Maps(encode))
            code.add(f"bytes{i}[{at}:{at + MAP_BYTES}] = {maps}[{_address(place, offset)}]")
        function = code.name("function", self.driver.handle)
        launch = code.name("launch", self.driver.driver_launch)
        again = code.name("again", self.driver.launch)  # or raises
        code.add(
            f"words{i}[{STREAM_WORD}] = stream",
            f"if {launch}(config{i}, {function}, places{i}, None):",
            f"    {again}(packed{i})",
        )
        code.add(f"{code.name('count', launches.place(self.kernel.name))}[0] += 1")


class _Maps(dict[int, bytes]):
    """Tensor maps of arrays that differ in address: {address: what ``encode(address)`` returns}."""

    def __init__(self, encode: Callable) -> None:
        super().__init__()
        self.encode = encode

    def __missing__(self, address: int) -> bytes:
        if len(self) >= MOST_MAPS:
            self.clear()
        found = self[address] = self.encode(address).tobytes()
        return found


class Product:
    """A product of cuBLASLt. ``plan``: the ``cublaslt.MatmulPlan``.

    ``places``: (which array, offset) of a, b, out, vector and aux, or None.
    """

    def __init__(self, plan: Any, places: list[Any]) -> None:
        self.plan, self.places = plan, places

    def touched(self) -> set[int]:
        """Return which arrays the product reads or writes."""
        return {place[0] for place in self.places if place is not None}

    def check(self, code: Code, allocated: bool, inputs: int) -> None:
        """Return None where the product does not take the addresses of arrays.

        ``allocated``: of those that the program allocates, else of the ``inputs`` given ones.
        """
        places = [place for place in self.places[:3] if (place[0] >= inputs) == allocated]
        wrong = []
        if places:
            low = " | ".join(_address(*place) for place in places)
            wrong.append(f"({low}) & {self.plan.alignment - 1}")  # a power of two
        if not allocated:
            wrong.append(f"not {code.name('current', self.plan.is_current)}()")
        if wrong:
            code.add(f"if {' or '.join(wrong)}:", "    return None")

    def run(self, code: Code) -> None:
        run, fail = code.name("run", self.plan.run_at), code.name("fail", self._fail)
        at = ", ".join("0" if place is None else _address(*place) for place in self.places)
        code.add(f"if not {run}(stream, {at}):", f"    {fail}()")

    def _fail(self):
        kind = self.plan.kind
        raise RuntimeError(f"matmul: cuBLASLt refuses a product that it computed: {kind}")


class Begin:
    """The begin of a block of work on a side stream. ``side()``: returns what has the stream."""

    def __init__(self, side: Callable) -> None:
        self.side = side

    def check(self, code: Code, allocated: bool, inputs: int) -> None:
        """It takes no addresses."""

    def run(self, code: Code) -> None:
        code.add(f"side = {code.name('side', self.side)}()", "stream = side.begin()")


class End:
    """The end of such a block.

    ``arrays``: those that the block touches. ``targets``: (which array, offset) of what it writes.
    """

    def __init__(self, arrays: list[int], targets: list[tuple]) -> None:
        self.arrays, self.targets = arrays, targets

    def check(self, code: Code, allocated: bool, inputs: int) -> None:
        """It takes any addresses."""

    def run(self, code: Text) -> None:
        kept = ", ".join(dict.fromkeys(map(code.memory, self.arrays)))
        written = ", ".join(_address(*target) for target in self.targets)
        code.add(f"stream = side.end([{kept}], {{{written}}})")


class Deferred:
    """What a side stream's owner launches later, together with other such work.

    ``side``: as of Begin. ``given``: ``launch``, and how many bytes it reads. ``arguments``: of
    ``launch``. ``targets``: (which array, offset) of each.
    """

    def __init__(
        self, side: Callable, given: tuple, arguments: tuple, targets: Sequence[tuple]
    ) -> None:
        self.side, self.given, self.arguments, self.targets = side, given, arguments, targets

    def check(self, code: Code, allocated: bool, inputs: int) -> None:
        """It takes any addresses."""

    def run(self, code: Text) -> None:
        (launch, size), given = self.given, code.expression(self.arguments)
        launch, size = code.name("launch", launch), code.name("size", size)
        side = code.name("side", self.side)
        written = ", ".join(_address(*target) for target in self.targets)
        code.add(f"{side}().defer({launch}, {given}, {size}, [{written}])")


class Offer:
    """A product that the caller may compute in a way of its own, in the middle of the call.

    ``arguments``: what describes the product.
    """

    def __init__(self, arguments: tuple) -> None:
        self.arguments = arguments

    def check(self, code: Code, allocated: bool, inputs: int) -> None:
        """It takes any addresses."""

    def run(self, code: Text) -> None:
        code.add(f"product = {code.expression(self.arguments)}", "taken = fold(product)")


def _address(place: int, offset: int) -> str:
    """Return the text of an address in an array; a place of -1 is a constant address."""
    return f"{offset}" if place < 0 else f"p{place} + {offset}" if offset else f"p{place}"
