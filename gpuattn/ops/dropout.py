"""Dropout without a stored mask: y = x * keep / (1 - p), keep from counter-based random bits.

Srivastava et al., "Dropout: a simple way to prevent neural networks from overfitting" (2014).
Bits: ``gpuattn/rng.py``, where an element's index is its row-major position in ``x``. Device code:
``rawkernels/dropout.cu``.
"""

from typing import Any

from gpuattn import arrays, rng
from gpuattn.arrays import check_floats, ctype, get_xp, wide
from gpuattn.autodiff.tape import op, raw
from gpuattn.cuda.kernels import kernel, kernel_refusal
from gpuattn.impls import Call, Impl, Impls
from gpuattn.ops.arguments import dropout_key, probability, take_arrays
from gpuattn.typing import Array

BLOCK = 256


@op
def dropout(x: Array, p: float, *, seed: Any = None, impl: str | None = None) -> Call[Array]:
    """Return ``x`` with each element zeroed with probability ``p``, the others times 1 / (1 - p).

    ``x``: float array or Tensor of any shape and strides; the result has its dtype. ``seed``: an
    int or a ``rng.Key``; None draws a fresh one (see ``manual_seed``). The gradient uses the same
    mask, computed again. p = 1 gives zeros. The probability is rounded to steps of 1 / 65536.

    Raises ValueError unless 0 <= p <= 1, TypeError for dtypes other than float32, float16,
    bfloat16 and float64, and for a seed that is no integer.
    """
    (x,) = take_arrays("dropout", {"x": x}, {}).values()
    check_floats("dropout", x=raw(x))
    p = probability("dropout", "p", p)
    return Call(IMPLS, (x,), impl, p=p, key=dropout_key("dropout", p, seed))


def factor(p: float) -> float:
    """Return what kept values are multiplied by: 1 / (1 - p)."""
    return 1 / (1 - p) if p < 1 else 0.0


def keep_of(x: Array, p: float, key: rng.Key | None) -> Array | None:
    """Return the boolean mask of the elements of ``x`` that are kept, or None if all are."""
    return rng.keep_mask(get_xp(x), x.shape, p, key) if p and key is not None else None


def drop(x: Array, keep: Array, p: float) -> Array:
    """Return x * keep / (1 - p) as a new array."""
    y = x * keep
    y *= factor(p)
    return y


# ---- reference: NumPy or CuPy -------------------------------------------------------------------


def _apply_reference(x, keep, p, dtype):
    if keep is None:
        return x.astype(dtype, order="C")
    return drop(x.astype(wide(dtype), order="C", copy=False), keep, p).astype(dtype, copy=False)


def _forward_reference(x, *, needs, p, key):
    keep = keep_of(x, p, key)
    return _apply_reference(x, keep, p, x.dtype), (keep, x.dtype) if any(needs) else None


def _backward_reference(saved, dy, *, needs, into, p, key):
    keep, dtype = saved
    return (_apply_reference(dy, keep, p, dtype),)


# ---- raw: rawkernels/dropout.cu -----------------------------------------------------------------


def _refuse_raw(x, **params):
    return kernel_refusal(x)


def device_numbers(p: float, key: rng.Key | None) -> tuple:
    """Return (threshold, factor, seed low, seed high, stream, step, device step) for kernels."""
    return rng.threshold(p), factor(p), *rng.device_arguments(key or rng.Key(0))


def _launch(x, p, key):
    x = get_xp(x).ascontiguousarray(x).reshape(x.shape)
    y = arrays.empty(x, x.shape)
    apply_mask = kernel("dropout.cu", "dropout_apply", scalar=ctype(x.dtype), BLOCK=BLOCK)
    grid = (-(-x.size // (rng.LANES * BLOCK)),)
    apply_mask(grid, (BLOCK,), x, y, x.size, *device_numbers(p, key))
    return y


def _forward_raw(x, *, needs, p, key):
    return _launch(x, p, key), (x.dtype,) if any(needs) else None


def _backward_raw(saved, dy, *, needs, into, p, key):
    (dtype,) = saved
    return (_launch(dy.astype(dtype, copy=False), p, key),)


IMPLS = Impls(
    "dropout",
    Impl("raw-simt", _forward_raw, _backward_raw, _refuse_raw),
    Impl("reference", _forward_reference, _backward_reference),
)
