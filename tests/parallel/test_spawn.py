"""Ranks of one machine and the terminal from which they are started."""

import os
import pty
import subprocess
import sys
import time

from ranks import ROOT

START = """
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # as of a shell
from gpuattn.parallel.spawn import spawn
sys.exit(spawn(2, [sys.executable, "-c", sys.argv[1]], reads=True))
"""
RANK = """
import os, signal, sys, time
rank, heard = os.environ["GPUATTN_RANK"], []
signal.signal(signal.SIGINT, lambda *_: heard.append(1))
os.write(1, f"{rank} {sys.stdin.readline()!r}\\n".encode())
for _ in range(1000):
    time.sleep(0 if heard else 0.01)
time.sleep(0.5)
os.write(1, f"{rank} {len(heard)}\\n".encode())
"""
SECONDS = 20


def test_the_first_rank_reads_the_terminal_and_each_hears_of_ctrl_c_once(tmp_path):
    ours, theirs = pty.openpty()

    def said(count):
        """Return the lines of the ranks, sorted, once there are so many."""
        end = time.monotonic() + SECONDS
        while (tmp_path / "said").read_text().count("\n") < count and time.monotonic() < end:
            time.sleep(0.01)
        return sorted((tmp_path / "said").read_text().splitlines())

    with (tmp_path / "said").open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", START, RANK], stdin=theirs, stdout=out, start_new_session=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )  # fmt: skip
    try:
        os.write(ours, b"typed\n")
        read = ["0 'typed\\n'", "1 ''"]
        assert said(2) == read
        os.write(ours, b"\x03")
        assert said(4) == sorted(["0 1", "1 1", *read])
        assert process.wait(SECONDS) == 0
    finally:
        for end in (ours, theirs):
            os.close(end)
        process.kill()
        process.wait()
