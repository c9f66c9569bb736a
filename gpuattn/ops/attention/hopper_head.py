"""raw-hopper-head, self-attention with a thread block per head, in one launch per direction.

The forward takes causal attention alone, the gradient full attention too.

Kernels: ``rawkernels/attention/flash_attention_{forward,backward}_hopper_head.cu``.
"""

import functools
from typing import Any

from gpuattn import rng
from gpuattn.arrays import ctype, get_xp
from gpuattn.cuda import kernels
from gpuattn.cuda.gpu import gpu
from gpuattn.cuda.kernels import kernel, kernel_refusal
from gpuattn.cuda.tensor_maps import refusal, tensor_map
from gpuattn.errors import SlowerRefusal
from gpuattn.ops.attention.gradient import gradient_arrays, output_gradients
from gpuattn.ops.attention.launch import Launch, drops, outputs, result, tma_refusal
from gpuattn.typing import Array

FORWARD_FILE = "attention/flash_attention_forward_hopper_head.cu"
BACKWARD_FILE = "attention/flash_attention_backward_hopper_head.cu"
FORWARD, BACKWARD = "flash_attention_forward_head", "flash_attention_backward_head"  # kernels
MAX_LENGTH, MAX_HEAD_DIM = 256, 64
MIN_FASTER_LENGTH = 97  # for shorter sequences raw-hopper was measured faster
MIN_FULL_LENGTH = 193  # of the gradient without a causal mask, which has four blocks
MAX_ROWS = 2**31  # of all heads, for 32-bit offsets
BLOCK, BLOCK_BYTES = 64, 8192  # rows of a block of q, k or v, and its bytes
FORWARD_THREADS, FORWARD_BLOCKS = 640, 4  # blocks of a head
FORWARD_WORD_BYTES = 14 << 10  # of a head in the tables of dropout
BACKWARD_THREADS, BACKWARD_STAGES = 512, 5  # blocks of queries in shared memory at a time
FULL_STAGES, FULL_SUM_BYTES = 4, 32 << 10  # without a mask: the same; sums of dq
BACKWARD_ROW_BYTES, BACKWARD_WORD_BYTES = 512, 2064 + 1024  # of a block: lse and delta; dropout


# ---- which calls --------------------------------------------------------------------------------


def _refuse(
    q, k, v, bias, key_lengths, cu_q, cu_k, slopes, sink, *, softcap, max_seqlen_q, max_seqlen_k,
    **_,
):  # fmt: skip
    """Return why neither direction can run here, or None."""
    if reason := kernel_refusal(q, "q"):
        return reason
    if not max_seqlen_q == max_seqlen_k <= MAX_LENGTH:
        return (
            f"the longest lengths of queries and keys are {max_seqlen_q} and {max_seqlen_k}, the "
            f"kernel takes equal ones up to {MAX_LENGTH}"
        )
    features = {
        "bias": bias, "key_lengths": key_lengths, "cu_seqlens": cu_q, "alibi_slopes": slopes,
        "sink": sink, "softcap": softcap or None,
    }  # fmt: skip
    used = [name for name, value in features.items() if value is not None]
    if used:
        return f"{', '.join(used)} given, the kernel takes none"
    size = max(q.shape[-1], v.shape[-1])
    if size > MAX_HEAD_DIM:
        return f"the head size is {size}, the kernel takes multiples of 8 up to {MAX_HEAD_DIM}"
    if q.shape[-2] != k.shape[-2]:
        return f"q has {q.shape[-2]} heads, k has {k.shape[-2]}, the kernel takes equal numbers"
    if min(q.size, k.size, v.size) == 0:
        return "q, k or v is empty"
    if q.size // q.shape[-1] >= MAX_ROWS:
        return f"there are {q.size // q.shape[-1]} rows of q, the kernel takes fewer than 2^31"
    return tma_refusal(q, k, v)


def _refuse_short(length):
    if length < MIN_FASTER_LENGTH:
        return SlowerRefusal(
            f"the sequences have {length} tokens; it is the fastest form from {MIN_FASTER_LENGTH}"
        )
    return None


