"""Rotary position embedding: queries and keys rotated by angles proportional to their positions.

Pair i of a head, (x_2i, x_2i+1) at position p, is rotated by p * base^(-2 i / D), so that the dot
product of a query and a key depends only on the distance between them. Su et al., "RoFormer:
Enhanced Transformer with Rotary Position Embedding" (2021). Device code: ``rawkernels/rotary.cu``.
"""

import functools
import math
from collections.abc import Sequence

import numpy as np

from gpuattn import arrays
from gpuattn.arrays import check_floats, check_together, ctype, get_xp, rows_refusal, wide
from gpuattn.autodiff.gradient_layout import target_like
from gpuattn.autodiff.tape import op, raw
from gpuattn.cuda.kernels import kernel, kernel_refusal
from gpuattn.errors import problem
from gpuattn.impls import Call, Fusion, Impl, Impls
from gpuattn.ops.arguments import check_flags, described, number, take_arrays
from gpuattn.typing import Array

NAME = "rotary"
BLOCK = 256
VECTOR_NUMBERS = 8  # of a head that a thread rotates at a time, if rows are aligned to 16 bytes
MIN_HEADS = 4  # per thread
MAX_HEAD_DIM, MAX_TOKENS = 256, 2**31 - 1


@op
def rotary(
    q: Array,
    k: Array,
    positions: Array | None = None,
    *,
    base: float = 10_000.0,
    frequencies: Sequence[float] | None = None,
    donate: bool = False,
    impl: str | None = None,
) -> Call[tuple[Array, Array]]:
    """Return ``q`` and ``k`` rotated by the positions of their tokens.

    ``q``: (B, T, H, D) or, packed, (tokens, H, D); ``k``: the same with Hk heads, arrays or Tensors
    of one float dtype with any strides, D even. ``positions``: int, (B, T) or (tokens,); by default
    0, 1, ... along T. ``base``: of the wavelengths, 2 pi * base^(2 i / D) tokens for pair i.
    ``frequencies``: instead of it, D / 2 numbers: the radians of each pair from one token to the
    next. ``donate``: the results may overwrite the memory of ``q`` and ``k``.

    Angles are exact for positions up to 2^24; on a GPU in float32, rounded once. ``impl``: an
    implementation's name, or None for the fastest that accepts the arguments. Raises ValueError
    for shapes that do not fit, TypeError for dtypes.
    """
    inputs = tuple(take_arrays(NAME, {"q": q, "k": k}, {"positions": positions}).values())
    _check(*map(raw, inputs))
    check_flags(NAME, donate=donate)
    base = number(NAME, "base", base, "a positive number", lambda b: 0 < b < math.inf)
    if frequencies is not None:
        frequencies = _checked(frequencies, raw(inputs[0]).shape[-1] // 2)
    return Call(IMPLS, inputs, impl, rates=frequencies or base, donate=bool(donate))


def _check(q, k, positions):
    check_together(NAME, q=q, k=k, positions=positions)
    check_floats(NAME, q=q, k=k)
    if q.ndim not in (3, 4) or q.shape[-1] % 2 or not q.shape[-1]:
        accepted = "(B, T, H, D) or (tokens, H, D) with an even D"
        raise ValueError(problem(NAME, "q.shape", q.shape, accepted))
    if k.ndim != q.ndim or (k.shape[:-2], k.shape[-1]) != (q.shape[:-2], q.shape[-1]):
        accepted = f"{q.shape} but for the number of heads, as q"
        raise ValueError(problem(NAME, "k.shape", k.shape, accepted))
    if positions is None:
        return
    if positions.dtype.kind not in "iu":
        raise TypeError(problem(NAME, "positions.dtype", positions.dtype, "integers"))
    if positions.shape != q.shape[:-2]:
        accepted = f"{q.shape[:-2]}, a position for each token of q"
        raise ValueError(problem(NAME, "positions.shape", positions.shape, accepted))


def _checked(frequencies, pairs):
    """Return frequencies as a tuple of floats, a key of plans."""
    accepted = f"{pairs} numbers, one for each pair of a head"
    if not isinstance(frequencies, (list, tuple, np.ndarray)):
        raise TypeError(problem(NAME, "frequencies", described(frequencies), accepted))
    found = tuple(number(NAME, "frequencies", one) for one in frequencies)
    if len(found) != pairs:
        raise ValueError(problem(NAME, "frequencies", f"{len(found)} numbers", accepted))
    return found


def frequencies_of(base: float, head_dim: int) -> np.ndarray:
    """Return the (D / 2,) float64 radians of each pair of a head from one token to the next."""
    return base ** (-np.arange(0, head_dim, 2) / head_dim)


@functools.cache
def _revolutions(rates, head_dim):
    """Return the (D / 2,) float64 revolutions of each pair from one token to the next.

    ``rates``: the base, or a tuple of frequencies.
    """
    given = rates if isinstance(rates, tuple) else frequencies_of(rates, head_dim)
    return np.asarray(given) / (2 * np.pi)


def _gradient(x, slot):
    """Return the array for the gradient of the op's input: that of ``slot``, or a new one."""
    place = target_like(slot, x)
    return arrays.empty(x, x.shape) if place is None else place


def _layout(saved, out, into, **params):
    """Return the arrays of ``impls.Fusion``: a gradient is rotated back in place."""
    return into, into[:2]


IN_PLACE = Fusion(layout=_layout, writes_into_layout=True)


# ---- reference: NumPy or CuPy -------------------------------------------------------------------


def _rotate_reference(pairs, positions, rates, direction):
    """Write x, rotated, to out, for each (x, out) of ``pairs``."""
    shape, head_dim = pairs[0][0].shape[:-2], pairs[0][0].shape[-1]
    xp = get_xp(pairs[0][0])
    if positions is None:
        positions = xp.broadcast_to(xp.arange(shape[-1]), shape)
    parts = positions[..., None] * xp.asarray(_revolutions(rates, head_dim))
    angles = 2 * np.pi * (parts - xp.rint(parts))[..., None, :]
    dtype = wide(pairs[0][0].dtype)
    cosine, sine = xp.cos(angles).astype(dtype), (direction * xp.sin(angles)).astype(dtype)
    for x, out in pairs:
        a, b = (x[..., i::2].astype(dtype) for i in (0, 1))
        out[..., 0::2] = (a * cosine - b * sine).astype(out.dtype, copy=False)
        out[..., 1::2] = (a * sine + b * cosine).astype(out.dtype, copy=False)


def _forward(rotate, q, k, positions, needs, rates, donate):
    outs = (q, k) if donate else tuple(arrays.empty(x, x.shape) for x in (q, k))
    rotate(list(zip((q, k), outs, strict=True)), positions, rates, 1)
    return outs, (positions, q.dtype) if any(needs) else None


def _backward(rotate, saved, grads, into, rates):
    positions, dtype = saved
    grads = [None if g is None else g.astype(dtype, copy=False) for g in grads]
    outs = [None if g is None else _gradient(g, slot) for g, slot in zip(grads, into, strict=False)]
    pairs = [pair for pair in zip(grads, outs, strict=True) if pair[1] is not None]
    rotate(pairs, positions, rates, -1)
    return (*outs, None)


def _forward_reference(q, k, positions, *, needs, rates, donate):
    return _forward(_rotate_reference, q, k, positions, needs, rates, donate)


def _backward_reference(saved, dq, dk, *, needs, into, rates, donate):
    return _backward(_rotate_reference, saved, (dq, dk), into, rates)


# ---- raw: rawkernels/rotary.cu ------------------------------------------------------------------


def _refuse_raw(q, k, positions, **params):
    if reason := kernel_refusal(q, "q"):
        return reason
    if q.shape[-1] > MAX_HEAD_DIM:
        return f"the head size is {q.shape[-1]}, the kernel takes at most {MAX_HEAD_DIM}"
    tokens = math.prod(q.shape[:-2])
    if tokens > MAX_TOKENS:
        return f"{tokens} tokens, the kernel takes at most {MAX_TOKENS}"
    return None


@functools.cache
def _struct(rates, head_dim):
    """Return the struct Rates of ``rotary.cu``."""
    exact, found = _revolutions(rates, head_dim), np.zeros((1, MAX_HEAD_DIM // 2, 2), np.float32)
    found[0, : len(exact), 0] = exact
    found[0, : len(exact), 1] = exact - found[0, : len(exact), 0]
    return found.reshape(1, -1).view(f"V{found.nbytes}")


def _strides(x):
    """Return the struct Strides of ``rotary.cu``."""
    steps = [step // x.itemsize for step in x.strides]
    return np.array([[0] * (4 - x.ndim) + steps]).view("V32")


def _rotate_raw(pairs, positions, rates, direction):
    (q, q_out), (k, k_out) = pairs[0], pairs[-1]
    head_dim, rows, tokens = q.shape[-1], q.shape[-3], math.prod(q.shape[:-2])
    heads = q.shape[-2], k.shape[-2] if len(pairs) == 2 else 0
    everything = (x for pair in pairs for x in pair)
    vector = head_dim % VECTOR_NUMBERS == 0 and not any(rows_refusal(x, "x") for x in everything)
    packs = head_dim // (VECTOR_NUMBERS if vector else 2)
    lanes = max(1, min(BLOCK // packs, -(-sum(heads) // MIN_HEADS)))
    if positions is not None:
        positions = get_xp(q).ascontiguousarray(positions, np.int32)
    kernel("rotary.cu", NAME, scalar=ctype(q.dtype), VECTOR=vector, BLOCK=BLOCK)(
        (-(-tokens // (BLOCK // (packs * lanes))),), (BLOCK,), q, k, q_out, k_out,
        *map(_strides, (q, k, q_out, k_out)), positions, _struct(rates, head_dim), tokens, rows,
        *heads, packs, lanes, direction,
    )  # fmt: skip


def _forward_raw(q, k, positions, *, needs, rates, donate):
    return _forward(_rotate_raw, q, k, positions, needs, rates, donate)


def _backward_raw(saved, dq, dk, *, needs, into, rates, donate):
    return _backward(_rotate_raw, saved, (dq, dk), into, rates)


IMPLS = Impls(
    NAME,
    Impl("raw-simt", _forward_raw, _backward_raw, _refuse_raw, fusion=IN_PLACE),
    Impl("reference", _forward_reference, _backward_reference, fusion=IN_PLACE),
)
