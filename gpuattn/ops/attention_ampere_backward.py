"""The gradient of attention by mma.sync: ``rawkernels/flash_attention_backward_ampere*.cu``."""

import functools

import numpy as np

from gpuattn import arrays
from gpuattn.arrays import ctype, get_xp, import_cupy, rows_refusal
from gpuattn.kernels import kernel
from gpuattn.ops import attention_short, attention_simt
from gpuattn.ops.attention_launch import Launch
from gpuattn.ops.attention_reference import sink_gradient, sum_to

FILE, DQ_FILE = "flash_attention_backward_ampere.cu", "flash_attention_backward_ampere_dq.cu"
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
PLAIN_ONLY = TILES[0]  # with extras its code is too long
UNIT = 16  # queries: the grain of stats and of the sum of dq
THREADS = 256


def choose_tile(size, extras, limit):
    """Return the tile of TILES for a head size and ``limit`` bytes of shared memory in a block."""
    return next(
        tile
        for tile in TILES
        if size <= tile[0]
        and shared_bytes(*tile, extras) <= limit
        and not (extras and tile == PLAIN_ONLY)
    )


def shared_bytes(width, own, step, stages, extras):
    """Return DKV_BYTES; DQ_BYTES is never more."""
    row, weights = -(-width // 64) * 128, step * -(-own // 64) * 128
    return 2 * own * row + stages * step * (2 * row + 8) + (3 + extras) * weights


@functools.cache
def _shared_limit(device):
    return import_cupy().cuda.Device(device).attributes["MaxSharedMemoryPerBlockOptin"]


def backward(saved, dout, dlse, *, needs, into, **params):
    """Return the gradients of q, k, v, bias and sink (None for the rest, and where not needed)."""
    q, k, v, *extras, out, lse = saved
    if q.dtype == np.float32:  # only the forward rounds to TF32
        return attention_simt.backward(saved, dout, dlse, needs=needs, into=into, **params)
    if attention_short.suits(q, k, v, *extras, **params):
        return attention_short.backward(saved, dout, dlse, needs=needs, into=into, **params)
    bias, *_, sink = extras
    out = _by_16_bytes(out)
    dout = arrays.zeros(q, out.shape) if dout is None else dout.astype(q.dtype, copy=False)
    dout = _by_16_bytes(dout)
    dlse = None if dlse is None else get_xp(q).ascontiguousarray(dlse, np.float32)
    dq, dk, dv = (arrays.empty(x, x.shape) for x in (q, k, v))
    launch = Launch(q, k, v, *extras, **params, out=out, dout=dout, dq=dq, dk=dk, dv=dv)
    problem, heads, sequences = launch.problem, launch.heads, launch.sequences

    extras = launch.extras or params["dropout_p"] > 0
    device = import_cupy().cuda.runtime.getDevice()
    tile = choose_tile(max(q.shape[-1], v.shape[-1]), extras, _shared_limit(device))
    width, own, *_ = tile
    constants = dict(zip(CONSTANTS, tile, strict=True), scalar=ctype(q.dtype), EXTRAS=extras)
    bytes = shared_bytes(*tile, extras)

    def run(name, grid, *args, file=FILE, threads=THREADS, bytes=0):
        launch_kernel = kernel(file, f"flash_attention_{name}", **constants)
        launch_kernel((grid,), (threads,), problem, *args, shared_bytes=bytes)

    units = -(-launch.queries // UNIT) * sequences
    rows = UNIT * (q.shape[0] // UNIT + sequences if launch.packed else units)
    stats = arrays.empty(q, (heads, rows, 2), np.float32)
    delta = arrays.empty(q, lse.shape, np.float32) if needs[8] else None
    by_keys = needs[1] or needs[2] or needs[3]
    by_queries = needs[0] and (launch.deterministic or not by_keys)
    adds = needs[0] and not by_queries
    dq_sum = arrays.empty(q, (rows, heads, width), np.float32) if adds else None
    run("rows", units, out, dout, lse, dlse, stats, delta, rows, dq_sum)

    shared = q, k, v, dout, stats, rows
    dbias = None
    if by_keys:
        if needs[3]:
            full = sequences, heads, launch.queries, launch.keys
            shape = full if launch.deterministic else bias.shape
            dbias = arrays.zeros(q, shape, np.float32)
        blocks = -(-launch.keys // own) * launch.kv_heads * sequences
        args = *shared, dq_sum, dbias, _broadcast_strides(dbias), dk, dv
        run("dkv", blocks, *args, bytes=bytes)
    if by_queries:
        blocks = -(-launch.queries // own) * heads * sequences
        threads = THREADS if own >= 64 else THREADS // 2
        run("dq", blocks, *shared, dq, file=DQ_FILE, threads=threads, bytes=bytes)
    elif needs[0]:
        run("dq_store", units, dq_sum, dq)
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
