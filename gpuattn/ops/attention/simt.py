"""Attention on any GPU, in float32 on CUDA cores: ``attention/flash_attention_*_simt.cu``."""

import numpy as np

from gpuattn import arrays
from gpuattn.arrays import ctype, get_xp
from gpuattn.cuda.kernels import kernel, kernel_refusal
from gpuattn.ops.attention.launch import Launch, gradient_arrays, tiles_refusal
from gpuattn.ops.attention.reference import sink_gradient, sum_to

MAX_HEAD_DIM = 256
WIDTHS = (32, 64, 128, 256)  # what HEAD_DIM is rounded up to
THREADS = 128


def refuse(q, k, v, bias, key_lengths, cu_q, *_, max_seqlen_q, max_seqlen_k, **__):
    if reason := kernel_refusal(q, "q"):
        return reason
    size = max(q.shape[-1], v.shape[-1])
    if size > MAX_HEAD_DIM:
        return f"the head size is {size}, the kernel takes 1 to {MAX_HEAD_DIM}"
    return tiles_refusal(q, cu_q, max_seqlen_q, max_seqlen_k)


def choose_tile(part, width, extras):
    """Return the rows that a block owns and the rows of the other side that it takes at a time.

    ``part``: "forward", "dkv" or "dq"; ``width``: HEAD_DIM; ``extras``: EXTRAS of the kernels.
    """
    if part == "forward":
        return 64 if width > 64 else 128, 64 if width == 128 else 32
    if width > 128:
        return 32, 16
    return 64 if width > 64 or extras else 128, 32


def shared_bytes(part, width, extras):
    """Return the bytes of a block's tiles: of one array of both sides, or of two (gradients)."""
    return (4 if part == "forward" else 8) * sum(choose_tile(part, width, extras)) * (width + 4)


class _Tiles:
    """The kernels of one call: which constants, and how many rows a block takes."""

    def __init__(self, launch, q, v):
        self.launch, self.scalar = launch, ctype(q.dtype)
        self.width = next(w for w in WIDTHS if max(q.shape[-1], v.shape[-1]) <= w)
        self.extras = launch.extras or launch.dropout

    def kernel(self, part):
        """Return the kernel ``flash_attention_<part>``."""
        direction = "forward" if part == "forward" else "backward"
        file = f"attention/flash_attention_{direction}_simt.cu"
        constants = {"scalar": self.scalar, "HEAD_DIM": self.width, "EXTRAS": self.extras}
        return kernel(file, f"flash_attention_{part}", **constants)

    def shape(self, part, longest, heads):
        """Return (grid, block, shared bytes) where blocks own rows of a head's ``longest``."""
        rows, _ = choose_tile(part, self.width, self.extras)
        grid = (-(-longest // rows) * heads * self.launch.sequences,)
        return grid, (THREADS,), shared_bytes(part, self.width, self.extras)

    def __call__(self, part, longest, heads, *args):
        grid, block, size = self.shape(part, longest, heads)
        self.kernel(part)(grid, block, self.launch.problem, *args, shared_bytes=size)


def forward(q, k, v, *extras, needs, **params):
    *lead, rows, heads, _ = q.shape
    out = arrays.empty(q, (*q.shape[:-1], v.shape[-1]))
    lse = arrays.empty(q, (*lead, heads, rows), np.float32)
    launch = Launch(q, k, v, *extras, **params, out=out)
    _Tiles(launch, q, v)("forward", launch.queries, heads, q, k, v, out, lse)
    return (out, lse), ((q, k, v, *extras, out, lse) if any(needs) else None)


def describe(q, k, v, *extras, **params):
    """Return what the forward takes of the GPU: see ``impls.WORDS``."""
    launch = Launch(q, k, v, *extras, **params)
    tiles = _Tiles(launch, q, v)
    taken = tiles.kernel("forward").resources(*tiles.shape("forward", launch.queries, launch.heads))
    return {"tile": choose_tile("forward", tiles.width, tiles.extras), **taken}


def delta_of(launch, tiles, out, dout, dlse, lse):
    """Return rowsum(dout * out) - dlse, float32, in the shape of ``lse``."""
    delta, rows = arrays.empty(out, lse.shape, np.float32), lse.size // max(launch.heads, 1)
    dlse = None if dlse is None else get_xp(out).ascontiguousarray(dlse, np.float32)
    grid = (-(-lse.size // 4),)
    tiles.kernel("delta")(grid, (128,), launch.problem, out, dout, dlse, delta, rows)
    return delta


def backward(saved, dout, dlse, *, needs, into, **params):
    q, k, v, *extras, out, lse = saved
    bias, *_, sink = extras
    dout = arrays.zeros(q, out.shape) if dout is None else dout.astype(q.dtype, copy=False)
    dq, dk, dv = gradient_arrays((q, k, v), into)
    launch = Launch(q, k, v, *extras, **params, out=out, dout=dout, dq=dq, dk=dk, dv=dv)
    tiles = _Tiles(launch, q, v)
    delta = delta_of(launch, tiles, out, dout, dlse, lse)
    dbias = dsink = None
    if needs[3]:
        full = launch.sequences, launch.heads, launch.queries, launch.keys
        dbias = arrays.zeros(q, full, np.float32)
    shared = q, k, v, dout, lse, delta
    if needs[1] or needs[2]:
        tiles("dkv", launch.keys, launch.kv_heads, *shared, dk, dv)
    if needs[0] or needs[3]:
        tiles("dq", launch.queries, launch.heads, *shared, dq, dbias)
    if needs[3]:
        dbias = sum_to(dbias, bias.shape).astype(bias.dtype, copy=False)
    if needs[8]:
        dsink = sink_gradient(sink, lse, delta)
    return dq, dk, dv, dbias, None, None, None, None, dsink
