"""The first seconds of a process on a GPU: libraries start in the background, and kernels compile
ahead of the work that needs them, all at the same time.

Which kernels some work needs is found by a rehearsal: the same calls with the same arrays, in
which nothing of ours is launched. So nothing is compiled that is not needed, and nothing has to be
listed. It takes the host's time of the calls alone; only CuPy compiles its own kernels meanwhile,
one after the other. So what runs before the first update and in an evaluation needs next to none of
them: ``tests/support/cupy_kernels.py`` lists those that are left.
"""

import contextlib
import contextvars
import functools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from gpuattn.arrays import import_cupy
from gpuattn.cuda import compiler, kernels
from gpuattn.errors import KernelCompileError
from gpuattn.gemm import cublaslt
from gpuattn.typing import DType


def rehearse(work: Callable[[], Any]) -> None:
    """Start to compile the kernels that ``work()`` launches, by calling it without launches.

    CuPy's own operations run, so ``work`` must not depend on what the memory holds. It ends at the
    first copy to the host at the latest. An error ends it too: it comes again when the work is
    done, or was one of arbitrary results.
    """
    with kernels.compiling_only(), contextlib.suppress(Exception):
        work()


class InBackground:
    """Calls ``work()`` in a thread, on the current GPU and a stream of its own. Ignores errors."""

    def __init__(self, work: Callable[[], Any]) -> None:
        device = import_cupy().cuda.runtime.getDevice()
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(_on, device, work))
        self._thread.start()

    def wait(self) -> None:
        """Wait until it is done."""
        self._thread.join()


def _on(device, work):
    cuda = import_cupy().cuda
    with (
        contextlib.suppress(Exception),
        cuda.Device(device),
        cuda.Stream(non_blocking=True) as stream,
    ):
        try:
            work()
        finally:
            stream.synchronize()


def start_libraries(dtype: DType = "float32") -> None:
    """Start CUDA on the current GPU, cuBLASLt and NVRTC in the background.

    ``dtype``: what float32 weights will be rounded to, by a kernel of CuPy's that compiles now.
    """
    InBackground(functools.partial(_start, np.dtype(dtype)))


def _start(dtype):
    cupy = import_cupy()
    if cublaslt.library()[0] is not None:
        cublaslt.handle(cupy.cuda.runtime.getDevice())
    with contextlib.suppress(KernelCompileError):
        compiler.nvrtc_version()
    cupy.zeros(1, np.float32).astype(dtype)
