"""Products and sums of single numbers that stay on the device.

On a GPU they are kernels of ours, which compile ahead with all others. Device code:
``rawkernels/scalars.cu``.
"""

from typing import Any

import numpy as np

from gpuattn import arrays
from gpuattn.arrays import on_gpu
from gpuattn.cuda.kernels import kernel

FILE, WARP = "scalars.cu", 32


def product(a: Any, b: Any) -> Any:
    """Return a * b, of () float arrays on one device."""
    if not _by_kernel(a, b):
        return a * b
    out = arrays.empty(a, ())
    kernel(FILE, "scalar_product")((1,), (WARP,), a, b, out)
    return out


def add_product(total: Any, a: Any, b: Any) -> None:
    """Add a * b to ``total`` in place; () float arrays on one device."""
    if not _by_kernel(total, a, b):
        total += a * b
        return
    kernel(FILE, "scalar_add_product")((1,), (WARP,), total, a, b)


def take_mean(total: Any, count: int) -> Any:
    """Return total / count, and set ``total``, a () float array, to 0."""
    if not _by_kernel(total):
        mean = total / count
        total[...] = 0
        return mean
    mean = arrays.empty(total, ())
    kernel(FILE, "scalar_take_mean")((1,), (WARP,), total, mean, count)
    return mean


def _by_kernel(*numbers):
    return on_gpu(numbers[0]) and all(x.dtype == np.float32 for x in numbers)
