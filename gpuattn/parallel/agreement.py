"""What all ranks must decide alike: whether a part of the work went well, and what they work on."""

import socket
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from gpuattn.errors import ConfigError, exit_code
from gpuattn.parallel.communicator import Communicator

Value = TypeVar("Value")
Failure = TypeVar("Failure", bound=BaseException)


def silent(error: Failure, elsewhere: bool, where: str = "") -> Failure:
    """Mark an error that all ranks end with; where ``elsewhere``, another one prints it.

    ``where``: words before its text.
    """
    error.__dict__.update(agreed=True, silent=elsewhere, where=where)
    return error


def is_agreed(error: BaseException) -> bool:
    """Return whether all ranks end with this error."""
    return getattr(error, "agreed", False)


def is_silent(error: BaseException) -> bool:
    """Return whether another rank prints an error."""
    return getattr(error, "silent", False)


def together(communicator: Communicator, work: Callable[[], Value]) -> Value:
    """Return ``work()`` of this rank, once that of all ranks has ended well.

    If it raised an Exception on some of them, each raises its own one, of which the first rank's
    is printed, and the others SystemExit. The work calls nothing that is collective.
    """
    if communicator.size == 1:
        return work()
    error: BaseException | None = None
    try:
        found = work()
    except Exception as raised:  # noqa: BLE001 it is raised again below, on all ranks
        error = raised
    codes = communicator.gather(None if error is None else exit_code(error))
    failed = [rank for rank, code in enumerate(codes) if code is not None]
    if not failed:
        return found
    first = failed[0]
    if error is None or exit_code(error) != codes[first]:
        error = SystemExit(codes[first])
    where = f"rank {first}, on {socket.gethostname()}: " if first else ""
    raise silent(error, communicator.rank != first, where)


def check_same(communicator: Communicator, facts: Mapping[str, Any]) -> None:
    """Raise ConfigError, on all ranks, that names the first of ``facts`` in which ranks differ."""
    if communicator.size == 1:
        return
    own, *others = communicator.gather((socket.gethostname(), dict(facts)))
    for rank, (host, theirs) in enumerate(others, 1):
        for name in own[1] | theirs:
            a, b = own[1].get(name), theirs.get(name)
            if a != b:
                raise silent(ConfigError(
                    f"rank {rank}, on {host}, has another {name} than rank 0, on {own[0]}: {b}, "
                    f"and {a}. Start all ranks with the same one"
                ), communicator.rank > 0)  # fmt: skip
