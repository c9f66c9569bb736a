"""``--gpus``: a command as several processes of this machine, one for each GPU."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import click

from gpuattn.arrays import import_cupy
from gpuattn.cli.shared.options import GroupedOption, Parsed
from gpuattn.errors import ConfigError
from gpuattn.parallel.agreement import silent, together
from gpuattn.parallel.communicator import Communicator
from gpuattn.parallel.spawn import spawn, this_command
from gpuattn.parallel.world import SPAWNER, connected, discover
from gpuattn.runtime.device import choose_device
from gpuattn.tasks.users.dealt import Dealt, serve
from gpuattn.units import whole

ALL = "all"


def gpus_option(function: Callable) -> Callable:
    """Add ``--gpus``."""
    return click.option(
        "--gpus", type=Parsed(_parse, "N|all"), cls=GroupedOption, group="Machine",
        help="Use so many GPUs of this machine, a process for each.",
    )(function)  # fmt: skip


def _parse(value: Any) -> int | str:
    try:
        return ALL if value == ALL else whole(1)(value)
    except ConfigError:
        raise ConfigError(f"{value!r}; accepted: {ALL}, or a whole number from 1 on") from None


def run_on(
    gpus: int | str | None, device: str, command: Sequence[str], reads: bool = False
) -> int | None:
    """Run a command as one rank for each of ``gpus``; return its exit code.

    None: this process itself shall do the work, alone or as one of the ranks. ``device``: as
    ``--device`` says. ``reads``: whether the command reads the standard input. Raises ConfigError
    for GPUs that are not there, or on NumPy, and where another launcher has started this process.
    """
    world = discover()
    if gpus is None or world.launcher == SPAWNER:
        return None
    if world.launcher:
        error = ConfigError(
            f"--gpus {gpus} and {world.launcher}, which has started {world.size} ranks; accepted: "
            "one of both. Leave --gpus out: each of these ranks takes a GPU"
        )
        raise silent(error, world.rank > 0)
    if device == "numpy":
        count = gpus if isinstance(gpus, int) else 2
        raise ConfigError(
            f"--gpus {gpus} and --device numpy; accepted: one of both. On NumPy: mpirun -n {count} "
            f"{' '.join(command[:2])} ... --device numpy"
        )
    choose_device("cuda")
    seen = import_cupy().cuda.runtime.getDeviceCount()
    if gpus != ALL and int(gpus) > seen:
        raise ConfigError(f"--gpus is {gpus}; accepted: 1 to {seen}, the GPUs that CUDA sees here")
    count = seen if gpus == ALL else int(gpus)
    return None if count == 1 else spawn(count, this_command(command[1:]), reads)


@contextlib.contextmanager
def ranks_of(ctx: click.Context, gpus: int | str | None, device: str) -> Iterator[Communicator]:
    """Return a context with the ranks that do a command, which exchange values of the host.

    With ``--gpus`` they are other processes: this one ends when they have. ``device``: as
    ``--device`` says.
    """
    command = ["gpuattn", str(ctx.info_name), *ctx.meta["arguments"]]
    code = run_on(gpus, device, command, reads=True)
    if code is not None:
        sys.exit(code)
    debug = getattr(ctx.find_root().command, "debug", False)
    with connected(debug, lambda: choose_device(device)[0], arrays=False) as ranks:
        yield ranks


@contextlib.contextmanager
def shared_user(
    ctx: click.Context, gpus: int | str | None, device: str, load: Callable[[], Any]
) -> Iterator[tuple[Any, int]]:
    """Return a context with (``load()`` of rank 0, whose lines all ranks compute; their number).

    Ranks other than 0 get (None, their number) when they have computed their lines. ``gpus``,
    ``device``: see ``ranks_of``.
    """
    with ranks_of(ctx, gpus, device) as ranks:
        user = together(ranks, load)
        if ranks.size == 1:
            yield user, 1
        elif ranks.rank:
            serve(user, ranks)
            yield None, ranks.size
        else:
            dealt = Dealt(user, ranks)
            yield dealt, ranks.size
            dealt.close()
