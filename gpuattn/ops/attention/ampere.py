"""raw-ampere, by mma.sync: ``attention/flash_attention_{forward,backward}_ampere*.cu``.

On 7.5 it takes float16 alone, and copies by registers where later GPUs have cp.async.
"""

from typing import Any

import numpy as np

from gpuattn import arrays
from gpuattn.arrays import ctype, rows_refusal
from gpuattn.cuda.gpu import AMPERE, HOPPER, dotted, gpu, tensor_core_refusal
from gpuattn.cuda.kernels import kernel, kernel_refusal
from gpuattn.errors import HardwareRefusal
from gpuattn.ops.attention.gradient import (
    bias_gradient,
    gradient_arrays,
    output_gradients,
    sink_gradient,
)
from gpuattn.ops.attention.launch import Launch, outputs, result, tiles_refusal
from gpuattn.typing import Array

MAX_HEAD_DIM, MAX_TF32_HEAD_DIM = 256, 128
MAX_TURING_GRADIENT_HEAD_DIM = 192
WIDTHS = (32, 64, 96, 128, 256)  # what HEAD_DIM of the forward is rounded up to
FORWARD_THREADS = 128
BACKWARD_FILE = "attention/flash_attention_backward_ampere.cu"
ROWS_FILE = "attention/flash_attention_backward_ampere_rows.cu"
EXTRAS_FILE = (
    "attention/flash_attention_backward_ampere_extras.cu"  # also dropout, and dq in a fixed order
)
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
"""Values of CONSTANTS, best first: the first that is wide enough and fits in shared memory runs."""
TURING_TILES = (64, 64, 64, 1), (128, 64, 32, 1), (192, 32, 32, 1)
"""The same before 8.0: a block has 64 KiB, and registers hold the tiles of a second step."""
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
TURING_EXTRAS_TILES = (64, 64, 64, 8, 1, 1), (128, 64, 32, 4, 1, 1), (192, 32, 32, 4, 1, 1)
"""The same for EXTRAS_FILE."""
PLAIN_ONLY = EXTRAS_TILES[0]  # uses all registers: extras do not fit
UNIT = 16  # sequences begin at multiples of so many rows in stats and in the sums of dq
BACKWARD_THREADS = 256


# ---- which calls --------------------------------------------------------------------------------


def refuse(
    q: Array, k: Array, v: Array, bias: Any, key_lengths: Any, cu_q: Any, *_: Any,
    max_seqlen_q: int, max_seqlen_k: int, tf32: bool = False, **__: Any,
) -> str | None:  # fmt: skip
    """Return why the forward does not run here, or None."""
    for x, name in ((q, "q"), (k, "k"), (v, "v")):
        if reason := kernel_refusal(x, name):
            return reason
        if x.dtype == np.float32 and not tf32:
            return f"{name} is float32: tf32=True lets tensor cores round it to TF32"
        if reason := tensor_core_refusal(q.device.id, x.dtype, name):
            return reason
        if reason := rows_refusal(x, name):
            return reason
    size = max(q.shape[-1], v.shape[-1])
    limit = MAX_TF32_HEAD_DIM if q.dtype == np.float32 else MAX_HEAD_DIM
    if size > limit:
        return f"the head size is {size}, of {q.dtype} the kernel takes at most {limit}"
    return tiles_refusal(q, cu_q, max(max_seqlen_q, max_seqlen_k), 16)


def refuse_backward(q: Array, *others: Any, **params: Any) -> str | None:
    """Return why the gradient does not run here, or None."""
    if reason := kernel_refusal(q, "q"):
        return reason
    if q.dtype == np.float32:
        return "q is float32; the kernel takes float16 or bfloat16, as only the forward uses TF32"
    if reason := refuse(q, *others, **params):
        return reason
    size, found = max(q.shape[-1], others[1].shape[-1]), gpu(q.device.id)
    if found.capability < AMPERE and size > MAX_TURING_GRADIENT_HEAD_DIM:
        return HardwareRefusal(
            f"the head size is {size}; its tiles do not fit in the 64 KiB of shared memory that a "
            f"block has on compute capability {dotted(found.capability)}, those of "
            f"{MAX_TURING_GRADIENT_HEAD_DIM} do"
        )
    return None


