"""The gradient of a linear layer on a GPU: ``plan`` decides, then one function launches each part.

For y = f(z) with z = x @ weight.T + bias, all parts come from dz, the gradient of z:
dx = dz @ weight, dweight = dz.T @ x, and dbias is the sum of dz over its rows.
"""

import contextlib
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from gpuattn import arrays
from gpuattn.arrays import as_rows, get_xp
from gpuattn.autodiff.pending_matmul import PendingMatmul
from gpuattn.autodiff.side_stream import defer, on_side_stream
from gpuattn.gemm.cublaslt import Reason
from gpuattn.gemm.matmul import matmul, matmul_and_sums
from gpuattn.ops.linear import gelu_hopper, hopper, weight_gradients
from gpuattn.ops.linear.bias_activation import launch_backward
from gpuattn.ops.norm.launch import add_parts
from gpuattn.typing import Array

TILE = 128  # rows and columns of a tile of dweight
FULL_TILES = 200  # tiles of dweight that fill a GPU by themselves
DEEP, DEEP_TILES = 12288, 128  # with DEEP rows or more DEEP_TILES are enough, as rows are split
JOINT_SIZE = 1 << 24  # numbers of dz, beyond which a launch of both is slower
SIDE_SHARE = 2  # a matmul on the side stream is planned for 1 / SIDE_SHARE of the multiprocessors


class Plan(NamedTuple):
    """Which launches compute a gradient.

    ``dz``: "codes" (by slopes stored as bytes), "matmul" (one launch computes the pending matmul
    that dy is and multiplies it by the slopes), "elementwise" (dy times the slopes), or "dy" (there
    is no activation). ``sums``: that launch sums up dbias too.
    ``joint``: dweight and dbias by one launch, if the library can do that. It sums up a large dz at
    a sixth of the copy rate, and dweight is no part of a common launch then. Beside the gradient of
    a single output it sums up nothing.
    ``small``: dweight does not fill a GPU by itself, so it may be deferred or go to the side
    stream.
    """

    dz: str
    sums: bool
    joint: bool
    small: bool


def plan(saved: tuple, dy: Array | PendingMatmul, needs: tuple[bool, ...], into: tuple) -> Plan:
    """Return the Plan of ``backward`` for the same arguments."""
    kind, x, *_ = saved
    if isinstance(dy, PendingMatmul) and kind != "codes":
        dz = "matmul"
    else:
        dz = {"codes": "codes", "none": "dy"}.get(kind, "elementwise")
    sums = dz == "elementwise" or (dz == "codes" and isinstance(dy, PendingMatmul))
    adds = into[2] is not None and into[2][1]  # to a bias gradient: no library does
    joint = needs[1] and needs[2] and not sums and not adds
    joint = joint and dy.shape[-1] > 1 and math.prod(dy.shape) <= JOINT_SIZE
    small = needs[1] and not _fills(math.prod(dy.shape[:-1]), x.shape[-1], dy.shape[-1])
    return Plan(dz, sums and needs[2], joint, small)


