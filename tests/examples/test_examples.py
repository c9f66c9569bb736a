"""Every example runs on NumPy, small, and prints its claim's figure; so does the README's code."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SAYS = {
    "01_library_calls.py": "the table of scores alone would be",
    "02_autodiff.py": "relative error",
    "03_translate.py": "unseen phrases are exactly right",
    "04_explain.py": "refusals, each with its sentence",
    "05_naive_vs_flash.py": "times the tokens",
    "06_every_implementation.py": "largest difference between any two",
}


@pytest.mark.parametrize("name", sorted(p.name for p in EXAMPLES.glob("*.py")))
def test_example(name, tmp_path):
    run = subprocess.run(
        [sys.executable, EXAMPLES / name, "--smoke"],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    assert "Claim: " in run.stdout and SAYS[name] in run.stdout


def test_add_an_op():
    folder = EXAMPLES / "add_an_op"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--rootdir", folder, folder],
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "5 passed" in run.stdout, run.stdout + run.stderr


def test_the_code_of_the_readme(capsys):
    text = (EXAMPLES.parent / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    here = [block for block in blocks if "to_gpu" not in block]
    assert len(here) == len(blocks) - 1
    names = {"x": np.ones((5, 3)), "y": np.ones((5, 1))}
    for block in here:
        exec(block, names)
    assert f"```\n{capsys.readouterr().out}```" in text
    assert names["out"].shape == (2, 1, 8, 64)
    assert names["lengths"].tolist() == [3, 3]
    assert names["w"].grad.shape == (3, 1)
