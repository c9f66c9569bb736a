"""A whole op in one file: y = max(x, 0)^2 (So et al., "Primer", 2021). The contributor's template.

Two plain functions and one line make it work and differentiate on NumPy and CuPy. A kernel,
``relu_squared.cu``, adds two functions and one entry of ``IMPLS``.
"""

from gpuattn.arrays import as_array, get_xp, wide
from gpuattn.autodiff.tape import Box, op
from gpuattn.impls import Call, Impl, Impls


@op
def relu_squared(x, *, impl=None):
    """Return max(x, 0) ** 2, element by element.

    ``x``: float array or Tensor of any shape. Returns its shape and dtype. Raises TypeError for
    what is no array.
    """
    x = x if isinstance(x, Box) else as_array(x, "relu_squared", "x")
    return Call(IMPLS, (x,), impl)


def _forward(x, *, needs):
    kept = get_xp(x).maximum(x, 0).astype(wide(x.dtype), copy=False)
    return (kept * kept).astype(x.dtype, copy=False), (kept,) if needs[0] else None


def _backward(saved, grad, *, needs, into):
    (kept,) = saved
    return ((2 * kept * grad.astype(kept.dtype, copy=False)).astype(grad.dtype, copy=False),)


IMPLS = Impls("relu_squared", Impl("reference", _forward, _backward))
