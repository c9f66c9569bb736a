"""Importing Numba, and launching its kernels. No other module imports it.

Kernel files write ``from gpuattn.numbakernels.device import cuda, jit``. With
NUMBA_ENABLE_CUDASIM=1 the same kernels run on NumPy arrays in Numba's simulator.
"""

import functools
import importlib.util
import os
from typing import Any

import numpy as np

from gpuattn.arrays import import_cupy, on_gpu
from gpuattn.typing import Array

SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"


def refusal(x: Array, name: str = "x") -> str | None:
    """Return why no Numba kernel takes the array ``x``, the argument ``name``, or None."""
    if not SIMULATED and not on_gpu(x):
        return f"{name} is a NumPy array; move it with gpuattn.to_gpu(x)"
    if not _is_installed():
        return "Numba is not installed; pip install 'gpuattn[cuda13x]'"
    return None


@functools.cache
def _is_installed():
    return importlib.util.find_spec("numba") is not None


def launch(kernel: Any, grid: tuple[int, ...], block: tuple[int, ...], *arguments: Any) -> None:
    """Launch a Numba kernel on CuPy's current stream, without synchronizing.

    The caller casts Python floats (``np.float32(x)``). A grid with a zero launches nothing.
    """
    if 0 in grid:
        return
    if SIMULATED:  # it writes all arguments back, and arrays saved by the tape are read-only
        kernel[grid, block](*[a.copy() if _is_frozen(a) else a for a in arguments])
        return
    from numba import cuda

    stream = cuda.external_stream(import_cupy().cuda.get_current_stream().ptr)
    kernel[grid, block, stream](*arguments)


def _is_frozen(argument):
    return isinstance(argument, np.ndarray) and not argument.flags.writeable


def __getattr__(name):
    """Import Numba when a kernel file first asks for ``cuda`` or ``jit``."""
    if name not in ("cuda", "jit"):
        raise AttributeError(name)
    from numba import config
    from numba import cuda as numba_cuda

    config.CUDA_LOW_OCCUPANCY_WARNINGS = 0  # small arrays need small grids only
    globals().update(cuda=numba_cuda, jit=numba_cuda.jit)
    return globals()[name]
