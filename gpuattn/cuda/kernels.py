"""Find, assemble, compile, cache and launch the CUDA kernels in ``rawkernels/``.

A kernel is compiled once for its constants and its architecture, by NVRTC, in tens of
milliseconds; the cubin is kept on disk under a hash of everything that went into it.
"""

import collections
import ctypes
import functools
import glob
import hashlib
import itertools
import math
import os
import re
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path

import numpy as np

from gpuattn.arrays import ctype, import_cupy, on_gpu
from gpuattn.cuda.launch import DependentLaunch, supported
from gpuattn.errors import KernelCompileError

ROOT = resources.files("rawkernels")
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
STATIC_SHARED, REGISTERS, MAX_DYNAMIC_SHARED = 1, 4, 8  # CU_FUNC_ATTRIBUTE_*
STATIC_SHARED_LIMIT = 48 * 1024  # that and no more needs no permission
_lock = threading.Lock()
_compilers = ThreadPoolExecutor(2, "gpuattn-compiler")  # begun when first asked
launches = collections.Counter()  # kernel name -> launches in this process; tests ask which ran


class Kernel:
    """A compiled kernel. Casts Python numbers to the types its signature declares."""

    def __init__(self, function, name, parameters, static_shared=0, dependent=False):
        self.function, self.name, self.parameters = function, name, parameters
        self.casts = [SCALARS.get(ctype, _as_is) for ctype, _ in parameters]
        self.launch = function
        if dependent:
            self.launch = DependentLaunch(function, [ctype for ctype, _ in parameters])
            self.casts = [_as_is] * len(parameters)  # packing casts
        self.shared_limit = STATIC_SHARED_LIMIT - static_shared

    def __call__(self, grid, block, *args, shared_bytes=0):
        """Launch on CuPy's current stream. A grid with a zero launches nothing."""
        if len(args) != len(self.casts):
            wants = ", ".join(f"{ctype} {name}" for ctype, name in self.parameters)
            raise TypeError(f"{self.name} takes ({wants}), got {len(args)} arguments")
        if 0 in grid:
            return
        self._allow(shared_bytes)
        cast = tuple([to(x) for to, x in zip(self.casts, args, strict=True)])
        launches[self.name] += 1
        self.launch(grid, block, cast, shared_mem=shared_bytes)

    def _allow(self, shared_bytes):
        if shared_bytes > self.shared_limit:
            driver = import_cupy().cuda.driver
            driver.funcSetAttribute(self.function.ptr, MAX_DYNAMIC_SHARED, shared_bytes)
            self.shared_limit = shared_bytes

    def resources(self, grid, block, shared_bytes=0):
        """Return what a launch takes of this GPU, by the names that ``impls.WORDS`` explains.

        ``limit`` says why no more blocks run at a time.
        """
        runtime, driver = import_cupy().cuda.runtime, import_cupy().cuda.driver
        self._allow(shared_bytes)
        function, gpu = self.function.ptr, runtime.getDeviceProperties(runtime.getDevice())
        registers = driver.funcGetAttribute(REGISTERS, function)
        total_shared = shared_bytes + driver.funcGetAttribute(STATIC_SHARED, function)
        threads, blocks = math.prod(block), math.prod(grid)
        side_by_side = driver.occupancyMaxActiveBlocksPerMultiprocessor(
            function, threads, shared_bytes
        )
        count = gpu["multiProcessorCount"]
        places = count * side_by_side
        shares = {
            "registers": registers * threads / gpu["regsPerMultiprocessor"],
            "shared memory": total_shared / gpu["sharedMemPerMultiprocessor"],
            "threads": threads / gpu["maxThreadsPerMultiProcessor"],
        }
        most = max(shares, key=shares.get)
        limit = f"{most}, {side_by_side} at a time on a multiprocessor"
        if blocks < places:
            limit = f"{blocks} blocks for {places} places on {count} multiprocessors"
        return {
            "threads": threads, "registers": registers, "shared_bytes": total_shared,
            "blocks": blocks, "waves": blocks / places, "limit": limit,
        }  # fmt: skip


