"""Ranks of torchrun: they meet by the store that its agent keeps for them."""

import datetime
import os
import secrets
import socket
from collections.abc import Mapping

from gpuattn.errors import ConfigError
from gpuattn.parallel.sockets import CONNECT, Sockets

NEAR = ("localhost", "127.0.0.1", "::1")


def meet(rank: int, size: int, environment: Mapping[str, str] = os.environ) -> Sockets:
    """Return the communicator of a rank. Raises ConfigError where the store cannot be asked."""
    try:
        from torch.distributed import TCPStore
    except ImportError as error:
        raise ConfigError(
            f"torchrun started {size} ranks, which meet by its store, and torch cannot be imported "
            f"({error}). Start them with mpirun, or with --gpus on one machine"
        ) from error
    host = environment.get("MASTER_ADDR", "localhost")
    port = environment.get("MASTER_PORT", "")
    if not port.isdecimal():
        raise ConfigError(
            f"torchrun started {size} ranks and MASTER_PORT is {port!r}; accepted: the port of its "
            "store, which it sets. Start the ranks anew, or with mpirun"
        )
    run = environment.get("TORCHELASTIC_RUN_ID", ""), environment.get("TORCHELASTIC_RESTART_COUNT")
    name = f"gpuattn/{run[0]}/{run[1] or 0}"
    try:
        limit = datetime.timedelta(seconds=CONNECT)
        store = TCPStore(host, int(port), None, is_master=False, timeout=limit)
        if rank == 0:
            server = socket.create_server(("127.0.0.1" if host in NEAR else "", 0))
            key = secrets.token_hex(16)
            store.set(name, f"{server.getsockname()[1]}:{key}")
            return Sockets(rank, size, key.encode(), server)
        there, key = bytes(store.get(name)).decode().split(":")
    except RuntimeError as error:
        raise ConfigError(
            f"torchrun's store at {host} port {port} does not answer ({error}). Start the ranks "
            "anew, or with mpirun"
        ) from error
    return Sockets(rank, size, key.encode(), address=(host, int(there)))
