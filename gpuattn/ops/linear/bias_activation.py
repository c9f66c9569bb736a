"""GELU, ReLU, SiLU and SwiGLU with an optional bias, then dropout: y = dropout(f(x + bias)).

GELU: Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016; its tanh form is
y = z (1 + tanh(sqrt(2 / pi) (z + 0.044715 z^3))) / 2.
SiLU, also called swish: Elfwing et al., "Sigmoid-Weighted Linear Units", 2018; y = z sigmoid(z).
SwiGLU: Shazeer, "GLU Variants Improve Transformer", 2020; y = gate sigmoid(gate) up.
Their values and slopes on arrays: ``activations``. Device code:
``rawkernels/linear/bias_activation.cu`` and ``rawkernels/column_sum.cu``.
"""

import math
from typing import Any

import numpy as np

from gpuattn import arrays
from gpuattn.arrays import (
    aligned_rows,
    check_floats,
    check_together,
    ctype,
    get_xp,
    strided_rows,
    wide,
)
from gpuattn.autodiff.tape import op, raw
from gpuattn.cuda.kernels import kernel, kernel_refusal
from gpuattn.errors import problem
from gpuattn.impls import Call, Impl, Impls
from gpuattn.ops.arguments import check_choice, dropout_key, probability, take_arrays
from gpuattn.ops.dropout import device_numbers, factor, keep_of
from gpuattn.ops.linear.activations import activate
from gpuattn.rng import Key
from gpuattn.typing import Array

# the constant ACTIVATION of bias_activation.cu; "gelu" is the tanh form
ACTIVATIONS = {None: 0, "relu": 1, "gelu": 2, "gelu_exact": 3, "swiglu": 4, "silu": 5}
BLOCK, SUM_BLOCK = 256, 128
COLUMNS = 8  # per thread
MAX_ROW_THREADS, MIN_ROW_THREADS = 32, 8  # threads that share a row of many columns
ROWS = 2, 1  # per thread in the forward kernel: without and with SwiGLU, whose rows have two parts
MAX_PARTS = 100  # partial sums of a column for the second stage, if narrower slabs can avoid more
BLOCKS = 528  # of a backward launch, about: four for each multiprocessor of an H200


@op
def gelu(
    x: Array,
    bias: Array | None = None,
    *,
    approximate: str = "tanh",
    p: float = 0.0,
    seed: Any = None,
    impl: str | None = None,
) -> Call[Array]:
    """Return ``dropout(GELU(x + bias))``, in the shape and dtype of ``x``.

    ``x``: (..., cols) float array or Tensor. ``bias``: (cols,) in the dtype of ``x``, or None.
    ``approximate``: "tanh", or "none" for the exact form x * Phi(x).
    ``p``: the probability that dropout zeroes an element; ``seed``: None, an int or ``rng.Key``.
    ``impl``: an implementation's name, or None for the fastest that accepts the arguments.
    Raises TypeError for other or mixed dtypes, ValueError for a bias that does not fit and for p
    outside 0..1.
    """
    check_choice("gelu", "approximate", approximate, "tanh", "none")
    activation = "gelu" if approximate == "tanh" else "gelu_exact"
    return _apply(GELU, x, bias, activation, p, seed, impl)


@op
def relu(
    x: Array,
    bias: Array | None = None,
    *,
    p: float = 0.0,
    seed: Any = None,
    impl: str | None = None,
) -> Call[Array]:
    """Return ``dropout(max(x + bias, 0))``, in the shape and dtype of ``x``; NaN stays NaN.

    Other arguments and errors are as in ``gelu``.
    """
    return _apply(RELU, x, bias, "relu", p, seed, impl)


@op
def silu(
    x: Array,
    bias: Array | None = None,
    *,
    p: float = 0.0,
    seed: Any = None,
    impl: str | None = None,
) -> Call[Array]:
    """Return ``dropout(z * sigmoid(z))`` where z is ``x + bias``, in the shape and dtype of ``x``.

    Other arguments and errors are as in ``gelu``.
    """
    return _apply(SILU, x, bias, "silu", p, seed, impl)


