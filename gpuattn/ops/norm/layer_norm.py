"""LayerNorm over the last axis: y = (x - mean) / sqrt(variance + eps) * weight + bias.

Ba, Kiros and Hinton, "Layer normalization" (2016). Device code: ``rawkernels/norm/layer_norm.cu``
(also of RMSNorm) and, in readable form, ``gpuattn/numbakernels/layer_norm.py``. The functions
without an underscore below are shared with ``rms_norm.py`` and ``dropout_add_norm.py``; the launch
plans of all three are in ``launch.py``.
"""

import math

import numpy as np

from gpuattn import arrays
from gpuattn.arrays import check_floats, check_together, get_xp, on_gpu, wide
from gpuattn.autodiff.tape import op, raw
from gpuattn.cuda.kernels import dtype_refusal, kernel
from gpuattn.errors import problem
from gpuattn.impls import Call, Impl, Impls
from gpuattn.numbakernels import device
from gpuattn.ops.arguments import check_shapes, number, take_arrays
from gpuattn.ops.l2_prefetch import prefetch_rows
from gpuattn.ops.norm.launch import (
    add_parts,
    backward_layout,
    forward_layout,
    parts_of,
    refuse_raw,
    rows_of,
)
from gpuattn.typing import Array, DType

NUMBA_WARPS = 1056  # of the backward kernel: 8 for each multiprocessor of an H200
NUMBA_MAX_TEAM, NUMBA_MAX_VECTORS = 256, 4  # threads that share a row; vectors per thread


@op
def layer_norm(
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    eps: float = 1e-5,
    impl: str | None = None,
) -> Call[Array]:
    """Return the rows of ``x`` with mean 0 and variance 1, times ``weight`` plus ``bias``.

    ``x``: (..., D), float array or Tensor, any strides. ``weight``, ``bias``: (D,) in the dtype of
    ``x``, or None for 1 and 0. The variance is the mean squared deviation (divided by D), found in
    a second pass, in float32 (float64 for float64). ``impl``: "raw-simt", "numba", "reference", or
    None for the first that accepts.

    Raises TypeError for dtypes other than float32, float16, bfloat16, float64 or for mixed ones,
    ValueError for shapes that do not fit and for an ``eps`` that is not positive and finite.
    """
    inputs, eps = check_inputs("layer_norm", {"x": x}, {"weight": weight, "bias": bias}, eps)
    return Call(IMPLS, inputs, impl, eps=eps)


def check_inputs(
    function: str, rows: dict[str, Array], vectors: dict[str, Array | None], eps: float
) -> tuple[tuple[Array | None, ...], float]:
    """Return (all inputs as Boxes, arrays or None; eps), or raise what the public functions say.

    ``rows``: name -> (..., D) of one shape. ``vectors``: name -> (D,) or None.
    """
    given = take_arrays(function, rows, vectors)
    plain = {name: raw(value) for name, value in given.items()}
    check_together(function, **plain)
    check_floats(function, **plain)
    first = next(iter(rows))
    shape = plain[first].shape
    if not shape:
        raise ValueError(problem(function, first, "0-dimensional", "(..., D)"))
    check_shapes(function, shape, **{name: plain[name] for name in rows})
    check_shapes(function, shape[-1:], **{name: plain[name] for name in vectors})
    return tuple(given.values()), check_eps(function, eps)


def check_eps(function: str, eps: float) -> float:
    """Return ``eps`` as a float. Raises TypeError or ValueError unless positive and finite."""
    accepted = "a positive, finite number, such as 1e-5"
    return number(function, "eps", eps, accepted, lambda e: 0 < e < math.inf)


# ---- reference: NumPy or CuPy -------------------------------------------------------------------


def row_dot(a: Array, b: Array) -> Array:
    """Return the sum over the last axis of a * b, keeping it."""
    if get_xp(a) is np:
        return np.vecdot(a, b)[..., None]
    return (a * b).sum(-1, keepdims=True)


def row_sum(a: Array) -> Array:
    """Return the sum over the last axis, keeping it."""
    if get_xp(a) is np:
        return row_dot(a, np.ones(a.shape[-1], a.dtype))  # BLAS: half the time of a.sum(-1)
    return a.sum(-1, keepdims=True)


def normalize(x: Array, eps: float, rms: bool = False) -> tuple[Array, Array]:
    """Return (normalized rows, 1 / standard deviation) in the dtype to accumulate in."""
    xp, work = get_xp(x), wide(x.dtype)
    x = x.astype(work, order="C", copy=False)
    cols = max(x.shape[-1], 1)
    if rms:
        normalized = x
    else:
        # subtract the first element: exact for a constant row, and accurate for any mean
        normalized = x - x[..., :1]
        normalized -= row_sum(normalized) / cols
    rstd = row_dot(normalized, normalized)
    rstd /= cols
    rstd += eps
    xp.sqrt(rstd, out=rstd)
    xp.reciprocal(rstd, out=rstd)
    if rms:
        return normalized * rstd, rstd
    normalized *= rstd
    return normalized, rstd


