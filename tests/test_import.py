"""Importing is cheap and touches no GPU."""

import configparser
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from imported import imported

import gpuattn

ROOT = Path(__file__).parents[1]

HEAVY = ["cupy", "numba", "click", "rich", "sentencepiece", "sacrebleu", "safetensors",
         "matplotlib", "torch", "mpi4py"]  # fmt: skip


def python(code):
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return run.stdout.strip()


def test_import_loads_no_heavy_module():
    loaded = python(f"import gpuattn, sys; print([m for m in {HEAVY} if m in sys.modules])")
    assert loaded == "[]"


def test_import_loads_few_modules():
    packages, own = imported("import gpuattn")
    assert packages == ["gpuattn", "ml_dtypes", "numpy", "rawkernels"] and own <= 130


def test_openblas_threads_sleep_soon_unless_the_user_sets_their_timeout(monkeypatch):
    code = "import gpuattn, os; print(os.environ['OPENBLAS_THREAD_TIMEOUT'])"
    monkeypatch.delenv("OPENBLAS_THREAD_TIMEOUT", raising=False)
    assert python(code) == "12"
    monkeypatch.setenv("OPENBLAS_THREAD_TIMEOUT", "20")
    assert python(code) == "20"


def test_public_names_exist_and_have_docstrings():
    assert sorted(gpuattn.__all__) == gpuattn.__all__
    assert [n for n in gpuattn.__all__ if not hasattr(gpuattn, n)] == []
    undocumented = [n for n in gpuattn.__all__ if not (getattr(gpuattn, n).__doc__ or "").strip()]
    assert undocumented == []


def test_the_version_is_that_of_setup_cfg():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    assert gpuattn.__version__ == config["metadata"]["version"]


@pytest.mark.parametrize("beside", [None, "[metadata]\nname = other\nversion = 3\n", "junk"])
def test_without_a_source_tree_the_version_is_the_installed_one(monkeypatch, tmp_path, beside):
    installed = tmp_path / "gpuattn-9.8.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: gpuattn\nVersion: 9.8\n")
    if beside:
        (tmp_path / "setup.cfg").write_text(beside)
    standard = sysconfig.get_path("stdlib")
    standard = [p for p in sys.path if p.startswith(standard) and "-packages" not in p]
    monkeypatch.setattr(sys, "path", [str(tmp_path), *standard])
    monkeypatch.setattr("gpuattn.version.TREE", tmp_path)
    assert gpuattn.__version__ == "9.8"


def test_dir_lists_the_public_names():
    shown = dir(gpuattn)
    lazy = {"Engine", "Speculation", "traffic", "runtime", "__version__"}
    assert set(shown) == {*gpuattn.__all__, *lazy}
    assert [name for name in shown if not hasattr(gpuattn, name)] == []


def test_rarely_used_modules_are_imported_on_first_use():
    code = """
import sys
import gpuattn
before = 'gpuattn.runs' in sys.modules
try:
    gpuattn.load_run("nowhere")
except RuntimeError as error:
    print(before, "gpuattn.runs" in sys.modules, type(error).__name__)
"""
    assert python(code) == "False True CheckpointError"
    code = "import gpuattn, sys; print('gpuattn.nn' in sys.modules, gpuattn.nn.__name__)"
    assert python(code) == "False gpuattn.nn"
    with pytest.raises(AttributeError, match="no attribute 'loadrun'"):
        _ = gpuattn.loadrun
