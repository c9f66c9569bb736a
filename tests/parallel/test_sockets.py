"""Ranks that meet over sockets: who may come, who does not, and by whose store."""

import socket
import sys
import threading
import time
from types import ModuleType

import pytest

from gpuattn.errors import ConfigError
from gpuattn.parallel import sockets, torchrun
from gpuattn.parallel.sockets import Sockets


def run(*works):
    """Return the result or exception of each of several threads."""
    found = [None] * len(works)

    def one(i, work):
        try:
            found[i] = work()
        except Exception as error:  # noqa: BLE001 given back
            found[i] = error

    threads = [threading.Thread(target=one, args=item) for item in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


def test_strangers_and_wrong_keys_do_not_count(monkeypatch):
    monkeypatch.setattr(sockets, "CONNECT", 10)
    monkeypatch.setattr(sockets, "HANDSHAKE", 1)
    server = socket.create_server(("127.0.0.1", 0))
    address = server.getsockname()
    silent = socket.create_connection(address)
    loud = socket.create_connection(address)
    loud.sendall(b"GET / HTTP/1.1\r\n\r\n")

    def right():
        time.sleep(0.2)
        return Sockets(1, 2, b"key", address=address).gather("one")

    def wrong():
        monkeypatch.setattr(sockets, "NAP", 0.2)
        return sockets._reached(address, b"other", 1, "values")

    first = lambda: Sockets(0, 2, b"key", server).gather("zero")  # noqa: E731
    zero, one, other = run(first, right, wrong)
    assert zero == one == ["zero", "one"]
    assert isinstance(other, ConfigError) and "cannot reach rank 0" in str(other)
    silent.close()
    loud.close()


def test_ranks_that_do_not_come_are_named(monkeypatch):
    monkeypatch.setattr(sockets, "CONNECT", 0.5)
    server = socket.create_server(("127.0.0.1", 0))
    with pytest.raises(ConfigError, match="rank 1, 2 of 3 did not come within 0.5 s"):
        Sockets(0, 3, b"key", server)


def test_a_rank_that_is_gone_is_told_after_the_watchdog_had_its_time(monkeypatch):
    monkeypatch.setattr(sockets, "LOST", 0.1)
    server = socket.create_server(("127.0.0.1", 0))
    address = server.getsockname()

    def gone():
        ranks = Sockets(1, 2, b"key", address=address)
        for lines in ranks._lines.values():
            lines[0].close()

    def left():
        ranks = Sockets(0, 2, b"key", server)
        assert not ranks.leave(5)
        return ranks.gather(1)

    assert isinstance(run(left, gone)[0], ConnectionError)


class Store:
    """The store of torchrun's agent, for threads. ``values``: of all of them."""

    values: dict = {}

    def __init__(self, host, port, world_size, is_master, timeout):
        assert (host, port, is_master) == ("localhost", 29999, False)

    def set(self, name, value):
        self.values[name] = value.encode()

    def get(self, name):
        while name not in self.values:
            time.sleep(0.01)
        return self.values[name]


def test_ranks_of_torchrun_meet_by_its_store(monkeypatch):
    module = ModuleType("torch.distributed")
    module.TCPStore = Store
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    monkeypatch.setitem(sys.modules, "torch.distributed", module)
    monkeypatch.setattr(Store, "values", {})
    environment = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29999",
                   "TORCHELASTIC_RUN_ID": "run", "TORCHELASTIC_RESTART_COUNT": "2"}  # fmt: skip

    def met(rank):
        ranks = torchrun.meet(rank, 3, environment)
        return ranks.gather((ranks.rank, ranks.local_rank, ranks.local_size))

    found = run(*(lambda rank=rank: met(rank) for rank in range(3)))
    assert found == [[(rank, rank, 3) for rank in range(3)]] * 3
    assert set(Store.values) == {"gpuattn/run/2"}
    for port in (None, "x"):
        environment.pop("MASTER_PORT", None)
        environment |= {"MASTER_PORT": port} if port else {}
        with pytest.raises(ConfigError, match=f"started 3 ranks and MASTER_PORT is '{port or ''}'"):
            torchrun.meet(1, 3, environment)
