"""Every example runs on NumPy with --smoke and prints its result; the README's code runs too."""

import re
import subprocess
import sys
from pathlib import Path

import background
import numpy as np
import pytest
from click.testing import CliRunner

from gpuattn.cli.main import main

EXAMPLES = Path(__file__).parents[2] / "examples"
RESULTS = {  # part of the line that each example prints at the end
    "01_library_calls.py": "a table of all scores alone would take",
    "02_autodiff.py": "relative error",
    "03_translate.py": "unseen phrases are exactly right",
    "04_explain.py": "refusals, each with its reason",
    "05_naive_vs_flash.py": "times the tokens",
    "06_every_implementation.py": "all agree",
    "07_pretrained.py": "saved again: 39 of 39 tensors are the same",
    "08_fine_tune.py": "nats a character from the folder",
    "09_vision.py": "unseen images are labelled right",
    "10_own_model.py": "and of the plain loop differ by 0",
}


@pytest.mark.background(run=background.run_example)
@pytest.mark.parametrize("name", sorted(p.name for p in EXAMPLES.glob("*.py")))
def test_example(name, result_of_background):
    run = result_of_background()
    assert run.returncode == 0, run.stderr[-2000:]
    assert "Claim: " in run.stdout and RESULTS[name] in run.stdout


def test_add_an_op():
    folder = EXAMPLES / "add_an_op"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--rootdir", folder, folder],
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "5 passed" in run.stdout, run.stdout + run.stderr


@pytest.fixture
def toy_run(tmp_path, monkeypatch):
    """Make what the README's code opens: a small run of one update, and a token store."""
    monkeypatch.chdir(tmp_path)
    small = "--dim 16 --heads 2 --layers 1 --ffn 16 --batch 400 --beam 2 --score-pairs 5 --for 1u"
    (tmp_path / "web.txt").write_text("A line.\n" * 9)
    store = "--tokenizer chars --workers 1 --out stores/web"
    for command in (["train", "--device", "numpy", *small.split()],
                    ["prepare", "web.txt", *store.split()]):  # fmt: skip
        result = CliRunner().invoke(main, command)
        assert result.exit_code == 0, result.output


def test_readme_code_prints_what_the_readme_shows(capsys, toy_run):
    """Every Python block runs, in order, and prints the block after it; GPU code is skipped."""
    text = (EXAMPLES.parent / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```\n(?:```\n(.*?)```)?", text, re.DOTALL)
    on_cpu = [(code, shown) for code, shown in blocks if "to_gpu" not in code]
    assert len(on_cpu) == len(blocks) - 1
    names = {"x": np.ones((5, 3)), "y": np.ones((5, 1))}
    capsys.readouterr()
    for code, shown in on_cpu:
        exec(code, names)
        assert capsys.readouterr().out == shown
    assert names["out"].shape == (2, 1, 8, 64)
    assert names["lengths"].tolist() == [3, 3]
    assert names["w"].grad.shape == (3, 1)
    assert names["loss"].item() < 0.01 and float(names["error"]) < 0.01
    assert [type(line) for line in names["german"]] == [str]
