"""NVRTC, CUDA's run-time compiler: the library, what it compiles for, CUDA C++ to machine code."""

import ctypes
import functools
import glob
import os
import sys
import tempfile
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

from gpuattn.cuda.gpu import dotted
from gpuattn.errors import KernelCompileError

ROOT = Path(str(resources.files("rawkernels")))  # where #include looks


@functools.cache
def nvrtc() -> ctypes.CDLL:
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


def _nvrtc_candidates() -> Iterator[str]:
    for folder in sys.path:
        for pattern in ("nvidia/cu1?/lib", "nvidia/cuda_nvrtc/lib"):
            yield from sorted(glob.glob(f"{folder}/{pattern}/libnvrtc.so.1[23]"), reverse=True)
    yield from ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")
    yield from sorted(glob.glob("/usr/local/cuda/lib64/libnvrtc.so.1[23]"), reverse=True)


@functools.cache
def nvrtc_version() -> str:
    """Return the version of NVRTC, such as "13.0"."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


@functools.cache
def nvrtc_architectures() -> list[int]:
    """Return the architectures that NVRTC compiles for, as numbers such as 90."""
    count = ctypes.c_int()
    nvrtc().nvrtcGetNumSupportedArchs(ctypes.byref(count))
    found = (ctypes.c_int * count.value)()
    nvrtc().nvrtcGetSupportedArchs(found)
    return list(found)


def compile_text(text: str, arch: str, name: str = "source.cu") -> tuple[bytes, str]:
    """Compile CUDA C++ for an ``arch`` such as "sm_90a" and return (cubin, log). Needs no GPU.

    For a virtual one such as "compute_75" it returns PTX in place of the cubin. The log holds
    registers, shared memory and spills of every kernel (not of PTX). Raises KernelCompileError with
    the first error and the path of a copy of the text.
    """
    lib, program = nvrtc(), ctypes.c_void_p()
    lib.nvrtcCreateProgram(ctypes.byref(program), text.encode(), name.encode(), 0, None, None)
    virtual = arch.startswith("compute_")
    options = [f"--gpu-architecture={arch}", "-std=c++17", f"-I{ROOT}"]
    options += [] if virtual else ["--ptxas-options=-v"]
    array = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
    try:
        failed = lib.nvrtcCompileProgram(program, len(options), array)
        log = _nvrtc_bytes(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
        if failed:
            raise KernelCompileError(_compile_message(text, arch, name, log))
        return _nvrtc_bytes(program, "PTX" if virtual else "CUBIN"), log
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))


def _nvrtc_bytes(program: ctypes.c_void_p, what: str) -> bytes:
    lib, size = nvrtc(), ctypes.c_size_t()
    getattr(lib, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    getattr(lib, f"nvrtcGet{what}")(program, buffer)
    return buffer.raw


def _compile_message(text: str, arch: str, name: str, log: str) -> str:
    first = next((line for line in log.splitlines() if "error" in line), log.strip())
    with tempfile.NamedTemporaryFile("w", suffix=f"-{Path(name).name}", delete=False) as copy:
        copy.write(f"{text}\n/*\n{log}\n*/\n")
    where = f"{name} does not compile for {arch} (NVRTC {nvrtc_version()})"
    return f"{where}: {first}\nfull text and log: {copy.name}"


def architecture(capability: int) -> str:
    """Return the newest architecture that NVRTC knows whose machine code a device can run.

    That is its own, or one of the same major version and an earlier minor one: sm_120 for 121.
    Raises KernelCompileError where NVRTC is too old for the device.
    """
    known = nvrtc_architectures()
    usable = [a for a in known if a // 10 == capability // 10 and a <= capability]
    if not usable and capability < min(known):
        raise KernelCompileError(
            f"NVRTC {nvrtc_version()} compiles for compute capability {dotted(min(known))} and "
            f"newer, this GPU's is {dotted(capability)}. Install that of CUDA 12: "
            "pip install 'gpuattn[cuda12x]'"
        )
    if not usable:
        raise KernelCompileError(
            f"NVRTC {nvrtc_version()} cannot compile for compute capability "
            f"{dotted(capability)}; it knows up to sm_{max(known)}. Install a newer one: "
            "pip install --upgrade 'gpuattn[cuda13x]'"
        )
    return f"sm_{max(usable)}"
