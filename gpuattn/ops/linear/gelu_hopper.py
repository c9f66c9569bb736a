"""GELU behind a linear layer without bias, and its slopes as bytes: ``linear_gelu_hopper.cu``.

For its gradient the layer keeps the slope of every result, rounded to a byte (Novikov et al.,
"Few-bit backward: quantized gradients of activation functions for memory footprint reduction",
2022), where it would keep what GELU was taken of: half the bytes, and no slopes to compute.
0 and 1 are exact; other slopes, -0.13 to 1.13, are off by at most 1/256 for bfloat16 (1/512 below
0.36), as its rounding is above 1, and by 1/400 and two roundings for float16. NaN and infinity
get some slope of up to 1.36; the layer's own result says what they are.
"""

import numpy as np

from gpuattn import arrays
from gpuattn.arrays import ctype, get_xp, on_gpu
from gpuattn.cuda import tensor_maps
from gpuattn.cuda.gpu import gpu
from gpuattn.cuda.kernels import kernel

FILE, NAME = "linear/linear_gelu_hopper.cu", "linear_gelu"
ALONE_FILE, ALONE = "linear/gelu_slopes.cu", "gelu_slopes_backward"
THREADS, TILE, DEPTH = 384, 128, 64  # rows and columns of a tile; of a stage of the sum
HELD = 6  # stages of a weight that may stay in shared memory,
LEAST_SHARE = 0.95  # if so many of the multiprocessors have a column of tiles then
LEAST_TILES, DEPTHS = 1024, (384, 768)  # of a layer: where it was measured
SHARED_BYTES = {0: 198656, HELD: 231424}
BLOCK_ROWS, BLOCK_COLUMNS = 64, 32  # whose codes lie together
MAX_SIDE = 2**31 - 2**10  # for 32-bit coordinates


def fits(x, weight):
    """Return whether ``forward`` can take ``x`` (rows, in) and ``weight`` (out, in)."""
    if ctype(x.dtype) not in tensor_maps.KINDS or x.dtype != weight.dtype:
        return False
    sides = (*x.shape, len(weight))
    if min(sides) == 0 or max(sides) > MAX_SIDE or len(weight) % 8:
        return False
    return not any(tensor_maps.refusal(array[:, None], "") for array in (x, weight))


def takes(x, weight):
    """Return whether ``forward`` is for a layer, as measured faster than a library's product."""
    if not on_gpu(x) or not gpu(x.device.id).has_wgmma or not fits(x, weight):
        return False
    least, most = DEPTHS
    tiles = _across(len(x)) * _across(len(weight))
    return tiles >= LEAST_TILES and least <= x.shape[1] <= most


def forward(x, weight):
    """Return (y, codes): gelu(x @ weight.T) by tanh, (rows, out), and its slopes as bytes.

    16-bit floats of one dtype. The codes are (bytes,), in the kernel's order; whole tiles of them.
    """
    y = arrays.empty(x, (len(x), len(weight)))
    codes = arrays.empty(x, (_across(len(x)) * _across(len(weight)) * TILE**2,), np.uint8)
    _launch(x, weight, y, codes, False)
    return y, codes


def are_codes(kept):
    """Return whether that is what ``forward`` left for the gradient."""
    return kept is not None and kept.dtype == np.uint8


def takes_matmul(product):
    """Return whether ``backward`` can go on from a ``PendingMatmul``."""
    dz, weight = product.dz, product.weight
    if dz.dtype != weight.dtype or not 0 < len(weight) <= MAX_SIDE:
        return False
    return not any(tensor_maps.refusal(array[:, None], "") for array in (dz, weight))


def backward(product, codes):
    """Return ``product * slopes``: (rows, out), for an ``autodiff.pending_matmul.PendingMatmul``.

    The product is rounded to its dtype before the slope multiplies it.
    """
    dz = arrays.empty(product.dz, (len(product.dz), product.weight.shape[1]))
    _launch(product.dz, product.weight, dz, codes, True)
    return dz


def backward_alone(dy, codes):
    """Return ``dy * slopes``: (rows, out), for an array."""
    dy = get_xp(dy).ascontiguousarray(dy)
    dz = arrays.empty(dy, dy.shape)
    rows, columns = dy.shape
    across = _across(columns) * TILE // BLOCK_COLUMNS
    kernel(ALONE_FILE, ALONE, scalar=ctype(dy.dtype))(
        (-(-rows // BLOCK_ROWS) * across,), (128,), dy, codes, dz, rows, columns, across
    )
    return dz


def _launch(a, weight, out, codes, gradient):
    (rows, columns), depth = out.shape, a.shape[1]
    maps = [
        tensor_maps.tensor_map(x[:, None], box)
        for x, box in ((a, TILE), (weight, DEPTH if gradient else TILE), (out, 16))
    ]
    problem = np.array([rows, columns, depth], np.int32).view("V12")
    held, grid = plan(rows, columns, depth, gpu(a.device.id).multiprocessors)
    kernel(FILE, NAME, scalar=ctype(a.dtype), GRADIENT=gradient, HELD=held)(
        (grid,), (THREADS,), *maps, codes, problem, shared_bytes=SHARED_BYTES[held]
    )


def plan(rows, columns, depth, multiprocessors):
    """Return (the constant HELD, how many blocks)."""
    down, across = _across(rows), _across(columns)
    high = min(multiprocessors // across, down)  # blocks in a column of tiles
    if depth <= HELD * DEPTH and high * across >= LEAST_SHARE * min(multiprocessors, down * across):
        return HELD, high * across
    return 0, min(multiprocessors, down * across)


def _across(size):
    return -(-size // TILE)
