"""Softmax over the last axis: y = exp(s - max s) / sum exp(s - max s) of s = scale * x + mask.

Dropout: ``dropout.py``. Device code: ``rawkernels/softmax.cu``, ``softmax_hopper.cu`` for long rows
on Hopper, and in readable form ``gpuattn/numbakernels/softmax.py``.
"""

from typing import Any

import numpy as np

from gpuattn import arrays
from gpuattn.arrays import (
    LOWEST,
    check_floats,
    check_together,
    ctype,
    get_xp,
    on_gpu,
    wide,
)
from gpuattn.autodiff.tape import Box, op, raw
from gpuattn.cuda.gpu import gpu
from gpuattn.cuda.kernels import dtype_refusal, kernel, kernel_refusal
from gpuattn.cuda.sources import serves
from gpuattn.errors import UnsupportedError, problem
from gpuattn.impls import Call, Impl, Impls
from gpuattn.numbakernels import device
from gpuattn.ops.arguments import check_flags, dropout_key, number, probability, take_arrays
from gpuattn.ops.dropout import device_numbers, drop, keep_of
from gpuattn.ops.l2_prefetch import prefetch_rows
from gpuattn.typing import Array

MAX_COLS = 2**31 - 2**20  # columns are counted in 32 bits
ROW_THREADS = 8, 16, 32, 64, 128, 256, 512  # threads of a block that can share a row
MIN_BLOCK = 128  # threads of a block
SHORT_VECTORS = 32  # rows of up to so many 16-byte vectors get the fewest threads
BEST_VECTORS = {"forward": 2, "backward": 1}  # vectors per thread that were measured fastest
MAX_VECTORS = 4  # per thread; a longer row does not stay in registers: two vectors at a time
LONG_ROW_THREADS = {"forward": 512, "backward": 256}
LONG_ROW_SHARED = 72 << 10  # bytes per block of long rows, so that three fit a multiprocessor
MAX_SHARED = 224 << 10  # bytes per block
MAX_CLUSTER = 8  # blocks that share a row

SOFTMAX = np.dtype(
    [(name, np.uint64) for name in (
        "x", "dy", "out", "undropped", "mask", "lengths", "device_step",
    )]
    + [(name, np.int64) for name in (
        "rows", "x_stride", "dy_stride", "out_stride", "undropped_stride", "length_rows",
    )]
    + [("mask_sizes", np.int64, 2), ("mask_strides", np.int64, 4), ("ahead", np.int64)]
    + [(name, np.int32) for name in ("cols", "vectors", "queries")]
    + [(name, np.float32) for name in ("scale", "factor")]
    + [(name, np.uint32) for name in ("threshold", "seed_low", "seed_high", "stream", "step")]
)  # fmt: skip
"""The struct Softmax of ``rawkernels/softmax.cuh``."""


