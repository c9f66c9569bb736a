"""The last layer of a residual branch, with dropout, the residual and the norm after it.

h = residual + dropout(x @ projection.T + projection_bias), and norm(h). "raw-hopper": one kernel
computes whole rows of the matmul and all that follows, ``linear/linear_dropout_add_norm.cu``.
"cublaslt" and "reference": the two ops ``linear`` and ``dropout_add_norm``, one after the other.
The gradient is that of the two ops in each of them. Without a gradient and dropout "cublaslt" lets
the product add to a residual that is donated, so that the norm reads one array instead of two.
"""

import math
from functools import partial
from typing import Any

import numpy as np

from gpuattn import arrays, rng
from gpuattn.arrays import as_rows, check_floats, check_together, ctype, get_xp
from gpuattn.autodiff.tape import Box, is_recording, op, raw
from gpuattn.cuda.gpu import gpu, hopper_refusal
from gpuattn.cuda.kernels import kernel, kernel_refusal
from gpuattn.cuda.tensor_maps import tensor_map
from gpuattn.errors import SlowerRefusal
from gpuattn.gemm.cublaslt import Reason
from gpuattn.gemm.matmul import add_matmul
from gpuattn.impls import Call, Fusion, Impl, Impls
from gpuattn.ops.arguments import check_flags, check_matrix, check_shapes, take_arrays
from gpuattn.ops.dropout import device_numbers
from gpuattn.ops.linear.gradients import save
from gpuattn.ops.linear.linear import IMPLS as LINEAR
from gpuattn.ops.norm.dropout_add_norm import IMPLS as DROPOUT_ADD_NORM
from gpuattn.ops.norm.dropout_add_norm import settings
from gpuattn.ops.norm.launch import refuse_raw, rows_of
from gpuattn.ops.norm.layer_norm import check_eps, contiguous, layer_norm
from gpuattn.ops.norm.rms_norm import rms_norm
from gpuattn.typing import Array

FILE, NAME = "linear/linear_dropout_add_norm.cu", "linear_dropout_add_norm_forward"
THREADS = 384
STAGE_BYTES, MAX_STAGES = 221184, 6  # shared memory for pipeline stages, and their number
TILES = {128: (64,), 192: (128,), 256: (128, 64), 384: (128, 64), 512: (64,)}
"""Columns: possible rows of a block, in the order in which they were measured faster."""
MIN_BUSY = 0.8  # share of the multiprocessors' time that blocks fill: below, two ops are faster
MAX_ROWS = 2**31 - 128


@op
def linear_dropout_add_norm(
    x: Array,
    projection: Array,
    residual: Array,
    weight: Array | None,
    bias: Array | None = None,
    *,
    projection_bias: Array | None = None,
    p: float = 0.0,
    norm: str = "layer",
    eps: float = 1e-5,
    seed: Any = None,
    donate: bool = False,
    impl: str | None = None,
) -> Call[tuple[Array, Array]]:
    """Return (normed, h): h = residual + dropout(x @ projection.T + projection_bias), norm(h).

    ``x``: (..., in). ``projection``: (D, in). ``residual``: (..., D). ``weight``, ``bias``,
    ``projection_bias``: (D,) or None. All of one float dtype, arrays or Tensors. ``norm``, ``p``,
    ``seed``, ``eps``: as in ``dropout_add_norm``. The results are those of
    ``dropout_add_norm(linear(x, projection), residual, ...)``, but for a rounding: "raw-hopper"
    does not round the matmul to the dtype, nor does "cublaslt" where it takes a donated residual.
    ``donate``: the memory of ``residual`` may become that of h, unless a gradient is recorded.
    ``impl``: "raw-hopper", "cublaslt", "reference", or None for the first that accepts.

    Raises TypeError for other or mixed dtypes, ValueError for shapes that do not fit, p outside
    0..1, an ``eps`` that is not positive and finite, and an unknown ``norm``.
    """
    name = "linear_dropout_add_norm"
    rows = {"x": x, "projection": projection, "residual": residual}
    vectors = {"weight": weight, "bias": bias, "projection_bias": projection_bias}
    inputs = take_arrays(name, rows, vectors)
    given = {name: raw(value) for name, value in inputs.items()}
    check_together(name, **given)
    check_floats(name, **given)
    x, projection, residual, *_ = given.values()
    check_matrix(name, x, projection, "projection", "(D, in)")
    shape = *x.shape[:-1], len(projection)
    check_shapes(name, shape, residual=residual)
    check_shapes(name, shape[-1:], **{name: given[name] for name in vectors})
    eps = check_eps(name, eps)
    check_flags(name, donate=donate)
    params = settings(name, norm, p, seed) | {"eps": eps, "donate": bool(donate)}
    own = inputs["residual"]
    donated = (own,) if donate and isinstance(own, Box) and not is_recording() else ()
    return Call(IMPLS, inputs.values(), impl, donated=donated, **params)


