"""A stand-in for CuPy with a GPU of any compute capability, whose launches are noted, not run.

Arrays are NumPy's and results of kernels are what the memory held: only what is asked of the GPU
counts. Products are NumPy's, as no cuBLASLt is there.
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
from gpuattn.cuda import kernels, tensor_maps
from gpuattn.gemm import cublaslt
from gpuattn.ops.attention import hopper
from gpuattn.ops.linear import weight_gradients
from gpuattn.ops.sampling import logit_slices

REMEMBERED = (  # addresses on a device
    arrays._flags, hopper._of_stream, hopper._free, logit_slices._of_stream,
    logit_slices._chunks, weight_gradients._rooms,
)  # fmt: skip
OPTIN = "MaxSharedMemoryPerBlockOptin"
NEW_ARRAYS = (
    "array", "asarray", "ascontiguousarray", "empty", "full", "zeros", "ones", "arange",
    "broadcast_to", "stack", "zeros_like", "ones_like", "empty_like", "where", "sqrt", "maximum",
)  # fmt: skip


class Card(NamedTuple):
    """What plans go by: ``shared`` are the KiB that a block may ask for, of the CUDA guide's table
    of technical specifications; ``multiprocessors``, of a product."""

    capability: str
    multiprocessors: int
    shared: int


CARDS = {
    "8.0": Card("80", 108, 163), "8.6": Card("86", 84, 99), "8.7": Card("87", 16, 163),
    "8.9": Card("89", 128, 99), "9.0": Card("90", 132, 227), "10.0": Card("100", 148, 227),
    "10.3": Card("103", 148, 227), "12.0": Card("120", 170, 99), "12.1": Card("121", 48, 99),
}  # fmt: skip


class Launch(NamedTuple):
    file: str
    name: str
    constants: tuple
    grid: tuple
    block: tuple
    shared_bytes: int


def as_array(x):
    return np.asarray(x).view(Array)


def fake_cupy(card):
    """Return a module in which device 0 is a ``card``."""
    cupy = ModuleType("cupy")
    cupy.__getattr__ = lambda name: getattr(np, name)
    for name in NEW_ARRAYS:
        setattr(cupy, name, _making_arrays(getattr(np, name)))
    stream = SimpleNamespace(ptr=0, is_capturing=lambda: False, synchronize=lambda: None)
    device = SimpleNamespace(
        compute_capability=card.capability,
        attributes={"MultiProcessorCount": card.multiprocessors, OPTIN: card.shared << 10},
    )
    cupy.ndarray = Array
    cupy._core = SimpleNamespace(_routines_linalg=SimpleNamespace(get_compute_type=lambda _: 1))
    cupy.cuda = SimpleNamespace(
        Device=lambda number: device,
        Memory=lambda size: SimpleNamespace(ptr=1 << 40, size=size),
        Stream=lambda non_blocking: stream,
        get_current_stream=lambda: stream,
        is_available=lambda: True,
        runtime=SimpleNamespace(getDevice=lambda: 0, memsetAsync=lambda *_: None),
    )
    return cupy


def _making_arrays(function):
    return lambda *args, **kwargs: as_array(function(*args, **kwargs))


def _encoded(words, *_):
    """Stand in for cuTensorMapEncodeTiled."""
    ctypes.memset(words, 1, 128)
    return 0


@contextlib.contextmanager
def launches_on(card):
    """Compute on a ``card``; yield the list of Launches so far."""
    noted = []

    def note(device, file, name, constants):
        def launch(grid, block, *args, shared_bytes=0):
            assert len(args) == len(kernels.signatures(file)[name])
            noted.append(Launch(file, name, constants, grid, block, shared_bytes))

        return launch

    cached = kernels.gpu, kernels.shared_limit, tensor_maps._encode
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(sys.modules, cupy=fake_cupy(card)))
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