@op
def softmax(
    x: Array,
    *,
    scale: float = 1.0,
    mask: Array | None = None,
    lengths: Array | None = None,
    causal: bool = False,
    dropout_p: float = 0.0,
    seed: Any = None,
    donate: bool = False,
    impl: str | None = None,
) -> Call[Array]:
    """Return the softmax of ``scale * x + mask`` over the last axis, in the dtype of ``x``.

    ``x``: (..., S), float array or Tensor, any strides. ``mask``: broadcasts to ``x``; bool (True
    keeps an element) or additive, in the dtype of ``x``; it gets no gradient. ``lengths``:
    integers of shape ``x.shape[:n]``, n < ``x.ndim``: in ``x[i]`` columns from ``lengths[i]`` on
    are masked. ``causal``: on (..., T, S), query i attends to keys j <= i + S - T. ``dropout_p``,
    ``seed``: dropout of the result, as in ``dropout``. ``donate``: the memory of ``x`` may be
    overwritten by the result. ``impl``: "raw-simt", "numba", "reference", or None for the first
    that accepts.

    A row that is -inf or masked everywhere is 0 and has gradient 0. A row with +inf or NaN where it
    is not masked is NaN, and no other row is. Raises TypeError for dtypes other than
    float32, float16, bfloat16 and float64, ValueError for a scale that is not finite, a probability
    outside 0..1, a mask that does not broadcast and lengths of another shape.
    """
    inputs = list(take_arrays("softmax", {"x": x}, {"mask": mask, "lengths": lengths}).values())
    _check(*map(raw, inputs))
    check_flags("softmax", causal=causal, donate=donate)
    if isinstance(mask, Box) and mask.requires_grad:
        raise UnsupportedError("softmax: mask gets no gradient; compute softmax(x + mask) instead")
    scale = number("softmax", "scale", scale)
    if causal and raw(inputs[0]).ndim < 2:
        accepted = "(..., T, S) with causal=True"
        raise ValueError(problem("softmax", "x.shape", raw(inputs[0]).shape, accepted))
    p = probability("softmax", "dropout_p", dropout_p)
    key = dropout_key("softmax", p, seed)
    params: dict[str, Any] = {"scale": scale, "causal": bool(causal), "p": p, "key": key}
    donated = (x,) if donate and isinstance(x, Box) else ()
    return Call(IMPLS, inputs, impl, donate=bool(donate), donated=donated, **params)


def _check(x, mask, lengths):
    check_together("softmax", x=x, mask=mask, lengths=lengths)
    check_floats("softmax", x=x)
    if x.ndim == 0:
        raise ValueError(problem("softmax", "x.shape", x.shape, "at least one axis"))
    if mask is not None:
        if mask.dtype not in (np.bool_, x.dtype):
            raise TypeError(problem("softmax", "mask.dtype", mask.dtype, f"bool or {x.dtype}"))
        if not _broadcasts(mask.shape, x.shape):
            accepted = f"a shape that broadcasts to {x.shape}"
            raise ValueError(problem("softmax", "mask.shape", mask.shape, accepted))
    if lengths is not None:
        if lengths.dtype.kind not in "iu":
            raise TypeError(problem("softmax", "lengths.dtype", lengths.dtype, "an integer dtype"))
        if lengths.ndim >= x.ndim or lengths.shape != x.shape[: lengths.ndim]:
            accepted = f"the first axes of {x.shape[:-1]}"
            raise ValueError(problem("softmax", "lengths.shape", lengths.shape, accepted))


def _broadcasts(shape, to):
    try:
        return np.broadcast_shapes(shape, to) == to
    except ValueError:
        return False


def _mask_kind(mask):
    """Return the constant MASK of the kernels: 0 no mask, 1 keep where true, 2 add."""
    return 0 if mask is None else 1 if mask.dtype == bool else 2


# ---- reference: NumPy or CuPy -------------------------------------------------------------------


def _forward_reference(x, mask, lengths, *, needs, scale, causal, p, key, donate):
    xp, work = get_xp(x), wide(x.dtype)
    if x.size == 0:
        y = arrays.empty(x, x.shape)
        return y, (y, None)
    e = x.astype(work, order="C")
    if scale != 1:
        e *= scale
    if mask is not None and mask.dtype != bool:
        e += mask.astype(work, copy=False)
    keep = _visible(xp, x, mask, lengths, causal)
    if keep is not None:
        e = xp.where(keep, e, work.type(-np.inf))
    # the bound keeps -inf - (-inf), a NaN, out of rows that are masked everywhere
    e -= xp.maximum(e.max(-1, keepdims=True), LOWEST[work])
    xp.exp(e, out=e)
    total = e.sum(-1, keepdims=True)
    total += total == 0
    e /= total
    y, drawn = e.astype(x.dtype, copy=False), keep_of(x, p, key)
    saved = (y, drawn) if any(needs) else None
    return (y if drawn is None else drop(e, drawn, p).astype(x.dtype, copy=False)), saved


