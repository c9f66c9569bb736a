"""The byte model of attention, by implementation and array.

- Fused kernels read q, k and v once and write the output and lse. That is the least; it holds where
  the cache keeps the keys and values of the heads at work, which other tiles of queries read again.
- "unfused" writes and reads its tables, (B, H, T, S), as its products and its softmax do: forward
  the scores (written, read) and the weights (written, read), backward seven times. Dropout reads
  and writes a table and a mask of bytes more. "copies": what puts the heads of q, k, v and the
  output apart for its products.
- "numba" has no cache in its model: each tile of queries reads all keys and values.
- "reference" is the formula too, on some keys at a time: the same traffic with less memory, unless
  a cache holds its block.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gpuattn.arrays import wide
from gpuattn.ops.attention.launch import drops


def total(parts: Mapping[str, int]) -> int:
    """Return the bytes of all arrays."""
    return sum(parts.values())


def model(
    inputs: Sequence, params: Mapping[str, Any], impl: str, direction: str
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the bytes that ``impl`` reads and writes, by array.

    ``inputs``: the nine arrays, or None, of a call of ``flash_attention``; ``params``: its others.
    """
    q, k, v, bias, lengths, cu_q, cu_k, slopes, sink = inputs
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
        tables = _tables(q, k, cu_q, params, impl, backward)
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
        rows = ends.clip(0).sum() if params["window"][1] == 0 else len(ends) * S
        reads |= {name: reads[name] * group * int(rows) // S for name in ("k", "v")}
    return reads, writes


def _tables(q, k, cu_q, params, impl, backward):
    """Return what is read and written of the tables of scores and weights."""
    on_numpy = isinstance(q, np.ndarray) or impl == "reference"
    itemsize = wide(q.dtype).itemsize if on_numpy else q.itemsize
    if cu_q is None:
        pairs = q.shape[0] * q.shape[2] * q.shape[1] * k.shape[1]
    else:  # packed, padded to the longest
        longest = params["max_seqlen_q"] * params["max_seqlen_k"]
        pairs = (len(cu_q) - 1) * q.shape[1] * longest
    table, dropped = pairs * itemsize, drops(params["dropout_p"])
    mask = {"dropout mask": pairs} if dropped else {}
    if not backward:
        reads = {"scores": table, "weights": table * (1 + dropped)}
        return reads | mask, {"scores": table, "weights": table * (1 + dropped)} | mask
    reads = {"weights": 2 * table, "dweights": table * (1 + dropped), "dscores": 2 * table}
    return reads | mask, {"dweights": table * (1 + dropped), "dscores": table}
