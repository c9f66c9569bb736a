"""The bytes that an attention call moves in the GPU's memory, as the GPU's own counters say.

NVIDIA's profiler ncu (Nsight Compute, on CUPTI) runs this module as a program and reads the
counters of its kernels. It is no part of this package; without it nothing is measured, and a
sentence says so. See ``traffic`` for the model.
"""

import csv
import io
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence

METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
UNITS = {"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "Tbyte": 1e12}
NO_COUNTERS = "ERR_NVGPUCTRPERM"
LIMIT = 60  # seconds of a measurement


def measure(
    op: str, shape: Sequence[int], impl: str | None, device: str = "cuda", dtype: str = "float16"
) -> tuple[float | None, str]:
    """Return (bytes read and written by a forward call, ""), or (None, why there is no figure).

    ``op``: "flash_attention", with q, k and v of ``shape`` (B, T, H, D). ``impl``: a name, or None.
    """
    if device != "cuda":
        return None, "counters are of GPUs"
    program = shutil.which("ncu")
    if program is None:
        return None, "the profiler ncu (Nsight Compute) is not installed"
    sizes = "x".join(map(str, shape))
    line = [
        program, "--csv", "--page", "raw", "--metrics", ",".join(METRICS), "--cache-control",
        "none", "--profile-from-start", "off", sys.executable, "-m", "gpuattn.bench.hbm", op, sizes,
        impl or "", dtype,
    ]  # fmt: skip
    try:
        run = subprocess.run(line, capture_output=True, text=True, timeout=LIMIT, env=os.environ)
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"ncu failed: {error}"
    if NO_COUNTERS in run.stdout + run.stderr:
        return None, "the driver lets administrators alone read the counters"
    try:
        return sum(_bytes(run.stdout)), ""
    except (ValueError, KeyError) as error:
        lines = [line for line in (run.stdout + run.stderr).splitlines() if line.strip()]
        return None, f"ncu gave no figure ({error}): {lines[-1] if lines else 'it said nothing'}"


def _bytes(text: str) -> Iterator[float]:
    """Yield the bytes of each kernel and counter in a table of ncu."""
    lines = text.splitlines()
    first = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if first is None:
        raise ValueError("no table")
    rows = list(csv.DictReader(io.StringIO("\n".join(lines[first:]))))
    if len(rows) < 2:
        raise ValueError("no kernel")
    units, *kernels = rows
    for kernel in kernels:
        for name in METRICS:
            yield float(kernel[name].replace(",", "")) * UNITS[units[name]]


def _main(op: str, sizes: str, impl: str, dtype: str) -> None:
    """Run one call between the marks that ncu waits for."""
    import cupy

    import gpuattn

    shape = tuple(map(int, sizes.split("x")))
    rng = cupy.random.default_rng(0)
    q, k, v = (rng.standard_normal(shape, cupy.float32).astype(dtype) for _ in range(3))

    def call():
        return getattr(gpuattn, op)(q, k, v, impl=impl or None)

    call()
    cupy.cuda.Device().synchronize()
    cupy.cuda.profiler.start()
    call()
    cupy.cuda.Device().synchronize()
    cupy.cuda.profiler.stop()


if __name__ == "__main__":
    _main(*sys.argv[1:])
