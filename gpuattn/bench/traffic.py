"""The byte model: what a call reads and writes in the large memory, by implementation and array.

Of attention the bytes follow from the shapes and from the implementation that would run:

- Fused kernels read q, k and v once and write the output and lse. That is the least; it holds where
  the cache keeps the keys and values of the heads at work, which other tiles of queries read again.
- "unfused" writes and reads its tables, (B, H, T, S), as its products and its softmax do: forward
  the scores (written, read) and the weights (written, read), backward seven times. Dropout reads
  and writes a table and a mask of bytes more. "copies": what puts the heads of q, k, v and the
  output apart for its products.
- "numba" has no cache in its model: each tile of queries reads all keys and values.
- "reference" is the formula too, on some keys at a time: the same traffic with less memory, unless
  a cache holds its block.

Other ops are run once, and each array that they read or write counts once: ``op_work``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpuattn.arrays import is_array, wide
from gpuattn.autodiff.hooks import hooked
from gpuattn.autodiff.tape import raw
from gpuattn.autodiff.tensor import Tensor
from gpuattn.bench import op_work
from gpuattn.errors import problem
from gpuattn.impls import Call, prepare
from gpuattn.ops.attention.flash_attention import NAME
from gpuattn.ops.attention.launch import drops

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
        return sum(self.reads.values()) + sum(self.writes.values())

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
        reads, writes = _attention(call, chosen.name, direction)
        return Traffic(NAME, chosen.name, direction, reads, writes)
    return _counted(call.impls.op, op, args, kwargs, direction)


def _is_float(x):
    return x is not None and x.dtype.kind not in "biu"


# ---- attention ----------------------------------------------------------------------------------


def _attention(call: Call, impl: str, direction: str) -> tuple[dict[str, int], dict[str, int]]:
    q, k, v, bias, lengths, cu_q, cu_k, slopes, sink = call.arrays
    rows = q.size // q.shape[-1]  # queries of all heads
    out, lse = rows * v.shape[-1] * q.itemsize, rows * 4
    reads = {"q": q.nbytes, "k": k.nbytes, "v": v.nbytes}
    given = {"bias": bias, "key_lengths": lengths, "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k,
             "alibi_slopes": slopes, "sink": sink}  # fmt: skip
    reads |= {name: x.nbytes for name, x in given.items() if x is not None}
    writes = {"out": out}
    backward = direction == "backward"
    if backward:
        reads |= {"dout": out}
        writes = {"dq": q.nbytes, "dk": k.nbytes, "dv": v.nbytes}
        if bias is not None and bias.dtype != bool:
            writes["dbias"] = bias.nbytes
    if impl in ("unfused", "reference"):
        tables = _tables(call, q, k, impl, backward)
        copies = {}
        if impl == "unfused":
            both = 2 * (q.nbytes + k.nbytes) + 2 * v.nbytes + out + q.nbytes
            copies = {"copies": both if backward else q.nbytes + k.nbytes + v.nbytes + out}
        return reads | tables[0] | copies, writes | tables[1] | copies
    if backward:  # delta = rowsum(dout * out) by a kernel of its own
        reads |= {"dout": 2 * out, "out": out, "lse": lse, "delta": lse}
        writes |= {"delta": lse}
    else:
        writes |= {"lse": lse}
    if impl == "numba":
        from gpuattn.numbakernels.flash_attention import TILE

        T, S, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
        ends = np.minimum(np.arange(TILE, T + TILE, TILE) + S - T, S)  # keys that a tile may see
        rows = ends.clip(0).sum() if call.params["window"][1] == 0 else len(ends) * S
        reads |= {name: reads[name] * group * int(rows) // S for name in ("k", "v")}
    return reads, writes


def _tables(call, q, k, impl, backward):
    """Return what is read and written of the tables of scores and weights."""
    on_numpy = isinstance(q, np.ndarray) or impl == "reference"
    itemsize = wide(q.dtype).itemsize if on_numpy else q.itemsize
    if call.arrays[5] is None:
        pairs = q.shape[0] * q.shape[2] * q.shape[1] * k.shape[1]
    else:  # packed, padded to the longest
        longest = call.params["max_seqlen_q"] * call.params["max_seqlen_k"]
        pairs = (len(call.arrays[5]) - 1) * q.shape[1] * longest
    table, dropped = pairs * itemsize, drops(call.params["dropout_p"])
    mask = {"dropout mask": pairs} if dropped else {}
    if not backward:
        reads = {"scores": table, "weights": table * (1 + dropped)}
        return reads | mask, {"scores": table, "weights": table * (1 + dropped)} | mask
    reads = {"weights": 2 * table, "dweights": table * (1 + dropped), "dscores": 2 * table}
    return reads | mask, {"dweights": table * (1 + dropped), "dscores": table}


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
