"""Find, assemble, load and launch the CUDA kernels in ``rawkernels/``.

A kernel is compiled once for its constants and its architecture, by NVRTC, in tens of
milliseconds; the cubin is kept on disk under a hash of everything that it was compiled from.
"""

import collections
import contextlib
import functools
import hashlib
import itertools
import math
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from gpuattn.arrays import ctype, import_cupy, on_gpu, recorders, rehearsing, without_plans
from gpuattn.cuda import disk_cache
from gpuattn.cuda.compiler import ROOT, architecture, compile_text, nvrtc_version
from gpuattn.cuda.driver_launch import COOPERATIVE, PROGRAMMATIC, DriverLaunch, clusters_at_once
from gpuattn.cuda.gpu import AMPERE, gpu, kernels_refusal
from gpuattn.environment import usable_cores
from gpuattn.errors import KernelCompileError

Constant = bool | int | str | None
SCALARS = {
    "int": np.int32,
    "unsigned int": np.uint32,
    "long long": np.int64,
    "unsigned long long": np.uint64,
    "float": np.float32,
    "bool": np.bool_,
}
SIGNATURE = re.compile(
    r'extern "C" __global__ void\s+(?:__\w+__\([^)]*\)\s*)*(\w+)\s*\(([^)]*)\)',
    re.DOTALL,
)
INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)
EVERYWHERE = "sm_75"  # on the Arch line of a file that runs on all devices
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
    dependent = name in dependent_kernels(file) and gpu(device).has_dependent_launch
    cooperative = name in cooperative_kernels(file)
    if name in _listed(file, "wide clusters"):
        import_cupy().cuda.driver.funcSetAttribute(function.ptr, ANY_CLUSTER, 1)
    return Kernel(function, name, signatures(file)[name], static_shared, dependent, cooperative)


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
    arch = arch_for(file, found.capability, found.forced)
    return _compilers.submit(cubin, file, arch, **dict(constants))


def cubin(file: str, arch: str, **constants: Constant) -> bytes:
    """Return the machine code of a file, from the disk cache or compiled and put there.

    For a virtual ``arch``, such as "compute_75", it is PTX.
    """
    text = source_text(file, **constants)
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


# ---- source text ------------------------------------------------------------------------------


def source_text(file: str, **constants: Constant) -> str:
    """Return the text given to NVRTC: typed constants, the file, a digest of its headers."""
    lines = [_declare(name, value) for name, value in sorted(constants.items()) if name != "scalar"]
    head = ['#include "common/types.cuh"']
    if "scalar" in constants:
        head.append(f"using scalar = {constants['scalar']};")
    body = [f'#line 1 "rawkernels/{file}"', (ROOT / file).read_text()]
    return "\n".join([*head, *lines, *body, f"// headers {_headers_digest(file)}\n"])


def _declare(name, value):
    if isinstance(value, bool):
        return f"constexpr bool {name} = {str(value).lower()};"
    if isinstance(value, int):
        return f"constexpr int {name} = {value};"
    return f"using {name} = {value};"


@functools.cache
def _headers_digest(file: str) -> str:
    """Return a digest of a file and of all headers that it includes, directly or by others."""
    texts, names = {}, ["common/types.cuh", file]
    while names:
        name = names.pop()
        if name not in texts:
            texts[name] = (ROOT / name).read_text()
            names += INCLUDE.findall(texts[name])
    everything = "".join(text for _, text in sorted(texts.items()))
    return hashlib.sha256(everything.encode()).hexdigest()[:16]


@functools.cache
def signatures(file: str) -> dict[str, list[tuple[str, str]]]:
    """Return ``{kernel: [(C type, parameter), ...]}`` for every kernel of a file."""
    found = SIGNATURE.findall(_without_comments(file))
    return {name: [_parameter(p) for p in inside.split(",")] for name, inside in found}


