"""The gradient of raw-hopper: ``rawkernels/attention/flash_attention_backward_hopper*.cu``.

Three launches, and a fourth for a bias that TMA loads: a kernel over rows (delta, and the order of
the tiles), the main kernel (dk, dv and sums of dq), and one that rounds dq, unless the main kernel
computes all tiles of a head in one block.
"""

import functools
import math
from typing import Any

import numpy as np

from gpuattn import arrays
from gpuattn.arrays import ctype, get_xp
from gpuattn.cuda import kernels, tensor_maps
from gpuattn.cuda.gpu import gpu
from gpuattn.cuda.kernels import kernel
from gpuattn.cuda.tensor_maps import tensor_map
from gpuattn.ops.attention import hopper
from gpuattn.ops.attention.gradient import (
    bias_gradient,
    gradient_arrays,
    output_gradients,
    sink_gradient,
)
from gpuattn.ops.attention.launch import UNLIMITED, Launch, drops
from gpuattn.typing import Array

NAME, FILE = "flash_attention_backward", "attention/flash_attention_backward_hopper.cu"
WIDE_FILE = "attention/flash_attention_backward_hopper_wide.cu"  # head sizes above 128
ROWS_FILE = "attention/flash_attention_backward_hopper_rows.cu"
BIAS_FILE = "attention/flash_attention_backward_hopper_bias.cu"
TILES = {64: (128, 128), 128: (64, 128), 256: (64, 64)}  # head sizes, rounded up: queries, keys
TILE_BYTES = 64  # struct Tile of attention/common/attention_backward_hopper.cuh
SHARED_BYTES = 232448  # all of a multiprocessor's: it runs one block at a time
L2_BYTES = 32 << 20  # of q, dout and dq that a section of heads may have in use
MIN_SECTION = 16  # heads of a causal section at head size 64, even if they exceed L2_BYTES
MAX_TURN, MAX_IDLE = 4, 1 / 16  # of ``tiles_in_turn``: tiles; idle blocks per head
MAX_COPY_BYTES = 1 << 30  # of a copied bias, where its gradient does not need as much anyway


def refuse(
    q: Array, k: Array, v: Array, bias: Any, key_lengths: Any, cu_q: Any, cu_k: Any, slopes: Any,
    sink: Any, *, needs: tuple, softcap: float | None, dropout_p: float, deterministic: bool,
    **params: Any,
) -> str | None:  # fmt: skip
    """Return why the gradient does not run here, or None."""
    if reason := hopper.refuse(q, k, v, bias, key_lengths, cu_q, cu_k, slopes, sink, **params):
        return reason
    size = max(q.shape[-1], v.shape[-1])
    extras = bias is not None or slopes is not None or softcap
    if size > 128 and (extras or dropout_p or deterministic):
        return (
            f"the head size is {size}; above 128 the kernel takes no bias, ALiBi, softcap or "
            "dropout, and has no deterministic form"
        )
    if extras and dropout_p:
        return "there is dropout beside a bias, ALiBi or softcap, the kernel takes either"
    if softcap and bias is not None and bias.dtype != bool and needs[3]:
        return "there is a softcap beside a bias with a gradient, the kernel takes either"
    return None


# ---- what is decided before the launches --------------------------------------------------------


def main_kernel(
    dtype: Any, size: int, *, extras: bool, dropout: bool, biased: bool, deterministic: bool,
    ahead: bool,
) -> tuple[str, str, dict[str, Any]]:  # fmt: skip
    """Return (file, name, constants) of the main kernel for both head sizes up to ``size``."""
    if extras or biased:
        size = max(size, 65)  # these variants exist from WIDTH = 128 on
    width = next(w for w in TILES if size <= w)
    constants = {"scalar": ctype(dtype), "WIDTH": width}
    if width == 256:
        return WIDE_FILE, f"{NAME}_wide", constants | {"SIZE": 192 if size <= 192 else 256}
    constants |= {"EXTRAS": extras, "DROPOUT": dropout, "BIASED": biased}
    return FILE, NAME, constants | {"DETERMINISTIC": deterministic, "AHEAD": ahead}


