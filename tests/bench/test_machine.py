"""bench machine: what NumPy can be asked, as a table and as a file; on a GPU every kind."""

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import compiled
import fake_cublaslt
import numpy as np
import pytest
from click.testing import CliRunner
from fake_gpu import GPUS

from gpuattn.bench import machine
from gpuattn.cli.bench import machine as command
from gpuattn.cli.bench.table import rate
from gpuattn.cli.main import main
from gpuattn.cuda.kernels import launches


@pytest.fixture(scope="module")
def found():
    return machine.measure(np)


def test_numpy_has_the_rates_that_it_can_have(found):
    assert list(found["copy_tbs"]) == list(machine.STRIDES)
    assert all(tbs > 0 for tbs in [*found["copy_tbs"].values(), found["on_chip_tbs"]])
    assert found["launch_us"]["alone"] > 0 and found["launch_us"]["graph"] is None
    assert {kind for kind, value in found["products"].items() if isinstance(value, float)} == {
        "FP64", "FP32", "FP16", "INT8",
    }  # fmt: skip
    assert found["products"]["FP8"] == "NumPy has no FP8"
    assert found["units"]["cores"] >= 1


def test_the_command_prints_and_writes_it(found, monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "measure", lambda xp: found)
    arguments = ["bench", "machine", "--device", "numpy", "--json", str(tmp_path / "m.json")]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    assert "NumPy has no FP8" in result.stdout and "cores" in result.stdout
    written = json.loads((tmp_path / "m.json").read_text())
    assert written["products"] == found["products"] and written["gpu"] is None
    command._show(found | {"launch_us": {"alone": 2.0, "graph": 0.5}})


def test_rates_of_a_cpu_are_gflops():
    assert [rate(x) for x in (0.0412, 799.3, 1.0)] == [
        "41.2 GFLOP/s", "799 TFLOP/s", "1 TFLOP/s",
    ]  # fmt: skip


def test_each_read_of_shared_memory_is_one(nvrtc):
    """The compiler unrolls the loop over rounds; what two rounds read alike it would read once."""
    if compiled.disassembler() is None:
        pytest.skip("no nvdisasm")
    code = compiled.instructions(machine.SOURCE, "sm_90", "machine.cu")["shared_reads"]
    reads = sum("LDS.128" in line for line in code)
    assert reads and reads % machine.UNROLLED == 0


def test_a_card_that_stands_for_another_loads_ptx(nvrtc, monkeypatch):
    loaded: list[bytes] = []
    monkeypatch.setattr(machine, "gpu", lambda device: replace(GPUS["7.5"], forced=True))
    runtime = SimpleNamespace(
        getDevice=lambda: 0,
        getDeviceProperties=lambda device: {"name": b"a card", "totalGlobalMem": 1 << 30},
    )
    module = SimpleNamespace(load=loaded.append)
    function = SimpleNamespace(Module=lambda: module)
    machine._Card(SimpleNamespace(cuda=SimpleNamespace(runtime=runtime, function=function)))
    assert b".target sm_75" in loaded[0]


def test_a_product_is_that_of_its_matrices(monkeypatch):
    """On the CPU, by a library that does what the descriptors say."""
    fake_cublaslt.install(monkeypatch)
    for kind in ("FP64", "FP32", "FP16"):
        product = machine._Product(sys.modules["cupy"], 0, kind, 16)
        product.fill_ones()
        before = launches[kind]
        product()
        assert (np.asarray(product.out).view(machine.ONES[kind]) == 16).all()
        assert launches[kind] == before + 1


@pytest.mark.gpu
def test_on_the_gpu(gpu):
    found = machine.measure(gpu)
    units = found["units"]
    if clock := units.get("MHz of the multiprocessors"):  # 128 bytes a cycle each, at most
        most = 128 * units["multiprocessors"] * clock / 1e6
        assert found["on_chip_tbs"] < 1.05 * most
    assert found["units"]["multiprocessors"] > 0
    assert found["copy_tbs"][1] > found["copy_tbs"][32]
    assert found["launch_us"]["graph"] < found["launch_us"]["alone"]
    for kind in ("FP32", "TF32", "FP16", "BF16"):
        assert found["products"][kind] > 1, found["products"]
