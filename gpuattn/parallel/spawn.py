"""The ranks of one machine: started together, watched, ended together."""

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence

from gpuattn.parallel.sockets import Sockets

RANK, RANKS, MEETING = "GPUATTN_RANK", "GPUATTN_RANKS", "GPUATTN_MEETING"
GRACE = 10.0  # seconds that the other ranks have to end once one has failed
KILL = 5.0  # seconds from SIGTERM to SIGKILL
TURN = 0.05  # seconds between looks at the ranks
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TYPED = (signal.SIGINT, signal.SIGHUP)  # a terminal sends them to all of its foreground group


def spawn(count: int, command: Sequence[str], reads: bool = False) -> int:
    """Run ``command`` as ``count`` ranks, and return their exit code.

    It is that of the first rank that failed, 128 and the number for a signal. Signals to this
    process go to all ranks, once. If one fails, the others get GRACE seconds to end by themselves;
    if this process dies, they end as by SIGTERM. Rank 0 alone has the standard input. ``reads``:
    whether the command reads it. A terminal stops a process that reads from it outside of its
    foreground group, so rank 0 then stays in the process group of this process.
    """
    server = socket.create_server(("127.0.0.1", 0))
    leash, held = os.pipe()
    common = {RANKS: str(count)}
    meeting = f"{server.getsockname()[1]}:{leash}:{secrets.token_hex(16)}"
    ranks: list[subprocess.Popen] = []
    joins = reads and os.isatty(0)

    def forward(number, frame):
        for rank in ranks[joins and number in TYPED :]:
            if rank.poll() is None:
                rank.send_signal(number)

    before = {number: signal.signal(number, forward) for number in FORWARDED}
    try:
        with server:
            for rank in range(count):
                fd = server.fileno() if rank == 0 else -1
                given = common | {RANK: str(rank), MEETING: f"{fd}:{meeting}"}
                ranks.append(subprocess.Popen(
                    command, env=os.environ | given,
                    process_group=None if joins and rank == 0 else 0,
                    stdin=None if rank == 0 else subprocess.DEVNULL,
                    pass_fds=(leash, fd) if rank == 0 else (leash,),
                ))  # fmt: skip
        os.close(leash)
        return _watched(ranks)
    finally:
        _end(ranks)
        os.close(held)
        for number, action in before.items():
            signal.signal(number, action)


def _watched(ranks):
    """Return the exit code of ranks when all have ended."""
    first, failed, deadline = 0, None, float("inf")
    while any(rank.poll() is None for rank in ranks):
        if not first:
            for number, rank in enumerate(ranks):
                if rank.poll():
                    first, failed = rank.returncode, number
                    deadline = time.monotonic() + GRACE
                    break
        if time.monotonic() > deadline:
            if first < 0:  # otherwise it has said itself what has happened
                told = f"rank {failed} of {len(ranks)} was ended by signal {-first}"
                os.write(2, f"gpuattn: error: {told}\n".encode())
            break
        time.sleep(TURN)
    first = first or next((rank.returncode for rank in ranks if rank.poll()), 0)
    return 128 - first if first < 0 else first


def _end(ranks):
    """End the ranks that are left."""
    for send in (subprocess.Popen.terminate, subprocess.Popen.kill):
        for rank in ranks:
            if rank.poll() is None:
                send(rank)
        deadline = time.monotonic() + KILL
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
            time.sleep(TURN)


def meet(environment: Mapping[str, str] = os.environ) -> Sockets:
    """Return the communicator of this process, one of those that ``spawn`` has started."""
    fd, port, leash, key = environment[MEETING].split(":")
    threading.Thread(
        target=_follow, args=(int(leash),), name="gpuattn-leash", daemon=True
    ).start()  # fmt: skip
    server = socket.socket(fileno=int(fd)) if fd != "-1" else None
    rank, size = int(environment[RANK]), int(environment[RANKS])
    return Sockets(rank, size, key.encode(), server, ("127.0.0.1", int(port)))


def _follow(leash):
    """End this rank, by a signal that lets it save, when the process that started it is gone."""
    with contextlib.suppress(OSError):
        if not os.read(leash, 1):
            os.kill(os.getpid(), signal.SIGTERM)


def this_command(arguments: Sequence[str]) -> list[str]:
    """Return the command line of ``gpuattn`` with these arguments, by this interpreter."""
    return [sys.executable, "-m", "gpuattn", *arguments]
