"""A residual branch's last layer and the border behind it: h = residual + dropout(y), norm(h).

y = x @ projection.T + projection_bias. On Hopper one kernel computes whole rows of y and goes on
with them, ``linear/linear_dropout_add_norm.cu``; else these are the two ops ``linear`` and
``dropout_add_norm``, whose gradients are this one's in any case.
"""

import math
from functools import partial

import numpy as np

from gpuattn import arrays, rng
from gpuattn.arrays import check_floats, check_together, ctype, get_xp
from gpuattn.autodiff.tape import op, raw
from gpuattn.cuda.gpu import gpu, hopper_refusal
from gpuattn.cuda.kernels import kernel, kernel_refusal
from gpuattn.cuda.tensor_maps import tensor_map
from gpuattn.errors import SlowerRefusal, problem
from gpuattn.impls import Call, Fusion, Impl, Impls
from gpuattn.ops.arguments import check_choice, dropout_key, number, probability, take_arrays
from gpuattn.ops.dropout import device_numbers
from gpuattn.ops.linear.linear import IMPLS as LINEAR
from gpuattn.ops.norm.dropout_add_norm import IMPLS as DROPOUT_ADD_NORM
from gpuattn.ops.norm.launch import refuse_raw, rows_of
from gpuattn.ops.norm.layer_norm import contiguous

FILE, NAME = "linear/linear_dropout_add_norm.cu", "linear_dropout_add_norm_forward"
THREADS = 384
STAGE_BYTES, MAX_STAGES = 221184, 6  # of shared memory, as the kernel has it
TILES = {128: (64,), 192: (128,), 256: (128, 64), 384: (128, 64), 512: (64,)}
"""Columns: rows of a block, as measured best first."""
LEAST_SHARE = 0.8  # of the multiprocessors' time that blocks fill, else two launches are faster
MAX_ROWS = 2**31 - 128


@op
def linear_dropout_add_norm(
    x, projection, residual, weight, bias=None, *, projection_bias=None, p=0.0, norm="layer",
    eps=1e-5, seed=None, impl=None,
):  # fmt: skip
    """Return (normed, h): h = residual + dropout(x @ projection.T + projection_bias), norm(h).

    ``x``: (..., in). ``projection``: (D, in). ``residual``: (..., D). ``weight``, ``bias``,
    ``projection_bias``: (D,) or None. All of one float dtype, arrays or Tensors. ``norm``, ``p``,
    ``seed``, ``eps``: as in ``dropout_add_norm``, which this is of ``linear(x, projection)``; the
    product need not be rounded in between. ``impl``: "raw-hopper", "raw-simt", "reference", or
    None for the first that accepts.

    Raises TypeError for other or mixed dtypes, ValueError for shapes that do not fit and for what
    ``dropout_add_norm`` does not take.
    """
    name = "linear_dropout_add_norm"
    rows = {"x": x, "projection": projection, "residual": residual}
    vectors = {"weight": weight, "bias": bias, "projection_bias": projection_bias}
    given = take_arrays(name, rows, vectors)
    _check({name: raw(value) for name, value in given.items()})
    check_choice(name, "norm", norm, "layer", "rms")
    eps = number(name, "eps", eps, "a positive number", lambda e: 0 < e < math.inf)
    p = probability(name, "p", p)
    key = dropout_key(name, p, seed)
    return Call(IMPLS, given.values(), impl, p=p, key=key, rms=norm == "rms", eps=eps)


def _check(given):
    def wrong(name, found, accepted):
        return ValueError(problem("linear_dropout_add_norm", name, found, accepted))

    check_together("linear_dropout_add_norm", **given)
    check_floats("linear_dropout_add_norm", **given)
    x, projection = given["x"], given["projection"]
    if projection.ndim != 2:
        raise wrong("projection.shape", projection.shape, "(D, in)")
    if x.ndim == 0 or x.shape[-1] != projection.shape[1]:
        raise wrong("x.shape", x.shape, f"(..., {projection.shape[1]}), as projection has it")
    shape = (*x.shape[:-1], len(projection))
    if given["residual"].shape != shape:
        raise wrong("residual.shape", given["residual"].shape, shape)
    for name in ("weight", "bias", "projection_bias"):
        if given[name] is not None and given[name].shape != shape[-1:]:
            raise wrong(f"{name}.shape", given[name].shape, shape[-1:])


# ---- as two ops ---------------------------------------------------------------------------------


def _of_product(needs):
    return needs[0], needs[1], False


def _of_border(needs):
    return needs[0] or needs[1], *needs[2:]


def _saved(of_product, of_border):
    """Return what both ops save as one flat tuple, in which the tape finds inputs and outputs."""
    return len(of_product or ()), *(of_product or ()), *of_border


def _parted(saved):
    return saved[1 : 1 + saved[0]], saved[1 + saved[0] :]


