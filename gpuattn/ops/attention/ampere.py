"""Attention on tensor cores, a warp at a time: ``attention/flash_attention_forward_ampere.cu``."""

import numpy as np

from gpuattn import arrays
from gpuattn.arrays import ctype, rows_refusal
from gpuattn.cuda.gpu import gpu
from gpuattn.cuda.kernels import kernel, kernel_refusal
from gpuattn.ops.attention import short
from gpuattn.ops.attention.launch import Launch, tiles_refusal

MAX_HEAD_DIM, MAX_TF32_HEAD_DIM = 256, 128
WIDTHS = (32, 64, 96, 128, 256)  # what HEAD_DIM is rounded up to
THREADS = 128


def refuse(
    q, k, v, bias, key_lengths, cu_q, *_, max_seqlen_q, max_seqlen_k, tf32=False, **__
):  # fmt: skip
    for name, x in {"q": q, "k": k, "v": v}.items():
        if reason := kernel_refusal(x, name):
            return reason
        if x.dtype == np.float32 and not tf32:
            return f"{name} is float32: tf32=True lets tensor cores round it to TF32"
        if reason := rows_refusal(x, name):
            return reason
    size = max(q.shape[-1], v.shape[-1])
    limit = MAX_TF32_HEAD_DIM if q.dtype == np.float32 else MAX_HEAD_DIM
    if size > limit:
        return f"the head size is {size}, of {q.dtype} the kernel takes at most {limit}"
    return tiles_refusal(q, cu_q, max_seqlen_q, max_seqlen_k)


def forward(q, k, v, *extras, needs, **params):
    if short.suits(q, k, v, *extras, **params):
        return short.forward(q, k, v, *extras, needs=needs, **params)
    *lead, rows, heads, _ = q.shape
    out = arrays.empty(q, (*q.shape[:-1], v.shape[-1]))
    lse = arrays.empty(q, (*lead, heads, rows), np.float32)
    launch = Launch(q, k, v, *extras, **params, out=out)
    run, shape, _ = _plan(launch, q, v)
    run(*shape[:2], launch.problem, q, k, v, out, lse, shared_bytes=shape[2])
    return (out, lse), ((q, k, v, *extras, out, lse) if any(needs) else None)


def describe(q, k, v, *extras, **params):
    """Return what the forward takes of the GPU: see ``impls.WORDS``."""
    if short.suits(q, k, v, *extras, **params):
        return short.describe(q, k, v, *extras, **params)
    run, shape, tile = _plan(Launch(q, k, v, *extras, **params), q, v)
    return {"tile": tile, **run.resources(*shape)}


def _plan(launch, q, v):
    """Return the forward kernel, its (grid, block, shared bytes), and (queries, keys) of a tile."""
    width = next(w for w in WIDTHS if max(q.shape[-1], v.shape[-1]) <= w)
    features = {"EXTRAS": launch.extras, "DROPOUT": launch.dropout}
    run = kernel(
        "attention/flash_attention_forward_ampere.cu", "flash_attention_forward",
        scalar=ctype(q.dtype), HEAD_DIM=width, **features,
    )  # fmt: skip
    capability = gpu(q.device.id).capability
    plain = not any(features.values())
    rows, keys = tile = forward_tile(width, q.itemsize, plain, capability)
    grid = (-(-launch.queries // rows) * launch.heads * launch.sequences,)
    return run, (grid, (THREADS,), shared_bytes(width, q.itemsize, *tile)), tile


def forward_tile(width, itemsize, plain, capability):
    """Return the queries and keys of a tile of the forward kernel for HEAD_DIM = ``width``."""
    rows = 64 if width * itemsize > 256 else 128
    if itemsize == 4 or width > 128:
        return rows, 32
    if plain:
        return rows, 48 if width > 64 and capability < 90 else 64
    return rows, 32 if width > 64 else 48


def shared_bytes(width, itemsize, rows, keys):
    """Return the bytes of the tiles: one of queries, two of keys, two of values."""
    return -(-width * itemsize // 128) * 128 * (rows + 4 * keys)
