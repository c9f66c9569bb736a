"""Attention of one new token of each text, over a cache that its keys and values join.

It is ``append_kv`` and ``decode_attention`` in one launch, for short texts: a block for each KV
head of a sentence, and no splits to combine. Device code:
``rawkernels/attention/cache/step_attention.cu``.
"""

from typing import Any

import numpy as np

from gpuattn import arrays
from gpuattn.arrays import check_floats, check_together, ctype
from gpuattn.autodiff.tape import op
from gpuattn.cuda.gpu import gpu, hopper_refusal, tensor_core_refusal
from gpuattn.cuda.kernels import kernel, kernel_refusal
from gpuattn.cuda.tensor_maps import tensor_map
from gpuattn.errors import SlowerRefusal, problem
from gpuattn.impls import Call, Impl, Impls
from gpuattn.modes import mode
from gpuattn.ops.attention.append_kv import append_kv
from gpuattn.ops.attention.decode_attention import decode_attention
from gpuattn.ops.attention.flash_attention import flash_attention
from gpuattn.typing import Array

NAME, FILE = "step_attention", "attention/cache/step_attention.cu"
HOPPER_NAME, HOPPER_FILE = "step_attention_hopper", "attention/cache/step_attention_hopper.cu"
GROUP, COLUMNS = 16, 8  # of a product: keys, and columns, pairs of a beam and a head
HEAD_DIMS = 32, 64, 128
PAGE = 64  # keys of a page that the kernel takes
SHORT_ROOM = 1024  # keys of a text at most; beyond, splitting them over blocks is faster
FEW_KEYS = 96  # of a text at most, for two warps of a head; measured with 64
BEAM_ROOM = 512  # with beams, whose list of rows is in shared memory
# Warps of a block from so many blocks of a multiprocessor on, else 4: with beams, of memories
BEAM_WARPS, MEMORY_WARPS = ((1, 12), (2, 4)), ((1, 24), (2, 12))
SHORT_MEMORY = 32  # keys, for which two warps are enough
APPEND, SETTLED, MEMORY = range(3)  # MODE of the kernel
LISTS, LISTED = 1, 2  # BEAMS of the kernel
LISTED_BEAMS = 8
HOPPER_HEAD_DIM = 64
# of pages: warps of a block where a multiprocessor has up to so many blocks, and else
WARPS_OF_PAGES, FEW_WARPS = ((1, 8), (3, 4)), 2
RING = 8192 + 16  # bytes of shared memory of a warp: two groups of keys and values, their barriers
SHARED = 233472  # bytes of a multiprocessor, of which each block takes 1,024 besides its own


