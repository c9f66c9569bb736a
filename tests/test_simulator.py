"""Runs the tests marked `simulator` in a process of their own.

Numba decides at its first import whether it simulates, so that cannot be switched here.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

REQUIRED = "simulator" in os.environ.get("GPUATTN_REQUIRE", "")
HERE = Path(__file__).parent


def test_numba_kernels_in_the_simulator():
    missing = [m for m in ("numba", "greenlet") if importlib.util.find_spec(m) is None]
    if missing:
        assert not REQUIRED, f"{missing} not installed: pip install '.[test]'"
        pytest.skip(f"no {', '.join(missing)}: pip install '.[test]'")
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1", "OPENBLAS_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "simulator", "tests"],
        cwd=HERE.parent, env=environment, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    print(run.stdout[-3000:])
    passed = re.search(r"(\d+) passed", run.stdout)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-1000:]
    assert passed and int(passed[1]) >= 10, "the simulator ran almost nothing"


if os.environ.get("NUMBA_ENABLE_CUDASIM") == "1":
    from gpuattn.numbakernels.device import cuda, jit

    @jit
    def half_the_warp(x):
        if cuda.threadIdx.x < 16:
            x[cuda.threadIdx.x] = cuda.shfl_xor_sync(0xFFFFFFFF, cuda.threadIdx.x, 1)

    @jit
    def neighbours(x):
        x[cuda.threadIdx.x] = cuda.shfl_xor_sync(0xFFFFFFFF, cuda.threadIdx.x, 1)


@pytest.mark.simulator
def test_the_simulator_notices_a_deadlock():
    with pytest.raises(RuntimeError, match="deadlock"):
        half_the_warp[1, 32](np.zeros(32))


@pytest.mark.simulator
def test_the_simulator_shuffles():
    x = np.zeros(32)
    neighbours[1, 32](x)
    assert x.tolist() == [i ^ 1 for i in range(32)]