# ---- as two ops ---------------------------------------------------------------------------------

_OF_LINEAR = 5  # values that ``save`` returns; what dropout_add_norm saves comes after them


def _needs_of_linear(needs):
    return needs[0], needs[1], False


def _needs_of_norm(needs):
    return needs[0] or needs[1], *needs[2:]


def _saved(x, projection, needs, of_norm):
    """Return what both ops save as one tuple, in which the tape finds inputs and outputs."""
    return *save("none", x, projection, _needs_of_linear(needs)), *of_norm


def _forward_two(linear, norm, x, projection, residual, *vectors, needs, donate=False, **params):
    if donate and linear.name == "cublaslt" and not any(needs):
        outs = _in_place(x, projection, residual, *vectors, **params)
        if outs is not None:
            return outs, None
    y, _ = linear.forward(x, projection, None, needs=(False,) * 3, activation=None)
    outs, saved = norm.forward(y, residual, *vectors, needs=_needs_of_norm(needs), **params)
    return outs, _saved(x, projection, needs, saved) if any(needs) else None


def _in_place(x, projection, residual, weight, bias, x_bias, *, p, key, rms, eps):
    """Return (normed, h) with h in the memory of the residual; None where that cannot be."""
    if rng.threshold(p) < 65536 or x.itemsize != 2 or not residual.flags.c_contiguous:
        return None
    h = residual.reshape(-1, len(projection))
    if type(add_matmul(as_rows(x), projection, x_bias, h)) is Reason:
        return None
    norm = rms_norm if rms else partial(layer_norm, bias=bias)
    return norm(residual, weight, eps=eps), residual


def _backward_two(linear, norm, saved, *grads, needs, into, donate=False, fold=None, **params):
    of_norm, slots = saved[_OF_LINEAR:], (None, *into[2:])
    dy, *rest = norm.backward(of_norm, *grads, needs=_needs_of_norm(needs), into=slots, **params)
    if not any(needs[:2]):
        return None, None, *rest
    params = {"needs": _needs_of_linear(needs), "into": (*into[:2], None), "activation": None}
    if linear.fusion.offers_matmul:
        params["fold"] = fold
    dx, dprojection, _ = linear.backward(saved[:_OF_LINEAR], dy, **params)
    return dx, dprojection, *rest


# ---- Hopper: rawkernels/linear/linear_dropout_add_norm.cu ---------------------------------------


