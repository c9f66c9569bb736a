"""Checks of this machine: what works, and the remedy for what does not."""

import contextlib
import io
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gpuattn.cuda import compiler, disk_cache
from gpuattn.cuda.gpu import FORCED, OLDEST, dotted, gpu
from gpuattn.environment import usable_cores
from gpuattn.errors import ConfigError, DeviceMissingError, KernelCompileError
from gpuattn.gemm import cublaslt
from gpuattn.runtime.device import version_of, versions
from gpuattn.tasks import store_cache

LAUNCHERS = "mpiexec", "mpirun", "srun"
PROBE = """
extern "C" __global__ void probe(float* y) { y[threadIdx.x] = 2.f * threadIdx.x; }
"""


@dataclass(frozen=True)
class Check:
    """A check: ``state`` is "ok", "missing" (a feature is off) or "broken"."""

    name: str
    state: str
    detail: str
    remedy: str = ""


def examine() -> list[Check]:
    """Return the checks: interpreter, libraries, BLAS, memory, GPU, compiler, MPI, caches."""
    checks = [_python(), _blas(), _memory(), _cupy(), _device(), _nvrtc(), _launch(), _graphs()]
    return [*checks, _numba(), _gemm(), _mpi(), _cache(), _stores()]


def as_dict(checks: Sequence[Check]) -> dict[str, Any]:
    """Return the checks and all versions as JSON-able data, for bug reports."""
    return {"checks": [asdict(check) for check in checks], "versions": versions()}


def _python():
    detail = f"{platform.python_version()} on {platform.platform()}, NumPy {np.__version__}"
    return Check("python", "ok", detail)


def _blas():
    with contextlib.redirect_stdout(io.StringIO()):
        config = np.show_config(mode="dicts") or {}
    name = config.get("Build Dependencies", {}).get("blas", {}).get("name", "unknown")
    x = np.random.default_rng(0).standard_normal((768, 768), dtype=np.float32)
    x @ x
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        x @ x
        times.append(time.perf_counter() - begin)
    rate = 2 * 768**3 / min(times) / 1e9
    detail = f"{name}, {rate:.0f} GFLOP/s in float32 on {usable_cores()} cores"
    if rate < 5:
        return Check(
            "blas", "broken", detail, "reinstall NumPy from PyPI: its wheels bring OpenBLAS"
        )
    return Check("blas", "ok", detail)


def _memory():
    try:
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return Check("memory", "ok", "size unknown on this system")
    return Check("memory", "ok", f"{pages / 2**30:.1f} GiB")


def _cupy():
    try:
        import cupy
    except ImportError as error:
        remedy = "pip install 'gpuattn[cuda13x]' (CUDA 13 driver) or 'gpuattn[cuda12x]'"
        return Check(
            "cupy", "missing", f"not importable ({error}): everything runs on NumPy", remedy
        )
    return Check("cupy", "ok", cupy.__version__)


def _gpu():
    """Return CuPy if a device works, else raise with the reason."""
    try:
        import cupy
    except ImportError as error:
        raise DeviceMissingError("CuPy is not installed") from error
    try:
        cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise DeviceMissingError(str(error)) from error
    return cupy


def _device():
    try:
        cupy = _gpu()
    except DeviceMissingError as error:
        remedy = "install an NVIDIA driver (r525 or newer for CUDA 12, r580 for CUDA 13)"
        return Check("device", "missing", f"no CUDA device: {error}", remedy)
    runtime = cupy.cuda.runtime
    properties = runtime.getDeviceProperties(runtime.getDevice())
    free, total = runtime.memGetInfo()
    capability = f"{properties['major']}.{properties['minor']}"
    driver = runtime.driverGetVersion()
    detail = (
        f"{properties['name'].decode()}, compute capability {capability}, "
        f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free, "
        f"driver for CUDA {driver // 1000}.{driver % 1000 // 10}"
    )
    own = 10 * properties["major"] + properties["minor"]
    if own < OLDEST:
        remedy = f"kernels need compute capability {dotted(OLDEST)}; NumPy's forms run on CuPy"
        return Check("device", "broken", detail, remedy)
    try:
        found = gpu(runtime.getDevice())
    except ConfigError as error:
        return Check("device", "broken", detail, str(error))
    if found.forced:
        detail += f"; {FORCED} makes kernels run as on {dotted(found.capability)}"
    return Check("device", "ok", f"{detail}; {_forms(found)}")


def _forms(found):
    """Return what runs how on a GPU, and what would be faster on another one."""
    if found.has_wgmma:
        return "all forms run"
    if found.has_bfloat16:
        return "tensor cores by mma.sync; attention and fused products are faster on 9.0 (Hopper)"
    if found.has_mma:
        return (
            "float16 on tensor cores, which is the default; bfloat16 is computed in float32, on "
            "8.0 (Ampere) and newer on tensor cores"
        )
    return "attention on CUDA cores; on 7.5 (Turing) and newer float16 uses tensor cores"


