"""A matrix product to read: each thread alone, and threads that share tiles; reads are counted.

No op runs it: ``gemm/matmul.py`` calls libraries. It shows what tiles in shared memory save. Alone,
a thread reads its row and its column, 2 K numbers; the T x T threads of a block together read each
number of their tiles once, 2 K / T numbers for each thread.
"""

import functools
from typing import Any

import numpy as np

from gpuattn.arrays import get_xp
from gpuattn.numbakernels import device
from gpuattn.numbakernels.device import cuda, jit
from gpuattn.typing import Array

TILE = 16
ZERO = np.float32(0)


def product(a: Array, b: Array, *, shared: bool = True) -> tuple[Array, int]:
    """Return (a @ b, how many numbers its threads read from ``a`` and ``b``).

    ``a``: (M, K); ``b``: (K, N); both float32, on a GPU, or of NumPy in Numba's simulator.
    ``shared``: by tiles that the threads of a block share, else each thread by itself. Raises
    ValueError for shapes that do not fit.
    """
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"product: {a.shape} @ {b.shape}; accepted: (M, K) @ (K, N)")
    xp, shape = get_xp(a), (a.shape[0], b.shape[1])
    out, reads = xp.zeros(shape, np.float32), xp.zeros(1, np.int64)
    grid = tuple(-(-n // TILE) for n in shape[::-1])
    alone, tiled = kernels()
    device.launch(tiled if shared else alone, grid, (TILE, TILE), a, b, out, reads)
    return out, int(reads[0])


@functools.cache
def kernels() -> Any:
    """Return the kernels (each thread alone, by shared tiles); a block computes TILE x TILE sums.

    Launch: grid = (columns / TILE, rows / TILE), block = (TILE, TILE).
    """

    @jit
    def alone(a, b, out, reads):
        i = cuda.blockIdx.y * TILE + cuda.threadIdx.y
        j = cuda.blockIdx.x * TILE + cuda.threadIdx.x
        if i >= out.shape[0] or j >= out.shape[1]:
            return
        total = ZERO
        for k in range(a.shape[1]):
            total += a[i, k] * b[k, j]
        out[i, j] = total
        cuda.atomic.add(reads, 0, 2 * a.shape[1])

    @jit
    def tiled(a, b, out, reads):
        left = cuda.shared.array((TILE, TILE), np.float32)
        right = cuda.shared.array((TILE, TILE), np.float32)
        y, x = cuda.threadIdx.y, cuda.threadIdx.x
        i, j = cuda.blockIdx.y * TILE + y, cuda.blockIdx.x * TILE + x
        total, count = ZERO, 0
        for first in range(0, a.shape[1], TILE):
            left[y, x] = right[y, x] = ZERO
            if i < a.shape[0] and first + x < a.shape[1]:
                left[y, x] = a[i, first + x]
                count += 1
            if first + y < b.shape[0] and j < b.shape[1]:
                right[y, x] = b[first + y, j]
                count += 1
            cuda.syncthreads()  # both tiles are whole
            for k in range(TILE):
                total += left[y, k] * right[k, x]
            cuda.syncthreads()  # before they are overwritten
        if i < out.shape[0] and j < out.shape[1]:
            out[i, j] = total
        cuda.atomic.add(reads, 0, count)

    return alone, tiled
