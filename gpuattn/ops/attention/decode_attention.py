"""Attention of a few new tokens over a key-value cache: one step of a decoder.

The cost is reading the cache once. Only all multiprocessors together read at full speed, so the
keys of a sequence are split over blocks, whose results are then combined ("Flash-Decoding", Dao et
al., 2023). Query heads and batch rows that share keys read them once. Reference:
``decode_reference.py``. Device code in ``rawkernels/attention/cache/``: ``decode_attention.cu``
(tensor cores), ``decode_attention_simt.cu`` (any dtype and strides),
``decode_attention_combine.cu``.
"""

import functools
import math
from operator import itemgetter
from typing import Any

import numpy as np

from gpuattn import arrays
from gpuattn.arrays import check_floats, check_together, ctype, get_xp, index_flag
from gpuattn.autodiff.tape import op, raw
from gpuattn.cuda.gpu import AMPERE, gpu, tensor_core_refusal
from gpuattn.cuda.kernels import kernel, kernel_refusal
from gpuattn.errors import problem
from gpuattn.impls import Call, Impl, Impls
from gpuattn.ops.arguments import check_flags, integer, number, take_arrays
from gpuattn.ops.attention import decode_reference
from gpuattn.ops.attention.launch import UNLIMITED
from gpuattn.typing import Array

NAME = "decode_attention"
MAX_QUERIES = 16
PAGE_STEP = 16  # the keys of a page are a multiple of it
MAX_HEAD_DIM = 256
MAX_BLOCKS = 2**31 - 1
FIXED_SPLIT = 512  # keys of a split with batch_invariant
SPLIT_KEYS = 64  # the keys of a split are a multiple of it; attention/cache/decode.cuh
BLOCK_COST = 4  # time of a block without keys, in units of SPLIT_KEYS keys; measured
COMBINE_COST = 3  # time to combine splits, in the same unit
MAX_SPLITS = 8192  # the combining kernel holds their weights in shared memory
STAGES = {64: (64, 4), 128: (64, 3), 256: (32, 3)}  # HEAD_DIM: keys of a stage, stages at most
TURING_STAGES = {64: (64, 3), 128: (32, 3), 256: (16, 3)}  # the same before 8.0, in 64 KiB
KEY_BYTES, FIXED_BYTES = 16, 512  # of shared memory: the places of a key of a stage; of a block

POINTERS = ("lengths", "pages", "slots", "slopes", "sink", "flag")
PROBLEM = np.dtype(
    [(name, np.int64, 4) for name in ("q", "k", "v")]
    + [("outputs", np.int64)]
    + [(name, np.uint64) for name in POINTERS]
    + [(name, np.int32) for name in (
        "sharers", "queries", "heads", "kv_heads", "group", "rows", "keys", "head_dim", "value_dim",
        "page", "page_count", "max_pages", "beam", "window", "slopes_batch", "splits", "chunk",
    )]
    + [(name, np.float32) for name in ("scale", "softcap")],
    align=True,
)  # fmt: skip
"""The struct Decode of ``rawkernels/attention/cache/decode.cuh``."""


