"""Compile, load and launch the CUDA kernels in ``rawkernels/``, whose texts ``sources`` reads.

A kernel is compiled once for its constants and its architecture, by NVRTC, in tens of
milliseconds; the cubin is kept on disk under a hash of everything that it was compiled from.
"""

import collections
import contextlib
import functools
import hashlib
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from gpuattn.arrays import ctype, import_cupy, on_gpu, recorders, rehearsing
from gpuattn.cuda import disk_cache, sources
from gpuattn.cuda.compiler import compile_text, nvrtc_version
from gpuattn.cuda.driver_launch import COOPERATIVE, PROGRAMMATIC, DriverLaunch, clusters_at_once
from gpuattn.cuda.gpu import gpu, kernels_refusal
from gpuattn.cuda.sources import Constant
from gpuattn.environment import usable_cores
from gpuattn.errors import KernelCompileError
from gpuattn.modes import without_plans

SCALARS = {
    "int": np.int32,
    "unsigned int": np.uint32,
    "long long": np.int64,
    "unsigned long long": np.uint64,
    "float": np.float32,
    "bool": np.bool_,
}
# CU_FUNC_ATTRIBUTE_*; ANY_CLUSTER: NON_PORTABLE_CLUSTER_SIZE_ALLOWED, of more than 8 blocks
STATIC_SHARED, REGISTERS, MAX_DYNAMIC_SHARED, ANY_CLUSTER = 1, 4, 8, 14
STATIC_SHARED_LIMIT = 48 * 1024  # a block may have so much without MAX_DYNAMIC_SHARED
_lock = threading.Lock()
# NVRTC compiles without Python's lock, and two texts at a time nearly twice as fast (1.8 times)
_compilers = ThreadPoolExecutor(min(16, max(2, usable_cores() - 1)), "gpuattn-compiler")


class Counts:
    """How often what has a name was done; read like a ``collections.Counter``.

    ``place(name)[0] += 1`` counts: a program, which launches in microseconds, keeps the place.
    """

    def __init__(self) -> None:
        self.places: dict[str, list[int]] = {}

    def place(self, name: str) -> list[int]:
        """Return the list whose one number is the count of ``name``: always the same list."""
        return self.places.setdefault(name, [0])

    def __getitem__(self, name: str) -> int:
        return self.places.get(name, [0])[0]

    def __sub__(self, other: collections.Counter[str]) -> collections.Counter[str]:
        return self.copy() - other

    def copy(self) -> collections.Counter[str]:
        """Return the counts as they are now."""
        return collections.Counter({name: place[0] for name, place in list(self.places.items())})


launches = Counts()  # of each kernel in this process


class Kernel:
    """A compiled kernel. Casts Python numbers to the types that its signature declares.

    ``function``: of CuPy. ``parameters``: (C type, name) of each. ``static_shared``: bytes of
    shared memory that the kernel declares. ``dependent``: a programmatic dependent launch.
    ``cooperative``: all blocks of a launch run at the same time, or the launch fails.
    """

    def __init__(
        self,
        function: Any,
        name: str,
        parameters: Sequence[tuple[str, str]],
        static_shared: int = 0,
        dependent: bool = False,
        cooperative: bool = False,
    ) -> None:
        self.function, self.name, self.parameters = function, name, parameters
        self.casts = [SCALARS.get(ctype, _as_is) for ctype, _ in parameters]
        self.launch = function
        if cooperative:
            self.launch = functools.partial(function, enable_cooperative_groups=True)
        self.attribute = PROGRAMMATIC if dependent else COOPERATIVE if cooperative else None
        if dependent:
            self.launch = self.driver_launch
            self.casts = [_as_is] * len(parameters)  # DriverLaunch casts as it packs
        self.shared_limit = STATIC_SHARED_LIMIT - static_shared

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int, ...], *args: Any, shared_bytes: int = 0
    ) -> None:
        """Launch on CuPy's current stream. A grid with a zero launches nothing, nor does anything
        inside ``compiling_only``.

        ``shared_bytes``: of dynamic shared memory. Raises TypeError for a wrong number of ``args``.
        """
        if len(args) != len(self.casts):
            wants = ", ".join(f"{ctype} {name}" for ctype, name in self.parameters)
            raise TypeError(f"{self.name} takes ({wants}), got {len(args)} arguments")
        if 0 in grid or rehearsing.get():
            return
        if (recorder := recorders.get()) is not None:
            recorder.launched(self, grid, block, args, shared_bytes)
        self._allow(shared_bytes)
        cast = tuple([to(x) for to, x in zip(self.casts, args, strict=True)])
        launches.place(self.name)[0] += 1
        self.launch(grid, block, cast, shared_mem=shared_bytes)

    @functools.cached_property
    def driver_launch(self) -> DriverLaunch:
        """How the driver launches the kernel without CuPy."""
        kinds = [ctype for ctype, _ in self.parameters]
        return DriverLaunch(self.function, kinds, self.attribute)

    def _allow(self, shared_bytes: int) -> None:
        if shared_bytes > self.shared_limit:
            driver = import_cupy().cuda.driver
            driver.funcSetAttribute(self.function.ptr, MAX_DYNAMIC_SHARED, shared_bytes)
            self.shared_limit = shared_bytes

    def clusters_at_once(self, blocks: int, threads: int, shared_bytes: int) -> int:
        """Return how many clusters of ``blocks`` of a kernel with ``__cluster_dims__`` run at a
        time on an idle GPU; 0: it takes none of this size."""
        self._allow(shared_bytes)
        return clusters_at_once(self.function, blocks, threads, shared_bytes)

    def resources(
        self, grid: tuple[int, ...], block: tuple[int, ...], shared_bytes: int = 0
    ) -> dict[str, Any]:
        """Return what a launch takes of this GPU, by the names that ``impls.WORDS`` explains.

        ``limit`` says why no more blocks run at a time.
        """
        self._allow(shared_bytes)
        cuda, function = import_cupy().cuda, self.function.ptr
        device, driver = gpu(cuda.runtime.getDevice()), cuda.driver
        registers = driver.funcGetAttribute(REGISTERS, function)
        total_shared = shared_bytes + driver.funcGetAttribute(STATIC_SHARED, function)
        threads, blocks = math.prod(block), math.prod(grid)
        per_multiprocessor = driver.occupancyMaxActiveBlocksPerMultiprocessor(
            function, threads, shared_bytes
        )
        at_once = device.multiprocessors * per_multiprocessor
        shares = {
            "registers": registers * threads / device.registers_per_multiprocessor,
            "shared memory": total_shared / device.shared_bytes_per_multiprocessor,
            "threads": threads / device.threads_per_multiprocessor,
        }
        most = max(shares, key=shares.__getitem__)
        limit = f"{most}, {per_multiprocessor} at a time on a multiprocessor"
        if blocks < at_once:
            limit = (
                f"{blocks} blocks for {at_once} places on {device.multiprocessors} multiprocessors"
            )
        return {
            "threads": threads, "registers": registers, "shared_bytes": total_shared,
            "blocks": blocks, "waves": blocks / at_once, "limit": limit,
        }  # fmt: skip


