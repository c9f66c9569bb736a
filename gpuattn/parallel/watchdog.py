"""One rank that fails, ends, is killed or is stopped ends all of them, with one message.

A launcher sees when a process has died, but not when it is stopped, nor when its main thread has
raised and waits for the others in MPI's finalizer. So a thread of each rank gives signs of life to
a ``witness``, and ends its rank when that says so.
"""

import contextlib
import faulthandler
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

from gpuattn.errors import exit_code
from gpuattn.parallel import witness
from gpuattn.parallel.agreement import is_agreed

TIMEOUT = 300.0  # seconds without progress of any rank that end all
BEAT = 1.0  # seconds between signs of life
CONNECT = 10.0  # seconds that a rank tries to reach the witness
LEAVE = 3.0  # seconds that a rank which ends waits for the others to end, too
PAUSE = 0.5  # seconds that a launcher has to forward a message before its ranks end: it drops it
TURN = 1.0  # seconds that a rank other than the first leaves to it to end all


class Watchdog:
    """A context around all that the ranks of a Communicator do together.

    An exception that not all ranks raise (``agreement.is_agreed``) ends all of them, with the exit
    code of ``errors.exit_code`` and a message that names rank, host and update. So does a rank that
    dies, or that gives no sign of life for ``witness.SILENCE`` seconds while it trains; and so do
    all where none notes anything for ``timeout`` seconds (``witness.START`` times as many before
    the first update): each then prints where its threads are. At the end all ranks leave together.
    ``debug``: whether such an exception shows its traceback.
    """

    def __init__(self, communicator: Any, debug: bool = False, timeout: float = TIMEOUT) -> None:
        self._ranks, self._debug, self._timeout = communicator, debug, timeout
        self._line: socket.socket | None = None
        self._sending, self._over = threading.Lock(), threading.Event()
        self._threads = [
            threading.Thread(target=work, name="gpuattn-watchdog", daemon=True)
            for work in (self._beat, self._listen)
        ]

    def __enter__(self) -> "Watchdog":
        ranks = self._ranks
        hosts = ranks.gather(socket.gethostname())
        near = len(set(hosts)) == 1
        place = None
        if ranks.rank == 0:
            names = [f"rank {rank} of {ranks.size}, on {host}" for rank, host in enumerate(hosts)]
            with contextlib.suppress(OSError):
                place = _start("127.0.0.1" if near else "", names, self._timeout)
        key, port = ranks.gather(place)[0] or ("", 0)
        with contextlib.suppress(OSError):
            host = "127.0.0.1" if near else hosts[0]
            self._line = socket.create_connection((host, port), CONNECT)
            self._line.settimeout(None)
        reached = ranks.gather(self._line is not None)
        if not all(reached):
            self._line = None
            if ranks.rank == 0:
                warnings.warn(
                    f"rank {reached.index(False)} cannot connect to rank 0: a rank that dies is "
                    "seen by the launcher alone, and one that is stopped by nobody", stacklevel=2,
                )  # fmt: skip
        self._send(key=key, rank=ranks.rank)
        ranks.on_update = lambda: self._send(update=ranks.update, notes=ranks.notes)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind, error, trace):
        code = 1 if error is None else _code(error)
        signalled = isinstance(error, SystemExit | KeyboardInterrupt) and self._ranks.update is None
        if error is not None and not is_agreed(error) and not signalled:
            if self._debug:
                traceback.print_exception(error)
            self._fail(_text(error), code)
        if not self._ranks.leave(LEAVE if error else float("inf")):
            os._exit(code)  # a signal to this rank alone; the launcher and the witness see it
        self._over.set()
        self._send(bye=True)

    def _beat(self):
        while not self._over.wait(BEAT):
            self._send(update=self._ranks.update, notes=self._ranks.notes)

    def _listen(self):
        """End this rank when the witness says so."""
        if self._line is None:
            return
        with contextlib.suppress(OSError, ValueError):
            if said := self._line.makefile().readline():
                words = json.loads(said)
                if words.get("where"):
                    self._tell_where()
                self._end(words["end"])

    def _tell_where(self):
        """Print where the threads of this rank are, at once: the other ranks print, too."""
        with tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file)
            file.seek(0)
            os.write(2, f"rank {self._ranks.rank}:\n".encode() + file.read())

    def _send(self, **words):
        if self._line is not None:
            with contextlib.suppress(OSError), self._sending:
                self._line.sendall(json.dumps(words).encode() + b"\n")

    def _fail(self, text, code):
        """Let the witness tell what has failed here, so that of many failures one is told."""
        if self._line is None:
            os.write(2, f"gpuattn: error: rank {self._ranks.rank}: {text}\n".encode())
            self._end(code)
        self._send(failed=text, code=code)
        time.sleep(PAUSE + LEAVE + TURN)  # the thread ends this process meanwhile
        os._exit(code)

    def _end(self, code):
        """End all ranks, by the first one that is left."""
        timer = threading.Timer(PAUSE + LEAVE, os._exit, (code,))
        timer.daemon = True
        timer.start()
        time.sleep(PAUSE + TURN * min(self._ranks.rank, 2))
        self._ranks.abort(code)


def _start(host, names, timeout):
    """Start the witness, in a session of its own, which launchers do not kill; return its (key,
    port)."""
    key = secrets.token_hex(16)
    given = {"host": host, "key": key, "names": names, "timeout": timeout}
    process = subprocess.Popen(
        [sys.executable, "-S", "-E", str(Path(witness.__file__))], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps(given) + "\n")
    process.stdin.flush()
    port = int(process.stdout.readline())
    process.stdin.close()
    process.stdout.close()
    process.returncode = 0  # it outlives this process: no warning about that
    return key, port


def _code(error):
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    return 130 if isinstance(error, KeyboardInterrupt) else exit_code(error)


def _text(error):
    if isinstance(error, SystemExit):
        return f"has exited with code {error.code}"
    return str(error) or type(error).__name__