@op
def step_attention(
    q: Any, k: Any, v: Any, k_cache: Any, v_cache: Any, key_counts: Any, slots: Any = None, *,
    listed: tuple[Any, Any] | None = None, page_table: Any = None, settled: bool = False,
    impl: str | None = None,
) -> Call[Array]:  # fmt: skip
    """Store k and v as the last keys and values of their texts; return the attention of ``q``.

    ``q``: (N, 1, H, D); ``k``, ``v``: (N, 1, Hk, D). Row b * K + i is beam i of sentence b. The
    caches: (N, S, Hk, D), contiguous. ``key_counts`` (N,) int32: keys of each text with the new
    one, 1 to S, the same for all beams of a sentence. ``slots`` (N / K, K, S) int16: key j of row
    b * K + i lies in row b * K + ``slots[b, i, j]``; of a new key that is i. ``listed``: the rows
    that these say for old keys, each once, in the order of keys, so that not each block has to find
    them: uint32 (N / K, K * S), i * S + j for key j in the row of beam i, and from bit 24 on a bit
    for each of up to LISTED_BEAMS beams that sees it; and how many there are, int32 (N / K,). Or,
    instead of ``slots``, ``page_table`` (N, P) int32: the caches are pages (pages, page, Hk, D),
    page a multiple of 16, and key j of row n is in row j % page of page
    ``page_table[n, j // page]``; rows may share pages, but that of a new key is written.
    ``settled``: what wrote the caches, ``key_counts``, ``slots``, ``listed`` and ``page_table`` was
    over before the launch before this one let it start, so they may be read beside that. Returns
    (N, 1, H, D). Raises ValueError for shapes that do not fit, TypeError for dtypes. There is no
    gradient.
    """
    rows_seen, row_counts = listed or (None, None)
    given = {"q": q, "k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache}
    tables = {"slots": slots, "page_table": page_table, "listed": rows_seen}
    check_together(NAME, **given, key_counts=key_counts, **tables)
    check_floats(NAME, **given)
    if (slots is None) == (page_table is None):
        got = "none given" if slots is None else "both given"
        raise ValueError(problem(NAME, "slots, page_table", got, "one of the two"))
    rows, room, kv_heads, head_dim = k_cache.shape
    indexed: tuple[str, Any, tuple[int, ...]]
    if page_table is None:
        indexed = "slots", slots, (slots.shape[0], rows // max(slots.shape[0], 1), room)
    else:
        rows = len(q)
        indexed = "page_table", page_table, (rows, page_table.shape[-1])
    seen: tuple[Any, ...] = ()
    if listed:
        sentences = indexed[2][0]
        seen = ("listed[0]", rows_seen, (sentences, rows // sentences * room)), (
            "listed[1]", row_counts, (sentences,),
        )  # fmt: skip
    heads = q.shape[2] if q.ndim == 4 else 0
    new = rows, 1, kv_heads, head_dim
    for name, x, accepted in (
        ("q", q, (rows, 1, heads, head_dim)), ("k", k, new), ("v", v, new),
        ("v_cache", v_cache, k_cache.shape), ("key_counts", key_counts, (rows,)), indexed, *seen,
    ):  # fmt: skip
        if x.shape != accepted:
            raise ValueError(problem(NAME, f"{name}.shape", x.shape, accepted))
    if heads % kv_heads:
        accepted = f"a multiple of the {kv_heads} heads of k and v"
        raise ValueError(problem(NAME, "the number of heads of q", heads, accepted))
    inputs = q, k, v, k_cache, v_cache, key_counts, slots, rows_seen, row_counts, page_table
    return Call(IMPLS, inputs, impl, settled=settled)


# ---- by two ops ---------------------------------------------------------------------------------


def _forward_by_two(
    q, k, v, k_cache, v_cache, key_counts, slots, rows_seen, row_counts, page_table, *, settled,
    needs,
):  # fmt: skip
    append_kv(k_cache, v_cache, k, v, key_counts - 1, page_table=page_table)
    return decode_attention(
        q, k_cache, v_cache, key_counts, slots=slots, page_table=page_table,
        batch_invariant=mode.get().batch_invariant,
    ), None  # fmt: skip


# ---- raw-hopper: rawkernels/attention/cache/step_attention_hopper.cu ----------------------------


def _refuse_hopper(q, *others, settled, needs):
    if reason := _refuse_raw(q, *others, settled=settled, needs=needs):
        return reason
    if reason := hopper_refusal(q.device.id):
        return reason
    if others[-1] is None:
        return "texts have their keys side by side, the kernel takes pages"
    if q.shape[-1] != HOPPER_HEAD_DIM:
        return f"the head size is {q.shape[-1]}, the kernel takes {HOPPER_HEAD_DIM}"
    return None


def _spread(blocks, multiprocessors):
    """Return the warps of a block over pages, and its bytes of shared memory.

    Few blocks have more warps; not under ``batch_invariant``, as that changes the order of sums. A
    block takes so much memory that none is a multiprocessor's while others have fewer.
    """
    each = -(-blocks // multiprocessors)
    fitting = (warps for most, warps in WARPS_OF_PAGES if each <= most)
    warps = 4 if mode.get().batch_invariant else next(fitting, FEW_WARPS)
    at_once = -(-each // -(-each // (16 // warps)))  # in equal rounds, by the kernel's registers
    return warps, max(1024 + warps * RING + 256, SHARED // (at_once + 1) - 1024 + 128)


def _forward_hopper(
    q, k, v, k_cache, v_cache, key_counts, slots, rows_seen, row_counts, page_table, *, settled,
    needs,
):  # fmt: skip
    rows, _, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    out = arrays.empty(q, q.shape)
    grid = rows * kv_heads, -(-heads // kv_heads // COLUMNS)
    warps, shared = _spread(grid[0] * grid[1], gpu(q.device.id).multiprocessors)
    maps = [tensor_map(x.reshape(-1, kv_heads, head_dim), GROUP) for x in (k_cache, v_cache)]
    steps = [x.strides[0] // x.itemsize for x in (q, k, v)]
    constants = {"scalar": ctype(q.dtype), "WARPS": warps, "SETTLED": int(settled)}
    kernel(HOPPER_FILE, HOPPER_NAME, **constants)(
        grid, (32 * warps,), *maps, q, k, v, k_cache, v_cache, key_counts, page_table, out, *steps,
        heads, kv_heads, page_table.shape[1], np.float32(head_dim**-0.5), shared_bytes=shared,
    )  # fmt: skip
    return out, None


# ---- raw-ampere: rawkernels/attention/cache/step_attention.cu -----------------------------------


def _refuse_raw(
    q, k, v, k_cache, v_cache, key_counts, slots, rows_seen, row_counts, page_table, *, settled,
    needs,
):  # fmt: skip
    if reason := kernel_refusal(q, "q"):
        return reason
    if q.itemsize != 2:
        return f"q is {q.dtype}, the kernel takes float16 or bfloat16"
    if reason := tensor_core_refusal(q.device.id, q.dtype):
        return reason
    head_dim, room = q.shape[-1], k_cache.shape[1]
    if page_table is not None:
        if room != PAGE:
            return f"a page has {room} keys, the kernel takes {PAGE}"
        if not page_table.flags.c_contiguous:
            return "the page table is not contiguous"
        room *= page_table.shape[1]
    if head_dim not in HEAD_DIMS:
        return f"the head size is {head_dim}, the kernel takes 32, 64 or 128"
    for name, x in (("q", q), ("k", k), ("v", v)):
        by_heads = x.strides[-1] == x.itemsize and x.strides[-2] == head_dim * x.itemsize
        if not by_heads or (x.strides[0] | x.data.ptr) % 16:
            return f"the heads of a row of {name} do not lie side by side; try a contiguous copy"
    if not (k_cache.flags.c_contiguous and v_cache.flags.c_contiguous):
        return "the caches are not contiguous"
    most = SHORT_ROOM if slots is None or slots.shape[1] == 1 else BEAM_ROOM
    if room > most:
        return SlowerRefusal(f"texts have up to {room} keys; splits are faster beyond {most}")
    return None


def _warps(blocks, head_dim, beam, room, multiprocessors):
    """Return the warps of a block.

    A warp takes 16 keys at a time. Few blocks have more warps, and many of short texts fewer, so
    that all run at once. That changes the order of sums, so not under ``batch_invariant``.
    """
    if mode.get().batch_invariant:
        return 2 if beam > 1 else 4
    if beam > 1:
        return _fewer(BEAM_WARPS, blocks, multiprocessors)
    at_once = 12 if head_dim == 128 else 24  # warps of a multiprocessor, by their registers
    for warps in (16, 8):
        fits = warps * head_dim <= 1024 and blocks <= multiprocessors * (at_once // warps)
        if fits and room >= 8 * warps:
            return warps
    return 2 if head_dim < 128 and room <= FEW_KEYS and blocks >= 2 * multiprocessors else 4


def _forward_raw(
    q, k, v, k_cache, v_cache, key_counts, slots, rows_seen, row_counts, page_table, *, settled,
    needs,
):  # fmt: skip
    rows, _, heads, head_dim = q.shape
    out = arrays.empty(q, q.shape)
    steps = [x.strides[0] // x.itemsize for x in (q, k, v)]
    page, beam, room, kv_heads = 0, 1, k_cache.shape[1], k.shape[2]
    if page_table is None:
        beam = slots.shape[1]
    else:
        page, room = PAGE, PAGE * page_table.shape[1]
    blocks, columns = rows // beam * kv_heads, -(-beam * heads // kv_heads // COLUMNS)
    cores = gpu(q.device.id).multiprocessors
    warps = _warps(blocks * columns, head_dim, beam, room, cores)
    constants = {"scalar": ctype(q.dtype), "HEAD_DIM": head_dim, "PAGE": page, "WARPS": warps}
    beams = LISTS if beam > 1 else 0
    if rows_seen is not None and heads == kv_heads and beam <= LISTED_BEAMS:
        beams = LISTED
    constants |= {"BEAMS": beams, "MODE": SETTLED if settled else APPEND}
    kernel(FILE, NAME, **constants)(
        (blocks, columns), (32 * warps,), q, k, v, k_cache, v_cache, key_counts, slots, rows_seen,
        row_counts, page_table, out, *steps, heads, kv_heads, beam, room,
        np.float32(head_dim**-0.5),
        shared_bytes=4 * room * min(beam, COLUMNS) if beams == LISTS else 0,
    )  # fmt: skip
    return out, None


def memory_attention(q: Any, k: Any, v: Any, key_lengths: Any) -> Any:
    """Return the attention of the queries of a step over memories that no step changes.

    ``q``: (N, K, H, D), K beams of each of N sentences; ``k``, ``v``: (N, S, Hk, D), contiguous;
    ``key_lengths``: int32 (N,), 1 to S. What wrote keys, values and lengths must be over when the
    launch before this one begins: they are read beside it. Returns (N, K, H, D). Where the kernel
    does not take them, by ``flash_attention``.
    """
    sentences, beam, heads, head_dim = q.shape
    room, kv_heads = k.shape[1:3]
    taken = q.itemsize == 2 and head_dim in HEAD_DIMS and kernel_refusal(q, "q") is None
    taken = taken and all(x.flags.c_contiguous for x in (q, k, v)) and room <= SHORT_ROOM
    if not taken or tensor_core_refusal(q.device.id, q.dtype):
        return flash_attention(q, k, v, key_lengths=key_lengths)
    out, step = arrays.empty(q, q.shape), heads * head_dim
    grid = sentences * kv_heads, -(-beam * heads // kv_heads // COLUMNS)
    warps = _warps_of_memory(grid[0] * grid[1], room, gpu(q.device.id).multiprocessors)
    constants = {"scalar": ctype(q.dtype), "HEAD_DIM": head_dim, "PAGE": 0, "WARPS": warps}
    kernel(FILE, NAME, **constants, BEAMS=0, MODE=MEMORY)(
        grid, (32 * warps,), q, None, None, k, v, key_lengths, None, None, None, None, out, step, 0,
        0, heads, kv_heads, beam, room, np.float32(head_dim**-0.5), shared_bytes=0,
    )  # fmt: skip
    return out


def _warps_of_memory(blocks, room, multiprocessors):
    """Return the warps of a block: fewer where there are many blocks, or few keys for each.

    Of many sentences most are shorter than the room, and a warp without keys only waits.
    """
    warps = _fewer(MEMORY_WARPS, blocks, multiprocessors)
    return min(warps, 2) if room <= SHORT_MEMORY else warps


def _fewer(rule, blocks, multiprocessors):
    return next((warps for warps, least in rule if blocks >= least * multiprocessors), 4)


IMPLS = Impls(
    NAME,
    Impl("raw-hopper", _forward_hopper, refuse=_refuse_hopper, specialized=True),
    Impl("raw-ampere", _forward_raw, refuse=_refuse_raw, specialized=True),
    Impl("two-ops", _forward_by_two),
)