def _as_is(value: Any) -> Any:
    return value


def kernel(file: str, name: str, **constants: Constant) -> Kernel:
    """Return the kernel ``name`` of ``rawkernels/<file>`` for these constants, on this device.

    Raises KernelCompileError where it does not compile.
    """
    device = import_cupy().cuda.runtime.getDevice()
    if rehearsing.get():
        _code(device, file, tuple(sorted(constants.items())))
        return _Unloaded(lambda: _kernel(device, file, name, tuple(constants.items())))
    return _kernel(device, file, name, tuple(constants.items()))


def compile_ahead(file: str, **constants: Constant) -> None:
    """Start to compile in another thread what ``kernel`` will ask for."""
    _code(import_cupy().cuda.runtime.getDevice(), file, tuple(sorted(constants.items())))


@contextlib.contextmanager
def compiling_only() -> Iterator[None]:
    """Compile the kernels that are called inside a block, in other threads; launch none of them.

    Matrix products are planned and not computed. What ops return is then arbitrary, and a copy of
    it to the host raises NothingComputed.
    """
    token = rehearsing.set(True)
    try:
        with without_plans():
            yield
    finally:
        rehearsing.reset(token)


class _Unloaded(Kernel):
    """A Kernel that may still compile: who launches it, or reads an attribute, waits for it."""

    def __init__(self, find: Callable[[], Kernel]) -> None:
        self._find = find

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if not rehearsing.get():
            self._find()(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._find(), name)


def kernel_refusal(x: Any, name: str = "x") -> str | None:
    """Return why no kernel takes the array ``x``, the argument ``name``, or None."""
    if not on_gpu(x):
        return f"{name} is a NumPy array; move it with gpuattn.to_gpu(x)"
    return kernels_refusal(x.device.id) or dtype_refusal(x, name)


def dtype_refusal(x: Any, name: str = "x") -> str | None:
    """Return why kernels do not take the dtype of ``x``, the argument ``name``, or None."""
    if ctype(x.dtype) is None:
        return f"{name} is {x.dtype}, the kernel takes float32, float16 or bfloat16"
    return None


@functools.cache
def _kernel(device: int, file: str, name: str, constants: tuple) -> Kernel:
    module = _module(device, file, tuple(sorted(constants)))
    function = module.get_function(name)
    static_shared = import_cupy().cuda.driver.funcGetAttribute(STATIC_SHARED, function.ptr)
    dependent = name in sources.dependent_kernels(file) and gpu(device).has_dependent_launch
    cooperative = name in sources.cooperative_kernels(file)
    if name in sources.wide_cluster_kernels(file):
        import_cupy().cuda.driver.funcSetAttribute(function.ptr, ANY_CLUSTER, 1)
    parameters = sources.signatures(file)[name]
    return Kernel(function, name, parameters, static_shared, dependent, cooperative)


@functools.cache
def _module(device: int, file: str, constants: tuple) -> Any:
    code = _code(device, file, constants).result()
    with _lock:
        module = import_cupy().cuda.function.Module()
        module.load(code)
    return module


@functools.cache
def _code(device: int, file: str, constants: tuple) -> Future[bytes]:
    """Return the future of a file's machine code, which another thread reads or compiles."""
    found = gpu(device)
    arch = sources.arch_for(file, found.capability, found.forced)
    return _compilers.submit(cubin, file, arch, **dict(constants))


def cubin(file: str, arch: str, **constants: Constant) -> bytes:
    """Return the machine code of a file, from the disk cache or compiled and put there.

    For a virtual ``arch``, such as "compute_75", it is PTX.
    """
    text = sources.source_text(file, **constants)
    key = hashlib.sha256(f"{arch} {nvrtc_version()} {text}".encode()).hexdigest()
    path = disk_cache.folder() / f"{Path(file).stem}-{arch}-{key[:32]}.cubin"
    stored = disk_cache.read_bytes(path)
    if stored is not None:
        return stored
    try:
        code, _ = compile_text(text, arch, name=file)
    except KernelCompileError as error:
        raise KernelCompileError(f"{error}\nconstants: {constants}") from None
    disk_cache.write_bytes(path, code)
    return code
