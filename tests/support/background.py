"""Long checks that run in other processes while the other tests run.

For a test marked ``background(run=function)``, ``function`` is called with the test's parameters
right after collection, once for all tests with the same function and parameters. The test gets the
result from the fixture ``result_of_background``. Functions marked ``long=True`` start first.

All cores are then busy, so BLAS runs in one thread in the other tests, unless the user has set
OPENBLAS_NUM_THREADS: with two threads, which wait for each other, they took twice the time.
``conftest.py`` imports this module before NumPy, which reads the variable when it is imported.
"""

import os
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).parents[2]
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def start():
    """Return a pool of processes with a low priority."""
    return ProcessPoolExecutor(min(os.cpu_count() or 1, 8), get_context("spawn"), _lower_priority)


def _lower_priority():
    if hasattr(os, "nice"):
        os.nice(10)


def run_simulator(order, options):
    """Run the tests marked ``simulator``; return pytest's (exit status, output)."""
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1", "GPUATTN_SIM_ORDER": order}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "simulator", *options, "tests"],
        cwd=ROOT, env=environment, capture_output=True, text=True,
        timeout=3600, check=False,
    )  # fmt: skip
    return run.returncode, run.stdout + run.stderr


def run_example(name):
    """Run a script of ``examples`` with --smoke; return the completed process."""
    with tempfile.TemporaryDirectory() as folder:
        return subprocess.run(
            [sys.executable, ROOT / "examples" / name, "--smoke"],
            cwd=folder, capture_output=True, text=True, check=False, timeout=600,
        )  # fmt: skip