def loads_ahead(
    q: Array, k: Array, v: Array, bias: Any, key_lengths: Any, cu_q: Any, cu_k: Any, slopes: Any,
    sink: Any, *, window: tuple, align: str, softcap: float | None, dropout_p: float,
    max_seqlen_q: int, max_seqlen_k: int, deterministic: bool, **params: Any,
) -> bool:  # fmt: skip
    """Return whether a thread block loads the keys of its next tile while it computes a tile.

    Up to head size 64, where all sequences have the same lengths and some query sees each tile.
    With dropout only where a block computes all tiles of a head: else it was slower.
    """
    optional = bias, key_lengths, cu_q, slopes
    if any(x is not None for x in optional) or softcap or deterministic:
        return False
    lengths = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    if drops(dropout_p) and tiles_in_turn(q, k, **lengths, **params) == 1:
        return False
    left, right = (UNLIMITED if limit is None else limit for limit in window)
    seen = (max_seqlen_q if align == "top_left" else max_seqlen_k) + right  # keys of any query
    sees_all = left >= max_seqlen_k and seen > (max_seqlen_k - 1) // TILES[64][1] * TILES[64][1]
    return sees_all and max(q.shape[-1], v.shape[-1]) <= 64


def tiles_in_turn(
    q: Array, k: Array, *, scale: float, max_seqlen_q: int, max_seqlen_k: int, **_: Any
) -> int:
    """Return how many tiles of keys a thread block computes in turn: 1, or all of a KV head.

    With all, no other block adds to dq of that head: the first tile, which all queries must see,
    stores the sums, and the last one that a query sees rounds them. But heads fill the
    multiprocessors less evenly than tiles do, and a long head exceeds L2. For calls that
    ``loads_ahead`` takes.
    """
    tiles = -(-max_seqlen_k // TILES[64][1])
    if max_seqlen_q > max_seqlen_k or scale <= 0 or tiles > MAX_TURN:
        return 1
    heads = k.shape[2] * q.shape[0]
    return tiles if -heads % gpu(q.device.id).multiprocessors <= MAX_IDLE * heads else 1


def compile_backward(
    q: Array, k: Array, v: Array, bias: Any, *others: Any, needs: tuple, **params: Any
) -> None:
    """Start to compile the main kernel, which takes longer than the forward's.

    Not with a bias: which kernel follows depends on how a copy of it would lie in memory.
    """
    if bias is not None or not (q.size and k.size and v.size):
        return
    *_, slopes, _ = others
    _compile_main(
        q.device.id, q.dtype, max(q.shape[-1], v.shape[-1]),
        extras=slopes is not None or bool(params["softcap"]),
        dropout=drops(params["dropout_p"]), biased=False, deterministic=params["deterministic"],
        ahead=loads_ahead(q, k, v, bias, *others, **params),
    )  # fmt: skip


@functools.lru_cache(1024)
def _compile_main(device, dtype, size, **form):
    file, _, constants = main_kernel(dtype, size, **form)
    kernels.compile_ahead(file, **constants)


class _Plan:
    """Which kernels compute a gradient, and on which tiles.

    ``bias``: what TMA loads, or None; see ``_staged``. ``row_blocks``: tiles of query rows of all
    sequences. ``section``: heads whose tiles are computed before those of other heads.
    """

    def __init__(self, launch, inputs, params, needs_bias):
        q, _, v, bias, *_, slopes, _ = inputs
        multiprocessors = gpu(q.device.id).multiprocessors
        extras = slopes is not None or bool(params["softcap"])
        self.bias = None if extras else _staged(bias, q.dtype, launch, needs_bias)
        ahead = loads_ahead(*inputs, **params)
        self.in_turn = tiles_in_turn(*inputs[:2], **params) if ahead else 1
        self.file, self.name, self.constants = main_kernel(
            q.dtype, max(q.shape[-1], v.shape[-1]),
            extras=extras or (bias is not None and self.bias is None), dropout=launch.dropout,
            biased=self.bias is not None, deterministic=bool(launch.deterministic),
            ahead=ahead,
        )  # fmt: skip
        self.width = self.constants["WIDTH"]
        self.rows, self.keys = TILES[self.width]
        sequences, longest = launch.sequences, -(-launch.queries // self.rows)
        # packed sequences each begin a block of rows of their own
        packed_blocks = q.shape[0] // self.rows + sequences
        self.row_blocks = packed_blocks if launch.packed else longest * sequences
        self.tiles = -(-launch.keys // self.keys) * launch.kv_heads * sequences
        self.section = self._section(launch, multiprocessors)
        self.row_grid = (longest * launch.heads * sequences,)
        self.main_grid = (min(self.tiles // self.in_turn, multiprocessors),)

    def _section(self, launch, multiprocessors):
        if self.in_turn > 1:
            return 1
        head_bytes = launch.queries * 8 * self.width * launch.fields["group"]  # of q, dout and dq
        section, banded = L2_BYTES // head_bytes, launch.right < UNLIMITED
        if self.width == 64 and banded:
            # many tiles of one head at a time cost more than reading DRAM does
            section = max(section, MIN_SECTION)
        if launch.deterministic and banded:
            # tiles of a head wait for each other: no more than two of them at a time
            section = multiprocessors // 2
        return 1 << max(0, section.bit_length() - 1)

    def row_kernel(self, name):
        scalar = self.constants["scalar"]
        constants = {"scalar": scalar, "WIDTH": self.width, "CHAINED": self.in_turn > 1}
        return kernel(ROWS_FILE, f"{NAME}_{name}", **constants)


def _staged(bias, dtype, launch, needs_gradient):
    """Return the bias as (B, T, H, S) that TMA loads, or None where the kernel loads it otherwise.

    It may be a copy. ``needs_gradient``: so is one, which takes the memory of all logits anyway.
    """
    if bias is None or bias.dtype != dtype:
        return None
    rows = launch.queries, launch.keys
    if bias.shape[2:] != rows or tensor_maps.refusal(bias.swapaxes(1, 2), "bias"):
        shape = (*bias.shape[:2], rows[0], -(-rows[1] // 8) * 8)
        if not needs_gradient and math.prod(shape) * bias.itemsize > MAX_COPY_BYTES:
            return None
        copy = arrays.empty(bias, shape)[..., : rows[1]]
        arrays.unrecorded_write()
        copy[...] = bias
        bias = copy
    return bias.swapaxes(1, 2)


# ---- the launches -------------------------------------------------------------------------------


def backward(
    saved: tuple, dout: Any, dlse: Any, *, needs: tuple, into: tuple, **params: Any
) -> tuple:
    """Return the gradients of q, k, v, bias and sink (None for the rest)."""
    *inputs, out, lse = saved
    q, k, v, bias, *_, sink = inputs
    if not (q.size and k.size and v.size):
        given = (x if need else None for x, need in zip(inputs, needs, strict=True))
        return tuple(x if x is None else arrays.zeros(x, x.shape) for x in given)
    lse, dout, dlse = output_gradients(q, out, lse, dout, dlse)
    out, dout = _for_tma(out), _for_tma(dout)
    dq, dk, dv = gradient_arrays((q, k, v), into)
    launch = Launch(*inputs, **params, out=out, dout=dout, dq=dq, dk=dk, dv=dv)
    plan = _Plan(launch, inputs, params, needs[3])
    delta = arrays.empty(q, lse.shape, np.float32) if needs[8] else None
    dlogits = _logit_gradients(launch, plan, q) if needs[3] else None

    grads = dq, dk, dv
    dq_sum = _launch_main(launch, plan, (q, k, v), (out, dout, lse, dlse), grads, delta, dlogits)
    if plan.in_turn == 1:
        plan.row_kernel("dq")(plan.row_grid, (256,), launch.problem, dq_sum, dq, plan.row_blocks)
    dbias = _sum_bias(launch, plan, dlogits, bias) if needs[3] else None
    dsink = sink_gradient(sink, lse, delta) if needs[8] else None
    return dq, dk, dv, dbias, None, None, None, None, dsink


def _for_tma(x):
    """Return ``x``, or a contiguous copy where TMA does not take its strides."""
    return get_xp(x).ascontiguousarray(x) if tensor_maps.refusal(x, "x") else x


def _logit_gradients(launch, plan, q):
    """Return the array for the gradient of all logits, for the bias.

    Where TMA loads the bias, it stores that too: (B, H, S, T), in 16 bits. Else the kernel adds to
    zeros, (B, H, T, S).
    """
    lead = launch.sequences, launch.heads
    if plan.bias is None:
        return arrays.zeros(q, (*lead, launch.queries, launch.keys), np.float32)
    return arrays.empty(q, (*lead, launch.keys, -(-launch.queries // 8) * 8))


def _launch_main(launch, plan, qkv, outs, grads, delta, dlogits):
    """Compute dk, dv, delta and the gradient of the logits; return the sums of dq, unrounded.

    Where a block computes all tiles of a head, dq is complete. ``outs``: out, dout, lse and dlse.
    ``grads``: dq, dk and dv. ``delta`` and ``dlogits`` may be None.
    """
    (q, k, v), dout, (dq, dk, dv), rows = qkv, outs[1], grads, plan.rows
    stats = arrays.empty(q, (2, launch.heads, plan.row_blocks, rows), np.float32)  # lse and delta
    dq_sum = arrays.empty(q, (launch.heads, plan.row_blocks, rows * plan.width), np.float32)
    order = arrays.empty(q, ((plan.tiles + 1) * TILE_BYTES + 16,), np.uint8)
    counter, turns = order[-16:], None
    if launch.deterministic:
        turns = arrays.empty(q, (launch.heads, plan.row_blocks, 2), np.int32)
    plan.row_kernel("rows")(
        plan.row_grid, (256,), launch.problem, *outs, stats[0], stats[1], delta, dq_sum, order,
        counter, turns, *plan.main_grid, plan.tiles, plan.section, plan.row_blocks,
    )  # fmt: skip

    loads = ((q, rows), (dout, rows), (k, plan.keys), (v, plan.keys))
    maps = [tensor_map(x, n) for x, n in (*loads, (dk, 64), (dv, 64))]
    shared, by_bias = (stats[0], stats[1], dq_sum, dk, dv, order), ()
    if plan.width < 256:
        by_tma = plan.bias is not None
        bias_map = tensor_map(plan.bias, rows) if by_tma else maps[0]
        stored = by_tma and dlogits is not None
        dlogits_map = tensor_map(dlogits.swapaxes(1, 2), 64) if stored else maps[0]
        shared += (None if by_tma else dlogits), turns
        by_bias = bias_map, dlogits_map, stored, plan.in_turn
        maps.append(tensor_map(dq, rows) if plan.in_turn > 1 else maps[0])
    kernel(plan.file, plan.name, **plan.constants)(
        plan.main_grid, (384,), *maps, launch.problem, *shared, counter, plan.tiles,
        plan.row_blocks, *by_bias, shared_bytes=SHARED_BYTES,
    )  # fmt: skip
    return dq_sum


def _sum_bias(launch, plan, dlogits, bias):
    """Return the gradient of the bias: that of the logits, summed where the bias broadcasts."""
    if plan.bias is None:
        return bias_gradient(dlogits, bias)
    batches, heads, rows, columns = bias.shape
    shared = 1 if rows < launch.queries else 2 if columns < launch.keys else 0
    rows, columns = -(-launch.queries // 64), -(-launch.keys // 64)
    blocks = rows * columns * batches * heads
    if shared == 0:
        dbias = arrays.empty(bias, bias.shape)
    else:
        tiles = (rows, launch.keys) if shared == 1 else (launch.queries, columns)
        dbias = arrays.empty(bias, (batches, heads, *tiles), np.float32)
    kernel(BIAS_FILE, f"{NAME}_bias", scalar=ctype(bias.dtype))(
        (blocks,), (256,), launch.problem, dlogits, dbias, batches, heads, shared, dlogits.shape[3]
    )
    return bias_gradient(dbias, bias)
