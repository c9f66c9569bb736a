"""The byte model: what a call reads and writes in the large memory, by implementation and array.

Of attention the bytes follow from the shapes and from the implementation that would run, by
``attention_traffic``. Other ops are run once, and each array that they read or write counts once:
``op_work``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gpuattn.arrays import is_array
from gpuattn.autodiff.hooks import hooked
from gpuattn.autodiff.tape import raw
from gpuattn.autodiff.tensor import Tensor
from gpuattn.bench import attention_traffic, op_work
from gpuattn.errors import problem
from gpuattn.impls import prepare
from gpuattn.ops.attention.flash_attention import NAME

DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True)
class Traffic:
    """The bytes that an implementation of ``op`` reads and writes in one ``direction``, by array.

    Printing it shows a table.
    """

    op: str
    impl: str
    direction: str
    reads: dict[str, int]
    writes: dict[str, int]

    @property
    def bytes(self) -> int:
        """All bytes, read and written."""
        return attention_traffic.total(self.reads) + attention_traffic.total(self.writes)

    def __str__(self) -> str:
        lines = [f"{self.op}, {self.impl}, {self.direction}: {self.bytes / 1e6:,.3f} MB"]
        for name in dict.fromkeys([*self.reads, *self.writes]):
            read, written = (part.get(name, 0) / 1e6 for part in (self.reads, self.writes))
            lines.append(f"  {name:12} read {read:12,.3f} MB  written {written:12,.3f} MB")
        return "\n".join(lines)


def traffic(op: Callable, *args: Any, direction: str = "forward", **kwargs: Any) -> Traffic:
    """Return the bytes that ``op(*args, **kwargs)`` moves, by the implementation that would run.

    ``op``: a public op, such as ``gpuattn.flash_attention``. ``direction``: "forward", or
    "backward" for the gradients of all float arguments. Attention is not run: its bytes follow from
    the shapes, with the tables of "unfused" where ``impl="unfused"`` is asked for. Others run once.
    Raises ValueError for another direction, and what ``op`` raises.

    >>> import numpy as np
    >>> import gpuattn
    >>> q = np.ones((1, 256, 2, 64), np.float32)
    >>> fused = gpuattn.traffic(gpuattn.flash_attention, q, q, q, impl="reference")
    >>> unfused = gpuattn.traffic(gpuattn.flash_attention, q, q, q, impl="unfused")
    >>> unfused.reads["weights"] == 2 * 256 * 256 * 4
    True
    """
    if direction not in DIRECTIONS:
        raise ValueError(problem("traffic", "direction", repr(direction), " or ".join(DIRECTIONS)))
    call = prepare(op, *args, **kwargs)
    chosen = call.choose()
    if call.impls.op == NAME:
        needs = tuple(_is_float(x) for x in call.arrays)
        if direction == "backward":
            chosen = call.choose_backward(chosen, needs)
        reads, writes = attention_traffic.model(call.arrays, call.params, chosen.name, direction)
        return Traffic(NAME, chosen.name, direction, reads, writes)
    return _counted(call.impls.op, op, args, kwargs, direction)


def _is_float(x):
    return x is not None and x.dtype.kind not in "biu"


# ---- other ops ----------------------------------------------------------------------------------


def _counted(name, op, args, kwargs, direction):
    """Run an op once and count the arrays that it reads and writes."""
    seen: list[tuple[str, int, int]] = []

    def hook(ran, way, function):
        def counted(*arguments, **given):
            with hooked(None):
                result = function(*arguments, **given)
            moved = op_work.moved(ran, way, arguments, given, result)
            held = {op_work.address(x): x.nbytes for x in op_work.arrays_in((arguments, given))}
            if ran == name and way == direction:
                seen.append((ran, min(sum(held.values()), moved), moved))
            return result

        return counted

    if direction == "backward":
        args = tuple(map(_leaf, args))
        kwargs = {key: _leaf(x) for key, x in kwargs.items()}
    with hooked(hook):
        result = op(*args, **kwargs)
        if direction == "backward":
            outs = result if isinstance(result, tuple) else (result,)
            sum(out.sum() for out in outs if isinstance(out, Tensor)).backward()
    read, moved = (sum(row[i] for row in seen) for i in (1, 2))
    chosen = prepare(op, *args, **kwargs).choose().name
    return Traffic(name, chosen, direction, {"arguments": read}, {"results": moved - read})


def _leaf(x):
    x = raw(x)
    return Tensor(x, requires_grad=True) if is_array(x) and _is_float(x) else x