def _as_is(value):
    return value


def kernel(file, name, **constants):
    """Return the kernel ``name`` of ``rawkernels/<file>`` for these constants, on this device."""
    device = import_cupy().cuda.runtime.getDevice()
    return _kernel(device, file, name, tuple(constants.items()))


def compile_ahead(file, **constants):
    """Begin to compile what ``kernel`` will ask for, beside what is compiled before it."""
    _code(import_cupy().cuda.runtime.getDevice(), file, tuple(sorted(constants.items())))


def kernel_refusal(x, name="x"):
    """Return why no kernel takes the array ``x``, the argument ``name``; None where one may."""
    if not on_gpu(x):
        return f"{name} is a NumPy array; move it with gpuattn.to_gpu(x)"
    return dtype_refusal(x, name)


def dtype_refusal(x, name="x"):
    """Return why kernels do not take the dtype of ``x``, or None."""
    if ctype(x.dtype) is None:
        return f"{name} is {x.dtype}, the kernel takes float32, float16 or bfloat16"
    return None


@functools.cache
def gpu(number):
    """Return the compute capability of a device, such as "90", and its multiprocessors."""
    device = import_cupy().cuda.Device(number)
    return device.compute_capability, device.attributes["MultiProcessorCount"]


@functools.cache
def shared_limit(number):
    """Return the bytes of shared memory that a block may ask for on a device."""
    return import_cupy().cuda.Device(number).attributes["MaxSharedMemoryPerBlockOptin"]


@functools.cache
def _kernel(device, file, name, constants):
    module = _module(device, file, tuple(sorted(constants)))
    function = module.get_function(name)
    static_shared = import_cupy().cuda.driver.funcGetAttribute(STATIC_SHARED, function.ptr)
    dependent = waits_first(file, name) and supported(gpu(device)[0])
    return Kernel(function, name, signatures(file)[name], static_shared, dependent)


@functools.cache
def _module(device, file, constants):
    code = _code(device, file, constants).result()
    with _lock:
        module = import_cupy().cuda.function.Module()
        module.load(code)
    return module


@functools.cache
def _code(device, file, constants):
    """Return the future of a file's machine code, which another thread reads or compiles."""
    return _compilers.submit(cubin, file, arch_for(file, gpu(device)[0]), **dict(constants))


def cubin(file, arch, **constants):
    """Return the machine code of a file, from the disk cache or compiled and put there."""
    text = source_text(file, **constants)
    key = hashlib.sha256(f"{arch} {nvrtc_version()} {text}".encode()).hexdigest()
    path = cache_folder() / f"{Path(file).stem}-{arch}-{key[:32]}.cubin"
    stored = _read_cached(path)
    if stored is not None:
        return stored
    try:
        code, _ = compile_text(text, arch, name=file)
    except KernelCompileError as error:
        raise KernelCompileError(f"{error}\nconstants: {constants}") from None
    _write_cached(path, code)
    return code


def cache_folder():
    """Return where cubins are kept: GPUATTN_CACHE_DIR, or a folder in the user's cache.

    For a user without a home that is a place where nothing can be kept.
    """
    base = os.environ.get("GPUATTN_CACHE_DIR")
    if base:
        return Path(base)
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        cache = Path(os.devnull)
    return cache / "gpuattn" / "kernels"


def _read_cached(path):
    try:
        blob = path.read_bytes()
    except OSError:
        return None
    code, digest = blob[:-32], blob[-32:]
    return code if hashlib.sha256(code).digest() == digest else None


