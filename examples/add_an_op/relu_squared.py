"""Squared ReLU: y = max(x, 0)^2 (So et al., "Primer", 2021). A template for a new op.

The public function, a forward and a backward are all it needs to compute and differentiate on NumPy
and CuPy. A CUDA kernel adds a second forward and backward and one entry of ``IMPLS``.
"""

from gpuattn.arrays import as_array, get_xp, wide
from gpuattn.autodiff.tape import Box, op
from gpuattn.impls import Call, Impl, Impls


@op
def relu_squared(x, *, impl=None):
    """Return max(x, 0) ** 2, elementwise.

    ``x``: float array or Tensor of any shape; the result has its shape and dtype. ``impl``: name of
    the implementation to run. Raises TypeError if ``x`` is not an array.
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
