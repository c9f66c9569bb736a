"""pytest leaves out tests marked exhaustive and prints their number; --all runs them."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.exhaustive
def test_runs_only_with_all(request):
    assert request.config.option.all


@pytest.mark.parametrize("options, chosen", [([], 2), (["--all"], 3)])
def test_left_out_tests_are_counted(options, chosen):
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "not gpu", __file__]
    run = subprocess.run(
        [*command, *options], cwd=Path(__file__).parents[1], capture_output=True, text=True
    )
    assert run.returncode == 0 and run.stdout.count("::test_") == chosen
    assert ("1 exhaustive test was left out" in run.stdout) == (not options)
