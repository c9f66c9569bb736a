"""Attention for short sequences, a warp for 16 rows: ``attention/flash_attention_short.cu``."""

import numpy as np

from gpuattn import arrays
from gpuattn.arrays import ctype, get_xp, rows_refusal
from gpuattn.cuda.kernels import kernel, kernel_refusal
from gpuattn.ops.attention.launch import Launch, gradient_arrays
from gpuattn.ops.attention.reference import sink_gradient, sum_to

MAX_LENGTH = 256
SUITED_LENGTH = 64  # beyond, tiles of 64 queries and more are faster
MAX_HEAD_DIM = 128
MAX_REACH = 2**31  # elements, for 32-bit offsets
WIDTHS = (32, 64, 128)  # what HEAD_DIM is rounded up to
TILE, WARPS = 16, 4  # rows of a warp, warps of a block
BLOCK = (32 * WARPS,)


def refuse(q, k, v, bias, key_lengths, cu_q, *_, max_seqlen_q, max_seqlen_k, **__):
    if reason := kernel_refusal(q, "q"):
        return reason
    if q.dtype.itemsize != 2:
        return f"q is {q.dtype}, the kernel takes float16 or bfloat16"
    longest = max(max_seqlen_q, max_seqlen_k)
    if longest > MAX_LENGTH:
        hint = "" if cu_q is None else "; give the true max_seqlen_q"
        return f"the longest sequence is {longest}, the kernel takes at most {MAX_LENGTH}{hint}"
    size = max(q.shape[-1], v.shape[-1])
    if size > MAX_HEAD_DIM:
        return f"the head size is {size}, the kernel takes at most {MAX_HEAD_DIM}"
    if q.size // q.shape[-1] * size >= MAX_REACH:
        return f"the output and q are larger than {MAX_REACH} elements, the kernel takes fewer"
    for name, x in {"q": q, "k": k, "v": v}.items():
        if reason := _layout_refusal(x, name):
            return reason
    return None


def suits(q, k, v, *extras, max_seqlen_q, max_seqlen_k, **params):
    """Return whether a call is better done here than by tiles for long sequences."""
    limits = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    short = max(limits.values()) <= SUITED_LENGTH
    return short and refuse(q, k, v, *extras, **limits, **params) is None


def _layout_refusal(x, name):
    if reason := rows_refusal(x, name):
        return reason
    steps = zip(x.shape[:-1], x.strides[:-1], strict=True)
    reach = sum(n * abs(step) for n, step in steps if n > 1) // x.itemsize + TILE * x.shape[-1]
    if x.size and reach >= MAX_REACH:
        return f"{name} reaches over {reach} elements, the kernel takes fewer than {MAX_REACH}"
    return None


def _plan(part, launch, q, v, lengths, heads):
    """Return (kernel, grid, places, tiles): a warp for each place of a tile, in each head.

    ``lengths``: (rows, longest) of what is tiled. Packed sequences are either given places for
    their longest each, or, where that is fewer, as many as could be needed (see first_place).
    """
    fields = launch.fields
    width = next(w for w in WIDTHS if max(q.shape[-1], v.shape[-1]) <= w)
    plain = q.shape[-1] == v.shape[-1] == width and not fields["softcap"]
    plain = plain and not fields.get("bias_kind") and not fields["slopes"]
    tiles = -(-max(longest for _, longest in lengths) // TILE)
    items = launch.sequences * tiles
    places = sum(rows for rows, _ in lengths) // TILE + launch.sequences
    if launch.packed and places < items:
        items, tiles = places, 0
    run = kernel(
        "attention/flash_attention_short.cu", f"flash_attention_short_{part}",
        scalar=ctype(q.dtype), HEAD_DIM=width, PLAIN=plain,
    )  # fmt: skip
    return run, (-(-items * heads // WARPS),), items, tiles


def _run(part, launch, q, v, lengths, heads, *args):
    run, grid, items, tiles = _plan(part, launch, q, v, lengths, heads)
    run(grid, BLOCK, launch.problem, *args, items, tiles)


def describe(q, k, v, *extras, **params):
    """Return what the forward takes of the GPU: see ``impls.WORDS``."""
    launch, rows = Launch(q, k, v, *extras, **params), q.shape[-3]
    run, grid, *_ = _plan("forward", launch, q, v, [(rows, launch.queries)], launch.heads)
    return {"tile": (TILE, TILE), **run.resources(grid, BLOCK)}


def forward(q, k, v, *extras, needs, **params):
    *lead, rows, heads, _ = q.shape
    out = arrays.empty(q, (*q.shape[:-1], v.shape[-1]))
    lse = arrays.empty(q, (*lead, heads, rows), np.float32)
    launch = Launch(q, k, v, *extras, **params, out=out)
    _run("forward", launch, q, v, [(rows, launch.queries)], heads, q, k, v, out, lse)
    return (out, lse), ((q, k, v, *extras, out, lse) if any(needs) else None)


def backward(saved, dout, dlse, *, needs, into, **params):
    q, k, v, *extras, out, lse = saved
    bias, _, cu_q, cu_k, _, sink = extras
    xp = get_xp(q)
    dout = arrays.zeros(q, out.shape) if dout is None else dout.astype(q.dtype, copy=False)
    dout, out = (xp.ascontiguousarray(x) if _layout_refusal(x, "") else x for x in (dout, out))
    dlse = None if dlse is None else xp.ascontiguousarray(dlse, np.float32)
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
        dbias = sum_to(dbias, bias.shape).astype(bias.dtype, copy=False)
    if needs[8]:
        dsink = sink_gradient(sink, lse, delta)
    return dq, dk, dv, dbias, None, None, None, None, dsink