def _fills(rows, inputs, outputs):
    """Return whether the library computes dweight alone faster than a launch with others does."""
    tiles = -(-inputs // TILE) * -(-outputs // TILE)
    return tiles >= (DEEP_TILES if rows >= DEEP else FULL_TILES)


def backward(
    saved: tuple, dy: Array | PendingMatmul, *, needs: tuple[bool, ...], into: tuple,
    activation: str | None, fold: Callable | None = None,
) -> tuple[Array | None, ...]:  # fmt: skip
    """Return (dx, dweight, dbias), each None if it is not needed, written to ``into`` or folded.

    ``saved``: of ``save``. ``dy``: (..., out). ``fold``: see ``impls.Fusion``.
    """
    _, x, weight, *_ = saved
    way = plan(saved, dy, needs, into)
    dz, dbias = _dz(way, saved, dy, activation, into[2])
    alone = needs[2] and not way.sums
    both = _weight_and_bias(way, x, dz, into) if alone else None
    if alone and both is None:
        _, dbias = launch_backward(None, None, dz, True, into[2], None)
    dx = _input(dz, weight, dy, fold) if needs[0] else None
    if both is not None:
        return dx, *both
    return dx, _weight(way, x, dz, into[1], dy.dtype) if needs[1] else None, dbias


def takes_matmul(
    saved: tuple, matmul: PendingMatmul, index: int, *, needs: tuple, activation: str | None
) -> bool:
    """Return whether ``backward`` takes a ``PendingMatmul`` as dy: see ``impls.Fusion``."""
    kind, _, _, kept, bias = saved
    if kind == "codes":
        return gelu_hopper.takes_matmul(matmul)
    return kind != "none" and bias is None and hopper.takes(matmul, kept, activation)


def save(
    kind: str, x: Array, weight: Array, needs: tuple[bool, ...], kept: Any = None, bias: Any = None
) -> tuple:
    """Return what a forward saves: (kind, x or None, weight or None, kept, bias).

    x and weight are None where no gradient reads them. ``kind`` says what ``kept`` is:
    "none": None, as there is no activation; "z": what the activation is applied to, after ``bias``
    is added unless it is None; "y": the result, of ReLU; "codes": slopes as bytes, of
    ``gelu_hopper``; "slope": slopes, of the reference.
    """
    return kind, x if needs[1] else None, weight if needs[0] else None, kept, bias


# ---- each part ----------------------------------------------------------------------------------


def _dz(way, saved, dy, activation, slot):
    """Return (dz, dbias); dbias is None unless the launch of dz computes it for a new array."""
    *_, kept, bias = saved
    if way.dz == "codes" and way.sums:
        dz, parts = gelu_hopper.backward_and_sums(dy, kept)
        return dz, *add_parts([parts], [slot], dz.dtype)
    if way.dz == "codes":
        return gelu_hopper.backward(dy, kept), None
    if way.dz == "matmul":
        return hopper.backward(dy, kept, activation), None
    dy = get_xp(dy).ascontiguousarray(as_rows(dy))
    if way.dz == "elementwise":
        return launch_backward(kept, bias, dy, way.sums, slot, activation)
    return dy, None


def _weight_and_bias(way, x, dz, into):
    """Return (dweight, dbias), each None if it was, or later will be, written to ``into``.

    Return None if no launch does both.
    """
    if _defer(way, x, dz, into[1:]):
        return None, None
    if not way.joint:
        return None
    out, accumulate = into[1] or (None, False)
    dbias, _ = into[2] or (arrays.empty(dz, dz.shape[1:]), False)
    with _side_stream(way, x, dz, into[1:]) as share:
        dweight = matmul_and_sums(dz, as_rows(x), dbias, out, accumulate, share)
    if type(dweight) is Reason:
        return None
    return None if into[1] else dweight, None if into[2] else dbias


def _input(dz, weight, dy, fold):
    """Return dx, or None if the op that made x fused with the matmul."""
    shape = (*dy.shape[:-1], weight.shape[1])
    if fold is not None and fold(PendingMatmul(dz, weight, shape)):
        return None
    return input_gradient(dz, weight, shape, dy.dtype)


def _weight(way, x, dz, slot, dtype):
    """Return dweight, or None if it was, or later will be, written to ``slot``."""
    if _defer(way, x, dz, [slot]):
        return None
    with _side_stream(way, x, dz, [slot]) as share:
        return weight_gradient(x, dz, slot, dtype, share)


def _defer(way, x, dz, slots):
    """Defer the gradients of ``slots`` to one launch with other layers'; return whether.

    ``slots``: of dweight, or of dweight and dbias. Deferred where the common launch is faster.
    """
    if not way.small or None in slots:  # x is None where no gradient of the weight is needed
        return False
    x, (out, *bias) = as_rows(x), [target for target, _ in slots]
    if not weight_gradients.takes(dz, x, out):
        return False
    if bias and not weight_gradients.takes_bias(*bias, out):
        return False
    problem = weight_gradients.Problem(dz, x, *itertools.chain(*slots))
    return defer(weight_gradients.launch, problem, (dz, x), [out, *bias])


@contextlib.contextmanager
def _side_stream(way, x, dz, slots):
    """Let launches of a block go to the side stream; yield the ``share`` their matmuls get."""
    targets = [slot and slot[0] for slot in slots] if way.small else [None]
    with on_side_stream((x, dz), targets) as is_there:
        yield SIDE_SHARE if is_there else 1


# ---- matmuls, also of the reference -------------------------------------------------------------


def input_gradient(dz: Array, weight: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """Return dx = dz @ weight, of ``shape`` (..., in) and ``dtype``; multiplied in that of dz."""
    dx = matmul(dz, weight.astype(dz.dtype, copy=False))
    return dx.astype(dtype, copy=False).reshape(shape)


def weight_gradient(
    x: Array, dz: Array, slot: tuple[Array, bool] | None, dtype: Any, share: int = 1
) -> Array | None:
    """Return dweight = dz.T @ x in ``dtype``, or None if written to ``slot``.

    ``slot``: (array, whether to add to it), or None. ``share``: as in ``gemm.matmul``.
    """
    rows = as_rows(x).astype(dz.dtype, copy=False)
    out, accumulate = slot or (None, False)
    dweight = matmul(dz, rows, transpose_a=True, out=out, accumulate=accumulate, share=share)
    return None if slot else dweight.astype(dtype, copy=False)
