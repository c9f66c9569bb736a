"""Long checks that need nobody: they run in other processes while the other tests run.

A test marked ``background(run=function)`` has ``function`` called with its parameters as soon as it
is collected, once for all tests that name it with these parameters, and asks for what came out with
the fixture ``result_of_background``. Those that are ``long`` begin first.

This keeps all cores busy, so the tests in front run BLAS in one thread, unless the user has set
OPENBLAS_NUM_THREADS: two threads that wait for each other took twice the time. ``conftest.py``
imports this module before NumPy, which reads the variable as it is loaded.
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
    """Return processes that leave the way to the tests in front."""
    return ProcessPoolExecutor(min(os.cpu_count() or 1, 8), get_context("spawn"), _step_back)


def _step_back():
    if hasattr(os, "nice"):
        os.nice(10)


def run_simulator(order, options):
    """Run the tests marked ``simulator``; return pytest's (exit status, output)."""
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1", "GPUATTN_SIM_ORDER": order}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "simulator", *options, "tests"],
        cwd=ROOT, env=environment, capture_output=True, text=True,
        timeout=1800, check=False,
    )  # fmt: skip
    return run.returncode, run.stdout + run.stderr


def run_example(name):
    """Run a script of ``examples``, small; return the process that has ended."""
    with tempfile.TemporaryDirectory() as folder:
        return subprocess.run(
            [sys.executable, ROOT / "examples" / name, "--smoke"],
            cwd=folder, capture_output=True, text=True, check=False, timeout=600,
        )  # fmt: skip
