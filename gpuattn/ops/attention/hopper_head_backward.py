"""Attention's gradient by whole heads: ``flash_attention_backward_hopper_head.cu``."""

import functools

import numpy as np

from gpuattn import arrays, rng
from gpuattn.arrays import ctype, get_xp
from gpuattn.cuda import kernels, tensor_maps
from gpuattn.cuda.gpu import gpu
from gpuattn.cuda.kernels import kernel
from gpuattn.ops.attention.launch import Launch, gradient_arrays

FILE, NAME = "attention/flash_attention_backward_hopper_head.cu", "flash_attention_backward_head"
LEAST_LENGTH, MAX_LENGTH, MAX_HEAD_DIM = 97, 256, 64
THREADS = 512
BLOCK, BLOCK_BYTES, PLACES = 64, 8192, 5  # rows of a block, its bytes, places for queries
ROW_BYTES, WORD_BYTES = 512, 2064 + 1024  # of a block: lse and delta; in dropout's tables
MAX_ROWS = 2**31  # of all heads, for 32-bit offsets


def fits(
    q, k, v, bias, key_lengths, cu_q, cu_k, slopes, sink, *, window, softcap, max_seqlen_q,
    max_seqlen_k, **_,
):  # fmt: skip
    """Return whether the kernel can take a gradient that Hopper's others take.

    That is of causal self-attention.
    """
    extras = bias, key_lengths, cu_q, slopes, sink
    if softcap or any(x is not None for x in extras) or q.shape[-2] != k.shape[-2]:
        return False
    if window[1] != 0 or not max_seqlen_q == max_seqlen_k <= MAX_LENGTH:
        return False
    if max(q.shape[-1], v.shape[-1]) > MAX_HEAD_DIM:
        return False
    return min(q.size, k.size, v.size) > 0 and q.size // q.shape[-1] < MAX_ROWS


def takes(q, k, v, *extras, **params):
    """Return whether a gradient is computed here, as measured faster than by tiles.

    That is for heads enough to keep all multiprocessors busy.
    """
    if params["max_seqlen_q"] < LEAST_LENGTH or not fits(q, k, v, *extras, **params):
        return False
    return q.shape[0] * q.shape[2] >= gpu(q.device.id).multiprocessors


def shared_bytes(dropout):
    """Return the shared memory of a thread block, as the kernel lays it out."""
    place = 4 * BLOCK_BYTES + ROW_BYTES + (WORD_BYTES if dropout else 0) + 4 * 8
    return 1024 + PLACES * place + 6 * BLOCK_BYTES + 64


@functools.lru_cache
def compile_ahead(device, dtype, dropout):
    """Begin to compile the kernel beside the forward's."""
    kernels.compile_ahead(FILE, scalar=ctype(dtype), DROPOUT=dropout)


def backward(saved, dout, dlse, *, needs, into, key, dropout_p, **params):
    """Return the gradients of q, k and v (None for the rest)."""
    q, k, v, *extras, out, lse = saved
    xp = get_xp(q)
    dout = arrays.zeros(q, out.shape) if dout is None else dout.astype(q.dtype, copy=False)
    out, dout = (xp.ascontiguousarray(x) if tensor_maps.refusal(x, "x") else x for x in (out, dout))
    lse = xp.ascontiguousarray(lse)
    dlse = None if dlse is None else xp.ascontiguousarray(dlse, np.float32)
    dq, dk, dv = gradient_arrays((q, k, v), into)
    launch = Launch(q, k, v, *extras, **params, key=key, dropout_p=dropout_p, out=out, tables=False)
    maps = [tensor_maps.tensor_map(x, BLOCK) for x in (q, dout, k, v)]
    maps += [tensor_maps.tensor_map(x, 16) for x in (dq, dk, dv)]  # a warp's rows
    random = 0, 0, 0, 0, 0, None
    if launch.dropout:
        random = rng.threshold(dropout_p), *rng.device_arguments(key)
    grid = (min(launch.sequences * launch.heads, gpu(q.device.id).multiprocessors),)
    kernel(FILE, NAME, scalar=ctype(q.dtype), DROPOUT=launch.dropout)(
        grid, (THREADS,), *maps, launch.problem, out, lse, dlse, *random,
        shared_bytes=shared_bytes(launch.dropout),
    )  # fmt: skip
    return dq, dk, dv, *(None,) * 6
