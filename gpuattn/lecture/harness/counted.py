"""Counts of what code reads, writes and computes, taken while it runs."""

import contextlib
import importlib.util
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from gpuattn.autodiff.hooks import hooked
from gpuattn.bench import op_work
from gpuattn.lecture.harness.forms import difference


class Counted:
    """An array in a memory whose accesses cost: indexing counts the numbers read and written."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.reads, self.writes = array, 0, 0

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, key: Any) -> Any:
        part = self.array[key]
        self.reads += part.size
        return part

    def __setitem__(self, key: Any, value: Any) -> None:
        self.writes += self.array[key].size
        self.array[key] = value

    @property
    def bytes(self) -> int:
        """Bytes read and written."""
        return (self.reads + self.writes) * self.array.itemsize


def memory(rng: Any, **shapes: tuple[int, ...]) -> dict[str, Counted]:
    """Return Counted arrays of random numbers by name."""
    return {name: Counted(rng.standard_normal(shape)) for name, shape in shapes.items()}


def moved(arrays: dict[str, Counted], size: int) -> int:
    """Return how many times arrays of ``size`` numbers were read or written."""
    return sum(x.reads + x.writes for x in arrays.values() if x.array.size == size) // size


class Number(float):
    """A number that counts the products and sums it is in: ``flops``, of all numbers."""

    flops = 0

    def __mul__(self, other: float) -> "Number":
        Number.flops += 1
        return Number(float(self) * float(other))

    def __add__(self, other: float) -> "Number":
        Number.flops += 1
        return Number(float(self) + float(other))


class Reductions(np.ndarray):
    """An array that counts reductions of itself and of what is computed from it: ``counts``."""

    counts: Counter = Counter()

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **given: Any) -> Any:
        if method == "reduce":
            Reductions.counts[ufunc.__name__] += 1
        out = given.pop("out", None)
        if out is not None:
            given["out"] = tuple(map(_bare, out))
        result = getattr(ufunc, method)(*map(_bare, inputs), **given)
        if out is not None:
            return out[0]
        return result.view(Reductions) if isinstance(result, np.ndarray) else result


def _bare(x):
    return x.view(np.ndarray) if isinstance(x, Reductions) else x


class Work(NamedTuple):
    """A call of an op: its FLOPs and bytes by ``bench.op_work``."""

    op: str
    direction: str
    flops: float
    bytes: int

    @property
    def intensity(self) -> float:
        """FLOPs a byte."""
        return self.flops / self.bytes


@contextlib.contextmanager
def ops() -> Iterator[list[Work]]:
    """Yield a list that gets every call of an op in the block, as its implementation ran."""
    calls: list[Work] = []

    def hook(op, direction, function):
        if op == "checkpoint":
            return function  # the ops in it are counted

        def counted(*arguments, **given):
            flops = op_work.flops(op, direction, arguments, given)
            with hooked(None):
                result = function(*arguments, **given)
            moved = op_work.moved(op, direction, arguments, given, result, function)
            calls.append(Work(op, direction, flops, moved))
            return result

        return counted

    with hooked(hook):
        yield calls


def run(form: Callable[..., Any], *given: Any) -> tuple[Any, list[Work]]:
    """Return what a form returns, and the calls of ops in it."""
    with ops() as calls:
        result = form(*given)
    return result, calls


def compare(say: Any, id: str, forms: Mapping[str, Callable], *given: Any) -> dict[str, float]:
    """State that two forms agree, and that the first has fewer calls of ops, reads and writes.

    Returns how many arrays of the size of its first result each form reads and writes.
    """
    ran = {name: run(form, *given) for name, form in forms.items()}
    outs = [out if isinstance(out, tuple) else (out,) for out, _ in ran.values()]
    calls = {name: len(found) for name, (_, found) in ran.items()}
    size = outs[0][0].data.nbytes
    moved = {name: sum(call.bytes for call in found) / size for name, (_, found) in ran.items()}
    say.near(id, f"{' and '.join(forms)}: difference of the results", difference(*outs), 1e-5)
    say.order(id, "calls of ops", calls)
    say.order(id, "arrays read and written", moved)
    return moved


def reductions(function: Callable[..., Any], x: np.ndarray) -> int:
    """Return how often a function of NumPy's arrays reduces ``x`` or what follows from it."""
    Reductions.counts.clear()
    function(x.view(Reductions))
    return sum(Reductions.counts.values())


def unfused(rng: Any, N: int, D: int) -> dict[str, int]:
    """Return the bytes of each step of softmax(dropout(mask(Q K^T))) V, of one head in 16 bits."""
    q, k, v = (Counted(rng.standard_normal((N, D)).astype(np.float16)) for _ in range(3))
    table, out = Counted(np.empty((N, N), np.float16)), Counted(np.empty((N, D), np.float16))
    keep, read = rng.random((N, N)) > 0.1, np.float32
    table[:] = q[:].astype(read) @ k[:].T.astype(read) / math.sqrt(D)
    moved = {"Q and K": q.bytes + k.bytes, "scores": table.bytes}
    table[:] = np.where(np.tri(N, dtype=bool), table[:], -np.inf)
    weights = np.exp(table[:].astype(read) - table.array.max(-1, keepdims=True))
    table[:] = weights / weights.sum(-1, keepdims=True)
    table[:] = table[:] * keep
    moved["mask, softmax, dropout"] = table.bytes - moved["scores"]
    out[:] = table.array.astype(read) @ v[:].astype(read)  # reads the table again: not in the notes
    return moved | {"V and out": v.bytes + out.bytes}


def by_tiles(say: Any) -> tuple[int, float, float] | None:
    """Compare products of side 1,024 on a GPU, by tiles in shared memory and each thread alone.

    Returns the side of a tile, how many times fewer reads of memory the kernel with tiles counts,
    and how many times as fast it is. None on NumPy, or without Numba.
    """
    if say.device != "cuda" or not importlib.util.find_spec("numba"):
        return None
    from gpuattn.numbakernels.matmul import TILE, product

    a, b = say.normal(1024, 1024), say.normal(1024, 1024)
    tiles, alone = partial(product, a, b), partial(product, a, b, shared=False)
    us = say.times({"tiles": tiles, "alone": alone})
    fewer = alone()[1] / tiles()[1]
    return TILE, fewer, statistics.median(us["alone"]) / statistics.median(us["tiles"])


def product(rows: int, inner: int, cols: int, dtype: Any) -> Work:
    """Return the work of ``linear`` on (rows, inner) and (cols, inner), without computing it."""
    shapes = (rows, inner), (cols, inner), (rows, cols)
    x, weight, out = (np.empty(shape, dtype) for shape in shapes)  # memory that nobody touches
    flops = op_work.flops("linear", "forward", (x, weight), {})
    moved = op_work.moved("linear", "forward", (x, weight), {}, out)
    assert moved == sum(math.prod(shape) for shape in shapes) * x.itemsize
    return Work("linear", "forward", flops, moved)