@op
def swiglu(
    x: Array,
    bias: Array | None = None,
    *,
    p: float = 0.0,
    seed: Any = None,
    impl: str | None = None,
) -> Call[Array]:
    """Return ``dropout(gate * sigmoid(gate) * up)`` where ``x + bias`` is (gate, up): (..., cols).

    ``x``: (..., 2 * cols), the gate in its first half. ``bias``: (2 * cols,) or None. Other
    arguments and errors are as in ``gelu``; also raises ValueError for an odd number of columns.
    """
    (x,) = take_arrays("swiglu", {"x": x}, {}).values()
    columns = x.shape[-1:]
    if not columns or columns[0] % 2:
        accepted = "an even number of columns, gate and up"
        raise ValueError(problem("swiglu", "x.shape", x.shape, accepted))
    return _apply(SWIGLU, x, bias, "swiglu", p, seed, impl)


def _apply(impls, x, bias, activation, p, seed, impl):
    x, bias = _checked(impls.op, x, bias)
    p = probability(impls.op, "p", p)
    key = dropout_key(impls.op, p, seed)
    return Call(impls, (x, bias), impl, activation=activation, p=p, key=key)


def _checked(function, x, bias):
    x, bias = take_arrays(function, {"x": x}, {"bias": bias}).values()
    raw_x, raw_bias = raw(x), raw(bias)
    check_together(function, x=raw_x, bias=raw_bias)
    check_floats(function, x=raw_x, bias=raw_bias)
    if raw_bias is not None and (raw_x.ndim == 0 or raw_bias.shape != raw_x.shape[-1:]):
        accepted = f"the last axis of x, which has shape {raw_x.shape}"
        raise ValueError(problem(function, "bias.shape", raw_bias.shape, accepted))
    return x, bias


# ---- reference: NumPy or CuPy ----------------------------------------------------------------


def _forward_reference(x, bias, *, needs, activation, p=0.0, key=None):
    z = x.astype(wide(x.dtype), copy=False)
    if bias is not None:
        z = z + bias.astype(z.dtype, copy=False)
    y, slope = activate(z, activation, any(needs))
    keep = keep_of(y, p, key)
    if keep is not None:
        share = keep * y.dtype.type(factor(p))
        y = y * share
        if any(needs):
            slope = (_halves(slope, y) * share[..., None, :]).reshape(x.shape)
    return y.astype(x.dtype, copy=False), ((slope,) if any(needs) else None)


def _backward_reference(saved, dy, *, needs, into, activation, p=0.0, key=None):
    (slope,) = saved
    dz = dy.astype(wide(dy.dtype), copy=False)
    dz = dz * slope if slope.shape == dy.shape else _halves(slope, dy) * dz[..., None, :]
    dz = dz.reshape(slope.shape)
    dx = dz.astype(dy.dtype, copy=False) if needs[0] else None
    dbias = dz.reshape(-1, dz.shape[-1]).sum(0).astype(dy.dtype, copy=False) if needs[1] else None
    return dx, dbias


def _halves(slope, y):
    """Return the slope by parts of x, (..., 1 or 2, cols), to be multiplied by y (..., cols)."""
    parts = slope.shape[-1] // y.shape[-1] if slope.ndim and y.shape[-1] else 1
    return slope.reshape(*y.shape[:-1], parts, *y.shape[-1:])


# ---- raw: rawkernels/linear/bias_activation.cu, rawkernels/column_sum.cu ------------------------


def refuse_raw(x: Array, *_: Any, **__: Any) -> str | None:
    """Return why the kernels do not take ``x``, or None."""
    return kernel_refusal(x)


