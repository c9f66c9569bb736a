"""A stand-in for CuPy with a GPU of any compute capability, whose launches are noted, not run.

Arrays are NumPy's, and results of kernels are what the memory held: the tests look only at what is
asked of the GPU. Products are NumPy's, because there is no cuBLASLt.
"""

import contextlib
import ctypes
import sys
from types import ModuleType, SimpleNamespace
from typing import NamedTuple
from unittest import mock

import numpy as np
from fake_cublaslt import Array

from gpuattn import arrays
from gpuattn.cuda import kernels, scratch, tensor_maps
from gpuattn.cuda.gpu import gpu
from gpuattn.gemm import cublaslt

REMEMBERED = arrays._flags, scratch._counters, scratch._chunks, scratch._workspaces  # addresses
NEW_ARRAYS = (
    "array", "asarray", "ascontiguousarray", "empty", "full", "zeros", "ones", "arange",
    "broadcast_to", "stack", "zeros_like", "ones_like", "empty_like", "where", "sqrt", "maximum",
)  # fmt: skip


class Launch(NamedTuple):
    file: str
    name: str
    constants: tuple
    grid: tuple
    block: tuple
    shared_bytes: int


def as_array(x):
    return np.asarray(x).view(Array)


def fake_cupy(record):
    """Return a module in which device 0 is the GPU of a Gpu record."""
    cupy = ModuleType("cupy")
    cupy.__getattr__ = lambda name: getattr(np, name)
    for name in NEW_ARRAYS:
        setattr(cupy, name, _making_arrays(getattr(np, name)))
    stream = SimpleNamespace(ptr=0, is_capturing=lambda: False, synchronize=lambda: None)
    device = SimpleNamespace(
        compute_capability=str(record.capability),
        attributes={
            "MultiProcessorCount": record.multiprocessors,
            "MaxSharedMemoryPerBlockOptin": record.shared_bytes,
            "MaxSharedMemoryPerMultiprocessor": record.shared_bytes_per_multiprocessor,
            "MaxRegistersPerMultiprocessor": record.registers_per_multiprocessor,
            "MaxThreadsPerMultiProcessor": record.threads_per_multiprocessor,
            "L2CacheSize": record.l2_bytes,
        },
    )
    cupy.ndarray = Array
    cupy._core = SimpleNamespace(_routines_linalg=SimpleNamespace(get_compute_type=lambda _: 1))
    cupy.cuda = SimpleNamespace(
        Device=lambda number: device,
        Memory=lambda size: SimpleNamespace(ptr=1 << 40, size=size),
        Stream=lambda non_blocking: stream,
        get_current_stream=lambda: stream,
        is_available=lambda: True,
        memory=SimpleNamespace(Memory=lambda size: SimpleNamespace(ptr=1 << 40, size=size)),
        runtime=SimpleNamespace(
            getDevice=lambda: 0,
            memsetAsync=lambda *_: None,
            driverGetVersion=lambda: record.driver_version,
        ),
    )
    return cupy


def _making_arrays(function):
    return lambda *args, **kwargs: as_array(function(*args, **kwargs))


def _encoded(words, *_):
    """Stand in for cuTensorMapEncodeTiled."""
    ctypes.memset(words, 1, 128)
    return 0


@contextlib.contextmanager
def launches_on(record):
    """Compute on the GPU of a Gpu record; yield the list of Launches so far."""
    noted = []

    def note(device, file, name, constants):
        def launch(grid, block, *args, shared_bytes=0):
            assert len(args) == len(kernels.signatures(file)[name])
            noted.append(Launch(file, name, constants, grid, block, shared_bytes))

        return launch

    cached = gpu, tensor_maps._encode
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(sys.modules, cupy=fake_cupy(record)))
        stack.enter_context(mock.patch.multiple(kernels, _kernel=note, _code=lambda *_: None))
        driver = SimpleNamespace(cuTensorMapEncodeTiled=_encoded)
        stack.enter_context(mock.patch.object(tensor_maps, "_driver", lambda: driver))
        stack.enter_context(mock.patch.object(cublaslt, "library", lambda: (None, "a fake GPU")))
        for addresses in REMEMBERED:
            stack.enter_context(mock.patch.dict(addresses, clear=True))
        for function in cached:
            function.cache_clear()
            stack.callback(function.cache_clear)
        yield noted
