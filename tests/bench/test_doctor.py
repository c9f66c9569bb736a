"""The doctor says what works, with a remedy for each thing that does not."""

import json
import sys

import numpy as np
import pytest
from click.testing import CliRunner

from gpuattn.bench import doctor
from gpuattn.cli.main import main
from gpuattn.cuda import compiler
from gpuattn.errors import KernelCompileError
from gpuattn.gemm import cublaslt


def test_every_check_has_a_state_and_every_fault_a_remedy():
    checks = {check.name: check for check in doctor.examine()}
    assert set(checks) == {
        "python", "blas", "memory", "cupy", "device", "nvrtc", "kernel", "graphs", "numba",
        "nvmath", "mpi", "nccl", "links", "shm", "cache", "stores",
    }  # fmt: skip
    for check in checks.values():
        assert check.state in ("ok", "missing", "broken")
        assert check.detail
        if check.state != "ok" and check.name not in ("kernel", "graphs"):
            assert check.remedy, check
    assert checks["python"].state == checks["blas"].state == "ok"


def test_json_is_for_machines():
    result = CliRunner().invoke(main, ["doctor", "--json"])
    report = json.loads(result.stdout)
    assert {"checks", "versions"} == set(report)
    assert report["versions"]["numpy"]


def test_plain_output_ends_with_a_verdict():
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 0
    assert "All is well." in result.stdout


def test_brackets_are_no_markup(monkeypatch):
    remedy = "pip install 'gpuattn[cuda13x]'"
    checks = [doctor.Check(name, "missing", "no [bold]", remedy) for name in ("cupy", "kernel")]
    monkeypatch.setattr(doctor, "examine", lambda: checks)
    shown = CliRunner().invoke(main, ["doctor"]).stdout
    assert shown.count(remedy) == shown.count("no [bold]") == 2


def test_an_unwritable_cache_is_found(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GPUATTN_CACHE_DIR", str(tmp_path / "file" / "x"))
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 1
    assert "GPUATTN_CACHE_DIR" in result.stdout


def test_mpi_without_mpi4py_or_a_launcher_is_off(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "mpi4py", None)
        check = doctor._mpi()
    assert check.state == "missing" and "gpuattn[mpi]" in check.remedy
    pytest.importorskip("mpi4py")
    monkeypatch.setattr("shutil.which", lambda name: None)
    check = doctor._mpi()
    assert check.state == "missing" and "none of mpiexec, mpirun, srun found" in check.detail


def test_a_product_library_that_does_not_load_is_found(monkeypatch):
    monkeypatch.setattr(cublaslt, "library", lambda: (None, "libcublasLt.so.13: cannot open"))
    check = next(check for check in doctor.examine() if check.name == "nvmath")
    assert check.state == "missing"
    assert "CUDA graphs are off" in check.detail
    assert "pip install" in check.remedy


def test_a_product_library_of_another_cuda_version_is_found(monkeypatch):
    def failing(*_):
        raise RuntimeError("matmul: cuBLASLt failed (CUBLAS_STATUS_NOT_INITIALIZED) to start")

    monkeypatch.setattr(cublaslt, "library", lambda: (object(), ""))
    monkeypatch.setattr(cublaslt, "multiply", failing)
    monkeypatch.setattr(doctor, "_gpu", lambda: np)
    check = doctor._gemm()
    assert check.state == "broken" and "to start" in check.detail and "cuda12x" in check.remedy


def test_a_missing_compiler_is_found(monkeypatch):
    def missing(*args):
        raise KernelCompileError("NVRTC, the CUDA run-time compiler, is not installed.")

    monkeypatch.setattr(compiler, "compile_text", missing)
    nvrtc = next(check for check in doctor.examine() if check.name == "nvrtc")
    assert nvrtc.state == "missing"
    assert "pip install" in nvrtc.remedy


@pytest.mark.gpu
def test_a_gpu_is_found(gpu):
    states = {check.name: check.state for check in doctor.examine()}
    assert states["device"] == states["kernel"] == states["graphs"] == "ok"