def _write_cached(path, code):
    """Store by rename, so that two processes never see half a file; a full disk is no error."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(code + hashlib.sha256(code).digest())
            os.replace(temporary, path)
        except OSError:
            os.unlink(temporary)
    except OSError:
        pass


# ---- source text ------------------------------------------------------------------------------


def source_text(file, **constants):
    """Return the text given to NVRTC: typed constants, the file, a digest of its headers."""
    lines = [_declare(name, value) for name, value in sorted(constants.items()) if name != "scalar"]
    head = ['#include "common/types.cuh"']
    if "scalar" in constants:
        head.append(f"using scalar = {constants['scalar']};")
    body = [f'#line 1 "rawkernels/{file}"', (ROOT / file).read_text()]
    return "\n".join([*head, *lines, *body, f"// headers {_headers_digest()}\n"])


def _declare(name, value):
    if isinstance(value, bool):
        return f"constexpr bool {name} = {str(value).lower()};"
    if isinstance(value, int):
        return f"constexpr int {name} = {value};"
    return f"using {name} = {value};"


@functools.cache
def _headers_digest():
    headers = sorted((ROOT / "common").iterdir(), key=lambda path: path.name)
    return hashlib.sha256(b"".join(path.read_bytes() for path in headers)).hexdigest()[:16]


@functools.cache
def signatures(file):
    """Return ``{kernel: [(C type, parameter), ...]}`` for every kernel of a file."""
    found = SIGNATURE.findall(_without_comments(file))
    return {name: [_parameter(p) for p in inside.split(",")] for name, inside in found}


@functools.cache
def waits_first(file, name):
    """Return whether a kernel's first statement waits for the kernels before it: see ``launch``."""
    begin = rf"\b{name}\([^)]*\) {{\s*grid_dependency_wait\(\);"
    return bool(re.search(begin, _without_comments(file)))


def _without_comments(file):
    return re.sub(r"//[^\n]*", "", (ROOT / file).read_text())


def _parameter(declaration):
    words = re.sub(r"\b(const|__restrict__|__grid_constant__)\b", "", declaration).split()
    return " ".join(words[:-1]), words[-1]


def files():
    """Return the names of all CUDA sources, sorted."""
    return sorted(path.name for path in ROOT.iterdir() if path.name.endswith(".cu"))


@functools.cache
def architectures(file):
    """Return the architectures on the ``Arch:`` line of a file's header."""
    return re.search(r"^// Arch:\s*(.*)$", (ROOT / file).read_text(), re.MULTILINE)[1].split()


@functools.cache
def serves(file, capability):
    """Return whether ``file`` is for devices such as "90", by its ``Arch:`` line.

    A file that lists sm_80 runs on all later devices. Others run where an architecture of the same
    major version is listed, and in its "a" form on that very device alone.
    """
    listed = architectures(file)
    majors = {arch[3:-1] for arch in listed if not arch.endswith("a")}
    return "sm_80" in listed or f"sm_{capability}a" in listed or capability[:-1] in majors


def arch_for(file, capability):
    """Return what to compile ``file`` for on a device such as "90": its "a" form if listed."""
    exact = f"sm_{capability}a"
    return exact if exact in architectures(file) else architecture(capability)