def _forward_raw(x, bias, *, needs, activation, p=0.0, key=None):
    cols = x.shape[-1:] if activation != "swiglu" else (x.shape[-1] // 2,)
    y = launch_forward(x, bias, arrays.empty(x, x.shape[:-1] + cols), activation, p, key)
    if not any(needs):
        return y, None
    return y, ((y, None) if activation == "relu" else (x, bias))


def _backward_raw(saved, dy, *, needs, into, activation, p=0.0, key=None):
    return launch_backward(*saved, dy, needs[1], into[1], activation, p, key)


def launch_forward(
    x: Array,
    bias: Array | None,
    y: Array,
    activation: str | None,
    p: float = 0.0,
    key: Key | None = None,
) -> Array:
    """Write dropout(f(x + bias)) to ``y``, C-contiguous, which may be ``x``. Return ``y``."""
    x, step = strided_rows(x)
    bias = None if bias is None else get_xp(bias).ascontiguousarray(bias)
    rows, cols = _rows_and_columns(y)
    lanes, slabs = _lanes_and_slabs(rows, cols)
    vector = _vector(cols, (x, step), (bias, 0), (y, 0))
    rows_of_a_block = ROWS[activation == "swiglu"] * BLOCK // lanes
    _kernel("forward", x, activation, vector, p)(
        (slabs * -(-rows // rows_of_a_block),), (BLOCK,),
        x, bias, y, rows, cols, step, slabs, lanes, *device_numbers(p, key),
    )  # fmt: skip
    return y


def launch_backward(
    x: Any,
    bias: Array | None,
    dy: Array,
    want_bias: bool,
    slot: tuple[Array, bool] | None,
    activation: str | None,
    p: float = 0.0,
    key: Key | None = None,
) -> tuple[Array, Array | None]:
    """Return (dx, dbias): the gradient ``dy`` times f'(x + bias), and its sum over the rows.

    For ReLU ``x`` is its result, and ``bias`` None. dbias is None unless ``want_bias``, or if
    written to ``slot``, (array, whether to add to it). Without an activation dx is dy.
    """
    if activation is None and not want_bias:
        return dy, None
    dx = dy if activation is None else arrays.empty(dy, x.shape)
    shape, step = dx.shape, 0
    given: Any = None
    if activation is None:
        bias = None
    else:
        given, step = strided_rows(x)
        bias = None if bias is None else get_xp(bias).ascontiguousarray(bias)
    dy, dy_step = strided_rows(dy)
    rows, cols = _rows_and_columns(dy)
    lanes, slabs, chunk, parts = _chunks(rows, cols)
    partial = arrays.empty(dy, (parts, shape[-1]), np.float32) if want_bias else None
    vector = _vector(cols, (given, step), (bias, 0), (dy, dy_step))
    _kernel("backward", dy, activation, vector, p)(
        (slabs * parts,), (BLOCK,), given, bias, dy, None if activation is None else dx, partial,
        rows, cols, step, dy_step, chunk, slabs, lanes, *device_numbers(p, key),
    )  # fmt: skip
    if not want_bias:
        return dx, None
    out, accumulate = slot or (arrays.empty(dy, shape[-1:]), False)
    finish = kernel("column_sum.cu", "column_sum", scalar=ctype(out.dtype), BLOCK=SUM_BLOCK)
    grid = (-(-out.size // SUM_BLOCK),)
    finish(grid, (SUM_BLOCK,), partial, out, parts, out.size, accumulate)
    return dx, None if slot else out


def _kernel(verb, x, activation, vector, p):
    constants = {"scalar": ctype(x.dtype), "ACTIVATION": ACTIVATIONS[activation]}
    constants |= {"VECTOR": vector, "DROPS": p > 0, "BLOCK": BLOCK}
    return kernel("linear/bias_activation.cu", f"bias_activation_{verb}", **constants)


def _vector(cols, *rows):
    """Return whether threads can read COLUMNS at a time; ``rows``: pairs (array, row step)."""
    return cols % COLUMNS == 0 and all(aligned_rows(x, step) for x, step in rows)


def _rows_and_columns(x):
    return math.prod(x.shape[:-1]), math.prod(x.shape[-1:])


def _lanes_and_slabs(rows, cols):
    """Return (threads that share a row, a power of two; slabs of a row that they cover).

    Chosen so that few threads are idle, at the end of a row or because there are few rows.
    """
    packs, lanes = -(-cols // COLUMNS), MAX_ROW_THREADS
    while lanes > 1 and 8 * (-packs % lanes) > packs:
        lanes //= 2
    while lanes < min(packs, BLOCK) and rows * lanes < BLOCK:
        lanes *= 2
    return lanes, -(-packs // lanes)


def _chunks(rows, cols):
    """Return (lanes, slabs, rows of a chunk, chunks); a block sums up a slab of one chunk.

    Narrow slabs give few chunks, so that the second stage has few partial sums to add.
    """
    lanes, _ = _lanes_and_slabs(rows, cols)
    while True:
        slabs = -(-cols // (COLUMNS * lanes))
        chunk = max(-(-rows * slabs // BLOCKS), BLOCK // lanes)
        parts = -(-rows // chunk)
        if parts <= MAX_PARTS or lanes <= MIN_ROW_THREADS:
            return lanes, slabs, chunk, parts
        lanes //= 2


GELU, RELU, SILU, SWIGLU = (
    Impls(
        op,
        Impl("raw-simt", _forward_raw, _backward_raw, refuse_raw),
        Impl("reference", _forward_reference, _backward_reference),
    )
    for op in ("gelu", "relu", "silu", "swiglu")
)