def weighted(normalized: Array, weight: Array | None, bias: Array | None, dtype: DType) -> Array:
    """Return normalized * weight + bias in ``dtype``."""
    work = normalized.dtype
    y = normalized if weight is None else normalized * weight.astype(work, copy=False)
    if bias is not None:
        bias = bias.astype(work, copy=False)
        y = y + bias if weight is None else get_xp(y).add(y, bias, out=y)
    return y.astype(dtype, copy=y is normalized)


def normalized_gradient(g: Array, normalized: Array, rstd: Array, rms: bool = False) -> Array:
    """Return the gradient of x, given that of the normalized rows; may overwrite ``g``."""
    cols = max(g.shape[-1], 1)
    mean = 0 if rms else row_sum(g) / cols
    dx = normalized * (row_dot(g, normalized) / -cols)
    dx += g
    if not rms:
        dx -= mean
    dx *= rstd
    return dx


def column_sum(values: Array, slot: tuple[Array, bool] | None, dtype: DType) -> Array | None:
    """Return the sums over all rows of (..., D) in ``dtype``, or None if written to ``slot``."""
    rows = math.prod(values.shape[:-1])
    total = get_xp(values).ones(rows, values.dtype) @ values.reshape(rows, values.shape[-1])
    return put(total, slot, dtype)


def put(total: Array, slot: tuple[Array, bool] | None, dtype: DType) -> Array | None:
    """Return ``total`` in ``dtype``, or None if written to ``slot``."""
    if slot is None:
        return total.astype(dtype, copy=False)
    place, accumulate = slot
    if accumulate:
        place += total.astype(place.dtype, copy=False)
    else:
        place[...] = total
    return None


def _forward_reference(x, weight, bias, *, needs, eps):
    normalized, rstd = normalize(x, eps)
    y = weighted(normalized, weight, bias, x.dtype)
    return y, (normalized, rstd, weight, x.dtype) if any(needs) else None


def _backward_reference(saved, dy, *, needs, into, eps):
    normalized, rstd, weight, dtype = saved
    dy = dy.astype(normalized.dtype, order="C", copy=False)
    dx = dweight = dbias = None
    if needs[0]:
        g = dy if weight is None else dy * weight.astype(dy.dtype, copy=False)
        dx = normalized_gradient(g, normalized, rstd).astype(dtype, copy=False)
    if needs[1]:
        dweight = column_sum(dy * normalized, into[1], dtype)
    if needs[2]:
        dbias = column_sum(dy, into[2], dtype)
    return dx, dweight, dbias


# ---- numba: gpuattn/numbakernels/layer_norm.py --------------------------------------------------


def _refuse_numba(x, *others, **params):
    if reason := dtype_refusal(x) or device.refusal(x):
        return reason
    most = NUMBA_MAX_TEAM * NUMBA_MAX_VECTORS * 16 // x.itemsize
    return (
        f"x has {x.shape[-1]} columns, this form takes at most {most}"
        if x.shape[-1] > most
        else None
    )


