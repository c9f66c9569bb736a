"""Products by the fastest of the algorithms that cuBLASLt proposes, found by trying them.

What was found is kept on disk beside the kernels, for this GPU and this version of the library: a
program that tunes again, such as one that goes on with a training, takes the same algorithms.
"""

import contextlib
import json
import math
import os
import re
import statistics
import tempfile

import numpy as np

from gpuattn.cuda.kernels import cache_folder
from gpuattn.gemm import cublaslt

CANDIDATES = 8
SAMPLES = 7  # of each, in turns
WORTH = 0.97  # times the time of the heuristic's choice: less gain may be noise
FLUSH_BYTES = 128 << 20  # written before every sample: more than the L2 cache holds


def tune(call):
    """Return ``call()``; the matrix products in it take their fastest algorithm from now on.

    That is, this process's cuBLASLt products of the same shapes, layouts and dtypes. New kinds are
    timed, in some milliseconds each, which waits for the GPU: tune before capturing a graph.
    Another algorithm adds in another order, so last bits may change.
    """
    tuner = _Tuner()
    token = cublaslt.tuner.set(tuner)
    try:
        return call()
    finally:
        cublaslt.tuner.reset(token)
        tuner.keep()


class _Tuner:
    def __init__(self):
        self.tables = {}  # device -> {kind of product: (algorithm, bytes of workspace)}
        self.new = set()  # devices of which the table has grown

    def __call__(self, plan, cupy, *arrays):
        """Let ``plan`` use its fastest algorithm; ``arrays``: of the product that is to be done."""
        if plan.tuned:
            return
        table = self.tables.get(plan.device)
        if table is None:
            table = self.tables[plan.device] = _read(_path(cupy, plan))
        if plan.kind not in table:
            if cupy.cuda.get_current_stream().is_capturing():
                return
            table[plan.kind] = _fastest(plan, cupy, *arrays)
            self.new.add((plan.device, _path(cupy, plan)))
        plan.take(table[plan.kind])
        plan.tuned = True

    def keep(self):
        for device, path in self.new:
            _write(path, self.tables[device])


def _fastest(plan, cupy, a, b, out, vector, aux):
    """Return the fastest of the heuristic's candidates, the first unless another is worth it."""
    candidates = plan.candidates(plan.alignment, CANDIDATES)
    before = out.copy() if plan.accumulate else None
    scratch = cupy.empty(FLUSH_BYTES, np.int8)
    pairs = {candidate: [] for candidate in candidates}
    for turn in range(SAMPLES):
        for candidate in candidates if turn % 2 else reversed(candidates):
            plan.take(candidate)
            begin, end = cupy.cuda.Event(), cupy.cuda.Event()
            scratch.fill(0)
            begin.record()
            ran = plan.run(cupy, a, b, out, vector, aux)
            end.record()
            if ran:
                pairs[candidate].append((begin, end))
    end.synchronize()
    if before is not None:
        out[...] = before
    times = {
        candidate: statistics.median(cupy.cuda.get_elapsed_time(*pair) for pair in of_one)
        for candidate, of_one in pairs.items()
        if of_one
    }
    first = candidates[0]
    best = min(times, key=times.get, default=first)
    return best if times.get(best, 0) < WORTH * times.get(first, math.inf) else first


# ---- on disk -------------------------------------------------------------------------------------


def _path(cupy, plan):
    name = cupy.cuda.runtime.getDeviceProperties(plan.device)["name"].decode()
    name = re.sub(r"\W+", "-", name)
    return cache_folder() / f"products-{name}-{plan.lt.get_version()}.json"


def _read(path):
    try:
        stored = json.loads(path.read_text())
        return {kind: (bytes.fromhex(code), size) for kind, (code, size) in stored.items()}
    except (OSError, ValueError):
        return {}


def _write(path, table):
    """Store by rename, with what others have stored meanwhile; a full disk is no error."""
    table = table | _read(path)
    text = json.dumps({kind: (code.hex(), size) for kind, (code, size) in sorted(table.items())})
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.replace(temporary, path)
