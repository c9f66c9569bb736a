"""The wheel's contents, the package's metadata, its requirements and the length of its files."""

import configparser
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    pytest.importorskip("build", reason="pip install build to build the wheel")
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "checkout"  # setuptools writes into the folder that it packs
    skip = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, copy, ignore=skip)
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--outdir", folder, copy],
        check=True, capture_output=True,
    )  # fmt: skip
    return next(folder.glob("*.whl"))


def test_the_wheel_holds_every_cuda_source(wheel):
    packed = set(zipfile.ZipFile(wheel).namelist())
    sources = {p.relative_to(ROOT).as_posix() for p in (ROOT / "rawkernels").rglob("*.cu*")}
    assert len(sources) >= 12
    assert sources <= packed


def test_the_wheel_holds_every_module_and_nothing_else(wheel):
    packed = set(zipfile.ZipFile(wheel).namelist())
    modules = {p.relative_to(ROOT).as_posix() for p in (ROOT / "gpuattn").rglob("*.py")}
    assert modules <= packed
    assert "gpuattn/py.typed" in packed  # type checkers then read the annotations
    assert "gpuattn/lecture/claims.toml" in packed
    tops = {name.split("/")[0] for name in packed}
    assert {t for t in tops if not t.endswith(".dist-info")} == {"gpuattn", "rawkernels"}


def test_metadata_lives_in_setup_cfg():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert set(project) == {"build-system", "tool"}
    assert set(project["tool"]) == {"ruff", "mypy"}
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    extras = set(config["options.extras_require"])
    assert extras == {
        "cuda12x", "cuda13x", "plots", "tensorboard", "mpi", "data", "pretrained", "images",
        "test",
    }  # fmt: skip


def test_every_requirement_has_a_lowest_version():
    script = ROOT / ".ci" / "lowest.py"
    run = subprocess.run([sys.executable, script], check=True, capture_output=True, text=True)
    names = [re.fullmatch(r"([\w-]+)==[\d.]+", line)[1] for line in run.stdout.splitlines()]
    assert {"numpy", "click", "rich"} <= set(names)


def test_files_are_short():
    """The limits of CONTRIBUTING.md, 400 lines of Python and 500 of CUDA, plus 50."""
    long = {}
    for path in [*ROOT.glob("gpuattn/**/*.py"), *ROOT.glob("rawkernels/**/*.cu*")]:
        lines = len(path.read_text().splitlines())
        if lines > (450 if path.suffix == ".py" else 550):
            long[path.name] = lines
    assert not long


def test_the_readme_begins_with_code_figures_and_the_first_run():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert max(map(len, lines)) < 120
    first = "\n".join(lines[:45])
    assert first.index("```python") < first.index("| model, batch") < first.index("gpuattn train\n")
    pictures = re.findall(r"^\[\w+\]: (\S+\.png)$", "\n".join(lines), re.MULTILINE)
    assert len(pictures) == 4 and all((ROOT / path).exists() for path in pictures)
