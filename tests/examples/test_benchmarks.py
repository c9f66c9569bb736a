"""The benchmarks among the examples run, small; their figures are for quiet machines."""

import re
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "examples" / "benchmarks"


def test_cpu_step():
    run = subprocess.run(
        [sys.executable, BENCHMARKS / "cpu_step.py", "--smoke"],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    assert re.search(r"gpuattn on NumPy .*: \d+\.\d ms", run.stdout)
