"""The gradient of attention by mma.sync: ``attention/flash_attention_backward_ampere*.cu``."""

import numpy as np

from gpuattn import arrays
from gpuattn.arrays import ctype, get_xp, rows_refusal
from gpuattn.cuda.gpu import gpu
from gpuattn.cuda.kernels import kernel
from gpuattn.ops.attention import short, simt
from gpuattn.ops.attention.launch import Launch, gradient_arrays
from gpuattn.ops.attention.reference import sink_gradient, sum_to

FILE = "attention/flash_attention_backward_ampere.cu"
ROWS = "attention/flash_attention_backward_ampere_rows.cu"
EXTRAS = "attention/flash_attention_backward_ampere_extras.cu"
CONSTANTS = "HEAD_DIM", "OWN", "STEP", "STAGES"
TILES = (
    (64, 128, 128, 2),
    (64, 128, 64, 2),
    (64, 64, 64, 2),
    (96, 128, 64, 2),
    (128, 128, 64, 2),
    (128, 64, 64, 2),
    (128, 64, 64, 1),
    (192, 64, 64, 2),
    (256, 64, 64, 2),
    (256, 64, 64, 1),
    (256, 32, 32, 1),
)
"""What CONSTANTS may be: the first that is wide enough and fits in shared memory is taken."""
EXTRAS_CONSTANTS = "HEAD_DIM", "OWN", "STEP", "WARPS", "STAGES", "DS_TILES"
EXTRAS_TILES = (
    (64, 128, 128, 8, 2, 2),
    (64, 128, 64, 8, 2, 1),
    (96, 128, 64, 8, 2, 2),
    (128, 128, 64, 8, 2, 2),
    (128, 64, 64, 8, 2, 2),
    (128, 64, 64, 8, 1, 1),
    (192, 64, 64, 8, 2, 2),
    (256, 64, 64, 8, 2, 2),
    (256, 64, 64, 8, 1, 1),
    (256, 32, 32, 4, 1, 1),
)
"""The same of the file EXTRAS."""
PLAIN_ONLY = EXTRAS_TILES[0]  # its registers are full
UNIT = 16  # queries: the grain of stats and of the sum of dq
THREADS = 256


def choose_tile(size, limit):
    """Return the tile of TILES for a head size and ``limit`` bytes of shared memory in a block."""
    return next(t for t in TILES if size <= t[0] and shared_bytes(*t) <= limit)


def choose_extras_tile(size, extras, limit):
    """Return the same of EXTRAS_TILES."""
    return next(
        tile
        for tile in EXTRAS_TILES
        if size <= tile[0]
        and extras_shared_bytes(*tile) <= limit
        and not (extras and tile == PLAIN_ONLY)
    )


