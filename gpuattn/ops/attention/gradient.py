"""What the gradients of all forms of attention share: the arrays that come in and go out."""

import numpy as np

from gpuattn import arrays
from gpuattn.arrays import get_xp
from gpuattn.autodiff.gradient_layout import target_like
from gpuattn.typing import Array


def output_gradients(
    q: Array, out: Array, lse: Array, dout: Array | None, dlse: Array | None
) -> tuple[Array, Array, Array | None]:
    """Return (lse, dout, dlse) as kernels take them, whichever form ran the forward.

    ``lse`` and ``dlse`` are contiguous float32, ``dlse`` may be None; ``dout`` has the dtype of
    ``q`` and is zeros where it is None.
    """
    xp = get_xp(q)
    dout = arrays.zeros(q, out.shape) if dout is None else dout.astype(q.dtype, copy=False)
    dlse = None if dlse is None else xp.ascontiguousarray(dlse, np.float32)
    return xp.ascontiguousarray(lse), dout, dlse


def gradient_arrays(inputs: tuple, into: tuple) -> list[Array]:
    """Return arrays for the gradients of ``inputs``: new ones, or those of ``into``.

    One of ``into`` is used if its strides and alignment are those of its input, which kernels have
    accepted.
    """
    return [_gradient_array(x, slot) for x, slot in zip(inputs, into, strict=False)]


def _gradient_array(x, slot):
    target = target_like(slot, x)
    if target is None or target.strides != x.strides or (target.data.ptr - x.data.ptr) % 16:
        return arrays.empty(x, x.shape)
    return target


def bias_gradient(dlogits: Array, bias: Array) -> Array:
    """Return the gradient of ``bias`` given that of all logits, (B, H, T, S) or less."""
    return sum_to(dlogits, bias.shape).astype(bias.dtype, copy=False)


def sink_gradient(sink: Array, lse: Array, delta: Array) -> Array:
    """Return the gradient of the sinks (H,), for ``lse`` and ``delta`` of shape (..., H, T)."""
    p = get_xp(lse).exp(sink.astype(lse.dtype)[:, None] - finite_lse(lse))
    others = (*range(lse.ndim - 2), lse.ndim - 1)
    return -(p * delta).sum(others).astype(sink.dtype, copy=False)


def finite_lse(lse: Array) -> Array:
    """Return ``lse`` with +inf for -inf: exp(logit - lse) of a row without keys is 0, not NaN."""
    return get_xp(lse).where(lse == -np.inf, lse.dtype.type(np.inf), lse)


def sum_to(x: Array, shape: tuple[int, ...]) -> Array:
    """Return ``x`` summed over the axes along which ``shape`` is 1."""
    axes = tuple(a for a, n in enumerate(shape) if n == 1 and x.shape[a] != 1)
    return x.sum(axes, keepdims=True) if axes else x
