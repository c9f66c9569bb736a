"""A stand-in for CuPy with a GPU of any compute capability, whose launches are noted, not run.

Arrays are NumPy's, and results of kernels are what the memory held: the tests look only at what is
asked of the GPU. Products are NumPy's, because there is no cuBLASLt.
"""

import contextlib
import ctypes
import struct
import sys
from types import ModuleType, SimpleNamespace
from typing import NamedTuple
from unittest import mock

import numpy as np
from fake_cublaslt import Array, matmul_of_cupy
from own_plans import separate_plans

from gpuattn import arrays
from gpuattn.cuda import driver_launch as driver_launch_module
from gpuattn.cuda import kernels, scratch, sources, tensor_maps
from gpuattn.cuda.gpu import gpu
from gpuattn.gemm import cublaslt

REMEMBERED = (  # addresses; and plans, among them that a library is missing
    arrays._flags, scratch._counters, scratch._chunks, scratch._workspaces, cublaslt._plans,
)  # fmt: skip
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


class Noted(list):
    """Launches so far. ``parameters``: of each launch, the bytes of each. ``streams``: addresses
    of their streams."""

    def __init__(self):
        super().__init__()
        self.parameters, self.streams = [], []


class _Kernel(kernels.Kernel):
    """Takes what NumPy made, numbers for arrays without axes too."""

    def __call__(self, grid, block, *args, shared_bytes=0):
        pairs = zip(self.parameters, args, strict=True)
        known = Array, np.uint64, type(None)
        args = [
            as_array(x) if kind.endswith("*") and not isinstance(x, known) else x
            for (kind, _), x in pairs
        ]
        super().__call__(grid, block, *args, shared_bytes=shared_bytes)


class _Function:
    """A function of a module as CuPy has it. ``kernel``: the ``kernels.Kernel`` that launches it.

    Launches are appended to ``noted``.
    """

    def __init__(self, key, ptr, noted):
        self.key, self.ptr, self.noted = key, ptr, noted
        file, name, _ = key
        has = name in sources.dependent_kernels(file) and gpu(0).has_dependent_launch
        parameters = sources.signatures(file)[name]
        self.kernel = _Kernel(
            self, name, parameters, 0, has, name in sources.cooperative_kernels(file)
        )
        self.kernel.shared_limit = 1 << 30

    def __call__(self, grid, block, args, shared_mem=0, enable_cooperative_groups=False):
        driver = self.kernel.driver_launch
        values = driver.values(args)
        packed = driver.pack(grid, block, values, shared_mem, 0)
        found = _parameters(self.kernel, packed.places)
        stream = sys.modules["cupy"].cuda.get_current_stream().ptr
        self.note(grid, block, shared_mem, found, stream)

    def note(self, grid, block, shared_bytes, parameters, stream):
        grid, block = ((*sides, 1, 1)[:3] for sides in (grid, block))
        self.noted.parameters.append(parameters)
        self.noted.streams.append(stream)
        self.noted.append(Launch(*self.key, grid, block, shared_bytes))


def _parameters(kernel, places):
    """Return the bytes of each parameter that the driver reads."""
    sizes = [struct.calcsize(word) for word in kernel.driver_launch.words]
    places = struct.unpack(f"{len(sizes)}P", ctypes.string_at(places, 8 * len(sizes)))
    return [ctypes.string_at(at, size) for at, size in zip(places, sizes, strict=True)]


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
    cupy.ndarray, cupy.matmul = Array, matmul_of_cupy
    cupy._core = SimpleNamespace(_routines_linalg=SimpleNamespace(get_compute_type=lambda _: 1))
    cupy.cuda = SimpleNamespace(
        Device=lambda number: device,
        Memory=lambda size: SimpleNamespace(ptr=1 << 40, size=size),
        alloc=lambda size: as_array(np.empty(size, np.uint8)).data,
        Stream=lambda non_blocking: stream,
        get_current_stream=lambda: stream,
        is_available=lambda: True,
        memory=SimpleNamespace(Memory=lambda size: SimpleNamespace(ptr=1 << 40, size=size)),
        runtime=SimpleNamespace(
            getDevice=lambda: 0,
            getDeviceCount=lambda: 1,
            memsetAsync=lambda *_: None,
            memcpyAsync=lambda to, source, size, *_: ctypes.memmove(to, source, size),
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
    """Compute on the GPU of a Gpu record; yield what is ``Noted``."""
    noted, functions = Noted(), {}

    def find(device, file, name, constants):
        key = file, name, constants
        if key not in functions:
            functions[key] = _Function(key, len(functions) + 1, noted)
        return functions[key].kernel

    def clusters_at_once(function, blocks, threads, shared_bytes):
        return record.multiprocessors // blocks - 1  # as was seen on an H200

    def driver_launch(config, function, places, extra):
        (one,) = (one for one in functions.values() if one.ptr == function)
        *shape, stream = struct.unpack_from("7IP", ctypes.string_at(config, 40))
        one.note(shape[:3], shape[3:6], shape[6], _parameters(one.kernel, places), stream)
        return 0

    cached = gpu, tensor_maps._encode
    with contextlib.ExitStack() as stack:
        cupy = fake_cupy(record)
        stack.enter_context(mock.patch.dict(sys.modules, cupy=cupy))
        stack.enter_context(mock.patch.multiple(kernels, _kernel=find, _code=lambda *_: None))
        stack.enter_context(mock.patch.object(kernels, "clusters_at_once", clusters_at_once))
        fakes = {"_driver_launch": lambda: driver_launch, "pointer": int}
        stack.enter_context(mock.patch.multiple(driver_launch_module, **fakes))
        driver = SimpleNamespace(cuTensorMapEncodeTiled=_encoded)
        stack.enter_context(mock.patch.object(tensor_maps, "_driver", lambda: driver))
        stack.enter_context(mock.patch.object(cublaslt, "library", lambda: (None, "a fake GPU")))
        stack.enter_context(separate_plans())
        for table in REMEMBERED:
            stack.enter_context(mock.patch.dict(table, clear=True))
        for function in cached:
            function.cache_clear()
            stack.callback(function.cache_clear)
        yield noted