@op
def decode_attention(
    q: Array, k_cache: Array, v_cache: Array, lengths: Array, *, scale: float | None = None,
    window: int | None = None, softcap: float | None = None, alibi_slopes: Array | None = None,
    sink: Array | None = None, page_table: Array | None = None, slots: Array | None = None,
    splits: int | None = None, batch_invariant: bool = False, return_lse: bool = False,
    impl: str | None = None,
) -> Any:  # fmt: skip
    """Return the output (B, T, H, Dv) in the dtype of ``q``; with ``return_lse``, (out, lse).

    ``q``: (B, T, H, D), the last T tokens of each sequence, 1 to 16. ``k_cache``: (N, S, Hk, D),
    ``v_cache``: (N, S, Hk, Dv), arrays of one float dtype with any strides; Hk divides H.
    ``lengths`` (N,) int32, on the device: the keys that the last query sees (clipped to 0 .. S), so
    query i is aligned with key lengths - T + i and sees none after it. N divides B: rows n * B / N
    up to (n + 1) * B / N of ``q`` share sequence n, as the beams of a sentence share its memory.

    ``page_table`` (N, P) int32: the caches are pages (pages, page, Hk, D), page a multiple of 16;
    key j of sequence n is in row j % page of page ``page_table[n, j // page]``. Entries past the
    end of a sequence are not read.
    ``slots`` (N / K, K, S) int16, beam search over K beams without copies: key j of sequence
    b * K + i is in sequence b * K + ``slots[b, i, j]`` of the cache.

    ``scale``, ``softcap``, ``alibi_slopes`` (H,) or (B, H), ``sink`` (H,) as in
    ``flash_attention``; ``window``: the most keys seen before a query's own, None for all.
    ``splits``: blocks that the keys of one sequence are split over, by default as many as fill the
    GPU. ``batch_invariant``: each split has a fixed number of keys, so that the bits of a sequence
    do not depend on the batch.
    ``lse``: log(sum(exp(logits))), float32 (float64 of float64), (B, H, T).
    A query that sees no key gives 0, lse -inf (the sink, if there is one). There is no gradient.

    The call does not synchronize and its launches depend on shapes alone, so that a CUDA graph of
    it can be replayed with other lengths. ``impl``: "raw-ampere" (16-bit, tensor cores; on 7.5
    float16 alone), "raw-simt", "reference", or None for the first that accepts. Raises ValueError
    for shapes or parameters that do not fit, TypeError for dtypes; a page or a slot out of range is
    an IndexError (from a GPU: at the next ``to_cpu``).
    """
    inputs = take_arrays(
        NAME,
        {"q": q, "k_cache": k_cache, "v_cache": v_cache, "lengths": lengths},
        {"page_table": page_table, "slots": slots, "alibi_slopes": alibi_slopes, "sink": sink},
    )
    given = {name: raw(x) for name, x in inputs.items()}
    check_together(NAME, **given)
    _check(**given)
    check_flags(NAME, batch_invariant=batch_invariant, return_lse=return_lse)
    if window is not None:
        window = integer(NAME, "window", window, "None, or a width >= 0")
    if softcap is not None:
        accepted = "a positive number, or None"
        softcap = number(NAME, "softcap", softcap, accepted, lambda c: 0 < c < math.inf)
    if splits is not None:
        splits = integer(NAME, "splits", splits, f"1 to {MAX_SPLITS}, or None", 1, MAX_SPLITS)
    if splits is not None and batch_invariant:
        raise ValueError(problem(NAME, "splits", splits, "None with batch_invariant"))
    scale = given["q"].shape[-1] ** -0.5 if scale is None else number(NAME, "scale", scale)
    return Call(
        IMPLS, inputs.values(), impl, scale=scale, window=window, softcap=softcap, splits=splits,
        batch_invariant=bool(batch_invariant), finish=None if return_lse else itemgetter(0),
    )  # fmt: skip


def check_cache(
    function: str, k_cache: Array, v_cache: Array, lengths: Array, page_table: Array | None
) -> tuple[int, int, int]:
    """Raise for arrays of a cache that do not match; return (sequences, most keys, KV heads)."""
    form = "(pages, page, Hk, D)" if page_table is not None else "(N, S, Hk, D)"
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        if x.ndim != 4:
            raise ValueError(problem(function, f"{name}.shape", x.shape, form))
    if k_cache.shape[:-1] != v_cache.shape[:-1]:
        accepted = f"{k_cache.shape[:-1]} + (Dv,), as in k_cache"
        raise ValueError(problem(function, "v_cache.shape", v_cache.shape, accepted))
    sequences, room, kv_heads, _ = k_cache.shape
    if page_table is not None:
        check_integers(function, "page_table", page_table, np.int32)
        if page_table.ndim != 2 or not sequences:
            got = f"of shape {page_table.shape} for {sequences} pages"
            raise ValueError(problem(function, "page_table", got, "(N, P) for 1 page or more"))
        if not room or room % PAGE_STEP:
            accepted = f"a multiple of {PAGE_STEP}"
            raise ValueError(problem(function, "the page, k_cache.shape[1],", room, accepted))
        sequences, room = page_table.shape[0], page_table.shape[1] * room
    check_integers(function, "lengths", lengths, np.int32)
    if lengths.shape != (sequences,):
        accepted = f"({sequences},), one for each sequence of the cache"
        raise ValueError(problem(function, "lengths.shape", lengths.shape, accepted))
    return sequences, room, kv_heads


def check_integers(function: str, name: str, x: Array, dtype: Any) -> None:
    """Raise TypeError unless ``x``, the argument ``name``, has this integer dtype."""
    if x.dtype != dtype:
        raise TypeError(problem(function, f"{name}.dtype", x.dtype, np.dtype(dtype).name))