def _nvrtc():
    try:
        begin = time.perf_counter()
        compiler.compile_text(PROBE, "sm_80", "probe.cu")
        spent = (time.perf_counter() - begin) * 1e3
    except KernelCompileError as error:
        return Check(
            "nvrtc", "missing", str(error).splitlines()[0], "pip install nvidia-cuda-nvrtc"
        )
    return Check(
        "nvrtc", "ok", f"{compiler.nvrtc_version()}, test kernel compiled in {spent:.0f} ms"
    )


def _launch():
    try:
        cupy = _gpu()
    except DeviceMissingError:
        return Check("kernel", "missing", "needs a device")
    try:
        capability = int(cupy.cuda.Device().compute_capability)
        code, _ = compiler.compile_text(PROBE, compiler.architecture(capability), "probe.cu")
        module = cupy.cuda.function.Module()
        module.load(code)
        y = cupy.empty(32, "float32")
        module.get_function("probe")((1,), (32,), (y,))
        right = y.get().tolist() == [2.0 * i for i in range(32)]
    except (KernelCompileError, cupy.cuda.driver.CUDADriverError) as error:
        remedy = "match the CUDA of CuPy and NVRTC to the driver: see the versions below"
        return Check("kernel", "broken", str(error).splitlines()[0], remedy)
    if not right:
        return Check("kernel", "broken", "the test kernel computed wrong numbers", "check the GPU")
    return Check("kernel", "ok", "a test kernel ran and computed the right numbers")


def _graphs():
    try:
        cupy = _gpu()
    except DeviceMissingError:
        return Check("graphs", "missing", "needs a device")
    try:
        with cupy.cuda.Stream(non_blocking=True) as stream:
            x = cupy.zeros(1, "float32")
            stream.begin_capture()
            x.data.memset_async(0xFF, x.nbytes, stream)
            stream.end_capture().launch(stream)
            if not cupy.isnan(x).all():
                return Check("graphs", "broken", "a CUDA graph did nothing", "check the GPU")
    except cupy.cuda.runtime.CUDARuntimeError as error:
        remedy = "install a newer NVIDIA driver; until then training is slower"
        return Check("graphs", "missing", f"CUDA graphs are off: {error}", remedy)
    return Check("graphs", "ok", "a CUDA graph was captured and ran")


def _numba():
    if version_of("numba-cuda") is None:
        remedy = "pip install 'gpuattn[cuda13x]'"
        return Check("numba", "missing", "no numba-cuda: the readable forms are off", remedy)
    return Check(
        "numba", "ok", f"numba {version_of('numba')}, numba-cuda {version_of('numba-cuda')}"
    )


def _gemm():
    library, reason = cublaslt.library()
    if library is None:
        remedy = "pip install 'gpuattn[cuda13x]'"
        if version_of("nvmath-python") is None:
            reason = "no nvmath-python"
        else:
            remedy = f"{remedy}, which brings cuBLAS, and a driver for it"
        detail = f"matrix products run through CuPy and CUDA graphs are off: {reason}"
        return Check("nvmath", "missing", detail, remedy)
    try:
        x = _gpu().ones((16, 16), "float32")
        cublaslt.multiply(x, x)
    except DeviceMissingError:
        pass
    except RuntimeError as error:
        return Check("nvmath", "broken", str(error), "pip install 'gpuattn[cuda12x]' or [cuda13x]")
    version = library.get_version()
    detail = f"nvmath-python {version_of('nvmath-python')}, cuBLASLt {version // 10000}"
    return Check("nvmath", "ok", f"{detail}.{version % 10000 // 100}.{version % 100}")


def _mpi():
    install = "pip install 'gpuattn[mpi]'"
    try:
        import mpi4py

        mpi4py.rc.initialize = False  # to be asked, it need not start
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        return Check("mpi", "missing", f"runs are of one process: no mpi4py ({error})", install)
    library = " ".join(MPI.Get_library_version().strip("\0").splitlines()[0].split())
    detail = f"mpi4py {version_of('mpi4py')} with {library}"
    found = next(filter(None, map(shutil.which, LAUNCHERS)), None)
    if found is None:
        remedy = "put the mpirun of this MPI on the PATH, or pip install mpich"
        return Check("mpi", "missing", f"{detail}; none of {', '.join(LAUNCHERS)} found", remedy)
    return Check("mpi", "ok", f"{detail}; {found}")


def _cache():
    folder = disk_cache.folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        detail = f"{folder} cannot be written ({error.strerror}): kernels compile in every process"
        return Check(
            "cache", "broken", detail, "set GPUATTN_CACHE_DIR to a folder that you can write"
        )
    size = sum(path.stat().st_size for path in Path(folder).iterdir() if path.is_file())
    return Check("cache", "ok", f"{folder}, {size / 2**20:.1f} MiB")


def _stores():
    every, folder = store_cache.cached(), store_cache.folder()
    held, most = sum(one.size for one in every) / 1e9, store_cache.MOST / 1e9
    tokens = sum(one.path.parent == folder for one in every)
    counts = f"{tokens} of tokens, {len(every) - tokens} of images"
    detail = f"{folder.parent}: {counts}, {held:.2f} of {most:.2f} GB"
    return Check("stores", "ok", detail)
