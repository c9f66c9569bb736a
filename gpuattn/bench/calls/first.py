"""The first call of an op in a new process, with empty or full caches of kernels.

What is timed is the call until its result is there: not the imports, not the inputs' way to the
GPU, which starts CUDA.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import numpy as np

from gpuattn.bench.calls import ops
from gpuattn.bench.calls.cases import COLD, CUPY, EAGER, Called
from gpuattn.bench.peers.calls import Eager
from gpuattn.errors import UnsupportedError
from gpuattn.runtime.device import array_module

SAMPLES = 5  # processes
SECONDS = 120  # that one may take
CACHES = "GPUATTN_CACHE_DIR", "CUPY_CACHE_DIR"
OURS = "ours"


def times(
    case: Called, xp: ModuleType, names: Sequence[str]
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Return ({name: microseconds}, {name: why there are none}) of ours and of peers.

    Raises UnsupportedError where ours cannot be called.
    """
    found, missing = {OURS: _samples(OURS, case, xp)}, {}
    for name in names:
        try:
            found[name] = _samples(name, case, xp)
        except UnsupportedError as error:
            missing[name] = str(error)
    return found, missing


def _samples(name, case, xp):
    if case.timed == COLD:
        return [_in_new_folder(name, case, xp, 1)[0] for _ in range(SAMPLES)]
    return _in_new_folder(name, case, xp, 1 + SAMPLES)[1:]  # the first one fills the caches


def _in_new_folder(name, case, xp, count):
    """Return the times of processes that share caches, which are empty at first."""
    with tempfile.TemporaryDirectory(prefix="gpuattn-first-") as folder:
        caches = {variable: str(Path(folder, variable)) for variable in CACHES}
        return [_in_process(name, case, xp, caches) for _ in range(count)]


def _in_process(name, case, xp, caches):
    row = {"op": case.op, "case": case.as_dict()}
    question = json.dumps([name, row, "numpy" if xp is np else "cuda"])
    try:
        run = subprocess.run(
            [sys.executable, "-m", __name__, question], capture_output=True, text=True,
            check=False, timeout=SECONDS, env=os.environ | caches,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise UnsupportedError(f"no answer after {SECONDS} s") from None
    if run.returncode:
        said = (run.stderr.strip().splitlines() or ["it ended"])[-1]
        raise UnsupportedError(f"in a new process: {said[:300]}")
    return json.loads(run.stdout)


def measure(name: str, case: Called, xp: ModuleType) -> float:
    """Return the microseconds of the first call in this process, by ``name``: ours or a peer."""
    inputs = ops.draw(case, xp)
    if name == EAGER:
        call = Eager(case, inputs, False, None).run
    else:
        call = (ops.plain(case, inputs, xp) if name == CUPY else ops.ours(case, inputs, False)).run
    wait = (lambda: None) if xp is np else xp.cuda.Device().synchronize
    wait()
    begin = time.perf_counter()
    call()
    wait()
    return (time.perf_counter() - begin) * 1e6


if __name__ == "__main__":
    _name, _row, _device = json.loads(sys.argv[1])
    print(json.dumps(measure(_name, Called.from_row(_row), array_module(_device))))
