"""Ranks that exchange Python values and NumPy arrays over sockets, by way of rank 0.

For the control of ranks that no MPI has started: those of ``spawn`` and of torchrun. Values are
pickled, so a connection counts only once both ends have shown that they know the key.
"""

import contextlib
import os
import socket
import struct
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

from gpuattn.errors import ConfigError
from gpuattn.parallel.communicator import Noted
from gpuattn.typing import Array

CONNECT = 120.0  # seconds in which all ranks must come
HANDSHAKE = 5  # seconds in which a connection must show that it has the key
LOST = 15.0  # seconds that the watchdog has to end a rank that has lost another
NAP = 0.05  # seconds between trials to connect
FAULTS = (OSError, EOFError, AuthenticationError)
ROLES = "values", "ends"  # of the connections of a rank; ``leave`` has its own


class Sockets(Noted):
    """The Communicator of processes that know an address and a key.

    ``server``: on rank 0 a listening socket, which is closed once all have come; ``address``: where
    the others find it. ``key``: bytes that all of them have. Raises ConfigError where ranks do not
    come within CONNECT seconds.
    """

    library = "sockets"

    def __init__(
        self, rank: int, size: int, key: bytes, server: socket.socket | None = None,
        address: tuple[str, int] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.rank, self.size = rank, size
        self._lines: dict[str, dict[int, Connection]] = {role: {} for role in ROLES}
        if rank == 0:
            assert server is not None
            with server:
                self._accept(server, key)
        else:
            assert address is not None
            for role in ROLES:
                self._lines[role][0] = _reached(address, key, rank, role)
        hosts = self.gather(_host())
        near = [other for other, host in enumerate(hosts) if host == hosts[rank]]
        self.local_rank, self.local_size = near.index(rank), len(near)
        self._all = self.split(0)

    def all_reduce(self, array: Array, ordered: bool = False) -> None:
        self._all.all_reduce(array)

    def reduce_scatter(self, whole: Array, piece: Array, ordered: bool = False) -> None:
        self._all.reduce_scatter(whole, piece)

    def all_gather(self, piece: Array, whole: Array) -> None:
        self._all.all_gather(piece, whole)

    def broadcast(self, array: Array) -> None:
        array[...] = self.gather(array if self.rank == 0 else None)[0]

    def barrier(self) -> None:
        self.gather(None)

    def gather(self, value: Any) -> list[Any]:
        begin = time.perf_counter()
        try:
            return self._gather(value)
        except (OSError, EOFError) as error:
            time.sleep(LOST)  # the watchdog knows better what has happened, and ends this rank
            raise ConnectionError("the connection to another rank has ended") from error
        finally:
            self.waited += time.perf_counter() - begin

    def _gather(self, value):
        lines = self._lines["values"]
        if self.rank:
            lines[0].send(value)
            return lines[0].recv()
        values = [value, *(lines[rank].recv() for rank in range(1, self.size))]
        for rank in range(1, self.size):
            lines[rank].send(values)
        return values

    def leave(self, seconds: float) -> bool:
        """Wait until all ranks have called this, ``seconds`` at most; return whether they have."""
        deadline, lines = time.monotonic() + seconds, self._lines["ends"]
        try:
            if self.rank:
                lines[0].send(None)
            for rank in sorted(lines):
                left = None if seconds == float("inf") else max(0.0, deadline - time.monotonic())
                if not lines[rank].poll(left):
                    return False
                lines[rank].recv()
            if self.rank == 0:
                for line in lines.values():
                    line.send(None)
        except (OSError, EOFError):
            return False
        return True

    def abort(self, code: int) -> None:
        """End this rank; the others end when the watchdog tells them, or their launcher."""
        os._exit(code)

    def _accept(self, server, key):
        deadline, wanted = time.monotonic() + CONNECT, 2 * (self.size - 1)
        while sum(map(len, self._lines.values())) < wanted:
            server.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                line, _ = server.accept()
            except TimeoutError:
                missing = sorted(set(range(1, self.size)) - self._lines["ends"].keys())
                raise ConfigError(
                    f"rank {', '.join(map(str, missing))} of {self.size} did not come within "
                    f"{CONNECT:g} s. Start all ranks at the same time, and look at what they print"
                ) from None
            with contextlib.suppress(*FAULTS):
                connection = _checked(line, key, first=True)
                rank, role = connection.recv()
                _without_limit(connection)
                self._lines[role][rank] = connection


def _reached(address, key, rank, role):
    """Return a Connection to rank 0, which may not listen yet."""
    deadline = time.monotonic() + CONNECT
    while True:
        try:
            line = socket.create_connection(address, CONNECT)
            line.settimeout(None)
            connection = _checked(line, key, first=False)
            connection.send((rank, role))
            _without_limit(connection)
            return connection
        except FAULTS as error:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"rank {rank} cannot reach rank 0 at {address[0]} port {address[1]} ({error}). "
                    "Let its host accept connections from the others"
                ) from error
            time.sleep(NAP)


def _checked(line, key, first):
    """Return a Connection over a socket whose other end knows the key."""
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", HANDSHAKE, 0))
    connection = Connection(line.detach())
    try:
        for show in (deliver_challenge, answer_challenge)[:: 1 if first else -1]:
            show(connection, key)
    except FAULTS:
        connection.close()
        raise
    return connection


def _without_limit(connection):
    line = socket.socket(fileno=os.dup(connection.fileno()))
    with line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))


def _host():
    """Return what names this host: names alone may be the same in containers."""
    boot = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname(), boot