def architecture(capability):
    """Return the newest architecture that NVRTC knows whose machine code a device can run.

    That is its own, or one of the same major version and an earlier minor one: sm_120 for "121".
    Raises KernelCompileError where NVRTC is too old for the device.
    """
    wanted, known = int(capability), nvrtc_architectures()
    usable = [arch for arch in known if arch // 10 == wanted // 10 and arch <= wanted]
    if not usable:
        raise KernelCompileError(
            f"NVRTC {nvrtc_version()} cannot compile for compute capability "
            f"{wanted // 10}.{wanted % 10}; it knows up to sm_{max(known)}. Install a newer one: "
            "pip install --upgrade 'gpuattn[cuda13x]'"
        )
    return f"sm_{max(usable)}"


@functools.cache
def variants(file):
    """Return every combination of the constants that the header's ``Constants:`` lines list.

    ``// Constants: scalar = float, f16, bf16; BLOCK = 128, 256`` gives six; lines that begin with
    ``//   `` continue it. Each further ``// Constants:`` line adds its combinations.
    """
    text = (ROOT / file).read_text()
    blocks = re.findall(r"^// Constants:(.*(?:\n//   .*)*)", text, re.MULTILINE)
    return [choice for block in blocks for choice in _combinations(block)] or [{}]


def _combinations(block):
    names, choices = [], []
    for item in re.sub(r"\n//", " ", re.sub(r"\([^)]*\)", "", block)).split(";"):
        name, values = item.split("=")
        names.append(name.strip())
        choices.append([_constant(value.strip()) for value in values.split(",")])
    return [dict(zip(names, values, strict=True)) for values in itertools.product(*choices)]


def _constant(word):
    if word in ("true", "false"):
        return word == "true"
    return int(word) if re.fullmatch(r"-?\d+", word) else word


# ---- NVRTC ------------------------------------------------------------------------------------


@functools.cache
def nvrtc():
    """Return the NVRTC library. Raises KernelCompileError with the remedy where there is none."""
    for path in _nvrtc_candidates():
        try:
            library = ctypes.CDLL(path)
            # NVRTC opens its built-in functions by bare name: in a wheel only a loaded one is found
            for builtins in glob.glob(f"{os.path.dirname(path)}/libnvrtc-builtins.so*"):
                ctypes.CDLL(builtins)
            return library
        except OSError:
            continue
    raise KernelCompileError(
        "NVRTC, the CUDA run-time compiler, is not installed. "
        "pip install 'gpuattn[cuda13x]', or without a GPU: pip install nvidia-cuda-nvrtc"
    )


def _nvrtc_candidates():
    for folder in sys.path:
        for pattern in ("nvidia/cu1?/lib", "nvidia/cuda_nvrtc/lib"):
            yield from sorted(glob.glob(f"{folder}/{pattern}/libnvrtc.so.1[23]"), reverse=True)
    yield from ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")
    yield from sorted(glob.glob("/usr/local/cuda/lib64/libnvrtc.so.1[23]"), reverse=True)


@functools.cache
def nvrtc_version():
    """Return the version of NVRTC, such as "13.0"."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


@functools.cache
def nvrtc_architectures():
    """Return the architectures that NVRTC compiles for, as numbers such as 90."""
    count = ctypes.c_int()
    nvrtc().nvrtcGetNumSupportedArchs(ctypes.byref(count))
    found = (ctypes.c_int * count.value)()
    nvrtc().nvrtcGetSupportedArchs(found)
    return list(found)


def compile_text(text, arch, name="source.cu"):
    """Compile CUDA C++ for ``arch`` and return (cubin, log). Needs no GPU.

    The log holds registers, shared memory and spills of every kernel. Raises KernelCompileError
    with the first error and the path of a copy of the text.
    """
    lib, program = nvrtc(), ctypes.c_void_p()
    lib.nvrtcCreateProgram(ctypes.byref(program), text.encode(), name.encode(), 0, None, None)
    options = [
        f"--gpu-architecture={arch}",
        "-std=c++17",
        f"-I{ROOT}",
        "--ptxas-options=-v",
    ]
    array = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
    try:
        failed = lib.nvrtcCompileProgram(program, len(options), array)
        log = _nvrtc_bytes(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
        if failed:
            raise KernelCompileError(_compile_message(text, arch, name, log))
        return _nvrtc_bytes(program, "CUBIN"), log
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))


def _nvrtc_bytes(program, what):
    lib, size = nvrtc(), ctypes.c_size_t()
    getattr(lib, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    getattr(lib, f"nvrtcGet{what}")(program, buffer)
    return buffer.raw


def _compile_message(text, arch, name, log):
    first = next((line for line in log.splitlines() if "error" in line), log.strip())
    with tempfile.NamedTemporaryFile("w", suffix=f"-{name}", delete=False) as copy:
        copy.write(f"{text}\n/*\n{log}\n*/\n")
    where = f"{name} does not compile for {arch} (NVRTC {nvrtc_version()})"
    return f"{where}: {first}\nfull text and log: {copy.name}"