@functools.cache
def dependent_kernels(file: str) -> frozenset[str]:
    """Return the kernels that the header's ``Launch:`` lines list behind ``dependent:``.

    Their launches are programmatic dependent ones where the GPU has them.
    """
    return _listed(file, "dependent")


@functools.cache
def cooperative_kernels(file: str) -> frozenset[str]:
    """Return the kernels behind ``cooperative:``: all blocks of a launch run at the same time."""
    return _listed(file, "cooperative")


def _listed(file, kind):
    launch = re.search(r"^// Launch:.*(?:\n//   .*)*", (ROOT / file).read_text(), re.MULTILINE)
    listed = launch and re.search(rf"\b{kind}: (.*)", launch[0])
    return frozenset(listed[1].split(", ")) if listed else frozenset()


def _without_comments(file: str) -> str:
    return re.sub(r"//[^\n]*", "", (ROOT / file).read_text())


def _parameter(declaration: str) -> tuple[str, str]:
    words = re.sub(r"\b(const|__restrict__|__grid_constant__)\b", "", declaration).split()
    return " ".join(words[:-1]), words[-1]


def files() -> list[str]:
    """Return the paths of all CUDA sources below ``rawkernels``, such as "norm/layer_norm.cu"."""
    return sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.cu"))


@functools.cache
def architectures(file: str) -> list[str]:
    """Return the architectures on the ``Arch:`` line of a file's header."""
    return re.findall(r"^// Arch:\s*(.*)$", (ROOT / file).read_text(), re.MULTILINE)[0].split()


@functools.cache
def serves(file: str, capability: int) -> bool:
    """Return whether ``file`` runs on devices of a capability such as 90, by its ``Arch:`` line.

    A file that lists sm_75 runs on all devices from 7.0 on that NVRTC compiles for. Others run
    where an architecture of the same major version is listed, and in its "a" form on that very
    device alone.
    """
    listed = architectures(file)
    majors = {int(arch[3:]) // 10 for arch in listed if not arch.endswith("a")}
    return EVERYWHERE in listed or f"sm_{capability}a" in listed or capability // 10 in majors


def arch_for(file: str, capability: int, forced: bool = False) -> str:
    """Return what to compile ``file`` for on a device such as 90: its "a" form if listed.

    ``forced``: for a later device that stands for such a one, whose driver compiles PTX.
    """
    exact = f"sm_{capability}a"
    arch = exact if exact in architectures(file) else architecture(capability)
    return arch.replace("sm_", "compute_") if forced else arch


@functools.cache
def variants(file: str, arch: str | None = None) -> list[dict[str, Constant]]:
    """Return every combination of the constants that the header's ``Constants:`` lines list.

    ``// Constants: scalar = float, f16, bf16; BLOCK = 128, 256`` gives six; lines that begin with
    ``//   `` continue it. Each further ``// Constants:`` line adds its combinations. A file with
    lines ``// Constants below sm_80:`` has these alone there, and the others from sm_80 on.
    ``arch``: of those for an architecture such as "sm_75" only.
    """
    text = (ROOT / file).read_text()
    blocks, older = (
        re.findall(rf"^// Constants{kind}:(.*(?:\n//   .*)*)", text, re.MULTILINE)
        for kind in ("", " below sm_80")
    )
    if arch is None:
        blocks = blocks + older
    elif older and int(re.sub(r"\D", "", arch)) < AMPERE:
        blocks = older
    return [choice for block in blocks for choice in _combinations(block)] or [{}]


def _combinations(block: str) -> list[dict[str, Constant]]:
    names, choices = [], []
    for item in re.sub(r"\n//", " ", re.sub(r"\([^)]*\)", "", block)).split(";"):
        name, values = item.split("=")
        names.append(name.strip())
        choices.append([_constant(value.strip()) for value in values.split(",")])
    return [dict(zip(names, values, strict=True)) for values in itertools.product(*choices)]


def _constant(word: str) -> Constant:
    if word in ("true", "false"):
        return word == "true"
    return int(word) if re.fullmatch(r"-?\d+", word) else word