def _visible(xp, x, mask, lengths, causal):
    """Return which elements of ``x`` are not masked, broadcast to its shape; None for all."""
    keep = mask if mask is not None and mask.dtype == bool else None
    rows, cols = x.shape[-2:] if causal else (1, x.shape[-1])
    if causal:
        seen = xp.tri(rows, cols, cols - rows, dtype=bool)
        keep = seen if keep is None else keep & seen
    if lengths is not None:
        ends = lengths.reshape(lengths.shape + (1,) * (x.ndim - lengths.ndim))
        seen = xp.arange(cols) < ends
        keep = seen if keep is None else keep & seen
    return keep


def _backward_reference(saved, dy, *, needs, into, scale, p, **_):
    y, drawn = saved
    work = wide(y.dtype)
    probability, dp = y.astype(work, copy=False), dy.astype(work, order="C", copy=False)
    if drawn is not None:
        dp = drop(dp, drawn, p)
    ds = probability * dp
    ds -= probability * ds.sum(-1, keepdims=True)
    if scale != 1:
        ds *= scale
    return ds.astype(y.dtype, copy=False), None, None


# ---- numba: gpuattn/numbakernels/softmax.py -----------------------------------------------------


def _refuse_numba(x, mask, lengths, *, p, **_):
    if lengths is not None or p:
        return "the readable form has neither lengths nor dropout"
    return dtype_refusal(x) or device.refusal(x)


def _matrix(x):
    """Return ``x`` (..., S) as a matrix whose rows are whole vectors of 16 bytes."""
    cols, rows, rest = x.shape[-1], x.size // x.shape[-1], -x.shape[-1] % (16 // x.itemsize)
    at_16_bytes = not on_gpu(x) or x.data.ptr % 16 == 0
    if x.flags.c_contiguous and at_16_bytes and not rest:
        return x.reshape(rows, cols)
    matrix = arrays.empty(x, (rows, cols + rest))
    matrix[:, :cols] = x.reshape(rows, cols)
    return matrix