def shared_bytes(width, own, step, stages):
    """Return DKV_BYTES."""
    row, weights = -(-width // 64) * 128, step * -(-own // 64) * 128
    return 2 * own * row + stages * step * (2 * row + 8) + 3 * weights


def extras_shared_bytes(width, own, step, warps, stages, ds_tiles):
    """Return DKV_BYTES of the file EXTRAS; its DQ_BYTES is never more."""
    row, weights = -(-width // 64) * 128, step * -(-own // 64) * 128
    return 2 * own * row + stages * step * (2 * row + 8) + (1 + ds_tiles) * weights


def backward(saved, dout, dlse, *, needs, into, **params):
    """Return the gradients of q, k, v, bias and sink (None for the rest, and where not needed)."""
    q, k, v, *extras, out, lse = saved
    if q.dtype == np.float32:  # only the forward rounds to TF32
        return simt.backward(saved, dout, dlse, needs=needs, into=into, **params)
    if short.suits(q, k, v, *extras, **params):
        return short.backward(saved, dout, dlse, needs=needs, into=into, **params)
    bias, *_, sink = extras
    out = _by_16_bytes(out)
    dout = arrays.zeros(q, out.shape) if dout is None else dout.astype(q.dtype, copy=False)
    dout = _by_16_bytes(dout)
    dlse = None if dlse is None else get_xp(q).ascontiguousarray(dlse, np.float32)
    dq, dk, dv = gradient_arrays((q, k, v), into)
    launch = Launch(q, k, v, *extras, **params, out=out, dout=dout, dq=dq, dk=dk, dv=dv)
    problem, heads, sequences = launch.problem, launch.heads, launch.sequences

    extras = launch.extras or params["dropout_p"] > 0
    limit = gpu(q.device.id).shared_bytes
    size, scalar = max(q.shape[-1], v.shape[-1]), ctype(q.dtype)
    tile, extras_tile = choose_tile(size, limit), choose_extras_tile(size, extras, limit)
    width = extras_tile[0] if extras else tile[0]

    def run_rows(name, *args):
        launch_kernel = kernel(ROWS, f"flash_attention_{name}", HEAD_DIM=width, scalar=scalar)
        launch_kernel((units,), (THREADS,), problem, *args)

    def run_extras(name, rows, heads, *args):
        constants = dict(zip(EXTRAS_CONSTANTS, extras_tile, strict=True), EXTRAS=extras)
        launch_kernel = kernel(EXTRAS, f"flash_attention_{name}", scalar=scalar, **constants)
        grid = -(-rows // constants["OWN"]) * heads * sequences
        block, bytes = 32 * constants["WARPS"], extras_shared_bytes(*extras_tile)
        launch_kernel((grid,), (block,), problem, *args, shared_bytes=bytes)

    units = -(-launch.queries // UNIT) * sequences
    rows = UNIT * (q.shape[0] // UNIT + sequences if launch.packed else units)
    stats = arrays.empty(q, (heads, rows, 2), np.float32)
    delta = arrays.empty(q, lse.shape, np.float32) if needs[8] else None
    run_rows("rows", out, dout, lse, dlse, stats, delta, rows)

    shared = q, k, v, dout, stats, rows
    by_keys = needs[1] or needs[2] or needs[3]
    by_queries = needs[0] and (launch.deterministic or not by_keys)
    dq_sum = dbias = None
    if by_keys:
        if needs[0] and not by_queries:
            dq_sum = arrays.zeros(q, (rows, heads, width), np.float32)
        if needs[3]:
            full = sequences, heads, launch.queries, launch.keys
            shape = full if launch.deterministic else bias.shape
            dbias = arrays.zeros(q, shape, np.float32)
        if extras:
            args = *shared, dq_sum, dbias, _broadcast_strides(dbias), dk, dv
            run_extras("dkv", launch.keys, launch.kv_heads, *args)
        else:
            constants = dict(zip(CONSTANTS, tile, strict=True))
            launch_kernel = kernel(FILE, "flash_attention_dkv", scalar=scalar, **constants)
            grid = -(-launch.keys // constants["OWN"]) * launch.kv_heads * sequences
            args, bytes = (*shared, dq_sum, dk, dv), shared_bytes(*tile)
            launch_kernel((grid,), (THREADS,), problem, *args, shared_bytes=bytes)
    if by_queries:
        run_extras("dq", launch.queries, heads, *shared, dq)
    elif needs[0]:
        run_rows("dq_store", dq_sum, dq)
    if needs[3]:
        dbias = sum_to(dbias, bias.shape).astype(bias.dtype, copy=False)
    dsink = sink_gradient(sink, lse, delta) if needs[8] else None
    dq, dk, dv = (x if need else None for x, need in zip((dq, dk, dv), needs[:3], strict=True))
    return dq, dk, dv, dbias, None, None, None, None, dsink


def _by_16_bytes(x):
    """Return ``x``, or a copy, such that its rows can be read 16 bytes at a time."""
    return x.copy(order="C") if rows_refusal(x, "x") else x


def _broadcast_strides(x):
    """Return the struct Strides of a contiguous (B, H, T, S) array, 0 where it broadcasts."""
    steps = [0] * 4
    if x is not None:
        steps = [step // x.itemsize if n > 1 else 0 for n, step in zip(x.shape, x.strides)]  # noqa: B905
    batch, head, row, column = steps
    return np.array([batch, row, head, column], np.int64).view("V32")
