"""Which rank a process is, by the variables of launchers."""

import sys

import pytest

from gpuattn.errors import ConfigError
from gpuattn.parallel import world
from gpuattn.parallel.communicator import Single
from gpuattn.parallel.world import check_replicas, connected, discover, is_first

TORCHRUN = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "none"}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "PMIX_RANK": "3"}
MPICH = {"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALRANKID": "0"}
SLURM = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "2"}
BATCH = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "3", "SLURM_PROCID": "0"}  # sbatch without srun
PLAIN = {"RANK": "1", "WORLD_SIZE": "2"}  # of another program than torchrun


@pytest.mark.parametrize("environment, rank, size, launcher", [
    ({}, 0, 1, ""), (TORCHRUN, 5, 8, "torchrun"), (OPEN_MPI, 3, 4, "mpirun of Open MPI"),
    (MPICH, 1, 2, "mpirun of MPICH"), (SLURM, 2, 3, "srun"), (BATCH, 0, 1, ""), (PLAIN, 0, 1, ""),
    (SLURM | OPEN_MPI, 3, 4, "mpirun of Open MPI"),  # Slurm started its daemons
])  # fmt: skip
def test_the_world_of_launchers(environment, rank, size, launcher):
    found = discover(environment)
    assert found[:3] == (launcher, rank, size)
    local = environment.get("LOCAL_RANK", environment.get("MPI_LOCALRANKID", str(rank)))
    assert found.is_first_here == (local == "0")
    assert is_first(environment) == (rank == 0)


@pytest.mark.parametrize("environment, said", [
    (MPICH | {"PMI_RANK": "x"}, "PMI_RANK is 'x' and PMI_SIZE is '2', of mpirun of MPICH"),
    (MPICH | {"PMI_RANK": "2"}, "accepted: a number of ranks, and one below it"),
    ({"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2"}, "RANK is '' and WORLD_SIZE is '2', of torch"),
    ({"TORCHELASTIC_RUN_ID": "x", "RANK": "1"}, "RANK is '1' and WORLD_SIZE is '', of torchrun"),
    ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}, "SLURM_PROCID is '' and SLURM_STEP_NUM_"),
    (TORCHRUN | MPICH, "torchrun says that this is rank 5 of 8, mpirun of MPICH that it is rank 1"),
])  # fmt: skip
def test_variables_that_contradict_each_other_are_refused(environment, said):
    with pytest.raises(ConfigError, match=said):
        discover(environment)
    assert is_first(environment)  # which then says so


def test_replicas_that_ranks_cannot_share():
    for ranks in (1, 2, 3, 6):
        check_replicas(6, ranks)
    with pytest.raises(ConfigError, match="4 ranks cannot share 6 replicas evenly; .* 1, 2, 3, 6"):
        check_replicas(6, 4)
    with pytest.raises(ConfigError, match="2 ranks cannot share 1 replica .*Give --replicas 2"):
        check_replicas(1, 2)


def connect(monkeypatch, **found):
    monkeypatch.setattr(
        world, "discover", lambda: world.World(**found, is_first_here=found["rank"] == 0)
    )
    with connected() as communicator:
        return communicator


def test_one_process_needs_no_mpi(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    assert isinstance(connect(monkeypatch, launcher="", rank=0, size=1), Single)


def test_mpirun_without_mpi4py_and_torchrun_on_numpy_are_refused_by_rank_0(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    monkeypatch.delitem(sys.modules, "gpuattn.parallel.mpi", raising=False)
    for rank in (0, 1):
        with pytest.raises(
            ConfigError, match=r"started 4 ranks.*pip install 'gpuattn\[mpi\]'"
        ) as e:
            connect(monkeypatch, launcher="mpirun of MPICH", rank=rank, size=4)
        assert e.value.silent == (rank > 0)
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "torch.distributed", None)
    with pytest.raises(ConfigError, match="torch cannot be imported .* --gpus on one machine"):
        connect(monkeypatch, launcher="torchrun", rank=0, size=4)
