"""Importing is cheap and touches no GPU."""

import subprocess
import sys

HEAVY = ["cupy", "numba", "click", "rich", "sentencepiece", "sacrebleu", "safetensors",
         "matplotlib", "torch", "mpi4py"]  # fmt: skip


def python(code):
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return run.stdout.strip()


def test_import_brings_nothing_heavy():
    loaded = python(f"import gpuattn, sys; print([m for m in {HEAVY} if m in sys.modules])")
    assert loaded == "[]"


def test_import_time(bytecode):
    code = "import time; t = time.perf_counter(); import gpuattn; print(time.perf_counter() - t)"
    assert min(float(python(code)) for _ in range(10)) <= 0.3


def test_threads_of_blas_sleep_soon_unless_the_user_says_otherwise(monkeypatch):
    code = "import gpuattn, os; print(os.environ['OPENBLAS_THREAD_TIMEOUT'])"
    monkeypatch.delenv("OPENBLAS_THREAD_TIMEOUT", raising=False)
    assert python(code) == "12"
    monkeypatch.setenv("OPENBLAS_THREAD_TIMEOUT", "20")
    assert python(code) == "20"


def test_every_public_name_is_there():
    import gpuattn

    assert sorted(gpuattn.__all__) == gpuattn.__all__
    assert [n for n in gpuattn.__all__ if not hasattr(gpuattn, n)] == []
    undocumented = [n for n in gpuattn.__all__ if not (getattr(gpuattn, n).__doc__ or "").strip()]
    assert undocumented == []
