"""raw-simt, in float32 on CUDA cores: ``attention/flash_attention_{forward,backward}_simt*.cu``.

The gradient: a kernel over rows (delta), then two launches, dk and dv, and dq, which both compute
the logits; or one for all three, see ``whole``.
"""

from typing import Any, NamedTuple

import numpy as np

from gpuattn import arrays
from gpuattn.arrays import ctype
from gpuattn.cuda.gpu import AMPERE, gpu
from gpuattn.cuda.kernels import kernel, kernel_refusal
from gpuattn.ops.attention.gradient import (
    bias_gradient,
    gradient_arrays,
    output_gradients,
    sink_gradient,
)
from gpuattn.ops.attention.launch import Launch, outputs, result, tiles_refusal
from gpuattn.typing import Array

MAX_HEAD_DIM = 256
WIDTHS = (32, 64, 128, 256)  # what HEAD_DIM is rounded up to
ROOMY = range(90, 110)  # compute capabilities with 228 KiB of shared memory a multiprocessor
FILES = {
    "forward": "attention/flash_attention_forward_simt.cu",
    **dict.fromkeys(("delta", "dkv", "dq"), "attention/flash_attention_backward_simt.cu"),
    **dict.fromkeys(("whole", "whole_rows"), "attention/flash_attention_backward_simt_whole.cu"),
}
WHOLE_WIDTHS = (64, 128)  # of WIDTHS, those of the gradient in one launch
MAX_TURNS = 1 << 24  # counters of query tiles: a max_seqlen_q far from the lengths asks for many


def refuse(
    q: Array, k: Array, v: Array, bias: Any, key_lengths: Any, cu_q: Any, *_: Any,
    max_seqlen_q: int, max_seqlen_k: int, **__: Any,
) -> str | None:  # fmt: skip
    """Return why neither direction runs here, or None."""
    if reason := kernel_refusal(q, "q"):
        return reason
    size = max(q.shape[-1], v.shape[-1])
    if size > MAX_HEAD_DIM:
        return f"the head size is {size}, the kernel takes 1 to {MAX_HEAD_DIM}"
    return tiles_refusal(q, cu_q, max(max_seqlen_q, max_seqlen_k), 16)


class Tile(NamedTuple):
    """The rows that a block computes, those of the other side that it loads at once, its size."""

    own: int
    step: int
    threads: int
    shared_bytes: int