def refuse_forward(
    *inputs: Any, window: tuple, scale: float, max_seqlen_q: int, max_seqlen_k: int, **params: Any
) -> str | None:
    """Return why the forward does not run here, or None.

    Depends on no number of sequences or heads, so neither do the bits of a sequence.
    """
    params |= {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    if reason := _refuse(*inputs, **params):
        return reason
    if window[1] != 0:
        return "there is no causal mask, the kernel takes causal self-attention"
    if window[0] is not None and window[0] < max_seqlen_k:
        return f"the window ends {window[0]} keys to the left, the kernel takes no such limit"
    if scale <= 0:
        return f"scale is {scale}, the kernel takes positive ones"
    return _refuse_short(max_seqlen_q)


def refuse_backward(
    *inputs: Any, max_seqlen_q: int, window: tuple, dropout_p: float, **params: Any
) -> str | None:
    """Return why the gradient does not run here, or None."""
    if reason := _refuse(*inputs, max_seqlen_q=max_seqlen_q, **params):
        return reason
    if window[1] != 0:
        if window != (None, None) or drops(dropout_p):
            return (
                f"there is no causal mask, and the window is {window}, dropout_p {dropout_p}; "
                "without a mask the kernel takes (None, None) and 0"
            )
        if max_seqlen_q < MIN_FULL_LENGTH:
            return (
                f"there is no causal mask, and the sequences have {max_seqlen_q} tokens; without "
                f"one the kernel takes {MIN_FULL_LENGTH} to {MAX_LENGTH}"
            )
    if reason := _refuse_short(max_seqlen_q):
        return reason
    q = inputs[0]
    heads, blocks = q.shape[0] * q.shape[2], gpu(q.device.id).multiprocessors
    if heads < blocks:
        return SlowerRefusal(
            f"there are {heads} heads in all; it is the fastest form from {blocks}, one per "
            "multiprocessor"
        )
    return None


# ---- both directions ----------------------------------------------------------------------------


def forward_shared_bytes(dropout: bool) -> int:
    """Return the shared memory of a thread block, as the kernel lays it out."""
    words = FORWARD_WORD_BYTES if dropout else 0
    return 1024 + 2 * (3 * FORWARD_BLOCKS * BLOCK_BYTES + words + 72)


def backward_shared_bytes(dropout: bool, causal: bool) -> int:
    """Return the shared memory of a thread block, as the kernel lays it out."""
    words = BACKWARD_WORD_BYTES if dropout else 0
    stage = 4 * BLOCK_BYTES + BACKWARD_ROW_BYTES + words + 4 * 8
    stages, sums = (BACKWARD_STAGES, 0) if causal else (FULL_STAGES, FULL_SUM_BYTES)
    return 1024 + stages * stage + 6 * BLOCK_BYTES + sums + 64


def _grid(launch, q):
    return (min(launch.sequences * launch.heads, gpu(q.device.id).multiprocessors),)


def _dropout_arguments(launch, dropout_p, key):
    """Return what the kernels draw the bits of dropout from."""
    if not launch.dropout:
        return 0, 0, 0, 0, 0, None
    return rng.threshold(dropout_p), *rng.device_arguments(key)


def _forward_kernel(launch, q):
    """Return (kernel, grid, block, shared bytes)."""
    run = kernel(FORWARD_FILE, FORWARD, scalar=ctype(q.dtype), DROPOUT=launch.dropout)
    return run, _grid(launch, q), (FORWARD_THREADS,), forward_shared_bytes(launch.dropout)


def forward(
    q: Array, k: Array, v: Array, *extras: Any, needs: tuple, key: Any, dropout_p: float,
    **params: Any,
) -> tuple:  # fmt: skip
    """Return (out, lse) and what the gradient needs."""
    out, lse = outputs(q, v)
    launch = Launch(q, k, v, *extras, **params, key=key, dropout_p=dropout_p, out=out, tables=False)
    run, grid, block, shared = _forward_kernel(launch, q)
    maps = [tensor_map(x, BLOCK) for x in (q, k, v)]
    random = _dropout_arguments(launch, dropout_p, key)
    run(grid, block, *maps, launch.problem, out, lse, *random, shared_bytes=shared)
    return result((q, k, v, *extras), out, lse, needs)


def describe(q: Array, *others: Any, **params: Any) -> dict[str, Any]:
    """Return what the forward uses of the GPU: see ``impls.WORDS``."""
    launch = Launch(q, *others, **params, tables=False)
    run, *shape = _forward_kernel(launch, q)
    heads = launch.sequences * launch.heads
    waves = heads / gpu(q.device.id).multiprocessors
    limit = "fewer heads than multiprocessors" if waves < 1 else "latency of memory and barriers"
    tiles = heads * -(-launch.queries // BLOCK)
    found = {"tile": (BLOCK, BLOCK), **run.resources(*shape)}
    return found | {"tiles": tiles, "waves": waves, "limit": limit}


def compile_backward(q: Array, *_: Any, window: tuple, dropout_p: float, **__: Any) -> None:
    """Start to compile the kernel of the gradient."""
    _compile_backward(q.device.id, q.dtype, window[1] == 0, drops(dropout_p))


@functools.lru_cache
def _compile_backward(device, dtype, causal, dropout):
    kernels.compile_ahead(BACKWARD_FILE, scalar=ctype(dtype), CAUSAL=causal, DROPOUT=dropout)


def backward(
    saved: tuple, dout: Any, dlse: Any, *, needs: tuple, into: tuple, key: Any, dropout_p: float,
    **params: Any,
) -> tuple:  # fmt: skip
    """Return the gradients of q, k and v (None for the rest)."""
    q, k, v, *extras, out, lse = saved
    lse, dout, dlse = output_gradients(q, out, lse, dout, dlse)
    xp = get_xp(q)
    out, dout = (xp.ascontiguousarray(x) if refusal(x, "x") else x for x in (out, dout))
    dq, dk, dv = gradient_arrays((q, k, v), into)
    causal = params["window"][1] == 0
    launch = Launch(q, k, v, *extras, **params, key=key, dropout_p=dropout_p, out=out, tables=False)
    maps = [tensor_map(x, BLOCK) for x in (q, dout, k, v)]
    maps += [tensor_map(x, 16) for x in (dq, dk, dv)]  # the rows that one warp stores
    random = _dropout_arguments(launch, dropout_p, key)
    constants = {"scalar": ctype(q.dtype), "CAUSAL": causal, "DROPOUT": launch.dropout}
    kernel(BACKWARD_FILE, BACKWARD, **constants)(
        _grid(launch, q), (BACKWARD_THREADS,), *maps, launch.problem, out, lse, dlse, *random,
        shared_bytes=backward_shared_bytes(launch.dropout, causal),
    )  # fmt: skip
    return dq, dk, dv, *(None,) * 6
