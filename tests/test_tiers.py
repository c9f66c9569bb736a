"""The default tier leaves out what is marked exhaustive, and says so; --all does not."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.exhaustive
def test_this_runs_with_all_alone(request):
    assert request.config.option.all


@pytest.mark.parametrize("options, chosen", [([], 2), (["--all"], 3)])
def test_what_is_left_out_is_said(options, chosen):
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "not gpu", __file__]
    run = subprocess.run(
        [*command, *options], cwd=Path(__file__).parents[1], capture_output=True, text=True
    )
    assert run.returncode == 0 and run.stdout.count("::test_") == chosen
    assert ("1 exhaustive test was left out" in run.stdout) == (not options)
