"""The device of a run: choice, memory, versions, and copies of batches to it."""

import platform
from dataclasses import fields, replace
from types import ModuleType
from typing import Any

import numpy as np

from gpuattn.arrays import import_cupy
from gpuattn.cuda.gpu import kernels_refusal
from gpuattn.data.batching import TokenOrder
from gpuattn.environment import usable_cores
from gpuattn.errors import ConfigError, DeviceMissingError, problem
from gpuattn.version import version

DEVICES = ("auto", "cuda", "numpy")
LIBRARIES = (
    "numpy", "ml_dtypes", "click", "rich", "safetensors", "sentencepiece", "sacrebleu",
    "threadpoolctl", "matplotlib", "cupy-cuda12x", "cupy-cuda13x", "numba", "numba-cuda",
    "nvmath-python", "cuda-bindings", "nvidia-cuda-nvrtc", "nvidia-nccl-cu12",
    "nvidia-nccl-cu13", "mpi4py",
)  # fmt: skip


def choose_device(name: str) -> tuple[str, str]:
    """Return ("numpy" or "cuda", a sentence on what was chosen and why).

    Raises DeviceMissingError for "cuda" when no GPU works, ConfigError for a name
    that is not in ``DEVICES``.
    """
    if name not in DEVICES:
        raise ConfigError(problem("device", "the name", repr(name), ", ".join(DEVICES)))
    if name == "numpy":
        return "numpy", f"NumPy on {usable_cores()} cores, as asked"
    reason = _missing_gpu()
    if reason is None:
        return "cuda", _gpu()
    if name == "cuda":
        raise DeviceMissingError(f"no GPU to use: {reason}. Run: gpuattn doctor")
    return "numpy", f"NumPy on {usable_cores()} cores, without a GPU ({reason})"


def array_module(device: str) -> ModuleType:
    """Return numpy or cupy for "numpy" or "cuda"."""
    return np if device == "numpy" else import_cupy()


def batch_to(batch: Any, xp: ModuleType) -> Any:
    """Return a batch of ``data.batching`` with its arrays on the device, by one copy."""
    if xp is np:
        return batch
    values = {f.name: getattr(batch, f.name) for f in fields(batch) if f.name != "sentences"}
    arrays = [a for value in values.values() for a in _arrays(value)]
    flat = xp.asarray(np.concatenate([a.ravel() for a in arrays]))
    ends = np.cumsum([a.size for a in arrays])
    moved = (flat[end - a.size : end].reshape(a.shape) for a, end in zip(arrays, ends, strict=True))
    return replace(batch, **{name: _moved(value, moved) for name, value in values.items()})


def _arrays(value):
    if isinstance(value, TokenOrder):
        return list(value)
    return [value] if isinstance(value, np.ndarray) else []


def _moved(value, moved):
    if isinstance(value, TokenOrder):
        return TokenOrder(*(next(moved) for _ in value))
    return next(moved) if isinstance(value, np.ndarray) else value


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception means that host or GPU memory is used up."""
    return isinstance(error, MemoryError) or "cudaErrorMemoryAllocation" in str(error)


def card_memory() -> tuple[int, int]:
    """Return (free, all) bytes of the current GPU, after CuPy's pool released its free blocks."""
    cupy = import_cupy()
    cupy.get_default_memory_pool().free_all_blocks()
    return cupy.cuda.runtime.memGetInfo()


def memory_in_use(xp: ModuleType) -> int:
    """Return the bytes that CuPy's pool holds, or on NumPy the peak of the process."""
    if xp is not np:
        return xp.get_default_memory_pool().total_bytes()
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if platform.system() == "Darwin" else peak * 1024


def versions() -> dict[str, str]:
    """Return ``{distribution: version}`` of Python, this package and installed libraries."""
    found: dict[str, str | None] = {"gpuattn": version(), "python": platform.python_version()}
    found.update({name: version_of(name) for name in LIBRARIES})
    return {name: version for name, version in found.items() if version}


def installed_version() -> str:
    """Return the version of this package."""
    return version()


def version_of(name: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _missing_gpu():
    """Return the reason why no GPU works, or None."""
    try:
        cupy = import_cupy()
        return None if cupy.cuda.is_available() else "no CUDA device or driver"
    except DeviceMissingError:
        return "CuPy is not installed"


def _gpu():
    runtime = import_cupy().cuda.runtime
    number = runtime.getDevice()
    properties = runtime.getDeviceProperties(number)
    text = f"{properties['name'].decode()}, {properties['totalGlobalMem'] / 2**30:.0f} GiB"
    refusal = kernels_refusal(number)
    return f"{text}; {refusal}" if refusal else text
