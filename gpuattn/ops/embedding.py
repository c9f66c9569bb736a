"""Token embedding with scale, positions and dropout, and its gradient without atomics.

y = dropout(scale * weight[tokens] + position_weight[positions]).
The gradient sorts the tokens by id and adds the rows of an id in a fixed order; many rows of one id
are added in parts. Device code: ``rawkernels/embedding.cu``, ``embedding_backward.cu`` and
``token_order.cu``.
"""

import math
from typing import Any

import numpy as np

from gpuattn import arrays, rng
from gpuattn.arrays import (
    aligned_rows,
    as_array,
    check_floats,
    check_together,
    ctype,
    get_xp,
    strided_rows,
    wide,
)
from gpuattn.autodiff.side_stream import on_side_stream
from gpuattn.autodiff.tape import op, raw
from gpuattn.cuda.gpu import gpu
from gpuattn.cuda.kernels import kernel, kernel_refusal
from gpuattn.errors import problem
from gpuattn.impls import Call, Impl, Impls
from gpuattn.ops.arguments import (
    check_flags,
    described,
    dropout_key,
    integer,
    number,
    probability,
    take_arrays,
)
from gpuattn.typing import Array

BLOCK = 256  # threads
PACKS = {False: 2, True: 1}  # packs of rng.LANES elements per thread, without and with positions
MAX_THREADS, MAX_CHUNKS = 128, 512  # of the gradient: threads of a block, chunks of sorted tokens
MAX_COUNT = 2**31 - 2**14  # tokens and columns are counted in 32 bits
TILE, WINDOW, ATOMIC_ROWS = 32, 128, 4  # as in embedding_backward.cu
RESERVED_SHARED = 1 << 10  # bytes of its shared memory that are not for rows
ORDERED = 16384  # tokens that token_order.cu sorts at most
ORDER_BLOCK, ORDER_PARTS = 64, 4  # tokens of its block, threads of each


@op
def embedding(
    tokens: Array,
    weight: Array,
    *,
    positions: Array | None = None,
    position_weight: Array | None = None,
    scale: Any = 1.0,
    p: float = 0.0,
    seed: Any = None,
    order: Any = None,
    deterministic: bool = True,
    vocab_size: int | None = None,
    impl: str | None = None,
) -> Call[Array]:
    """Return ``dropout(scale * weight[tokens] + position_weight[positions])``: (..., D).

    ``tokens``: integers (...,). ``weight``: (V, D) float table. ``position_weight``: (P, D) in the
    same dtype, a parameter or a plain array, or None. ``positions``: integers in the shape of
    ``tokens``; without them a token's position is its index along the last axis.
    ``p``: the probability that dropout zeroes an element; ``seed``: None, an int or ``rng.Key``.
    ``order``: (order, segments, ids), the int32 arrays of ``data.batching.token_order(tokens)``,
    for the gradient. Without it the gradient sorts the tokens itself; NumPy does so also without
    the last two.
    ``deterministic``: False lets a GPU add the gradients by float32 atomics, in any order; nothing
    is then sorted.
    ``vocab_size``: the rows that are tokens, V by default; the rows after them are padding.
    ``impl``: an implementation's name, or None for the fastest that accepts the arguments.

    Raises IndexError for a token or position without a row: at once on NumPy, on a GPU at the next
    ``to_cpu`` or ``check_indices``. TypeError for other dtypes, ValueError for other shapes, p
    outside 0..1, or a scale that is not finite.
    """
    tables = take_arrays("embedding", {"weight": weight}, {"position_weight": position_weight})
    weight, position_weight = tables.values()
    tokens = _integers("tokens", tokens)
    positions = None if positions is None else _integers("positions", positions)
    order = (None,) * 3 if order is None else tuple(_order(order))
    _check(tokens, raw(weight), positions, raw(position_weight), order)
    check_flags("embedding", deterministic=deterministic)
    p = probability("embedding", "p", p)
    rows = len(raw(weight))
    vocab_size = rows if vocab_size is None else vocab_size
    accepted = f"0 to {rows}, the rows of weight"
    vocab_size = integer("embedding", "vocab_size", vocab_size, accepted, 0, rows)
    key = dropout_key("embedding", p, seed)
    inputs = (tokens, weight, positions, position_weight, *order)
    numbers: dict[str, Any] = {
        "scale": number("embedding", "scale", scale),
        "p": p,
        "vocab_size": vocab_size,
    }
    return Call(IMPLS, inputs, impl, **numbers, key=key, deterministic=deterministic)


def _order(order):
    """Yield the parts of ``order``: three integer arrays, of which the last two may be None."""
    if not isinstance(order, tuple | list) or len(order) != 3:
        accepted = "None, or (order, segments, ids) of data.batching.token_order"
        raise TypeError(problem("embedding", "order", described(order), accepted))
    for part in order:
        yield None if part is None else _integers("order", part)


