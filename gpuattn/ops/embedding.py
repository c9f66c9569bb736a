"""Token embedding with scale, positions and dropout, and its gradient without atomics.

y = dropout(scale * weight[tokens] + position_weight[positions]).
The gradient sorts the tokens by id, so that each row of the table has one owner that adds what is
its own in a fixed order. Device code: ``rawkernels/embedding.cu`` and ``embedding_backward.cu``.
"""

import math

import numpy as np

from gpuattn import arrays, rng
from gpuattn.arrays import as_array, check_floats, check_together, ctype, get_xp, wide
from gpuattn.autodiff import tape
from gpuattn.errors import problem
from gpuattn.impls import Impl, Impls
from gpuattn.kernels import kernel, kernel_refusal

BLOCK = 256
COLUMNS = 32  # columns that a block of the gradient owns; its BLOCK / COLUMNS lanes share the rows


def embedding(
    tokens,
    weight,
    *,
    positions=None,
    position_weight=None,
    scale=1.0,
    p=0.0,
    seed=None,
    order=None,
    vocab_size=None,
    impl=None,
):
    """Return ``dropout(scale * weight[tokens] + position_weight[positions])``: (..., D).

    ``tokens``: integers (...,). ``weight``: (V, D) float table. ``position_weight``: (P, D) in the
    same dtype, a parameter or a plain array, or None. ``positions``: integers in the shape of
    ``tokens``; without them a token's position is its index along the last axis.
    ``p``: the probability that dropout zeroes an element; ``seed``: None, an int or ``rng.Key``.
    ``order``: (order, segments, ids), the int32 arrays of ``data.batching.token_order(tokens)``,
    for the gradient; without it they are made on the spot.
    ``vocab_size``: the rows that are tokens, V by default; those behind them are padding.
    ``impl``: an implementation's name, or None for the fastest that accepts the arguments.

    Raises IndexError for a token or position without a row: at once on NumPy, on a GPU at the next
    ``to_cpu`` or ``check_indices``. TypeError for other dtypes, ValueError for other shapes,
    0 <= p <= 1 not true, or a scale that is not finite.
    """
    weight = weight if isinstance(weight, tape.Box) else as_array(weight, "embedding", "weight")
    if position_weight is not None and not isinstance(position_weight, tape.Box):
        position_weight = as_array(position_weight, "embedding", "position_weight")
    tokens, positions = _integers("tokens", tokens), _integers("positions", positions)
    order = (None,) * 3 if order is None else tuple(_integers("order", part) for part in order)
    _check(tokens, tape.raw(weight), positions, tape.raw(position_weight), order)
    if not 0 <= p <= 1:
        raise ValueError(problem("embedding", "p", p, "0 <= p <= 1"))
    if not math.isfinite(scale):
        raise ValueError(problem("embedding", "scale", scale, "a finite number"))
    rows = len(tape.raw(weight))
    vocab_size = rows if vocab_size is None else vocab_size
    if not 0 <= vocab_size <= rows:
        accepted = f"0 to {rows}, the rows of weight"
        raise ValueError(problem("embedding", "vocab_size", vocab_size, accepted))
    key = rng.as_key(seed) if p else None
    inputs = (tokens, weight, positions, position_weight, *order)
    numbers = {"scale": float(scale), "p": float(p), "vocab_size": int(vocab_size)}
    return tape.apply(IMPLS, inputs, impl, **numbers, key=key)


def _integers(name, index):
    if index is None:
        return None
    index = as_array(tape.raw(index), "embedding", name)
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
    if order[0] is not None and (order[0].size != tokens.size or order[1].size != order[2].size):
        sizes = tuple(part.size for part in order)
        accepted = f"({tokens.size}, U, U), for {tokens.size} tokens with U different ids"
        raise ValueError(problem("embedding", "the sizes of order", sizes, accepted))


def _length(tokens):
    return tokens.shape[-1] if tokens.ndim else 1


# ---- reference: NumPy or CuPy ----------------------------------------------------------------