def _check(q, k_cache, v_cache, lengths, page_table, slots, alibi_slopes, sink):
    check_floats(NAME, q=q, k_cache=k_cache, v_cache=v_cache)
    if q.ndim != 4:
        raise ValueError(problem(NAME, "q.shape", q.shape, "(B, T, H, D)"))
    B, T, H, D = q.shape
    sequences, room, kv_heads = check_cache(NAME, k_cache, v_cache, lengths, page_table)
    if not 1 <= T <= MAX_QUERIES:
        advice = "Longer prompts are for flash_attention."
        raise ValueError(problem(NAME, "T, q.shape[1],", T, f"1 to {MAX_QUERIES}", advice))
    if k_cache.shape[-1] != D or not D or not v_cache.shape[-1]:
        sizes = f"{D}, {k_cache.shape[-1]} and {v_cache.shape[-1]}"
        accepted = "the same size >= 1 for q and k_cache, any size >= 1 for v_cache"
        raise ValueError(problem(NAME, "the head size of q, k_cache and v_cache", sizes, accepted))
    if not kv_heads or not H or H % kv_heads:
        accepted = f"a multiple of the {kv_heads} heads of the caches"
        raise ValueError(problem(NAME, "the number of heads of q", H, accepted))
    if B % sequences if sequences else B:
        accepted = f"a multiple of the {sequences} sequences of the cache"
        raise ValueError(problem(NAME, "B, q.shape[0],", B, accepted))
    if slots is not None:
        if page_table is not None:
            raise ValueError(problem(NAME, "slots", "given with page_table", "one of the two"))
        check_integers(NAME, "slots", slots, np.int16)
        fits = slots.ndim == 3 and slots.shape[0] * slots.shape[1] == sequences
        if not fits or slots.shape[2] != room:
            accepted = f"(N / K, K, S) for N = {sequences} sequences with S = {room} keys"
            raise ValueError(problem(NAME, "slots.shape", slots.shape, accepted))
    for name, x, shapes in (
        ("alibi_slopes", alibi_slopes, ((H,), (B, H))), ("sink", sink, ((H,),)),
    ):  # fmt: skip
        if x is not None and not arrays.is_floating(x.dtype):
            raise TypeError(problem(NAME, f"{name}.dtype", x.dtype, "a float dtype"))
        if x is not None and x.shape not in shapes:
            accepted = " or ".join(map(str, shapes))
            raise ValueError(problem(NAME, f"{name}.shape", x.shape, accepted))


# ---- raw: rawkernels/attention/decode_attention*.cu ---------------------------------------------