def _integers(name, index):
    index = as_array(raw(index), "embedding", name)
    if index.dtype.kind not in "iu":
        raise TypeError(problem("embedding", f"{name}.dtype", index.dtype, "an integer dtype"))
    return index


def _check(tokens, weight, positions, position_weight, order):
    names = ("order", "segments", "ids")
    given = {"tokens": tokens, "weight": weight, "positions": positions}
    given |= {"position_weight": position_weight, **dict(zip(names, order, strict=True))}
    check_together("embedding", **given)
    check_floats("embedding", weight=weight, position_weight=position_weight)
    if weight.ndim != 2:
        raise ValueError(problem("embedding", "weight.shape", weight.shape, "(V, D)"))
    if positions is not None and position_weight is None:
        raise ValueError("embedding: positions without position_weight; pass the table too")
    if position_weight is not None:
        if position_weight.ndim != 2 or position_weight.shape[1] != weight.shape[1]:
            got, accepted = position_weight.shape, f"(P, {weight.shape[1]})"
            raise ValueError(problem("embedding", "position_weight.shape", got, accepted))
        if positions is not None and positions.shape != tokens.shape:
            accepted = f"the shape of tokens, {tokens.shape}"
            raise ValueError(problem("embedding", "positions.shape", positions.shape, accepted))
        if positions is None and _length(tokens) > len(position_weight):
            accepted = f"at most {len(position_weight)}, the rows of position_weight"
            raise ValueError(problem("embedding", "tokens.shape[-1]", _length(tokens), accepted))
    sizes = tuple(None if part is None else part.size for part in order)
    if order[0] is not None and (sizes[0] != tokens.size or sizes[1] != sizes[2]):
        accepted = f"({tokens.size}, U, U), for {tokens.size} tokens with U different ids"
        raise ValueError(problem("embedding", "the sizes of order", sizes, accepted))


def _length(tokens):
    return tokens.shape[-1] if tokens.ndim else 1


# ---- reference: NumPy or CuPy ----------------------------------------------------------------


def _forward_reference(
    tokens, weight, positions, position_weight, *order, needs, scale, p, key, vocab_size=None, **_
):
    xp, dtype = get_xp(weight), wide(weight.dtype)
    rows = len(weight) if vocab_size is None else vocab_size
    index = arrays.checked_index(tokens, rows, "embedding: tokens")
    y = weight.take(index, axis=0).astype(dtype, copy=False)
    if scale != 1:
        y *= scale
    if position_weight is not None:
        if positions is None:
            first = position_weight[: _length(tokens)].astype(dtype, copy=False)
            y += first.reshape(*tokens.shape[-1:], weight.shape[1])
        else:
            places = arrays.checked_index(positions, len(position_weight), "embedding: positions")
            y += position_weight.take(places, axis=0).astype(dtype, copy=False)
    keep = rng.keep_mask(xp, y.shape, p, key) if p else None
    if p:
        y *= keep
        y *= _keep_scale(p)
    saved = (index, positions, order, keep, _table(weight), _table(position_weight))
    return y.astype(weight.dtype, copy=False), (saved if any(needs) else None)


def _backward_reference(saved, dy, *, needs, into, scale, p, key, **_):
    index, positions, order, keep, table, position_table = saved
    rows = dy.reshape(index.size, table[0][1]).astype(wide(dy.dtype), copy=False)
    if p:
        rows = rows * keep.reshape(rows.shape)
        rows *= _keep_scale(p)
    grads = [None] * 7
    if needs[1]:
        order = _runs(index.ravel()) if order[1] is None else order
        grads[1] = _sum_rows(rows, order, table, scale, into[1])
    if needs[3]:
        places = _default_positions(index) if positions is None else positions
        grads[3] = _sum_rows(rows, _runs(places.ravel()), position_table, 1, into[3])
    return tuple(grads)


def _keep_scale(p):
    return 1 / (1 - p) if p < 1 else 0.0


def _table(weight):
    return None if weight is None else (weight.shape, weight.dtype)


def _default_positions(tokens):
    xp = get_xp(tokens)
    return xp.broadcast_to(xp.arange(_length(tokens), dtype=np.int32), tokens.shape or (1,))


def _runs(index):
    """Return (order, segments, ids) as ``embedding`` takes them; synchronizes with a GPU."""
    xp = get_xp(index)
    order = xp.argsort(index, kind="stable")
    ids = index[order]
    segments = xp.flatnonzero(xp.concatenate((xp.ones(1, bool), ids[1:] != ids[:-1]))[: ids.size])
    return order, segments, ids[segments]


