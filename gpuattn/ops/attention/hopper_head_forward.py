"""Causal attention by whole heads: ``attention/flash_attention_forward_hopper_head.cu``."""

from gpuattn import rng
from gpuattn.arrays import ctype
from gpuattn.cuda.gpu import gpu
from gpuattn.cuda.kernels import kernel
from gpuattn.cuda.tensor_maps import tensor_map
from gpuattn.ops.attention import hopper_head_backward
from gpuattn.ops.attention.hopper_head_backward import BLOCK, BLOCK_BYTES, LEAST_LENGTH

FILE, NAME = "attention/flash_attention_forward_hopper_head.cu", "flash_attention_forward_head"
THREADS, BLOCKS = 640, 4  # blocks of a head
WORD_BYTES = 14 << 10  # of a head in dropout's tables


def takes(q, k, v, *extras, window, scale, max_seqlen_q, max_seqlen_k, **params):
    """Return whether attention that Hopper's kernel takes is computed here, as measured faster.

    It depends on no number of sequences or heads, so neither do a sequence's bits.
    """
    left, _ = window
    unbanded = left is None or left >= max_seqlen_k
    if not unbanded or scale <= 0 or max_seqlen_q < LEAST_LENGTH:
        return False
    lengths = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    return hopper_head_backward.fits(q, k, v, *extras, window=window, **lengths, **params)


def shared_bytes(dropout):
    """Return the shared memory of a thread block, as the kernel lays it out."""
    return 1024 + 2 * (3 * BLOCKS * BLOCK_BYTES + (WORD_BYTES if dropout else 0) + 72)


def _kernel(q, launch):
    """Return the kernel of a call and its grid, block and shared memory."""
    grid = (min(launch.sequences * launch.heads, gpu(q.device.id).multiprocessors),)
    chosen = kernel(FILE, NAME, scalar=ctype(q.dtype), DROPOUT=launch.dropout)
    return chosen, grid, (THREADS,), shared_bytes(launch.dropout)


def forward(launch, q, k, v, out, lse, *, key, dropout_p):
    """Fill ``out`` and ``lse``. ``launch``: of the call, without dropout's tables."""
    random = 0, 0, 0, 0, 0, None
    if launch.dropout:
        random = rng.threshold(dropout_p), *rng.device_arguments(key)
    run, grid, block, shared = _kernel(q, launch)
    maps = [tensor_map(x, BLOCK) for x in (q, k, v)]
    run(grid, block, *maps, launch.problem, out, lse, *random, shared_bytes=shared)


def describe(launch, q):
    """Return what it takes of the GPU: see ``impls.WORDS``."""
    run, *how = _kernel(q, launch)
    heads = launch.sequences * launch.heads
    waves = heads / gpu(q.device.id).multiprocessors
    limit = "fewer heads than multiprocessors" if waves < 1 else "memory, and waits"
    tile, taken = (BLOCK, BLOCK), run.resources(*how)
    tiles = heads * -(-launch.queries // BLOCK)
    return {"tile": tile, **taken, "tiles": tiles, "waves": waves, "limit": limit}
