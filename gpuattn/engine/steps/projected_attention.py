"""Queries of a decoding step's rows and their attention over memories, in one launch.

The memory of a translation's sentence does not change while it is translated, so keys, values and
the weights of the query projection are loaded beside the launch before. Device code:
``rawkernels/attention/cache/projected_attention.cu``.
"""

from typing import Any, NamedTuple

import numpy as np

from gpuattn import arrays
from gpuattn.arrays import ctype
from gpuattn.cuda.gpu import gpu
from gpuattn.cuda.kernels import kernel

FILE = "attention/cache/projected_attention.cu"
HEAD_DIMS, WARPS, COLUMNS = (32, 64), (1, 2, 4, 6, 8, 12), 8  # COLUMNS: beams at most
SHARED_BYTES, ALL_SHARED = 232448, 233472  # of a block at most, of a multiprocessor
ENOUGH = 7  # warps keep a multiprocessor busy


class Blocks(NamedTuple):
    """What a block has: at most ``rows`` rows, 8 or 16, of ``sentences`` sentences."""

    rows: int
    sentences: int


def blocks_of(x: Any, sentences: int, cross: Any, keys: Any) -> Blocks | None:
    """Return the Blocks of ``projected_attention``, or None where the kernel does not fit.

    ``x``: the states (rows, width); ``cross``: a layer's attention over the memory ``keys``.
    """
    (rows, width), (room, heads, head_dim) = x.shape, keys.shape[1:]
    beam, warps, cores = rows // sentences, width // 64, gpu(x.device.id).multiprocessors
    if heads != cross.heads or head_dim not in HEAD_DIMS or warps not in WARPS or beam > COLUMNS:
        return None

    def at_once(blocks):
        shared = shared_bytes(blocks, warps, head_dim, room)
        most = min(2 if warps == 8 else 12 // warps, ALL_SHARED // (shared + 1024))
        return shared <= SHARED_BYTES and heads * -(-sentences // blocks.sentences) <= most * cores

    few, many = (Blocks(most, most // beam) for most in (8, 16))
    # blocks of 16 rows load weights half as often: where all run at once and are enough
    if at_once(many) and heads * -(-sentences // many.sentences) * warps >= ENOUGH * cores:
        return many
    if at_once(few):
        return few
    # blocks that come later load weights late, which eight sentences are worth
    fits = shared_bytes(few, warps, head_dim, room) <= SHARED_BYTES
    return few if fits and few.sentences == few.rows else None


def shared_bytes(blocks: Blocks, warps: int, head_dim: int, room: int) -> int:
    """Return the bytes of shared memory of a block, as the kernel divides them."""
    rows, sentences = blocks
    own = 4 * warps * rows * (head_dim + 4) + rows * (2 * head_dim + 16) + 8 * (head_dim + rows)
    return -(-own // 128) * 128 + sentences * 2 * -(-room // 16) * 16 * 128


def projected_attention(
    x: Any, weight: Any, bias: Any, folded: Any, statistics: Any, keys: Any, values: Any,
    lengths: Any, *, eps: float, blocks: Blocks,
) -> Any:  # fmt: skip
    """Return the attention (N, K, H, D) of ``norm(x) weight^T + bias`` over memories.

    ``x``: (N * K, inputs), K beams of each of N sentences; ``weight``: (H * D, inputs); ``folded``,
    ``statistics``: of a norm of x, as ``row_linear`` takes them; ``keys``, ``values``: (N, S, H,
    D), contiguous; ``lengths``: int32 (N,), 1 to S. The launch before this one must be
    ``row_linear``: weights, keys, values and lengths are read beside it.
    """
    (rows, inputs), (sentences, room, heads, head_dim) = x.shape, keys.shape
    out, warps = arrays.empty(x, (sentences, rows // sentences, heads, head_dim)), inputs // 64
    constants = {"HEAD_DIM": head_dim, "WARPS": warps, "ROWS": blocks.rows}
    kernel(FILE, "projected_attention", scalar=ctype(x.dtype), **constants)(
        (heads, -(-sentences // blocks.sentences)), (32 * warps,), x, weight, bias, folded,
        statistics, keys, values, lengths, out, sentences, rows // sentences, blocks.sentences,
        room, 1 if statistics is None else statistics.shape[1], eps, np.float32(head_dim**-0.5),
        shared_bytes=shared_bytes(blocks, warps, head_dim, room),
    )  # fmt: skip
    return out
