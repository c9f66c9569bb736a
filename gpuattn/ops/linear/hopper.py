"""The gradient of an activation in the product before it: ``bias_activation_hopper.cu``.

Between two linear layers the gradient of the first one's result is ``dz @ weight`` of the second,
times the slope of the activation: one kernel of Hopper's, where it would be a library's product and
``bias_activation.cu``.
"""

import numpy as np

from gpuattn import arrays
from gpuattn.arrays import ctype, on_gpu
from gpuattn.cuda import tensor_maps
from gpuattn.cuda.gpu import gpu
from gpuattn.cuda.kernels import kernel

FILE, NAME = "linear/bias_activation_hopper.cu", "product_activation_backward"
ACTIVATIONS = {"relu": 1, "gelu": 2}  # the constant ACTIVATION; "gelu" is the tanh form
THREADS, ROWS, COLUMNS, DEPTH = 384, 128, 256, 64  # of a tile, and of a stage of the sum
SPREADS = 12, 8, 6, 4, 2  # over how many stages the tile before is finished
LEAST_TILES = 96  # with fewer, most of a GPU is idle
SHARED_BYTES = 2048 + 3 * (ROWS + COLUMNS) * DEPTH * 2 + 2 * 4 * 64 * 64 * 2
MAX_SIDE = 2**31 - 2**10  # for 32-bit coordinates


def fits(product, before, activation):
    """Return whether ``backward`` can go on from a ``PendingMatmul``; ``before`` as there."""
    dz, weight = product.dz, product.weight
    if (
        activation not in ACTIVATIONS
        or before.ndim != 2
        or ctype(dz.dtype) not in tensor_maps.KINDS
    ):
        return False
    if {weight.dtype, before.dtype} != {dz.dtype} or 0 in (*before.shape, len(weight)):
        return False
    if len(weight) <= DEPTH or max(*before.shape, len(weight)) > MAX_SIDE:
        return False
    return not any(tensor_maps.refusal(x[:, None], "") for x in (dz, weight, before))


def takes(product, before, activation):
    """Return whether ``backward`` takes a ``PendingMatmul``, as measured faster than without."""
    dz = product.dz
    if not on_gpu(dz) or not gpu(dz.device.id).has_wgmma:
        return False
    return fits(product, before, activation) and _tiles(before) >= LEAST_TILES


def backward(product, before, activation):
    """Return ``product * f'``: (rows, in), for ``product`` a ``PendingMatmul``.

    ``before``: (rows, in), what GELU was taken of, or ReLU's own result. 16-bit floats, all of one
    dtype. The product is rounded to it before the slope, at ``before``, multiplies it.
    """
    dz, weight = product.dz, product.weight
    out = arrays.empty(before, before.shape)
    maps = [
        tensor_maps.tensor_map(x[:, None], rows)
        for x, rows in ((dz, ROWS), (weight, DEPTH), (before, 64), (out, 16))
    ]
    problem = np.array([*before.shape, len(weight)], np.int32).view("V12")
    grid = (min(_tiles(before), gpu(dz.device.id).multiprocessors),)
    kernel(FILE, NAME, **constants_of(len(weight), dz.dtype, activation))(
        grid, (THREADS,), *maps, problem, shared_bytes=SHARED_BYTES
    )
    return out


def constants_of(depth, dtype, activation):
    """Return the constants of the kernel for a sum of ``depth`` products."""
    spread = next(n for n in SPREADS if n <= -(-depth // DEPTH))
    return {"scalar": ctype(dtype), "ACTIVATION": ACTIVATIONS[activation], "SPREAD": spread}


def _tiles(before):
    rows, columns = before.shape
    return -(-rows // ROWS) * -(-columns // COLUMNS)