def _forward_by_two(product, border, x, projection, residual, *vectors, needs, **params):
    y, kept = product.forward(x, projection, None, needs=_of_product(needs), activation=None)
    outs, saved = border.forward(y, residual, *vectors, needs=_of_border(needs), **params)
    return outs, _saved(kept, saved) if any(needs) else None


def _backward_by_two(product, border, saved, *grads, needs, into, fold=None, **params):
    kept, saved = _parted(saved)
    places = None, *into[2:]
    dy, *rest = border.backward(saved, *grads, needs=_of_border(needs), into=places, **params)
    if not any(needs[:2]):
        return None, None, *rest
    places, params = (*into[:2], None), {"needs": _of_product(needs), "activation": None}
    params |= {"fold": fold} if product.fusion.offers_matmul else {}
    dx, dprojection, _ = product.backward(kept, dy, into=places, **params)
    return dx, dprojection, *rest


# ---- Hopper: rawkernels/linear/linear_dropout_add_norm.cu ---------------------------------------


def _refuse_hopper(x, projection, residual, *vectors, **params):
    if reason := kernel_refusal(x):
        return reason
    if reason := hopper_refusal(x.device.id):
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
    if (share := share_of(count, block_rows(width, count, x.device.id), x.device.id)) < LEAST_SHARE:
        return SlowerRefusal(f"its blocks would fill {share:.0%} of the multiprocessors' time")
    return None


def share_of(count, rows, device):
    """Return which share of the time of all multiprocessors blocks of ``rows`` of rows fill."""
    at_once = rows * gpu(device).multiprocessors
    return count / (-(-count // at_once) * at_once) if count else 0.0


def block_rows(width, count, device):
    """Return the rows of a block: of two tiles the first, where blocks of it fill about as much."""
    best = max(share_of(count, rows, device) for rows in TILES[width])
    return next(r for r in TILES[width] if share_of(count, r, device) >= LEAST_SHARE * best)


def _map(x, box):
    """Return (x, the copy engine's map of its rows in boxes of ``box``), a copy where need be."""
    x, step = rows_of(x)
    if step < x.shape[-1]:
        x = get_xp(x).array(x, order="C")
    return x, tensor_map(x.reshape(1, math.prod(x.shape[:-1]), 1, x.shape[-1]), box)


def box(width, rows):
    """Return the rows of a box of the projection, by those of a block."""
    own = width if rows == 128 else width // 2  # columns of a warpgroup
    return own // 2 if own > 256 else own


def shared_bytes(width, rows):
    """Return the shared memory of a block of so many rows, as the kernel lays it out."""
    stage = 128 * (rows + width)
    stages = min(STAGE_BYTES // stage, MAX_STAGES)
    return 2048 + stages * stage + 6 * width + 1024 + rows * width // 8


def _forward_hopper(x, projection, residual, weight, bias, x_bias, *, needs, p, key, rms, eps):
    width, depth = projection.shape
    normed, h = arrays.empty(x, residual.shape), arrays.empty(x, residual.shape)
    count, mean, rstd = residual.size // width, None, None
    if any(needs):
        mean, rstd = (arrays.empty(x, count, np.float32) for _ in range(2))
    rows = block_rows(width, count, x.device.id)
    boxes = rows, box(width, rows), 64, 16, 16
    given = [_map(*pair) for pair in zip((x, projection, residual, normed, h), boxes, strict=True)]
    dropout = rng.threshold(p) < 65536  # else p is too small to drop any
    constants = {"ROWS": rows, "COLUMNS": width, "RMS": rms, "DROPOUT": dropout}
    weight, bias, x_bias = contiguous(weight, bias, x_bias)
    kernel(FILE, NAME, scalar=ctype(x.dtype), **constants)(
        (-(-count // rows),), (THREADS,), *(of for _, of in given), weight, bias, x_bias, mean,
        rstd, count, depth, eps, *device_numbers(p, key), shared_bytes=shared_bytes(width, rows),
    )  # fmt: skip
    if not any(needs):
        return (normed, h), None
    kept = x if needs[1] else None, projection if needs[0] else None, None, None
    return (normed, h), _saved(kept, (h, weight, mean, rstd))


def _implementation(name, forward=None, refuse=None, of="raw-simt"):
    product, border = (
        next(impl for impl in impls if impl.name == of) for impls in (LINEAR, DROPOUT_ADD_NORM)
    )
    return Impl(
        name, forward or partial(_forward_by_two, product, border),
        partial(_backward_by_two, product, border), refuse,
        fusion=Fusion(offers_matmul=product.fusion.offers_matmul),
    )  # fmt: skip


IMPLS = Impls(
    "linear_dropout_add_norm",
    _implementation("raw-hopper", _forward_hopper, _refuse_hopper),
    _implementation("raw-simt", refuse=refuse_raw),
    _implementation("reference", of="reference"),
)
