"""Processes that train together, started by the mpiexec of MPICH and ended for certain."""

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from gpuattn.runs.config import to_toml

ROOT = Path(__file__).parents[2]
MARK = "GPUATTN_TEST_RANKS"  # in the environment of all processes of one call
SECONDS = 60  # that a call may take; far more than it needs
TRAIN = """
import json, os, signal, sys
import numpy as np
from stopping import After
from gpuattn.parallel.world import connected
from gpuattn.runs.config import read_toml, resolve
from gpuattn.train.session import train
with connected() as ranks:
    {lines}
    for options, out, calls in json.loads(sys.argv[1]):
        config = resolve(("test", read_toml(options)))[0]
        stop = After(calls) if calls else None
        train(config, out, device="numpy", stop=stop, communicator=ranks, shard=sys.argv[2])
"""
COMMAND = """
import os, resource, signal, sys
from gpuattn.cli.main import main
{lines}
main(sys.argv[1:])
"""
FAULT = """
import time
from pathlib import Path
from gpuattn.train.trainer import Trainer
inner = Trainer._update
out = Path(sys.argv[sys.argv.index("--out") + 1])
def update(trainer):
    if trainer.communicator.rank == {rank} and trainer.at.update == {update}:
        while not any(out.glob("state-*.json")):
            time.sleep(0.01)
        {fault}
    inner(trainer)
Trainer._update = update
"""  # ``fault`` happens on a rank after an update, once a state is on the disk


def mpiexec():
    """Return the path of the mpiexec that mpi4py fits to; skip the test without one."""
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found and importlib.util.find_spec("mpi4py"):
        return found
    missing = "no mpi4py and mpiexec: pip install mpi4py mpich"
    if "mpi" in os.environ.get("GPUATTN_REQUIRE", ""):
        pytest.fail(missing)
    pytest.skip(missing)


SPAWN = """
import sys
from gpuattn.parallel.spawn import spawn
sys.exit(spawn(int(sys.argv[1]), sys.argv[2:]))
"""


class Ranks:
    """``count`` processes that run Python code with ``arguments``, or with those of each rank.

    ``spawned``: started by ``gpuattn.parallel.spawn``, instead of the mpiexec of MPICH. ``mpi``:
    False starts one process without either.
    """

    def __init__(self, count, code, *arguments, each=None, folder=ROOT, spawned=False, mpi=True):
        self._mark = f"{MARK}={uuid.uuid4().hex}"
        program = [sys.executable, "-c", code]
        if spawned:
            command = [sys.executable, "-c", SPAWN, str(count), *program, *map(str, arguments)]
        elif not mpi:
            mpiexec()  # mpi4py must be there
            command = [*program, *map(str, arguments)]
        else:
            command = [mpiexec()]
            for given in each or [arguments] * count:
                command += [*([":"] if len(command) > 1 else []), "-n", "1", *program]
                command += map(str, given)
        others = filter(None, [os.environ.get("PYTHONPATH")])
        path = os.pathsep.join([str(ROOT), str(ROOT / "tests/support"), *others])
        environment = dict([self._mark.split("=")]) | {
            "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1",
        }  # fmt: skip
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder,
            env=os.environ | environment, start_new_session=True,
        )  # fmt: skip

    def end(self, seconds=SECONDS):
        """Wait for the end; return (exit code, standard error). All processes are gone then."""
        try:
            self.printed, said = self.process.communicate(timeout=seconds)
            return self.process.returncode, said
        finally:
            for number in self.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)

    def processes(self):
        """Return the numbers of all processes of this call that are alive."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if self._mark.encode() in path.read_bytes():
                    found.append(int(path.parent.name))
        return found


def train_by(count, *runs, lines="pass", shard="auto", spawned=False):
    """Train (config, folder, calls of ``stop`` or None) one after the other, by so many ranks."""
    given = []
    for i, (config, out, calls) in enumerate(runs):
        options = Path(f"{out}-{i}.toml")
        options.write_text(to_toml(config))
        given.append((str(options), str(out), calls))
    program = TRAIN.format(lines=lines)
    code, said = Ranks(count, program, json.dumps(given), shard, spawned=spawned).end()
    assert code == 0, said


def command_by(count, *arguments, lines="", **options):
    """Return (exit code, standard error, of that the lines of errors) of ``gpuattn``."""
    code, said = Ranks(count, COMMAND.format(lines=lines), *arguments, **options).end()
    return code, said, [line for line in said.splitlines() if line.startswith("gpuattn: error")]