def _sum_rows(rows, order, table, scale, slot):
    """Return the gradient of a table, or None if written to ``slot``: sums of rows by id."""
    order, segments, ids = order
    xp, (shape, dtype) = get_xp(rows), table
    out, accumulate = slot or (arrays.empty(rows, shape, dtype), False)
    if not accumulate:
        out.fill(0)
    if order.size and rows.size:
        sums = xp.add.reduceat(rows.take(order, axis=0), segments, axis=0)
        if scale != 1:
            sums *= scale
        if accumulate:
            sums += out[ids].astype(sums.dtype, copy=False)
        out[ids] = sums.astype(out.dtype, copy=False)
    return None if slot else out


# ---- raw: rawkernels/embedding.cu, rawkernels/embedding_backward.cu --------------------------


def _refuse_raw(tokens, weight, *_, **__):
    if max(tokens.size, weight.shape[1]) > MAX_COUNT:
        return f"the kernel takes at most {MAX_COUNT} tokens and columns of weight"
    return kernel_refusal(weight, "weight")


def _forward_raw(
    tokens,
    weight,
    positions,
    position_weight,
    *order,
    needs,
    scale,
    p,
    key,
    vocab_size=None,
    deterministic=True,
):
    index, places = _for_kernel(tokens), _for_kernel(positions)
    if places is not None and places.dtype != index.dtype:
        index, places = index.astype(np.int64), places.astype(np.int64)
    y = arrays.empty(weight, (*tokens.shape, weight.shape[1]))
    rows, step = strided_rows(weight)
    table, table_step, position_flag = None, 0, None
    if position_weight is not None:
        table, table_step = strided_rows(position_weight)
        position_flag = arrays.index_flag(weight, "embedding: positions")
    arrived = None
    if deterministic and (needs[1] or needs[3]):
        arrived = arrays.empty(
            weight, (2, _chunks(tokens.size)[1] * -(-weight.shape[1] // MAX_THREADS)), np.uint32
        )
    aligned = weight.shape[1] % rng.LANES == 0 and all(
        map(aligned_rows, (rows, table), (step, table_step))
    )
    constants = {"scalar": ctype(weight.dtype), "token": _token(index)}
    constants |= {"POSITIONS": table is not None, "DROPOUT": p > 0}
    grid, block = _forward_grid(tokens.size, weight.shape[1], aligned, PACKS[table is not None])
    kernel("embedding.cu", "embedding_forward", **constants, ALIGNED=aligned, BLOCK=BLOCK)(
        grid, block,
        index, rows, places, table, y, arrived, 0 if arrived is None else arrived.size,
        tokens.size, len(weight) if vocab_size is None else vocab_size, step,
        0 if table is None else len(table), table_step, weight.shape[1], _length(tokens),
        scale, *_dropout_arguments(p, key),
        arrays.index_flag(weight, "embedding: tokens"), position_flag,
    )  # fmt: skip
    saved = (index, places, order[0], _table(weight), _table(position_weight), arrived)
    return y, (saved if any(needs) else None)


def _forward_grid(tokens, cols, aligned, each):
    """Return (grid, block) where each thread computes ``each`` packs.

    Both are 2-D, along a row and over rows, if all packs are ``aligned``, else 1-D.
    """
    packs = -(-(cols if aligned else tokens * cols) // rng.LANES)
    threads = -(-packs // each)
    if not aligned:
        return (-(-threads // BLOCK),), (BLOCK,)
    slabs = max(-(-threads // BLOCK), 1)
    threads = max(-(-threads // slabs), 1)
    return (-(-tokens // (BLOCK // threads)), slabs), (threads, BLOCK // threads)


def _backward_raw(saved, dy, *, needs, into, scale, p, key, deterministic=True, **_):
    index, places, order, table, position_table, arrived = saved
    numbers = _dropout_arguments(p, key)
    grads = [None] * 7
    if not deterministic:
        if needs[1]:
            grads[1] = _add_by_atomics(dy, index, table, scale, numbers, into[1])
        if needs[3]:
            grads[3] = _add_by_atomics(dy, places, position_table, 1, numbers, into[3])
        return tuple(grads)
    if needs[1]:
        order = _argsort(index) if order is None else order
        reads = dy, index, order, arrived
        with on_side_stream(reads, [into[1] and into[1][0]]):  # no table's gradient fills a GPU
            grads[1] = _add_in_order(dy, index, order, table, scale, numbers, arrived[0], into[1])
    if needs[3]:
        order = None if places is None else _argsort(places)
        grads[3] = _add_in_order(dy, places, order, position_table, 1, numbers, arrived[1], into[3])
    return tuple(grads)


def _for_kernel(index):
    """Return indices as contiguous int32 or int64 (from other dtypes) at a multiple of 16 bytes."""
    if index is None:
        return None
    known = index.dtype in (np.int32, np.int64)
    index = get_xp(index).ascontiguousarray(index if known else index.astype(np.int64))
    return index if aligned_rows(index, 0) else index.copy()


def _token(index):
    return "int" if index is None or index.dtype == np.int32 else "long long"


def _dropout_arguments(p, key):
    if not p:
        return 1 << 16, 1.0, 0, 0, 0, 0, None
    return rng.threshold(p), _keep_scale(p), *rng.device_arguments(key)


def _argsort(index):
    """Return what sorts indices, which are contiguous, in a stable order."""
    tokens = index.size
    if tokens > ORDERED:
        return get_xp(index).argsort(index.ravel(), kind="stable")
    order = arrays.empty(index, (tokens,), np.int32)
    if tokens:
        constants = {"token": _token(index), "BLOCK": ORDER_BLOCK, "PARTS": ORDER_PARTS}
        kernel("token_order.cu", "token_order", **constants)(
            (-(-tokens // ORDER_BLOCK),), (ORDER_BLOCK * ORDER_PARTS,), index, order, tokens
        )
    return order


def _add_in_order(dy, index, order, table, scale, numbers, arrived, slot):
    """Return the gradient of a table, or None if written to ``slot``: sums of rows by id.

    Without ``index`` and ``order`` the id of a row is its position on the last axis but one.
    """
    (rows, cols), dtype = table
    out, accumulate = slot or (arrays.empty(dy, (rows, cols), dtype), False)
    length = dy.shape[-2] if dy.ndim > 1 else 1
    dy, step = strided_rows(dy)
    staged = TILE * (dy.itemsize + accumulate * out.itemsize)
    tokens, vec, threads, slabs = _geometry(dy, step, out, staged)
    if order is not None:
        order = get_xp(dy).ascontiguousarray(order.astype(np.int32, copy=False))
    size, chunks = _chunks(tokens)
    partial = arrays.empty(dy, (chunks, 2, cols), np.float32)
    _backward_kernel("embedding_backward", dy, out, index, vec)(
        (chunks + (0 if accumulate else -(-rows // WINDOW)), slabs), (threads,),
        dy, index, order, out, partial, arrived, tokens, rows, cols, step,
        length, size, chunks, scale, accumulate, *numbers,
        shared_bytes=staged * threads * vec,
    )  # fmt: skip
    return None if slot else out


def _add_by_atomics(dy, index, table, scale, numbers, slot):
    """Return what ``_add_in_order`` does, added by float32 atomics in any order."""
    shape, dtype = table
    out, accumulate = slot or (arrays.empty(dy, shape, dtype), False)
    sums = out if out.dtype == np.float32 else arrays.empty(dy, shape, np.float32)
    arrays.unrecorded_write()
    if not accumulate:
        sums.fill(0)
    elif sums is not out:
        sums[...] = out.astype(np.float32)
    length = dy.shape[-2] if dy.ndim > 1 else 1
    dy, step = strided_rows(dy)
    tokens, vec, threads, slabs = _geometry(dy, step, sums)
    _backward_kernel("embedding_backward_atomic", dy, out, index, vec)(
        (-(-tokens // ATOMIC_ROWS), slabs), (threads,),
        dy, index, sums, tokens, *shape, step, length, scale, *numbers,
    )  # fmt: skip
    if sums is not out:
        out[...] = sums.astype(out.dtype)
    return None if slot else out


def _geometry(dy, step, out, staged=0):
    """Return (rows of ``dy``, columns per thread, threads per block, blocks per row).

    ``staged``: bytes of shared memory for each column of a block.
    """
    cols = dy.shape[-1]
    vec = 4 if cols % 4 == 0 and aligned_rows(dy, step) and aligned_rows(out, cols) else 1
    threads = min(MAX_THREADS, -(-cols // (32 * vec)) * 32)
    while threads * vec * staged > gpu(dy.device.id).shared_bytes - RESERVED_SHARED:
        threads = -(-threads // 64) * 32
    return math.prod(dy.shape[:-1]), vec, threads, -(-cols // (threads * vec)) if cols else 0


def _chunks(tokens):
    """Return (tokens per chunk, a multiple of TILE; number of chunks)."""
    size = max(1, -(-tokens // (TILE * MAX_CHUNKS))) * TILE
    return size, -(-tokens // size)


def _backward_kernel(name, dy, out, index, vec):
    constants = {"scalar": ctype(dy.dtype), "target": ctype(out.dtype)}
    constants |= {"token": _token(index), "VEC": vec}
    return kernel("embedding_backward.cu", name, **constants)


IMPLS = Impls(
    "embedding",
    Impl("raw-simt", _forward_raw, _backward_raw, _refuse_raw),
    Impl("reference", _forward_reference, _backward_reference),
)
