"""Compiles the peers' kernels in several processes, into their caches on disk.

The process that measures reads them there. Nothing is timed here, and choices between kernels that
were timed while other processes ran are not kept.
"""

import contextlib
import importlib.util
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from gpuattn.bench.cases import Cell
from gpuattn.environment import usable_cores

COMPILED = ("torch-compile", "quack", "liger", "torch-graph", "hf-static")
PROCESSES = 16
SECONDS = 60
ONE_THREAD = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}  # the processes use all cores


def compile_ahead(cells: Sequence[Cell]) -> None:
    """Run each peer of ``cells`` that compiles once, for at most SECONDS. Ignores failures."""
    todo = [(cell, name) for cell in cells for name in cell.peers if name in COMPILED]
    if not todo or importlib.util.find_spec("torch") is None:
        return
    os.environ.update(ONE_THREAD)
    count = min(len(todo), PROCESSES, usable_cores())
    command, end = [sys.executable, "-m", __name__], time.monotonic() + SECONDS
    null = subprocess.DEVNULL
    workers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=null, stderr=null)
        for _ in range(count)
    ]
    for i, worker in enumerate(workers):
        pipe: Any = worker.stdin
        with contextlib.suppress(BrokenPipeError), pipe:
            pipe.write(pickle.dumps(todo[i::count]))
    for worker in workers:
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.wait(max(0, end - time.monotonic()))
        worker.kill()
        worker.wait()


def _compile(cell, name):
    import cupy

    from gpuattn.bench.peers import timing

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream, timing.on_stream(stream):
        (_run_generation if cell.op == "decode" else _run_op)(cell, name)
        stream.synchronize()
    timing.release()
    cupy.get_default_memory_pool().free_all_blocks()


def _run_op(cell, name):
    import cupy

    from gpuattn.bench.fused import measure as fused
    from gpuattn.bench.peers import fused as fused_peers

    arrays = fused.Ours(cell.case, cell.direction, cupy).draw(0)
    fused_peers.Call(name, cell.case, cell.direction, *arrays).run()


def _run_generation(cell, name):
    import cupy

    from gpuattn.bench.decode import measure as decode
    from gpuattn.bench.peers import decode as decode_peers

    opened = decode_peers.Opened()
    opened.peer(name, cell.case, decode.random_model(cell.case, cupy))
    opened.close()


if __name__ == "__main__":
    for cell_and_name in pickle.load(sys.stdin.buffer):
        with contextlib.suppress(Exception):
            _compile(*cell_and_name)
