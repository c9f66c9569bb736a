"""The process that tells which rank has failed, without ranks: connections alone."""

import json
import socket
import threading

import pytest

from gpuattn.parallel import witness

NAMES = ["rank 0 of 2, on here", "rank 1 of 2, on there"]


@pytest.fixture
def connect():
    """A function that connects to a Witness in a thread; all is over at the end of the test."""
    server = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=witness.Witness(server, "key", NAMES).run)
    thread.start()
    lines = []

    def connected(**first):
        line = socket.create_connection(server.getsockname(), 10)
        lines.append(line)
        say(line, **first)
        return line

    yield connected
    for line in lines:
        line.close()
    thread.join(10)
    server.close()
    assert not thread.is_alive()


def say(line, **words):
    line.sendall(json.dumps(words).encode() + b"\n")


def told(line):
    """Return what the witness says, or None at the end of the connection.

    A connection that is closed before all that was sent on it is read ends with a reset.
    """
    try:
        text = line.makefile().readline()
    except ConnectionResetError:
        return None
    return json.loads(text) if text else None


def test_a_connection_that_ends_is_named_once_with_the_last_update(connect, capfd):
    zero, one = (connect(key="key", rank=rank) for rank in (0, 1))
    say(zero, update=1_234)
    say(one, update=1_233)
    one.close()
    assert told(zero) == {"end": 1}
    zero.close()
    error = capfd.readouterr().err
    assert error.count("gpuattn: error") == 1
    assert "rank 1 of 2, on there, after update 1,23" in error and "without a word" in error


def test_the_first_failure_is_told_with_its_exit_code(connect, capfd):
    zero, one = (connect(key="key", rank=rank) for rank in (0, 1))
    say(one, failed="no such file", code=2)
    assert told(zero) == told(one) == {"end": 2}
    say(zero, failed="another one", code=1)
    zero.close()
    error = capfd.readouterr().err
    assert error == "gpuattn: error: rank 1 of 2, on there: no such file\n"


def test_ranks_that_leave_and_strangers_are_no_failure(connect, capfd):
    zero, one = (connect(key="key", rank=rank) for rank in (0, 1))
    strangers = connect(key="other", rank=0), connect()
    strangers[1].sendall(b"GET / HTTP/1.1\n\n")
    assert [told(line) for line in strangers] == [None, None]
    for line in (one, zero):
        say(line, update=3)
        say(line, bye=True)
        line.close()
    assert not capfd.readouterr().err


def test_silence_counts_once_a_rank_trains(connect, capfd, monkeypatch):
    monkeypatch.setattr(witness, "SILENCE", 0.3)
    zero, one = (connect(key="key", rank=rank) for rank in (0, 1))
    say(one, update=7)  # rank 0 reads its data, perhaps for minutes
    assert told(zero) == {"end": 1}
    assert "rank 1 of 2, on there, after update 7, has given no sign" in capfd.readouterr().err
