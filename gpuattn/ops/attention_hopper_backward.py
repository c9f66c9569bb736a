"""The gradient of attention on Hopper: ``rawkernels/flash_attention_backward_hopper*.cu``."""

import functools

import numpy as np

from gpuattn import arrays, tensormaps
from gpuattn.arrays import ctype, get_xp, import_cupy
from gpuattn.kernels import kernel, kernel_refusal
from gpuattn.ops.attention_launch import Launch
from gpuattn.ops.attention_reference import sink_gradient

WIDTHS = (64, 128)  # what both head sizes are rounded up to
KEYS = 128  # of a tile
TILE_BYTES = 64  # struct Tile of common/attention_backward_hopper.cuh
L2_BYTES = 32 << 20  # what one section of heads may keep busy


def refuse_backward(
    q, k, v, bias, key_lengths, cu_q, cu_k, slopes, sink, *, softcap, dropout_p, deterministic, **_
):
    """Return why these kernels do not take the gradient of this call, or None."""
    if reason := kernel_refusal(q, "q"):
        return reason
    if (found := _device()[0]) != "90":
        return f"the GPU's compute capability is {found}, the kernel is made for 90 (Hopper)"
    for x, name in ((q, "q"), (k, "k"), (v, "v")):
        if x.size and (reason := tensormaps.refusal(x, name)):
            return reason
    size = max(q.shape[-1], v.shape[-1])
    if size > WIDTHS[-1]:
        return f"the head size is {size}, the kernel takes multiples of 8 up to {WIDTHS[-1]}"
    if bias is not None or slopes is not None:
        return "there is a bias or ALiBi, the kernel takes none"
    if softcap or dropout_p:
        return "there is a softcap or dropout, the kernel takes none"
    if deterministic:
        return "dq is summed in any order; deterministic=True asks for one"
    return None


@functools.cache
def _device():
    cupy = import_cupy()
    device = cupy.cuda.Device()
    return device.compute_capability, device.attributes["MultiProcessorCount"]


def _copyable(x):
    """Return ``x``, or a contiguous copy where the copy engine does not take its strides."""
    return get_xp(x).ascontiguousarray(x) if tensormaps.refusal(x, "x") else x


def backward(saved, dout, dlse, *, needs, into, **params):
    """Return the gradients of q, k, v and sink (None for the rest)."""
    q, k, v, *extras, out, lse = saved
    sink = extras[-1]
    if q.size == 0 or k.size == 0 or v.size == 0:
        dsink = arrays.zeros(sink, sink.shape) if needs[8] else None
        return *(arrays.zeros(x, x.shape) for x in (q, k, v)), *[None] * 5, dsink
    dout = arrays.zeros(q, out.shape) if dout is None else dout.astype(q.dtype, copy=False)
    out, dout = _copyable(out), _copyable(dout)
    dlse = None if dlse is None else get_xp(q).ascontiguousarray(dlse, np.float32)
    dq, dk, dv = (arrays.empty(x, x.shape) for x in (q, k, v))
    launch = Launch(q, k, v, *extras, **params, out=out, dout=dout, dq=dq, dk=dk, dv=dv)
    delta = arrays.empty(q, lse.shape, np.float32) if needs[8] else None
    _launch(launch, q, k, v, out, lse, dout, dlse, delta, dq, dk, dv)
    dsink = sink_gradient(sink, lse, delta) if needs[8] else None
    return dq, dk, dv, None, None, None, None, None, dsink


def _launch(launch, q, k, v, out, lse, dout, dlse, delta, dq, dk, dv):
    width = next(w for w in WIDTHS if max(q.shape[-1], v.shape[-1]) <= w)
    rows = 128 if width == 64 else 64
    heads, sequences = launch.heads, launch.sequences
    longest = -(-launch.queries // rows)
    # blocks of rows, of all sequences; packed ones each begin a block of their own
    row_blocks = q.shape[0] // rows + sequences if launch.packed else longest * sequences
    tiles = -(-launch.keys // KEYS) * launch.kv_heads * sequences
    busy = launch.queries * (4 * width + 4 * width) * launch.fields["group"]
    section = 1 << max(0, (L2_BYTES // max(busy, 1)).bit_length() - 1)
    constants = {"scalar": ctype(q.dtype), "WIDTH": width}
    file = "flash_attention_backward_hopper"

    lse_rows, delta_rows = arrays.empty(q, (2, heads, row_blocks, rows), np.float32)
    dq_sum = arrays.empty(q, (heads, row_blocks, rows * width), np.float32)
    plan = arrays.empty(q, ((tiles + 1) * TILE_BYTES + 16,), np.uint8)
    counter = plan[-16:]
    problem, row_grid = launch.problem, (longest * heads * sequences,)
    kernel(f"{file}_rows.cu", "flash_attention_backward_rows", **constants)(
        row_grid, (256,), problem, out, dout, lse, dlse, lse_rows, delta_rows, delta, dq_sum,
        plan, counter, tiles, section, row_blocks,
    )  # fmt: skip
    maps = [tensormaps.tensor_map(x, n) for x, n in ((q, rows), (dout, rows), (k, KEYS), (v, KEYS))]
    maps += [tensormaps.tensor_map(x, 64) for x in (dk, dv)]
    pair = 2 * KEYS * width * 2 + 4 * rows * width * 2  # keys and values; two stages of q and dout
    shared = 2048 + 16 * rows + pair + 2 * KEYS * rows * 2
    kernel(f"{file}.cu", "flash_attention_backward", **constants)(
        (min(tiles, _device()[1]),), (384,), *maps, problem, lse_rows, delta_rows, dq_sum, dk, dv,
        plan, counter, tiles, row_blocks, shared_bytes=shared,
    )  # fmt: skip
    kernel(f"{file}_rows.cu", "flash_attention_backward_dq", **constants)(
        row_grid, (256,), problem, dq_sum, dq, row_blocks
    )
