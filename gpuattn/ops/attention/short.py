"""raw-short, a warp per 16 rows of short sequences: ``attention/flash_attention_short.cu``."""

from typing import Any

import numpy as np

from gpuattn import arrays
from gpuattn.arrays import ctype, get_xp, rows_refusal
from gpuattn.cuda.gpu import tensor_core_refusal
from gpuattn.cuda.kernels import kernel, kernel_refusal
from gpuattn.errors import SlowerRefusal
from gpuattn.ops.attention.gradient import (
    bias_gradient,
    gradient_arrays,
    output_gradients,
    sink_gradient,
)
from gpuattn.ops.attention.launch import Launch, inputs_refusal, outputs, result, tiles_refusal
from gpuattn.typing import Array

MAX_LENGTH, MAX_HEAD_DIM = 256, 128
MAX_FASTER_LENGTH = 64  # for longer sequences tiles of 64 queries and more were measured faster
MAX_REACH = 2**31  # elements, for 32-bit offsets
WIDTHS = (32, 64, 128)  # what HEAD_DIM is rounded up to
TILE, WARPS = 16, 4  # rows of a warp, warps of a block
BLOCK = (32 * WARPS,)


def refuse(
    q: Array, k: Array, v: Array, bias: Any, key_lengths: Any, cu_q: Any, *_: Any,
    max_seqlen_q: int, max_seqlen_k: int, **__: Any,
) -> str | None:  # fmt: skip
    """Return why neither direction runs here, or None."""
    if reason := kernel_refusal(q, "q"):
        return reason
    longest = max(max_seqlen_q, max_seqlen_k)
    if longest > MAX_LENGTH:
        hint = "" if cu_q is None else "; give the true max_seqlen_q"
        return f"the longest sequence is {longest}, the kernel takes at most {MAX_LENGTH}{hint}"
    if q.dtype.itemsize != 2:
        return f"q is {q.dtype}, the kernel takes float16 or bfloat16"
    if reason := tensor_core_refusal(q.device.id, q.dtype):
        return reason
    size = max(q.shape[-1], v.shape[-1])
    if size > MAX_HEAD_DIM:
        return f"the head size is {size}, the kernel takes at most {MAX_HEAD_DIM}"
    if q.size // q.shape[-1] * size >= MAX_REACH:
        return f"the output or q has {MAX_REACH} elements or more, the kernel takes fewer"
    if reason := inputs_refusal(_layout_refusal, q, k, v):
        return reason
    if reason := tiles_refusal(q, cu_q, longest, TILE):
        return reason
    if longest > MAX_FASTER_LENGTH:
        return SlowerRefusal(
            f"the longest sequence is {longest}; it is the fastest form up to {MAX_FASTER_LENGTH}"
        )
    return None


def _layout_refusal(x, name):
    if reason := rows_refusal(x, name):
        return reason
    steps = zip(x.shape[:-1], x.strides[:-1], strict=True)
    reach = sum(n * abs(step) for n, step in steps if n > 1) // x.itemsize + TILE * x.shape[-1]
    if x.size and reach >= MAX_REACH:
        return f"{name} reaches over {reach} elements, the kernel takes fewer than {MAX_REACH}"
    return None


def _plan(part, launch, q, v, lengths, heads):
    """Return (kernel, grid, items, tiles): a warp computes one item, a tile of a head's rows.

    ``lengths``: (rows, longest) of each side that is cut into tiles. ``items``: tiles of a head.
    ``tiles``: items of each sequence, as many as the longest needs; or 0 where packed sequences are
    numbered one after another, because that makes fewer items (see first_place in the kernel).
    """
    fields = launch.fields
    width = next(w for w in WIDTHS if max(q.shape[-1], v.shape[-1]) <= w)
    plain = q.shape[-1] == v.shape[-1] == width and not fields["softcap"]
    plain = plain and not fields.get("bias_kind") and not fields["slopes"]
    tiles = -(-max(longest for _, longest in lengths) // TILE)
    items = launch.sequences * tiles
    most = sum(rows for rows, _ in lengths) // TILE + launch.sequences
    if launch.packed and most < items:
        items, tiles = most, 0
    run = kernel(
        "attention/flash_attention_short.cu", f"flash_attention_short_{part}",
        scalar=ctype(q.dtype), HEAD_DIM=width, PLAIN=plain,
    )  # fmt: skip
    return run, (-(-items * heads // WARPS),), items, tiles


def _run(part, launch, q, v, lengths, heads, *args):
    run, grid, items, tiles = _plan(part, launch, q, v, lengths, heads)
    run(grid, BLOCK, launch.problem, *args, items, tiles)


def describe(q: Array, k: Array, v: Array, *extras: Any, **params: Any) -> dict[str, Any]:
    """Return what the forward uses of the GPU: see ``impls.WORDS``."""
    launch, rows = Launch(q, k, v, *extras, **params, tables=False), q.shape[-3]
    run, grid, *_ = _plan("forward", launch, q, v, [(rows, launch.queries)], launch.heads)
    return {"tile": (TILE, TILE), **run.resources(grid, BLOCK)}


def forward(q: Array, k: Array, v: Array, *extras: Any, needs: tuple, **params: Any) -> tuple:
    """Return (out, lse) and what the gradient needs."""
    out, lse = outputs(q, v)
    launch, rows = Launch(q, k, v, *extras, **params, out=out), q.shape[-3]
    _run("forward", launch, q, v, [(rows, launch.queries)], launch.heads, q, k, v, out, lse)
    return result((q, k, v, *extras), out, lse, needs)


def backward(
    saved: tuple, dout: Any, dlse: Any, *, needs: tuple, into: tuple, **params: Any
) -> tuple:
    """Return the gradients of q, k, v, bias and sink (None for the rest)."""
    q, k, v, *extras, out, lse = saved
    bias, *_, sink = extras
    lse, dout, dlse = output_gradients(q, out, lse, dout, dlse)
    xp = get_xp(q)
    dout, out = (xp.ascontiguousarray(x) if _layout_refusal(x, "") else x for x in (dout, out))
    dq, dk, dv = gradient_arrays((q, k, v), into)
    launch = Launch(q, k, v, *extras, **params, out=out, dout=dout, dq=dq, dk=dk, dv=dv)
    delta = arrays.empty(q, lse.shape, np.float32) if needs[8] else None
    dbias = dsink = None
    if needs[3]:
        full = launch.sequences, launch.heads, launch.queries, launch.keys
        dbias = arrays.zeros(q, full, np.float32)
    lengths = [(q.shape[-3], launch.queries)]
    if launch.fields["cu_q"] != launch.fields["cu_k"] or not launch.packed:
        lengths.append((k.shape[-3], launch.keys))
    _run(
        "backward", launch, q, v, lengths, launch.kv_heads,
        q, k, v, out, dout, lse, dlse, dq, dk, dv, dbias, delta,
    )  # fmt: skip
    if needs[3]:
        dbias = bias_gradient(dbias, bias)
    if needs[8]:
        dsink = sink_gradient(sink, lse, delta)
    return dq, dk, dv, dbias, None, None, None, None, dsink
