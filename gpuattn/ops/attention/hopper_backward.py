"""The gradient of attention on Hopper: ``attention/flash_attention_backward_hopper*.cu``."""

import functools
import math

import numpy as np

from gpuattn import arrays
from gpuattn.arrays import ctype, get_xp
from gpuattn.cuda import kernels, tensor_maps
from gpuattn.cuda.gpu import gpu, hopper_refusal
from gpuattn.cuda.kernels import kernel, kernel_refusal
from gpuattn.ops.attention.launch import UNLIMITED, Launch, gradient_arrays
from gpuattn.ops.attention.reference import sink_gradient, sum_to

NAME, FILE = "flash_attention_backward", "attention/flash_attention_backward_hopper.cu"
WIDE_FILE = "attention/flash_attention_backward_hopper_wide.cu"  # head sizes above 128
ROWS_FILE = "attention/flash_attention_backward_hopper_rows.cu"
BIAS_FILE = "attention/flash_attention_backward_hopper_bias.cu"
TILES = {64: (128, 128), 128: (64, 128), 256: (64, 64)}  # head sizes, rounded up: queries, keys
TILE_BYTES = 64  # struct Tile of attention/common/attention_backward_hopper.cuh
SHARED_BYTES = 232448  # all there is: one block to a multiprocessor
L2_BYTES = 32 << 20  # what one section of heads may keep busy
LEAST_HEADS = 16  # of a causal section at head size 64, whatever L2 holds
CHAIN, IDLE = 4, 1 / 16  # tiles of a head that a block takes in turn; see ``chain_of``
COPY_BYTES = 1 << 30  # of a bias with all its rows and columns, where its gradient takes no more


def refuse_backward(
    q,
    k,
    v,
    bias,
    key_lengths,
    cu_q,
    cu_k,
    slopes,
    sink,
    *,
    softcap,
    dropout_p,
    deterministic,
    needs=None,
    **_,
):
    """Return why these kernels do not take the gradient of this call, or None."""
    if reason := kernel_refusal(q, "q"):
        return reason
    if reason := hopper_refusal(q.device.id):
        return reason
    for x, name in ((q, "q"), (k, "k"), (v, "v")):
        if x.size and (reason := tensor_maps.refusal(x, name)):
            return reason
    size = max(q.shape[-1], v.shape[-1])
    if size > 256:
        return f"the head size is {size}, the kernel takes multiples of 8 up to 256"
    extras = bias is not None or slopes is not None or softcap
    if size > 128 and (extras or dropout_p or deterministic):
        return (
            f"the head size is {size}; above 128 the kernel takes no bias, ALiBi, softcap or "
            "dropout, and has no deterministic form"
        )
    if extras and dropout_p:
        return "there is dropout beside a bias, ALiBi or softcap, the kernel takes either"
    if softcap and bias is not None and bias.dtype != bool and (needs is None or needs[3]):
        return "there is a softcap beside a bias with a gradient, the kernel takes either"
    return None


def _main(dtype, size, *, extras, dropout, biased, deterministic, chained):
    """Return file, kernel and constants of the main launch, for both head sizes up to ``size``."""
    if extras or biased:
        size = max(size, 65)  # there is no form for 64
    width = next(w for w in TILES if size <= w)
    constants = {"scalar": ctype(dtype), "WIDTH": width}
    if width == 256:
        return WIDE_FILE, f"{NAME}_wide", constants | {"SIZE": 192 if size <= 192 else 256}
    constants |= {"EXTRAS": extras, "DROPOUT": dropout, "BIASED": biased}
    return FILE, NAME, constants | {"DETERMINISTIC": deterministic, "CHAINED": chained}


