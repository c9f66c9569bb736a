"""Bytes by the GPU's counters: a table of ncu is read, and what is missing is said."""

import subprocess
from types import SimpleNamespace

import pytest

from gpuattn.bench import hbm

TABLE = """==PROF== Connected to process 7
"ID","Kernel Name","dram__bytes_read.sum","dram__bytes_write.sum"
"","","Mbyte","Kbyte"
"0","product","1,200.5","3"
"1","softmax","2","500"
"""


def given(monkeypatch, stdout="", stderr="", error=None):
    def run(line, **_):
        if error:
            raise error
        assert line[0] == "/bin/ncu" and line[-4:] == ["flash_attention", "1x8x2x64", "", "float16"]
        return SimpleNamespace(stdout=stdout, stderr=stderr)

    monkeypatch.setattr(hbm.shutil, "which", lambda name: "/bin/ncu")
    monkeypatch.setattr(subprocess, "run", run)
    return hbm.measure("flash_attention", (1, 8, 2, 64), None)


def test_counters_of_all_kernels_are_added(monkeypatch):
    assert given(monkeypatch, TABLE) == (pytest.approx(1200.5e6 + 3e3 + 2e6 + 500e3), "")


@pytest.mark.parametrize("stdout, stderr, error, said", [
    ("", "==ERROR== ERR_NVGPUCTRPERM", None, "administrators alone"),
    ("nothing\n", "", None, "no figure (no table): nothing"),
    (TABLE[: TABLE.index('"0"')], "", None, "no figure (no kernel)"),
    ("", "", subprocess.TimeoutExpired("ncu", 60), "ncu failed"),
])  # fmt: skip
def test_what_is_lacking_is_said(monkeypatch, stdout, stderr, error, said):
    found, why = given(monkeypatch, stdout, stderr, error)
    assert found is None and said in why


def test_without_the_profiler_or_a_gpu_nothing_is_measured(monkeypatch):
    monkeypatch.setattr(hbm.shutil, "which", lambda name: None)
    assert hbm.measure("flash_attention", (1, 8, 2, 64), None)[1].endswith("is not installed")
    assert hbm.measure("flash_attention", (1, 8, 2, 64), None, "numpy")[0] is None