def _refuse_simt(
    q, k, v, lengths, page_table, slots, slopes, sink, *, splits, batch_invariant, **_
):
    if reason := kernel_refusal(q, "q"):
        return reason
    size = max(q.shape[-1], v.shape[-1])
    if size > MAX_HEAD_DIM:
        return f"the head size is {size}, the kernel takes 1 to {MAX_HEAD_DIM}"
    if batch_invariant:
        splits = -(-_room(k, page_table) // FIXED_SPLIT)
        if splits > MAX_SPLITS:
            return f"{splits} splits of {FIXED_SPLIT} keys, the kernel takes {MAX_SPLITS}"
    blocks = math.prod(q.shape[:3]) * (splits or 1)
    if blocks > MAX_BLOCKS:
        return f"{blocks} blocks, the kernel takes {MAX_BLOCKS}"
    return None


def _refuse_ampere(q, k, v, *others, **params):
    if reason := _refuse_simt(q, k, v, *others, **params):
        return reason
    if q.dtype == np.float32:
        return "q is float32, tensor cores take float16 or bfloat16"
    if reason := tensor_core_refusal(q.device.id, q.dtype):
        return reason
    for name, x in (("k_cache", k), ("v_cache", v)):
        if reason := arrays.rows_refusal(x, name):
            return reason
    return None


def _forward_ampere(q, *others, needs, **params):
    steps = [step for step, n in zip(q.strides[:3], q.shape[:3], strict=True) if n > 1]
    if q.strides[-1] != q.itemsize or any(step % 4 for step in steps) or q.data.ptr % 4:
        q = get_xp(q).ascontiguousarray(q)  # the kernel reads pairs of elements
    size = max(q.shape[-1], others[1].shape[-1])
    width = next(w for w in (64, 128, 256) if size <= w)
    found = gpu(q.device.id)
    table = STAGES if found.capability >= AMPERE else TURING_STAGES
    stages, shared_bytes = pipeline(width, found.shared_bytes, table)
    constants = {"scalar": ctype(q.dtype), "HEAD_DIM": width, "STAGES": stages}
    run = kernel("attention/cache/decode_attention.cu", NAME, **constants)
    return _launch(run, 64, 3 if width == 64 else 2, shared_bytes, q, *others, **params)


def pipeline(width: int, limit: int, table: dict = STAGES) -> tuple[int, int]:
    """Return (stages, bytes of their tiles) for HEAD_DIM = ``width``.

    ``limit``: bytes of shared memory that a block may have; they also hold the place of each key.
    ``table``: STAGES, or TURING_STAGES.
    """
    keys, most = table[width]
    stages = min(most, (limit - FIXED_BYTES) // (keys * (4 * width + KEY_BYTES)))
    return stages, stages * keys * 4 * width


def _forward_simt(q, *others, needs, **params):
    width = 128 if max(q.shape[-1], others[1].shape[-1]) <= 128 else 256
    constants = {"scalar": ctype(q.dtype), "HEAD_DIM": width}
    run = kernel("attention/cache/decode_attention_simt.cu", f"{NAME}_simt", **constants)
    return _launch(run, 1, 8, 0, q, *others, **params)


def _launch(
    run, block_rows, blocks_per_sm, shared_bytes, q, k, v, lengths, page_table, slots, slopes, sink,
    *, scale, window, softcap, splits, batch_invariant,
):  # fmt: skip
    """Launch one of the kernels, whose blocks compute ``block_rows`` query rows, and combine."""
    (B, T, H, D), kv_heads, value_dim = q.shape, k.shape[2], v.shape[3]
    sequences = len(lengths)
    out = arrays.empty(q, (B, T, H, value_dim))
    lse = arrays.empty(q, (B, H, T), np.float32)
    if B == 0:
        return (out, lse), None
    paged = page_table is not None
    keys = _room(k, page_table)
    window = UNLIMITED if window is None else min(window, UNLIMITED)
    rows, span, chunk = B // sequences * T * (H // kv_heads), min(keys, window + T), 0
    blocks = kv_heads * -(-rows // block_rows) * sequences
    if batch_invariant:
        chunk, splits = FIXED_SPLIT, max(1, -(-span // FIXED_SPLIT))
    elif splits is None:
        splits = best_splits(blocks, span, blocks_per_sm * gpu(q.device.id).multiprocessors)
    indexed = "page_table" if paged else "slots"
    extras = [_contiguous(x) for x in (lengths, page_table, slots)]
    extras += [_contiguous(x, np.float32) for x in (slopes, sink)]
    extras += [index_flag(q, f"{NAME}: {indexed}") if paged or slots is not None else None]
    fields = {
        name: 0 if x is None else x.data.ptr for name, x in zip(POINTERS, extras, strict=True)
    }
    for name, x in (("q", q), ("k", k), ("v", v)):
        fields[name] = [step // x.itemsize for step in x.strides]
    fields |= {
        "outputs": B * T * H, "sharers": B // sequences, "queries": T, "heads": H,
        "kv_heads": kv_heads, "group": H // kv_heads, "rows": rows, "keys": keys, "head_dim": D,
        "value_dim": value_dim, "page": k.shape[1], "page_count": k.shape[0],
        "max_pages": page_table.shape[1] if paged else 0,
        "beam": slots.shape[1] if slots is not None else 0, "window": window,
        "slopes_batch": H if slopes is not None and slopes.ndim == 2 else 0, "splits": splits,
        "chunk": chunk, "scale": scale, "softcap": softcap or 0,
    }  # fmt: skip
    problem = np.array([tuple([fields[name] for name in PROBLEM.names])], PROBLEM)
    parts = parts_lse = None
    if splits > 1:
        parts = arrays.empty(q, (splits, *out.shape), np.float32)
        parts_lse = arrays.empty(q, (splits, B, T, H), np.float32)
    struct = problem.view(f"V{PROBLEM.itemsize}")
    grid = (blocks * splits,)
    run(grid, (128,), struct, q, k, v, out, lse, parts, parts_lse, shared_bytes=shared_bytes)
    if splits > 1:
        file = f"attention/cache/{NAME}_combine.cu"
        combine = kernel(file, f"{NAME}_combine", scalar=ctype(q.dtype))
        arguments = parts, parts_lse, out, lse, splits, value_dim, T, H
        combine((B * T * H,), (256,), *arguments, shared_bytes=4 * splits)
    return (out, lse), None


def _room(k, page_table):
    """Return the most keys of a sequence."""
    return k.shape[1] * (1 if page_table is None else page_table.shape[1])


def _contiguous(x, dtype=None):
    return None if x is None else get_xp(x).ascontiguousarray(x, dtype)


@functools.lru_cache(1024)
def best_splits(blocks: int, keys: int, at_once: int) -> int:
    """Return the number of splits of ``keys``, where each split has ``blocks`` blocks.

    ``at_once``: blocks that the GPU runs at a time. Minimizes waves times the time of a block; of
    equal results it takes the fewest splits.
    """
    steps = -(-keys // SPLIT_KEYS)

    def cost(splits):
        waves = -(-blocks * splits // at_once)
        return waves * (-(-steps // splits) + BLOCK_COST) + (COMBINE_COST if splits > 1 else 0)

    return min(range(1, min(steps, MAX_SPLITS, 4 * at_once) + 1), key=cost, default=1)


IMPLS = Impls(
    NAME,
    Impl("raw-ampere", _forward_ampere, refuse=_refuse_ampere),
    Impl("raw-simt", _forward_simt, refuse=_refuse_simt),
    Impl("reference", decode_reference.forward),
)
