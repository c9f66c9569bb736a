"""Where a run computes, why, and how batches get there."""

import os
import platform
from dataclasses import fields, replace

import numpy as np

from gpuattn.arrays import import_cupy
from gpuattn.data.batching import TokenOrder
from gpuattn.errors import ConfigError, DeviceMissingError, problem
from gpuattn.version import version

DEVICES = ("auto", "cuda", "numpy")
LIBRARIES = (
    "numpy", "ml_dtypes", "click", "rich", "safetensors", "sentencepiece", "sacrebleu",
    "threadpoolctl", "matplotlib", "cupy-cuda12x", "cupy-cuda13x", "numba", "numba-cuda",
    "nvmath-python", "cuda-bindings", "nvidia-cuda-nvrtc", "mpi4py",
)  # fmt: skip


def choose_device(name):
    """Return ("numpy" or "cuda", a sentence that says what was chosen and why).

    Raises DeviceMissingError when "cuda" is asked for and no GPU works, ConfigError for a name
    that is not in ``DEVICES``.
    """
    if name not in DEVICES:
        raise ConfigError(problem("device", "the name", repr(name), ", ".join(DEVICES)))
    if name == "numpy":
        return "numpy", f"{_cpu()}, as asked"
    reason = _missing_gpu()
    if reason is None:
        return "cuda", _gpu()
    if name == "cuda":
        raise DeviceMissingError(f"no GPU to use: {reason}. Run: gpuattn doctor")
    return "numpy", f"{_cpu()}, for want of a GPU ({reason})"


def array_module(device):
    """Return numpy or cupy for "numpy" or "cuda"."""
    return np if device == "numpy" else import_cupy()


def batch_to(batch, xp):
    """Return a batch of ``data.batching`` with its arrays on the device, moved in one copy."""
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


def is_out_of_memory(error):
    """Return whether an exception says that memory is used up, that of the host or of a GPU."""
    return isinstance(error, MemoryError) or "cudaErrorMemoryAllocation" in str(error)


def card_memory():
    """Return (free, all) bytes of the current GPU, once CuPy's pool has given back what it can."""
    cupy = import_cupy()
    cupy.get_default_memory_pool().free_all_blocks()
    return cupy.cuda.runtime.memGetInfo()


def memory_in_use(xp):
    """Return bytes: what CuPy's pool holds, or the most the process ever had on a CPU."""
    if xp is not np:
        return xp.get_default_memory_pool().total_bytes()
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if platform.system() == "Darwin" else peak * 1024


def versions():
    """Return ``{distribution: version}`` of what is installed."""
    found = {"gpuattn": version(), "python": platform.python_version()}
    found.update({name: version_of(name) for name in LIBRARIES})
    return {name: version for name, version in found.items() if version}


def installed_version():
    """Return the version of this package."""
    return version()


def version_of(name):
    """Return the version of an installed distribution, or None."""
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _missing_gpu():
    """Return why there is no GPU to use, or None."""
    try:
        cupy = import_cupy()
        return None if cupy.cuda.is_available() else "no CUDA device or driver"
    except DeviceMissingError:
        return "CuPy is not installed"


def _gpu():
    runtime = import_cupy().cuda.runtime
    properties = runtime.getDeviceProperties(runtime.getDevice())
    return f"{properties['name'].decode()}, {properties['totalGlobalMem'] / 2**30:.0f} GiB"


def _cpu():
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"NumPy on {cores} cores"