def _matrix(x, cols):
    """Return ``x`` as a matrix whose rows are whole 16-byte vectors, bfloat16 as its bits."""
    from gpuattn.numbakernels.vectors import numbers

    xp, rest = get_xp(x), -cols % (16 // x.itemsize)
    x = xp.ascontiguousarray(x).reshape(x.size // cols, cols)
    if rest or (on_gpu(x) and x.data.ptr % 16):
        wide_rows = xp.zeros((len(x), cols + rest), x.dtype)
        wide_rows[:, :cols] = x
        x = wide_rows
    return numbers(x)


def _vector(vector, like, missing):
    if vector is None:
        vector = get_xp(like).full(like.shape[-1], missing, like.dtype)
    return _matrix(vector, like.shape[-1])


def _numba_kernel(kernel_for, x):
    """Return (kernel for the rows ``x``, threads of a team, teams of a block)."""
    from gpuattn.numbakernels.reduce import layout, teams_of_a_block

    cols, width = x.shape[-1], 16 // x.itemsize
    team, vectors = layout(-(-cols // width))
    edges = cols != team * vectors * width
    return kernel_for(team, vectors, width, edges), team, teams_of_a_block(team)


def _forward_numba(x, weight, bias, *, needs, eps):
    from gpuattn.numbakernels.layer_norm import layer_norm_forward
    from gpuattn.numbakernels.vectors import numbers

    if not x.size:
        return x.copy(), (x, weight, None, None) if any(needs) else None
    cols = x.shape[-1]
    rows = _matrix(x, cols)
    y = arrays.empty(x, rows.shape)
    mean, rstd = (arrays.empty(x, len(rows), np.float32) for _ in range(2))
    vectors = _vector(weight, x, 1), _vector(bias, x, 0)
    outs = numbers(y), mean, rstd, cols, np.float32(eps)
    kernel, team, teams = _numba_kernel(layer_norm_forward, x)
    device.launch(kernel, (-(-len(rows) // teams),), (team * teams,), rows, *vectors, *outs)
    return y[:, :cols].reshape(x.shape), (x, weight, mean, rstd) if any(needs) else None


def _backward_numba(saved, dy, *, needs, into, eps):
    from gpuattn.numbakernels.layer_norm import SUMMING, column_sums, layer_norm_backward
    from gpuattn.numbakernels.vectors import numbers

    x, weight, mean, rstd = saved
    cols = x.shape[-1]
    if not x.size:
        none = get_xp(x).zeros(cols, np.float32)
        return x.copy(), *(put(none, into[i], x.dtype) if needs[i] else None for i in (1, 2))
    rows, vector = _matrix(x, cols), _vector(weight, x, 1)
    dy = _matrix(dy.astype(x.dtype, copy=False), cols)
    dx = arrays.empty(x, rows.shape)
    kernel, team, teams = _numba_kernel(layer_norm_backward, x)
    blocks = min(-(-len(rows) // teams), NUMBA_WARPS * 32 // (team * teams))
    count = blocks * teams
    sums = arrays.empty(x, (2 * count, rows.shape[1]), np.float32)
    outs = numbers(dx), sums[:count], sums[count:], cols
    device.launch(kernel, (blocks,), (team * teams,), rows, vector, dy, mean, rstd, *outs)
    dweight = dbias = None
    if needs[1] or needs[2]:
        total = arrays.empty(x, (2, rows.shape[1]), np.float32)
        device.launch(column_sums, (-(-rows.shape[1] // 32), 2), (32 * SUMMING,), sums, total)
        dweight, dbias = (
            put(total[i - 1, :cols], into[i], x.dtype) if needs[i] else None for i in (1, 2)
        )
    return dx[:, :cols].reshape(x.shape), dweight, dbias


# ---- raw: rawkernels/norm/layer_norm.cu, layer_norm_backward.cu ---------------------------------


def contiguous(*vectors: Array | None) -> list[Array | None]:
    """Return each vector contiguous and at a multiple of 16 bytes, None for None."""
    return [None if a is None else rows_of(a)[0] for a in vectors]


def forward_raw(
    x: Array,
    weight: Array | None,
    bias: Array | None,
    needs: tuple[bool, ...],
    eps: float,
    rms: bool,
) -> tuple[Array, tuple | None]:
    """Return (y, saved) of LayerNorm or RMSNorm."""
    x, step = rows_of(x)
    weight, bias = contiguous(weight, bias)
    rows, cols = x.size // max(x.shape[-1], 1), x.shape[-1]
    y, mean, rstd = arrays.empty(x, x.shape), None, None
    if any(needs):
        mean, rstd = (arrays.empty(x, rows, np.float32) for _ in range(2))
    given = {"WEIGHT": weight is not None, "BIAS": bias is not None}
    constants, block_rows = forward_layout(cols, x.dtype, 1, sum(given.values()))
    forward = kernel("norm/layer_norm.cu", "layer_norm_forward", RMS=rms, **constants, **given)
    grid, ahead = (-(-rows // block_rows),), prefetch_rows(x)
    forward(
        grid, (constants["BLOCK"],), x, weight, bias, y, mean, rstd, rows, cols, step, ahead, eps
    )  # fmt: skip
    return y, (x, step, weight, mean, rstd) if any(needs) else None


def backward_raw(
    saved: tuple, dy: Array, needs: tuple[bool, ...], into: tuple, rms: bool
) -> tuple[Array | None, ...]:
    """Return (dx, dweight, dbias) of LayerNorm or RMSNorm; ``needs``, ``into``: of all three."""
    x, step, weight, mean, rstd = saved
    dy, dy_step = rows_of(dy.astype(x.dtype, copy=False))
    rows, cols = x.size // max(x.shape[-1], 1), x.shape[-1]
    dx = arrays.empty(x, x.shape)
    constants, grid, shared = backward_layout(x, 2, 2, pairs=True)
    sums = parts_of(x, grid, needs[1:])
    given = {"RMS": rms, "WEIGHT": weight is not None}
    backward = kernel("norm/layer_norm_backward.cu", "layer_norm_backward", **constants, **given)
    numbers = rows, cols, step, dy_step
    backward(
        (grid,), (constants["BLOCK"],), x, weight, dy, mean, rstd, dx, *sums, *numbers,
        shared_bytes=shared,
    )  # fmt: skip
    return dx, *add_parts(sums, into[1:], x.dtype)


def _forward_raw(x, weight, bias, *, needs, eps):
    return forward_raw(x, weight, bias, needs, eps, rms=False)


def _backward_raw(saved, dy, *, needs, into, eps):
    return backward_raw(saved, dy, needs, into, rms=False)


IMPLS = Impls(
    "layer_norm",
    Impl("raw-simt", _forward_raw, _backward_raw, refuse_raw),
    Impl("numba", _forward_numba, _backward_numba, _refuse_numba),
    Impl("reference", _forward_reference, _backward_reference),
)