# ---- forward ------------------------------------------------------------------------------------


def forward_tile(
    width: int, itemsize: int, extras: bool, dropout: bool, capability: int
) -> tuple[int, int]:
    """Return the queries and keys of a tile of the forward kernel for HEAD_DIM = ``width``.

    ``extras``, ``dropout``: its constants EXTRAS and DROPOUT.
    """
    rows = 64 if width * itemsize > 256 else 128
    if capability < AMPERE:
        return rows, 16 if width > 128 or (width == 128 and extras and dropout) else 32
    if itemsize == 4 or width > 128:
        return rows, 32
    if not (extras or dropout):
        return rows, 48 if width > 64 and capability < 90 else 64
    short = dropout if AMPERE < capability < HOPPER else not dropout and capability >= 120
    if width == 128 and extras and short:  # of registers
        return rows, 16
    return rows, 32 if width > 64 else 48


def forward_shared_bytes(width: int, itemsize: int, rows: int, keys: int) -> int:
    """Return the bytes of the tiles: one of queries, two of keys, two of values."""
    return -(-width * itemsize // 128) * 128 * (rows + 4 * keys)


def _plan(launch, q, v):
    """Return the forward kernel, its (grid, block, shared bytes), and (queries, keys) of a tile."""
    width = next(w for w in WIDTHS if max(q.shape[-1], v.shape[-1]) <= w)
    features = {"EXTRAS": launch.extras, "DROPOUT": launch.dropout}
    run = kernel(
        "attention/flash_attention_forward_ampere.cu", "flash_attention_forward",
        scalar=ctype(q.dtype), HEAD_DIM=width, **features,
    )  # fmt: skip
    capability = gpu(q.device.id).capability
    rows, _ = tile = forward_tile(width, q.itemsize, *features.values(), capability)
    grid = (-(-launch.queries // rows) * launch.heads * launch.sequences,)
    size = forward_shared_bytes(width, q.itemsize, *tile)
    return run, (grid, (FORWARD_THREADS,), size), tile


def forward(q: Array, k: Array, v: Array, *extras: Any, needs: tuple, **params: Any) -> tuple:
    """Return (out, lse) and what the gradient needs."""
    out, lse = outputs(q, v)
    launch = Launch(q, k, v, *extras, **params, out=out)
    run, (grid, block, size), _ = _plan(launch, q, v)
    run(grid, block, launch.problem, q, k, v, out, lse, shared_bytes=size)
    return result((q, k, v, *extras), out, lse, needs)


def describe(q: Array, k: Array, v: Array, *extras: Any, **params: Any) -> dict[str, Any]:
    """Return what the forward uses of the GPU: see ``impls.WORDS``."""
    run, shape, tile = _plan(Launch(q, k, v, *extras, **params, tables=False), q, v)
    return {"tile": tile, **run.resources(*shape)}


# ---- backward -----------------------------------------------------------------------------------


def choose_tile(size: int, limit: int, tiles: tuple = TILES) -> tuple:
    """Return the tile for a head size and ``limit`` bytes of shared memory in a block."""
    return next(t for t in tiles if size <= t[0] and backward_shared_bytes(*t) <= limit)


def choose_extras_tile(size: int, extras: bool, limit: int, tiles: tuple = EXTRAS_TILES) -> tuple:
    """Return the same of EXTRAS_TILES."""
    return next(
        tile
        for tile in tiles
        if size <= tile[0]
        and extras_shared_bytes(*tile) <= limit
        and not (extras and tile == PLAIN_ONLY)
    )


def backward_shared_bytes(width: int, own: int, step: int, stages: int) -> int:
    """Return DKV_BYTES of the kernel."""
    row, weights = -(-width // 64) * 128, step * -(-own // 64) * 128
    return 2 * own * row + stages * step * (2 * row + 8) + 3 * weights


def extras_shared_bytes(
    width: int, own: int, step: int, warps: int, stages: int, ds_tiles: int
) -> int:
    """Return the greater one of DKV_BYTES and DQ_BYTES of EXTRAS_FILE."""
    row, weights, ds = -(-width // 64) * 128, step * -(-own // 64) * 128, own * -(-step // 64) * 128
    tiles = 2 * own * row + stages * step * 2 * row
    return tiles + max(stages * step * 8 + (1 + ds_tiles) * weights, ds + own * 8)


def backward(
    saved: tuple, dout: Any, dlse: Any, *, needs: tuple, into: tuple, **params: Any
) -> tuple:
    """Return the gradients of q, k, v, bias and sink (None for the rest, and where not needed)."""
    q, k, v, *optional, out, lse = saved
    bias, *_, sink = optional
    lse, dout, dlse = output_gradients(q, out, lse, dout, dlse)
    out, dout = _with_aligned_rows(out), _with_aligned_rows(dout)
    dq, dk, dv = gradient_arrays((q, k, v), into)
    launch = Launch(q, k, v, *optional, **params, out=out, dout=dout, dq=dq, dk=dk, dv=dv)
    problem, heads, sequences = launch.problem, launch.heads, launch.sequences

    extras = launch.extras or params["dropout_p"] > 0
    found, head_dim = gpu(q.device.id), max(q.shape[-1], v.shape[-1])
    limit, scalar = found.shared_bytes, ctype(q.dtype)
    tables: tuple[tuple, tuple] = TILES, EXTRAS_TILES
    if found.capability < AMPERE:
        tables = TURING_TILES, TURING_EXTRAS_TILES
    tile = choose_tile(head_dim, limit, tables[0])
    extras_tile = choose_extras_tile(head_dim, extras, limit, tables[1])
    width = extras_tile[0] if extras else tile[0]

    def run_rows(name, *args):
        launch_kernel = kernel(ROWS_FILE, f"flash_attention_{name}", HEAD_DIM=width, scalar=scalar)
        launch_kernel((units,), (BACKWARD_THREADS,), problem, *args)

    def run_extras(name, rows, heads, *args):
        constants = dict(zip(EXTRAS_CONSTANTS, extras_tile, strict=True), EXTRAS=extras)
        launch_kernel = kernel(EXTRAS_FILE, f"flash_attention_{name}", scalar=scalar, **constants)
        grid = -(-rows // constants["OWN"]) * heads * sequences
        block, size = 32 * constants["WARPS"], extras_shared_bytes(*extras_tile)
        launch_kernel((grid,), (block,), problem, *args, shared_bytes=size)

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
            more = dq_sum, dbias, _broadcast_strides(dbias), dk, dv
            run_extras("dkv", launch.keys, launch.kv_heads, *shared, *more)
        else:
            constants = dict(zip(CONSTANTS, tile, strict=True))
            launch_kernel = kernel(BACKWARD_FILE, "flash_attention_dkv", scalar=scalar, **constants)
            grid = -(-launch.keys // constants["OWN"]) * launch.kv_heads * sequences
            args, size = (*shared, dq_sum, dk, dv), backward_shared_bytes(*tile)
            launch_kernel((grid,), (BACKWARD_THREADS,), problem, *args, shared_bytes=size)
    if by_queries:
        run_extras("dq", launch.queries, heads, *shared, dq)
    elif needs[0]:
        run_rows("dq_store", dq_sum, dq)
    if needs[3]:
        dbias = bias_gradient(dbias, bias)
    dsink = sink_gradient(sink, lse, delta) if needs[8] else None
    dq, dk, dv = (x if need else None for x, need in zip((dq, dk, dv), needs[:3], strict=True))
    return dq, dk, dv, dbias, None, None, None, None, dsink


def _with_aligned_rows(x):
    """Return ``x``, or a copy, such that its rows can be read 16 bytes at a time."""
    return x.copy(order="C") if rows_refusal(x, "x") else x


def _broadcast_strides(x):
    """Return the struct Strides of a contiguous (B, H, T, S) array, 0 where it broadcasts."""
    steps = [0] * 4
    if x is not None:
        steps = [step // x.itemsize if n > 1 else 0 for n, step in zip(x.shape, x.strides)]  # noqa: B905
    batch, head, row, column = steps
    return np.array([batch, row, head, column], np.int64).view("V32")