def chain_of(launch, device):
    """Return how many tiles of keys a thread block takes in turn: 1, or all of a KV head.

    Nobody else adds to that head's dq then, and the first tile, which all queries must see, stores
    it, so that it needs no zeros. But heads fill the multiprocessors less evenly than tiles do, and
    those of longer ones leave L2.
    """
    size = max(launch.fields["head_dim"], launch.fields["value_dim"])
    plain = not (launch.extras or launch.dropout or launch.deterministic or launch.packed)
    everywhere = launch.left >= launch.keys >= launch.queries and not launch.fields["key_lengths"]
    heads, tiles = launch.kv_heads * launch.sequences, -(-launch.keys // TILES[64][1])
    even = -heads % gpu(device).multiprocessors <= IDLE * heads
    return tiles if size <= 64 and plain and everywhere and even and tiles <= CHAIN else 1


@functools.lru_cache(1024)
def compile_ahead(device, dtype, size, **form):
    """Begin to compile the main kernel beside the forward's: it takes longer."""
    file, _, constants = _main(dtype, size, **form)
    kernels.compile_ahead(file, **constants)


def _copyable(x):
    """Return ``x``, or a contiguous copy where the copy engine does not take its strides."""
    return get_xp(x).ascontiguousarray(x) if tensor_maps.refusal(x, "x") else x


def _staged(bias, dtype, launch, needed):
    """Return the bias as (B, T, H, S) that the copy engine takes, or None.

    ``needed``: so is its gradient, which takes the memory of all logits.
    """
    if bias is None or bias.dtype != dtype:
        return None
    rows = launch.queries, launch.keys
    if bias.shape[2:] != rows or tensor_maps.refusal(bias.swapaxes(1, 2), "bias"):
        shape = (*bias.shape[:2], rows[0], -(-rows[1] // 8) * 8)
        if not needed and math.prod(shape) * bias.itemsize > COPY_BYTES:
            return None
        copy = arrays.empty(bias, shape)[..., : rows[1]]
        copy[...] = bias
        bias = copy
    return bias.swapaxes(1, 2)


def _bias_gradient(ds, bias, launch):
    """Return the gradient of the bias out of that of all logits, ``ds`` (B, H, S, T)."""
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
        (blocks,), (256,), launch.problem, ds, dbias, batches, heads, shared, ds.shape[3]
    )
    return sum_to(dbias, bias.shape).astype(bias.dtype, copy=False)


def backward(saved, dout, dlse, *, needs, into, **params):
    """Return the gradients of q, k, v and sink (None for the rest)."""
    q, k, v, *extras, out, lse = saved
    bias, *_, slopes, sink = extras
    if q.size == 0 or k.size == 0 or v.size == 0:
        given = (x if need else None for x, need in zip((q, k, v, *extras), needs, strict=True))
        return tuple(x if x is None else arrays.zeros(x, x.shape) for x in given)
    dout = arrays.zeros(q, out.shape) if dout is None else dout.astype(q.dtype, copy=False)
    out, dout = _copyable(out), _copyable(dout)
    lse = get_xp(q).ascontiguousarray(lse)
    dlse = None if dlse is None else get_xp(q).ascontiguousarray(dlse, np.float32)
    dq, dk, dv = gradient_arrays((q, k, v), into)
    launch = Launch(q, k, v, *extras, **params, out=out, dout=dout, dq=dq, dk=dk, dv=dv)
    delta = arrays.empty(q, lse.shape, np.float32) if needs[8] else None
    extras = slopes is not None or bool(params["softcap"])
    staged = None if extras else _staged(bias, q.dtype, launch, needs[3])
    extras = extras or (bias is not None and staged is None)
    chain = chain_of(launch, q.device.id)
    file, name, constants = _main(
        q.dtype, max(q.shape[-1], v.shape[-1]), extras=extras, dropout=launch.dropout,
        biased=staged is not None, deterministic=bool(launch.deterministic), chained=chain > 1,
    )  # fmt: skip
    width = constants["WIDTH"]
    dbias, ds = None, None
    if needs[3]:
        sheets = launch.sequences, launch.heads
        if staged is None:
            dbias = arrays.zeros(q, (*sheets, launch.queries, launch.keys), np.float32)
        else:
            ds = arrays.empty(q, (*sheets, launch.keys, -(-launch.queries // 8) * 8))
    rows, keys = TILES[width]
    heads, sequences = launch.heads, launch.sequences
    longest = -(-launch.queries // rows)
    # blocks of rows, of all sequences; packed ones each begin a block of their own
    row_blocks = q.shape[0] // rows + sequences if launch.packed else longest * sequences
    tiles = -(-launch.keys // keys) * launch.kv_heads * sequences
    busy = launch.queries * 8 * width * launch.fields["group"]  # bytes of q, dout and dq
    section = L2_BYTES // busy
    if width == 64 and launch.right < UNLIMITED:
        # many tiles of one head slow each other down, by more than DRAM does
        section = max(section, LEAST_HEADS)
    if launch.deterministic and launch.right < UNLIMITED:
        # tiles of a head wait for each other: no more than two of them at a time
        section = gpu(q.device.id).multiprocessors // 2
    section = 1 if chain > 1 else 1 << max(0, section.bit_length() - 1)

    side = arrays.empty(q, (2, heads, row_blocks, rows), np.float32)  # lse and delta
    dq_sum = arrays.empty(q, (heads, row_blocks, rows * width), np.float32)
    plan = arrays.empty(q, ((tiles + 1) * TILE_BYTES + 16,), np.uint8)
    counter = plan[-16:]
    turns = arrays.empty(q, (heads, row_blocks, 2), np.int32) if launch.deterministic else None
    around = {"scalar": constants["scalar"], "WIDTH": width, "CHAINED": chain > 1}
    before = kernel(ROWS_FILE, f"{NAME}_rows", **around)
    before(
        (longest * heads * sequences,), (256,), launch.problem, out, dout, lse, dlse, side[0],
        side[1], delta, dq_sum, plan, counter, turns, tiles, section, row_blocks,
    )  # fmt: skip
    maps = [
        tensor_maps.tensor_map(x, n) for x, n in ((q, rows), (dout, rows), (k, keys), (v, keys))
    ]
    maps += [tensor_maps.tensor_map(x, 64) for x in (dk, dv)]
    shared = side[0], side[1], dq_sum, dk, dv, plan
    by_copies = ()
    if width < 256:
        shared += dbias, turns
        bias_map, ds_map = maps[0], maps[0]
        if staged is not None:
            bias_map = tensor_maps.tensor_map(staged, rows)
        if ds is not None:
            ds_map = tensor_maps.tensor_map(ds.swapaxes(1, 2), 64)
        by_copies = bias_map, ds_map, ds is not None, chain
    grid = (min(tiles // chain, gpu(q.device.id).multiprocessors),)
    kernel(file, name, **constants)(
        grid, (384,), *maps, launch.problem, *shared, counter, tiles, row_blocks, *by_copies,
        shared_bytes=SHARED_BYTES,
    )  # fmt: skip
    after = kernel(ROWS_FILE, f"{NAME}_dq", **around)
    after((longest * heads * sequences,), (256,), launch.problem, dq_sum, dq, row_blocks)

    if ds is not None:
        dbias = _bias_gradient(ds, bias, launch)
    elif needs[3]:
        dbias = sum_to(dbias, bias.shape).astype(bias.dtype, copy=False)
    dsink = sink_gradient(sink, lse, delta) if needs[8] else None
    return dq, dk, dv, dbias, None, None, None, None, dsink
