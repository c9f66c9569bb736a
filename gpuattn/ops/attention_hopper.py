"""Attention on Hopper's matrix units: ``rawkernels/flash_attention_forward_hopper.cu``."""

import threading

import numpy as np

from gpuattn import arrays
from gpuattn.arrays import ctype, import_cupy
from gpuattn.kernels import kernel, kernel_refusal
from gpuattn.ops import attention_simt
from gpuattn.ops.attention_launch import UNLIMITED, Launch
from gpuattn.tensormaps import refusal, tensor_map

FILE, NAME = "flash_attention_forward_hopper.cu", "flash_attention_forward_hopper"
CAPABILITY = "90"
MAX_HEAD_DIM, MAX_TILES = 256, 2**31 - 1
TILES = {64: (192, 128), 96: (128, 128), 128: (128, 128), 192: (128, 112), 256: (128, 80)}
"""HEAD_DIM, both head sizes rounded up: queries and keys of a tile. A function of the head size,
the features and the lengths alone, so that a sequence's bits depend on no other sequence."""
FEATURE_TILE = 128, 128  # at HEAD_DIM 64 with EXTRAS or DROPOUT, which need the registers
DROPOUT_TILE = 128, 64  # at HEAD_DIM 256, likewise
SHORT_TILE, SHORT = (256, 64), 1024  # at HEAD_DIM 64 with a band and few queries
TILE_BYTES = 224 << 10  # of shared memory, beside the barriers
L2_SECTION = 32 << 20  # bytes of keys and values that neighbouring tiles may keep in L2
COUNTERS = 4096  # allocated at a time