def choose_tile(part: str, width: int, extras: bool, capability: int = AMPERE) -> Tile:
    """Return the tile of a kernel.

    ``part``: "forward", "dkv", "dq" or "whole"; ``width``: HEAD_DIM; ``extras``: EXTRAS.
    """
    forward, roomy, split, held = part == "forward", capability in ROOMY, 1, 0
    if roomy:
        if forward:
            own, step = (64, 16) if width > 128 else (128, 32 if width > 64 else 64)
            held = 4 if width == 128 else 8
        else:
            split, held = 2 if width == 128 else 1, 8
            own = 32 if width > 128 else 64 if width <= 64 and extras else 128
            step = 16 if width > 128 else 32 * split
    elif capability < AMPERE:  # in 64 KiB
        if forward:
            own, step = (128, 32) if width <= 64 else (64, 32) if width <= 128 else (32, 16)
        elif width > 64:
            own, step = (32, 16) if width <= 128 else (16, 8)
        else:
            own, step = 64 if width > 32 or extras else 128, 32
    elif forward:
        few = width > 128 and capability >= 120  # registers are short there
        own, step = 64 if width > 64 else 128, 64 if width == 128 else 16 if few else 32
    else:
        own, step = (32, 16) if width > 128 else (64 if width > 64 or extras else 128, 32)
    weights = 4 * held * (own * step // (32 * split) + 4)
    rows = own + step * (1 + roomy) if forward else 2 * (own + step)
    exchanged = 2048 if part == "whole" and width == 64 else 0
    return Tile(own, step, 128 * split, 4 * (rows * (width + 4) + weights + exchanged))


class _Tiles:
    """The kernels of one call: their constants, grids and shared memory."""

    def __init__(self, launch, q, v):
        self.launch, self.scalar = launch, ctype(q.dtype)
        self.capability = gpu(q.device.id).capability
        self.width = next(w for w in WIDTHS if max(q.shape[-1], v.shape[-1]) <= w)
        self.extras = launch.extras or launch.dropout

    def kernel(self, part):
        """Return the kernel ``flash_attention_<part>``."""
        constants = {"scalar": self.scalar, "HEAD_DIM": self.width, "EXTRAS": self.extras}
        return kernel(FILES[part], f"flash_attention_{part}", **constants)

    def shape(self, part, longest, heads):
        """Return (grid, block, shared bytes) to cut ``longest`` rows of each head into blocks."""
        tile = choose_tile(part, self.width, self.extras, self.capability)
        grid = (-(-longest // tile.own) * heads * self.launch.sequences,)
        return grid, (tile.threads,), tile.shared_bytes

    def query_tiles(self, part):
        """Return how many tiles of queries all heads have in a kernel that owns keys."""
        step = choose_tile(part, self.width, self.extras, self.capability).step
        return -(-self.launch.queries // step) * self.launch.heads * self.launch.sequences

    def __call__(self, part, longest, heads, *args):
        grid, block, size = self.shape(part, longest, heads)
        self.kernel(part)(grid, block, self.launch.problem, *args, shared_bytes=size)


def forward(q: Array, k: Array, v: Array, *extras: Any, needs: tuple, **params: Any) -> tuple:
    """Return (out, lse) and what the gradient needs."""
    out, lse = outputs(q, v)
    launch = Launch(q, k, v, *extras, **params, out=out)
    _Tiles(launch, q, v)("forward", launch.queries, launch.heads, q, k, v, out, lse)
    return result((q, k, v, *extras), out, lse, needs)


def describe(q: Array, k: Array, v: Array, *extras: Any, **params: Any) -> dict[str, Any]:
    """Return what the forward uses of the GPU: see ``impls.WORDS``."""
    launch = Launch(q, k, v, *extras, **params, tables=False)
    tiles = _Tiles(launch, q, v)
    used = tiles.kernel("forward").resources(*tiles.shape("forward", launch.queries, launch.heads))
    tile = choose_tile("forward", tiles.width, tiles.extras, tiles.capability)
    return {"tile": (tile.own, tile.step), **used}


def whole(tiles: "_Tiles", needs: tuple) -> bool:
    """Return whether one launch computes dq, dk and dv.

    Float32 alone, as it adds to dq. The gradient of a bias is stored by the launch of dq.
    """
    served = tiles.capability in ROOMY and tiles.scalar == "float" and tiles.width in WHOLE_WIDTHS
    served = served and tiles.query_tiles("whole") <= MAX_TURNS
    return served and needs[0] and (needs[1] or needs[2]) and not needs[3]


def backward(
    saved: tuple, dout: Any, dlse: Any, *, needs: tuple, into: tuple, **params: Any
) -> tuple:
    """Return the gradients of q, k, v, bias and sink (None for the rest)."""
    q, k, v, *extras, out, lse = saved
    bias, *_, sink = extras
    lse, dout, dlse = output_gradients(q, out, lse, dout, dlse)
    dq, dk, dv = gradient_arrays((q, k, v), into)
    launch = Launch(q, k, v, *extras, **params, out=out, dout=dout, dq=dq, dk=dk, dv=dv)
    tiles = _Tiles(launch, q, v)
    delta, rows = arrays.empty(out, lse.shape, np.float32), lse.size // max(launch.heads, 1)
    grid, block = (-(-lse.size // 4),), (128,)
    by_rows = launch.problem, out, dout, dlse, delta
    shared = q, k, v, dout, lse, delta
    dbias = dsink = None
    if whole(tiles, needs):
        turns = arrays.empty(q, (1 + tiles.query_tiles("whole"),), np.int32)
        grid = (max(1, *grid),)  # it clears ``turns``
        tiles.kernel("whole_rows")(grid, block, *by_rows, dq, turns, rows, turns.size)
        tiles("whole", launch.keys, launch.kv_heads, *shared, dq, dk, dv, turns)
    else:
        tiles.kernel("delta")(grid, block, *by_rows, rows)
        if needs[3]:
            full = launch.sequences, launch.heads, launch.queries, launch.keys
            dbias = arrays.zeros(q, full, np.float32)
        if needs[1] or needs[2]:
            tiles("dkv", launch.keys, launch.kv_heads, *shared, dk, dv)
        if needs[0] or needs[3]:
            tiles("dq", launch.queries, launch.heads, *shared, dq, dbias)
    if needs[3]:
        dbias = bias_gradient(dbias, bias)
    if needs[8]:
        dsink = sink_gradient(sink, lse, delta)
    return dq, dk, dv, dbias, None, None, None, None, dsink
