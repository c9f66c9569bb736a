"""The gradient of an activation, computed by the matmul before it: ``bias_activation_hopper.cu``.

Between two linear layers the gradient of the first one's result is ``dz @ weight`` of the second,
times the slope of the activation. On Hopper one kernel computes both; elsewhere they are a matmul
of the library and ``bias_activation.cu``.
"""

from typing import Any

import numpy as np

from gpuattn import arrays
from gpuattn.arrays import ctype, on_gpu
from gpuattn.autodiff.pending_matmul import PendingMatmul
from gpuattn.cuda import tensor_maps
from gpuattn.cuda.gpu import gpu
from gpuattn.cuda.kernels import kernel
from gpuattn.typing import Array

FILE, NAME = "linear/bias_activation_hopper.cu", "product_activation_backward"
ACTIVATIONS = {"relu": 1, "gelu": 2}  # the constant ACTIVATION; "gelu" is the tanh form
THREADS = 384
ROWS, COLUMNS = 128, 256  # of a tile
DEPTH = 64  # columns of dz in one pipeline stage
SPREADS = 12, 8, 6, 4, 2  # the constant SPREAD: stages during which the previous tile is finished
MIN_TILES = 96  # with fewer, most of a GPU is idle
SHARED_BYTES = 2048 + 3 * (ROWS + COLUMNS) * DEPTH * 2 + 2 * 4 * 64 * 64 * 2
MAX_SIDE = 2**31 - 2**10  # coordinates have 32 bits


def fits(matmul: PendingMatmul, before: Array, activation: str | None) -> bool:
    """Return whether ``backward`` can compute this; arguments as there."""
    dz, weight = matmul.dz, matmul.weight
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


def takes(matmul: PendingMatmul, before: Array, activation: str | None) -> bool:
    """Return whether ``backward`` can compute this and was measured faster than two launches."""
    dz = matmul.dz
    if not on_gpu(dz) or not gpu(dz.device.id).has_wgmma:
        return False
    return fits(matmul, before, activation) and _tiles(before) >= MIN_TILES


def backward(matmul: PendingMatmul, before: Array, activation: str) -> Array:
    """Return ``matmul * f'(before)``: (rows, in).

    ``before``: (rows, in), the input of GELU, or the result of ReLU. All are 16-bit floats of one
    dtype, to which the matmul is rounded before the slope multiplies it.
    """
    dz, weight = matmul.dz, matmul.weight
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


def constants_of(depth: int, dtype: np.dtype, activation: str) -> dict[str, Any]:
    """Return the kernel's constants for a matmul that sums ``depth`` products."""
    spread = next(n for n in SPREADS if n <= -(-depth // DEPTH))
    return {"scalar": ctype(dtype), "ACTIVATION": ACTIVATIONS[activation], "SPREAD": spread}


def _tiles(before):
    rows, columns = before.shape
    return -(-rows // ROWS) * -(-columns // COLUMNS)