def _refuse_hopper(x, projection, residual, *vectors, **params):
    if reason := kernel_refusal(x) or hopper_refusal(x.device.id):
        return reason
    if x.itemsize != 2:
        return f"x is {x.dtype}, the kernel takes float16 and bfloat16"
    width, depth = projection.shape
    if width not in TILES:
        return f"{width} outputs, the kernel takes {', '.join(map(str, TILES))}"
    if depth % 8 or not depth:
        return f"{depth} inputs, the kernel takes multiples of 8"
    if (count := residual.size // width) > MAX_ROWS:
        return f"{count} rows, the kernel takes {MAX_ROWS}"
    if (share := share_of(count, block_rows(width, count, x.device.id), x.device.id)) < MIN_BUSY:
        return SlowerRefusal(f"its blocks would fill {share:.0%} of the multiprocessors' time")
    return None


def share_of(count: int, rows: int, device: int) -> float:
    """Return the share of the multiprocessors' time that blocks of ``rows`` fill: 0 to 1.

    ``count``: all rows. The last wave of blocks leaves some multiprocessors idle.
    """
    at_once = rows * gpu(device).multiprocessors
    return count / (-(-count // at_once) * at_once) if count else 0.0


def block_rows(width: int, count: int, device: int) -> int:
    """Return the rows of a block: the first of TILES that fills the GPU about as well as any."""
    best = max(share_of(count, rows, device) for rows in TILES[width])
    return next(r for r in TILES[width] if share_of(count, r, device) >= MIN_BUSY * best)


def _map(x, box):
    """Return (x, the tensor map of its rows in boxes of ``box`` rows); copies x if need be."""
    x, step = rows_of(x)
    if step < x.shape[-1]:
        x = get_xp(x).array(x, order="C")
    return x, tensor_map(x.reshape(1, math.prod(x.shape[:-1]), 1, x.shape[-1]), box)


def box(width: int, rows: int) -> int:
    """Return the rows of the projection that one TMA copy loads, for a block of ``rows``."""
    own = width if rows == 128 else width // 2  # columns of a warpgroup
    return own // 2 if own > 256 else own


def shared_bytes(width: int, rows: int) -> int:
    """Return the bytes of shared memory of a block, as the kernel divides them."""
    stage = 128 * (rows + width)
    stages = min(STAGE_BYTES // stage, MAX_STAGES)
    return 2048 + stages * stage + 6 * width + 1024 + rows * width // 8


def _forward_hopper(
    x, projection, residual, weight, bias, x_bias, *, needs, p, key, rms, eps, donate=False
):  # fmt: skip
    width, depth = projection.shape
    normed, h = arrays.empty(x, residual.shape), arrays.empty(x, residual.shape)
    count, mean, rstd = residual.size // width, None, None
    if any(needs):
        mean, rstd = (arrays.empty(x, count, np.float32) for _ in range(2))
    rows = block_rows(width, count, x.device.id)
    boxes = rows, box(width, rows), 64, 16, 16
    given = [_map(*pair) for pair in zip((x, projection, residual, normed, h), boxes, strict=True)]
    dropout = rng.threshold(p) < 65536  # else p is too small to drop an element
    constants = {"ROWS": rows, "COLUMNS": width, "RMS": rms, "DROPOUT": dropout}
    weight, bias, x_bias = contiguous(weight, bias, x_bias)
    kernel(FILE, NAME, scalar=ctype(x.dtype), **constants)(
        (-(-count // rows),), (THREADS,), *(of for _, of in given), weight, bias, x_bias, mean,
        rstd, count, depth, eps, *device_numbers(p, key), shared_bytes=shared_bytes(width, rows),
    )  # fmt: skip
    if not any(needs):
        return (normed, h), None
    return (normed, h), _saved(x, projection, needs, (h, weight, mean, rstd))


def _impl(name, linear, norm, forward=None, refuse=None, **more):
    """Return an Impl whose gradient is that of these implementations of the two ops."""
    linear = next(impl for impl in LINEAR if impl.name == linear)
    norm = next(impl for impl in DROPOUT_ADD_NORM if impl.name == norm)
    forward = forward or partial(_forward_two, linear, norm)
    fusion = Fusion(
        offers_matmul=linear.fusion.offers_matmul, takes_second=norm.fusion.takes_second
    )
    backward = partial(_backward_two, linear, norm)
    return Impl(name, forward, backward, refuse, fusion=fusion, **more)


IMPLS = Impls(
    "linear_dropout_add_norm",
    _impl("raw-hopper", "cublaslt", "raw-simt", _forward_hopper, _refuse_hopper, specialized=True),
    _impl("cublaslt", "cublaslt", "raw-simt", refuse=refuse_raw),
    _impl("reference", "reference", "reference"),
)