def refuse(q, k, v, bias, key_lengths, cu_q, *_, max_seqlen_q, **__):
    if reason := kernel_refusal(q, "q"):
        return reason
    if q.device.compute_capability != CAPABILITY:
        return f"the GPU has compute capability {q.device.compute_capability}, the kernel takes 90"
    for x, name in ((q, "q"), (k, "k"), (v, "v")):
        if reason := refusal(x, name):
            return reason
    size = max(q.shape[-1], v.shape[-1])
    if size > MAX_HEAD_DIM:
        return f"the head size is {size}, the kernel takes 8 to {MAX_HEAD_DIM}"
    sequences = q.shape[0] if cu_q is None else len(cu_q) - 1
    tiles = (max_seqlen_q // 64 + 1) * q.shape[-2] * sequences
    if tiles > MAX_TILES:
        return f"{tiles} tiles, the kernel takes {MAX_TILES}"
    return None


def _tile(width, queries, bands, extras, dropout):
    if width == 256 and dropout:
        return DROPOUT_TILE
    if width == 64 and (extras or dropout):
        return FEATURE_TILE
    return SHORT_TILE if width == 64 and bands and queries <= SHORT else TILES[width]


class _Plan:
    """The kernel of one call, and how it is launched."""

    def __init__(self, launch, q, v, bias):
        fields = launch.fields
        size = max(fields["head_dim"], fields["value_dim"])
        width = next(w for w in TILES if size <= w)
        bands = min(launch.left, launch.right) < UNLIMITED
        extras = bias is not None or fields["slopes"] or fields["softcap"] or fields["scale"] <= 0
        dropout = fields["threshold"] < 65536
        self.rows, self.keys = _tile(width, launch.queries, bands, extras, dropout)
        self.constants = {
            "scalar": ctype(q.dtype), "HEAD_DIM": width, "BM": self.rows, "BN": self.keys,
            "BANDED": bands, "EXTRAS": bool(extras), "DROPOUT": dropout,
        }  # fmt: skip
        self.bias_by_copies = (
            bias is not None and width <= 128 and bias.dtype == q.dtype
            and bias.shape[-2:] == (launch.queries, launch.keys)
            and refusal(bias.swapaxes(1, 2), "bias") is None
        )  # fmt: skip
        if launch.packed:  # see find_tile
            self.row_blocks = q.shape[0] // self.rows + launch.sequences
            self.all_heads = launch.heads
        else:
            self.row_blocks = -(-launch.queries // self.rows)
            self.all_heads = launch.heads * launch.sequences
        self.tiles = self.row_blocks * self.all_heads
        self.section = 1
        if bands:
            head = max(1, launch.keys * (fields["head_dim"] + fields["value_dim"]) * 2)
            kv_heads = max(1, 1 << (L2_SECTION // head).bit_length() >> 1)  # a power of two
            self.section = max(1, min(self.all_heads, kv_heads * fields["group"]))
        self.threads = 2 * self.rows + 128
        self.shared_bytes = self._shared_bytes(width, extras)

    def _shared_bytes(self, width, extras):
        slabs = -(-width // 64)
        q, kv = self.rows * slabs * 128, self.keys * slabs * 128
        bias = self.rows * -(-self.keys // 64) * 128 if extras and width <= 128 else 0
        operands = q + (3 if width == 64 else 2) * (2 * kv + bias)
        return 2048 + operands + (q if operands + q <= TILE_BYTES else 0)

    def kernel(self):
        return kernel(FILE, NAME, **self.constants)


def forward(q, k, v, *extras, needs, **params):
    *lead, rows, heads, _ = q.shape
    out = arrays.empty(q, (*q.shape[:-1], v.shape[-1]))
    lse = arrays.empty(q, (*lead, heads, rows), np.float32)
    saved = (q, k, v, *extras, out, lse) if any(needs) else None
    if not out.size:
        return (out, lse), saved
    launch, bias = Launch(q, k, v, *extras, **params, out=out), extras[0]
    plan = _Plan(launch, q, v, bias)
    q_map = tensor_map(q, 64)
    # without keys nothing is loaded, and there may be no address
    k_map, v_map = (tensor_map(x, plan.keys) if x.size else q_map for x in (k, v))
    bias_map = tensor_map(bias.swapaxes(1, 2), plan.rows) if plan.bias_by_copies else q_map
    plan.kernel()(
        (min(plan.tiles, _processors(q)),), (plan.threads,), launch.problem,
        q_map, k_map, v_map, tensor_map(out, 64), bias_map, out, lse, _counter(),
        plan.row_blocks, plan.all_heads, plan.section, plan.bias_by_copies,
        shared_bytes=plan.shared_bytes,
    )  # fmt: skip
    return (out, lse), saved


def _processors(x):
    return x.device.attributes["MultiProcessorCount"]


def backward(saved, dout, dlse, **params):
    return attention_simt.backward(saved, dout, dlse, **params)


# ---- the counters from which a launch's thread blocks take their tiles ------------------------

_free, _of_stream, _lock = {}, {}, threading.Lock()


def _counter():
    """Return the address of an int32 0 that no other launch uses at the same time.

    Launches on one stream follow each other, so they share one; the kernel leaves it at 0. A launch
    under graph capture has one for good: a replay may run beside anything.
    """
    cupy = import_cupy()
    device, stream = cupy.cuda.runtime.getDevice(), cupy.cuda.get_current_stream()
    with _lock:
        if stream.ptr and stream.is_capturing():
            return _new_counter(cupy, device)
        key = device, threading.get_ident(), stream.ptr  # a per-thread stream has one address
        if key not in _of_stream:
            _of_stream[key] = _new_counter(cupy, device)
        return _of_stream[key]


def _new_counter(cupy, device):
    if not _free.get(device):
        memory = cupy.cuda.Memory(4 * COUNTERS)  # no pool's: kept for good, whatever is captured
        stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.runtime.memsetAsync(memory.ptr, 0, memory.size, stream.ptr)
        stream.synchronize()
        _free[device] = [(memory, memory.ptr + 4 * n) for n in range(COUNTERS)]
    memory, address = _free[device].pop()
    _kept.append(memory)
    return np.uint64(address)


_kept = []


# ---- explain ----------------------------------------------------------------------------------


def describe(q, k, v, *extras, needs=None, **params):
    """Return the tile, the resources and the expected limit of a call's forward, as a dict."""
    launch = Launch(q, k, v, *extras, **params, out=q[..., : v.shape[-1]])
    plan = _Plan(launch, q, v, extras[0])
    waves = plan.tiles / _processors(q)
    work = plan.constants["HEAD_DIM"]
    limit = "launch and prologue" if waves < 1 else "exponentials" if work <= 64 else "matrix units"
    return {
        "tile": (plan.rows, plan.keys),
        "threads": plan.threads,
        "registers": _registers(plan.kernel()),
        "shared_bytes": plan.shared_bytes,
        "tiles": plan.tiles,
        "waves": waves,
        "limit": limit,
    }


def _registers(compiled):
    driver = import_cupy().cuda.driver
    return driver.funcGetAttribute(driver.CU_FUNC_ATTRIBUTE_NUM_REGS, compiled.function.ptr)