def _launch_numba(kernel_for, matrices, x, *numbers, edges=False, **constants):
    """Launch a kernel over the rows of ``x``; return the last of ``matrices`` in its shape."""
    from gpuattn.numbakernels.reduce import layout, teams_of_a_block
    from gpuattn.numbakernels.vectors import numbers as bits

    (rows, room), cols, width = matrices[-1].shape, x.shape[-1], 16 // x.itemsize
    team, vectors = layout(room // width)
    held, teams = team * vectors * width, teams_of_a_block(team)
    edges = edges or cols % held > 0
    kernel = kernel_for(team, vectors, width, **constants, edges=edges, long=cols > held)
    given = [bits(matrix) for matrix in matrices]
    device.launch(kernel, (-(-rows // teams),), (team * teams,), *given, cols, *numbers)
    return get_xp(x).ascontiguousarray(matrices[-1][:, :cols]).reshape(x.shape)


def _forward_numba(x, mask, lengths, *, needs, scale, causal, **_):
    if not x.size:
        return _forward_reference(x, mask, lengths, needs=needs, scale=scale, causal=causal, **_)
    from gpuattn.numbakernels.softmax import softmax_forward

    matrix, kind = _matrix(x), _mask_kind(mask)
    seen = matrix  # an argument that is not read
    if kind == 1:
        keep = get_xp(x).broadcast_to(mask, x.shape).reshape(len(matrix), -1)
        seen = get_xp(x).ascontiguousarray(keep)
    if kind == 2:
        seen = _matrix(get_xp(x).broadcast_to(mask, x.shape))
    matrices = matrix, seen, arrays.empty(x, matrix.shape)
    numbers = x.shape[-2] if causal else 0, np.float32(scale)
    y = _launch_numba(softmax_forward, matrices, x, *numbers, edges=causal, kind=kind)
    return y, (y,) if any(needs) else None


def _backward_numba(saved, dy, *, needs, into, scale, **_):
    (y, *_) = saved
    if not y.size:
        return y, None, None
    from gpuattn.numbakernels.softmax import softmax_backward

    matrices = _matrix(y), _matrix(dy.astype(y.dtype, copy=False))
    matrices = *matrices, arrays.empty(y, matrices[0].shape)
    return _launch_numba(softmax_backward, matrices, y, np.float32(scale)), None, None


# ---- raw: rawkernels/softmax.cu -----------------------------------------------------------------


def _refuse_raw(x, *_, **__):
    if reason := kernel_refusal(x):
        return reason
    if x.shape[-1] > MAX_COLS:
        return f"x has {x.shape[-1]} columns, the kernel takes at most {MAX_COLS}"
    return None


def row_threads(verb: str, vectors: int, edges: bool) -> tuple[int, int] | None:
    """Return (threads, vectors of each) that keep a row of ``vectors`` in registers, or None.

    ``edges``: each vector has to be checked, which takes fewer instructions with fewer threads.
    """
    if vectors <= SHORT_VECTORS:
        return ROW_THREADS[0], max(-(-vectors // ROW_THREADS[0]), 1)
    choices = [
        (lanes, -(-vectors // lanes)) for lanes in ROW_THREADS if vectors <= lanes * MAX_VECTORS
    ]
    filled = [choice for choice in choices if not edges and vectors % choice[0] == 0]
    if filled:
        return min(filled, key=lambda choice: abs(choice[1] - BEST_VECTORS[verb]))
    return choices[0] if choices else None


def _launch(verb, lines, p, key, kind=0, edges=False, **fields):
    """Launch a kernel. ``lines``: {name in SOFTMAX: (array, elements from row to row)}."""
    x, cols = lines["x"][0], lines["x"][0].shape[-1]
    itemsize, width, rows = x.itemsize, 16 // x.itemsize, x.size // cols
    fields |= {"rows": rows, "cols": cols}
    starts = {}
    for name, (array, stride) in lines.items():
        fields |= {name: array.data.ptr, f"{name}_stride": stride}
        starts[name] = (array.data.ptr | stride * itemsize) % 16
    vectors = -(-(cols + (width - 1 if starts["out"] else 0)) // width)
    fields["vectors"] = vectors
    constants = {"scalar": ctype(x.dtype), "MASK": kind, "DROPOUT": p > 0}
    in_clusters, shared = serves("softmax_hopper.cu", gpu(x.device.id).capability), 0
    edges = edges or any(starts.values()) or cols % width > 0
    file, blocks, held = "softmax.cu", 1, row_threads(verb, vectors, edges)
    lanes, each = held or (LONG_ROW_THREADS[verb], 2)
    if not held and in_clusters:
        read = 2 if verb == "backward" else 1
        wanted = -(-16 * vectors * read // LONG_ROW_SHARED)
        file, blocks = "softmax_hopper.cu", min(1 << (wanted - 1).bit_length(), MAX_CLUSTER)
        shared = 16 + read * 16 * (-(-vectors // blocks) + 2)
        shared = shared if shared <= MAX_SHARED else 0
        constants |= {"CLUSTER": blocks, "STAGED": shared > 0}
    else:
        constants["LONG"] = held is None
    edges = edges or vectors % (lanes * each * blocks) > 0
    constants |= {"EDGES": edges, "LANES": lanes, "VECTORS": each}
    numbers = device_numbers(p, key)
    names = "threshold", "factor", "seed_low", "seed_high", "stream", "step", "device_step"
    fields |= dict(zip(names, numbers, strict=True))
    fields["device_step"] = 0 if numbers[-1] is None else numbers[-1].data.ptr
    problem = np.zeros(1, SOFTMAX)
    for name, value in fields.items():
        problem[name] = value
    block = max(lanes, MIN_BLOCK)
    grid = (-(-rows // (block // lanes)) * blocks,)
    function = kernel(file, f"softmax_{verb}", **constants)
    function(grid, (block,), problem.view(f"V{SOFTMAX.itemsize}"), shared_bytes=shared)


def _lines(x):
    """Return (x, elements from one row to the next), with a copy of x if that is not constant."""
    merged = _merged(x.shape[:-1], x.strides[:-1])
    if len(merged) > 1 or (x.shape[-1] > 1 and x.strides[-1] != x.itemsize):
        return get_xp(x).ascontiguousarray(x), x.shape[-1]
    return x, merged[0][1] // x.itemsize if merged else x.shape[-1]


def _merged(shape, strides):
    """Return [size, stride] of these axes: contiguous ones merged, those of size 1 left out."""
    merged = []
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == stride * size:
            merged[-1] = [merged[-1][0] * size, stride]
        else:
            merged.append([size, stride])
    return merged


def _mask_layout(mask, shape):
    """Return (mask, sizes, strides) such that the mask of row r and column j is at
    ``i0 * strides[0] + i1 * strides[1] + i2 * strides[2] + j * strides[3]`` elements, where
    (i0, i1, i2) are the digits of r: i2 = r % sizes[1], i1 = r // sizes[1] % sizes[0], i0 the rest.
    """
    xp = get_xp(mask)
    full = xp.broadcast_to(mask, shape)
    merged = _merged(shape[:-1], full.strides[:-1])
    if len(merged) > 3:
        return _mask_layout(xp.ascontiguousarray(full), shape)
    merged = [[1, 0]] * (3 - len(merged)) + merged
    strides = [stride // mask.itemsize for _, stride in merged]
    return mask, [size for size, _ in merged[1:]], [*strides, full.strides[-1] // mask.itemsize]


def _forward_raw(x, mask, lengths, *, needs, scale, causal, p, key, donate):
    if not x.size:
        y = arrays.empty(x, x.shape)
        return y, (y,)
    cols, rows, given = x.shape[-1], x.size // x.shape[-1], x
    x, stride = _lines(x)
    free = x is not given or (donate and (rows == 1 or abs(stride) >= cols))
    first = (x[...], stride) if free else (arrays.empty(x, x.shape), cols)
    lines = {"x": (x, stride), "out": first}
    if p > 0 and any(needs):  # the gradient reads the probabilities before dropout
        lines |= {"out": (arrays.empty(x, x.shape), cols), "undropped": first}
    fields = {"scale": scale, "queries": x.shape[-2] if causal else 0, "ahead": prefetch_rows(x)}
    if mask is not None:
        mask, fields["mask_sizes"], fields["mask_strides"] = _mask_layout(mask, x.shape)
        fields["mask"] = mask.data.ptr
    if lengths is not None:
        if lengths.dtype != np.int32:
            lengths = get_xp(x).clip(lengths, 0, cols).astype(np.int32)
        lengths = get_xp(x).ascontiguousarray(lengths)
        fields |= {"lengths": lengths.data.ptr, "length_rows": rows // lengths.size}
    edges = causal or lengths is not None
    _launch("forward", lines, p, key, _mask_kind(mask), edges, **fields)
    return lines["out"][0], (first[0],) if any(needs) else None


def _backward_raw(saved, dy, *, needs, into, scale, p, key, **_):
    (y,) = saved
    dx = arrays.empty(y, y.shape)
    if y.size:
        dy = dy.astype(y.dtype, copy=False)
        lines = {"x": _lines(y), "dy": _lines(dy), "out": (dx, y.shape[-1])}
        _launch("backward", lines, p, key, scale=scale)
    return dx, None, None


IMPLS = Impls(
    "softmax",
    Impl("raw-simt", _forward_raw, _backward_raw, _refuse_raw),
    Impl("numba", _forward_numba, _backward_numba, _refuse_numba),
    Impl("reference", _forward_reference, _backward_reference),
)
