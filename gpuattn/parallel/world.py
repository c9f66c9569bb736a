"""How many processes train together, and which one this is: from the environment of launchers."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from gpuattn.errors import ConfigError
from gpuattn.parallel import spawn
from gpuattn.parallel.agreement import check_same, silent, together
from gpuattn.parallel.communicator import Communicator, Single
from gpuattn.parallel.watchdog import TIMEOUT, Watchdog

TORCHRUN, SPAWNER = "torchrun", "--gpus"
LAUNCHERS = {  # name: (what must be set, size, rank, rank on the host); the first one counts
    SPAWNER: (spawn.MEETING, spawn.RANKS, spawn.RANK, spawn.RANK),
    TORCHRUN: ("TORCHELASTIC_RUN_ID", "WORLD_SIZE", "RANK", "LOCAL_RANK"),
    "mpirun of Open MPI": (
        "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK",
    ),
    # Intel MPI, and srun with PMI-2, set these, too
    "mpirun of MPICH": ("PMI_SIZE", "PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID"),
    "srun": ("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID"),
}  # fmt: skip
INSTALL = "pip install 'gpuattn[mpi]'"


class World(NamedTuple):
    """This process is ``rank`` of ``size`` that ``launcher`` has started: "" for one by itself.

    ``is_first_here``: whether no other rank of its host has a lower number.
    """

    launcher: str
    rank: int
    size: int
    is_first_here: bool


def discover(environment: Mapping[str, str] = os.environ) -> World:
    """Return the World that the variables of a launcher tell.

    Raises ConfigError for variables without a meaning, and where torchrun and MPI differ.
    """
    found = [
        _world(environment, launcher, *names)
        for launcher, (mark, *names) in LAUNCHERS.items()
        if mark in environment and any(name in environment for name in names[:2])
    ]
    if not found:
        return World("", 0, 1, True)
    first = found[0]
    for other in found[1:]:
        # Slurm may have started the daemons of mpirun, one a node, and its numbers are then theirs
        if first.launcher == TORCHRUN and other.launcher != "srun" and other[1:3] != first[1:3]:
            raise ConfigError(
                f"{first.launcher} says that this is rank {first.rank} of {first.size}, "
                f"{other.launcher} that it is rank {other.rank} of {other.size}. Start the ranks "
                "by one of them"
            )
    return first


def is_first(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process is rank 0, or no rank of a launcher."""
    try:
        return discover(environment).rank == 0
    except ConfigError:
        return True


def _world(environment, launcher, size, rank, local):
    """Return the World that the variables of these names tell."""
    texts = environment.get(rank, ""), environment.get(size, "")
    if all(text.isdecimal() for text in texts) and int(texts[0]) < int(texts[1]):
        is_first_here = environment.get(local, texts[0]) == "0"
        return World(launcher, int(texts[0]), int(texts[1]), is_first_here)
    raise ConfigError(
        f"{rank} is {texts[0]!r} and {size} is {texts[1]!r}, of {launcher}; accepted: a number of "
        "ranks, and one below it. Unset both to train in one process"
    )


@contextmanager
def connected(
    debug: bool = False, device: Callable[[], str] = lambda: "numpy", timeout: float = TIMEOUT,
    arrays: bool = True,
) -> Iterator[Communicator]:  # fmt: skip
    """Return a context that gives the Communicator of this process, and ends all ranks together.

    Whatever ends one rank inside of it ends all of them: see ``watchdog.Watchdog``. ``debug``:
    whether an error of one rank shows its traceback. ``device()``: "numpy" or "cuda", called where
    there are several ranks: each then takes a GPU. ``timeout``: of ``Watchdog``. ``arrays``:
    whether they exchange arrays of their devices, or values of the host alone. Raises ConfigError
    for ranks that cannot work together.
    """
    world = discover()
    if world.size == 1:
        yield Single()
        return
    try:
        control = _control(world)
    except ConfigError as error:
        raise silent(error, not world.is_first_here) from None  # other hosts may lack nothing
    with Watchdog(control, debug, timeout):
        yield _on_device(control, device, arrays)


def _on_device(control, device, arrays):
    """Return the Communicator of ranks that ``control`` connects, each on its device."""
    chosen = together(control, device)
    check_same(control, {"device": chosen})
    if chosen == "numpy":
        return control
    from gpuattn.parallel.nccl import NCCL, take_card

    together(control, lambda: take_card(control))
    return NCCL(control) if arrays else control


def _control(world):
    """Return the communicator of a World for values of the host."""
    if world.launcher == SPAWNER:
        return spawn.meet()
    if world.launcher == TORCHRUN:
        from gpuattn.parallel.torchrun import meet

        return meet(world.rank, world.size)
    return _mpi(world)


def _mpi(world):
    """Return the MPI communicator of a World, checked against it."""
    started = f"{world.launcher} started {world.size} ranks"
    try:
        from gpuattn.parallel.mpi import MPI
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"{started}, which work together by mpi4py, and that cannot be imported ({error}). "
            f"Try {INSTALL}"
        ) from error
    communicator = MPI()
    if (communicator.rank, communicator.size) != (world.rank, world.size):
        raise ConfigError(
            f"{started}, but mpi4py sees {communicator.size}: it uses another MPI, "
            f"{communicator.library}. Start with the launcher of that one (srun: --mpi=pmix or "
            "pmi2), or install mpi4py for this one"
        )
    return communicator


def check_replicas(replicas: int, ranks: int) -> None:
    """Raise ConfigError unless ``ranks`` can share ``replicas`` evenly."""
    if replicas % ranks:
        usable = ", ".join(str(n) for n in range(1, replicas + 1) if replicas % n == 0)
        raise ConfigError(
            f"{ranks} ranks cannot share {replicas} replica{'s' * (replicas > 1)} evenly; "
            f"accepted: {usable}. Give --replicas {ranks} to a new run, or start as many ranks"
        )
