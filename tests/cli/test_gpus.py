"""--gpus: how many processes start, and what is refused."""

import sys
from types import SimpleNamespace

import pytest

from gpuattn.cli.shared import gpus
from gpuattn.errors import ConfigError, DeviceMissingError
from gpuattn.parallel import spawn
from gpuattn.parallel.agreement import is_silent
from gpuattn.runtime import device

COMMAND = ["gpuattn", "train", "toy", "--gpus", "all"]


@pytest.fixture
def started(monkeypatch):
    """What ``run_on`` starts on a machine with 3 GPUs: (ranks, command) each."""
    found = []
    runtime = SimpleNamespace(getDeviceCount=lambda: 3)
    stand_in = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))
    monkeypatch.setattr(gpus, "import_cupy", lambda: stand_in)
    monkeypatch.setattr(gpus, "choose_device", lambda name: (name, "a card"))
    monkeypatch.setattr(gpus, "spawn", lambda *given: found.append(given) or 7)
    return found


@pytest.mark.parametrize("asked, ranks", [("all", 3), (2, 2), (3, 3)])
def test_a_process_for_each_gpu(started, asked, ranks):
    assert gpus.run_on(asked, "auto", COMMAND) == 7
    assert gpus.run_on(asked, "auto", COMMAND, reads=True) == 7
    command = [sys.executable, "-m", "gpuattn", *COMMAND[1:]]
    assert started == [(ranks, command, False), (ranks, command, True)]


def test_one_gpu_and_ranks_of_the_spawner_need_no_process(started, monkeypatch):
    assert gpus.run_on(None, "auto", COMMAND) is gpus.run_on(1, "cuda", COMMAND) is None
    for name, value in ((spawn.RANK, "1"), (spawn.RANKS, "2"), (spawn.MEETING, "x")):
        monkeypatch.setenv(name, value)
    assert gpus.run_on("all", "auto", COMMAND) is None
    assert not started


def test_more_gpus_than_there_are(started):
    with pytest.raises(ConfigError, match="--gpus is 4; accepted: 1 to 3, the GPUs that CUDA sees"):
        gpus.run_on(4, "auto", COMMAND)


def test_gpus_on_numpy_and_with_another_launcher(started, monkeypatch):
    with pytest.raises(ConfigError, match="--gpus 4 and --device numpy; .* mpirun -n 4 gpuattn"):
        gpus.run_on(4, "numpy", COMMAND)
    monkeypatch.setenv("PMI_SIZE", "2")
    for rank in (0, 1):
        monkeypatch.setenv("PMI_RANK", str(rank))
        with pytest.raises(ConfigError, match="--gpus all and mpirun of MPICH, .* started 2") as e:
            gpus.run_on("all", "auto", COMMAND)
        assert is_silent(e.value) == (rank > 0)
    assert not started


def test_no_gpu(monkeypatch):
    monkeypatch.setattr(device, "_missing_gpu", lambda: "CuPy is not installed")
    with pytest.raises(DeviceMissingError, match="no GPU to use"):
        gpus.run_on(2, "auto", COMMAND)


@pytest.mark.parametrize("value", ["some", "0", "-1", "1.5"])
def test_what_is_no_number_of_gpus(call, value):
    result = call("train", "toy", f"--gpus={value}")
    assert result.exit_code == 2
    assert f"'{value}'; accepted: all, or a whole number from 1 on" in result.stderr