def _forward_reference(
    tokens, weight, positions, position_weight, *order, needs, scale, p, key, vocab_size=None
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
        order = order if order[0] is not None else _runs(index.ravel())
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
    """Return (order, segments, ids) as ``embedding`` takes them; on a GPU this waits for it."""
    xp = get_xp(index)
    order = xp.argsort(index, kind="stable")
    ids = index[order]
    segments = xp.flatnonzero(xp.concatenate((xp.ones(1, bool), ids[1:] != ids[:-1]))[: ids.size])
    return order, segments, ids[segments]


def _sum_rows(rows, order, table, scale, slot):
    """Return the gradient of a table (or None once it is in ``slot``): sums of rows by id."""
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
    return kernel_refusal(weight, "weight")


def _forward_raw(
    tokens, weight, positions, position_weight, *order, needs, scale, p, key, vocab_size=None
):
    index, places = _for_kernel(tokens), _for_kernel(positions)
    if places is not None and places.dtype != index.dtype:
        index, places = index.astype(np.int64), places.astype(np.int64)
    contiguous = get_xp(weight).ascontiguousarray
    token = "int" if index.dtype == np.int32 else "long long"
    forward = kernel(
        "embedding.cu", "embedding_forward", scalar=ctype(weight.dtype), token=token, BLOCK=BLOCK
    )
    y = arrays.empty(weight, (*tokens.shape, weight.shape[1]))
    position_rows, position_flag = 0, None
    if position_weight is not None:
        position_weight = contiguous(position_weight)
        position_rows = len(position_weight)
        position_flag = arrays.index_flag(weight, "embedding: positions")
    forward(
        (tokens.size,),
        (BLOCK,),
        index,
        contiguous(weight),
        places,
        position_weight,
        y,
        len(weight) if vocab_size is None else vocab_size,
        position_rows,
        weight.shape[1],
        _length(tokens),
        scale,
        *_dropout_arguments(p, key),
        arrays.index_flag(weight, "embedding: tokens"),
        position_flag,
    )
    saved = (index, places, order, _table(weight), _table(position_weight))
    return y, (saved if any(needs) else None)


def _backward_raw(saved, dy, *, needs, into, scale, p, key, **_):
    index, places, order, table, position_table = saved
    dy = get_xp(dy).ascontiguousarray(dy)
    grads = [None] * 7
    if needs[1]:
        order = order if order[0] is not None else _runs_of_all(index.ravel(), table[0][0])
        grads[1] = _launch_backward(dy, order, table, scale, p, key, into[1])
    if needs[3]:
        places = _default_positions(index) if places is None else places
        order = _runs_of_all(places.ravel(), position_table[0][0])
        grads[3] = _launch_backward(dy, order, position_table, 1, p, key, into[3])
    return tuple(grads)


def _for_kernel(index):
    """Return int32 and int64 indices as they are, others as int64; C-contiguous."""
    if index is None:
        return None
    known = index.dtype in (np.int32, np.int64)
    return get_xp(index).ascontiguousarray(index if known else index.astype(np.int64))


def _dropout_arguments(p, key):
    if not p:
        return 1 << 16, 1.0, 0, 0, 0, 0, None
    return rng.threshold(p), _keep_scale(p), *rng.device_arguments(key)


def _runs_of_all(index, size):
    """Return (order, segments, None) with a segment, often empty, for each of ``size`` ids.

    Unlike ``_runs`` it needs no number from the GPU.
    """
    xp = get_xp(index)
    order = xp.argsort(index, kind="stable")
    return order, xp.searchsorted(index[order], xp.arange(size, dtype=index.dtype)), None


def _launch_backward(dy, order, table, scale, p, key, slot):
    order, segments, ids = (
        None if part is None else get_xp(dy).ascontiguousarray(part.astype(np.int32, copy=False))
        for part in order
    )
    shape, dtype = table
    out, accumulate = slot or (arrays.empty(dy, shape, dtype), False)
    if ids is not None and not accumulate:
        out.fill(0)
    constants = {"scalar": ctype(dy.dtype), "target": ctype(out.dtype)}
    constants |= {"BLOCK": BLOCK, "COLUMNS": COLUMNS}
    backward = kernel("embedding_backward.cu", "embedding_backward", **constants)
    backward(
        (segments.size, -(-shape[1] // COLUMNS)),
        (BLOCK,),
        dy,
        order,
        segments,
        ids,
        out,
        order.size,
        *shape,
        scale,
        accumulate,
        *_dropout_arguments(p, key),
    )
    return None if slot else out


IMPLS = Impls(
    "embedding",
    Impl("raw-simt", _forward_raw, _backward_raw, _refuse_raw),
    Impl("reference", _forward_reference, _backward_reference),
)
