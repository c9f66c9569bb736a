"""The time of one training step, op by op.

The step runs op by op, and each call of an op is timed by itself: on a GPU as a CUDA graph of some
repetitions, which excludes the host; on NumPy by the clock, within the step. On a GPU, calls with
the same shapes and options, such as those of equal layers, are timed once. Repeated calls find
their arrays in the L2 cache more often than a step does, and nothing runs on a side stream or fuses
with a pending matmul (``autodiff.pending_matmul``). ``step_us``, the whole step as one graph, shows
how far the sum is off.
"""

import datetime
import time
from typing import Any

import numpy as np

from gpuattn.arrays import is_array
from gpuattn.autodiff.hooks import hooked
from gpuattn.bench import op_work, timing
from gpuattn.cuda.ceilings import ceilings
from gpuattn.errors import UnsupportedError
from gpuattn.gemm.matmul import capture_refusal, matmul
from gpuattn.models.config import padded_rows
from gpuattn.models.loss import in_slices
from gpuattn.ops.loss.linear_cross_entropy import rows_at_a_time
from gpuattn.runtime.device import choose_device
from gpuattn.tasks.task import Task
from gpuattn.train.progress import Listener
from gpuattn.train.trainer import Trainer

GRAPH_CALLS, GRAPH_US = 20, 3000.0  # calls of a graph: at most so many, about so long
SAMPLES, TURNS = 7, 3  # on a GPU; on NumPy, of the vocabulary's matrix products
REST = "the rest"  # other kernels: sums of gradients, fills of buffers, statistics


def profile(task: Task, device: str) -> dict[str, Any]:
    """Return a document on the training step of a ``tasks.task.Task`` on ``device``.

    Keys: ``where``, ``date``, ``model`` and ``update`` in words, ``dtype``, ``ceilings`` (measured,
    or None), ``tokens`` and ``model_flops`` of the step (``models.flops``), ``step_us``, and
    ``rows``, the longest first, each an ``op`` in one ``direction`` ("forward", "backward",
    "update"): how many ``calls`` and, on a GPU, ``launches``; ``us``, ``bytes`` and ``flops`` of
    all calls (see ``op_work``); ``share`` of the time; ``roof``, the least time that the ceilings
    allow as a share of ``us`` (None without bytes). On NumPy all times are of the same update.
    ``stages``: the microseconds of the rows by direction; ``kinds``: of matrix products, of
    attention and of all others; both with those of other kernels as ``REST``.
    ``vocabulary``: the gain of padding its table, see ``_vocabulary``; None where there is nothing
    to pad. Raises UnsupportedError where CUDA graphs cannot capture matrix products.
    """
    if device == "cuda" and (missing := capture_refusal()):
        raise UnsupportedError(f"ops are timed in CUDA graphs, which do not work here: {missing}")
    trainer = Trainer(task, device, Listener(), graphs=False)
    dtype, meter = trainer.precision.dtype, trainer.meter
    watcher = watch(device)

    def measure(update, again):
        update()  # compiles
        meter.restart()
        begin = time.perf_counter()
        with hooked(watcher):
            update()
        spent = (time.perf_counter() - begin) * 1e6
        return spent if device == "numpy" else _median(timing.Graph([again]))

    step, reach = trainer.look(measure), ceilings(trainer.xp, dtype)
    rows = _rows(watcher.calls, step, reach)
    vocabulary = trainer.look(lambda *_: _vocabulary(trainer))
    (batch,) = meter.batches
    size = sum(parameter.size for parameter in task.model.parameters())
    return {
        "where": choose_device(device)[1].removesuffix(", as asked"),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "model": f"{task.describe_model()}, {size / 1e6:.2f} M parameters",
        "update": task.describe_update(), "dtype": str(np.dtype(dtype)), "ceilings": reach,
        "tokens": batch.all_tokens, "model_flops": task.flops([batch]), "step_us": step,
        "vocabulary": vocabulary, "stages": _sums(rows, lambda row: row["direction"] or REST),
        "kinds": _sums(rows, _kind_of), "rows": rows,
    }  # fmt: skip


def _sums(rows, name):
    """Return {name(row): microseconds}."""
    found: dict[str, float] = {}
    for row in rows:
        found[name(row)] = found.get(name(row), 0) + row["us"]
    return found


def _kind_of(row):
    if row["op"] == REST:
        return REST
    if not row["flops"]:
        return "other ops"
    return "attention" if "attention" in row["op"] else "matrix products"


def _vocabulary(trainer):
    """Return the times of the vocabulary table's three matrix products, padded and not.

    They are the logits and the gradients of states and table, for ``tokens`` at a time: those of
    the batch or of a slice. Keys: ``size`` of the vocabulary, ``rows`` of the padded table,
    ``pads``: whether the model's table is padded, ``tokens``, ``padded_us``, ``plain_us``.
    """
    config, xp, dtype = trainer.model.config, trainer.xp, trainer.workspace.params.dtype
    size, rows, count = config.vocab, padded_rows(config.vocab), trainer.step.feed.batch.labels.size
    if size == rows or not trainer.config.has("pad_vocab"):
        return None
    if in_slices(count, rows, dtype.itemsize, trainer.model.checkpoint):
        count = rows_at_a_time(count, rows, dtype.itemsize, xp is not np)
    draw = xp.random.default_rng(0).standard_normal
    states, table = (draw((n, config.d_model), np.float32).astype(dtype) for n in (count, rows))
    dstates, dtable, logits = states.copy(), table.copy(), xp.empty(count * rows, dtype)

    def products(rows):
        def call():
            out = logits[: count * rows].reshape(count, rows)
            matmul(states, table[:rows], transpose_b=True, out=out)
            matmul(out, table[:rows], out=dstates)
            matmul(out, states, transpose_a=True, out=dtable[:rows])

        trainer.step.calls.first(call)  # as a run does: may choose their algorithms
        return call if xp is np else timing.Graph([call])

    calls = {"padded_us": products(rows), "plain_us": products(size)}
    times = _in_turns(calls) if xp is np else timing.alternate(calls)
    times = {name: timing.median(samples) for name, samples in times.items()}
    return {"size": size, "rows": rows, "pads": config.pad_vocab, "tokens": count, **times}


def _in_turns(calls):
    """Return {name: [microseconds]} of TURNS calls each, by the clock."""
    times = {name: [] for name in calls}
    for _ in range(TURNS):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - begin) * 1e6)
    return times


def _rows(calls, step, reach):
    rows = {}
    for call in calls:
        key = call["op"], call["direction"]
        row = rows.setdefault(key, dict.fromkeys(("calls", "launches", "us", "bytes", "flops"), 0))
        row["calls"] += 1
        for name in ("launches", "us", "bytes", "flops"):
            row[name] = None if call[name] is None else row[name] + call[name]
    rows = [
        {"op": op, "direction": direction, **row}
        for (op, direction), row in rows.items()
        if row["launches"] != 0  # views
    ]
    whole = max(step, sum(row["us"] for row in rows))
    rest = whole - sum(row["us"] for row in rows)
    if rest > 0:
        rows.append({"op": REST, "direction": "", "calls": None, "launches": None, "us": rest,
                     "bytes": None, "flops": None})  # fmt: skip
    for row in rows:
        row["share"] = row["us"] / whole
        row["roof"] = _roof(row, reach)
    return sorted(rows, key=lambda row: -row["us"])


def _roof(row, reach):
    """Return the least time that the ceilings allow as a share of the measured time."""
    if not reach or not row["bytes"] or not row["us"]:
        return None
    products = row["flops"] / reach["matmul_tflops"] / 1e6
    copies = row["bytes"] / reach["copy_tbs"] / 1e6
    return max(products, copies) / row["us"]


def watch(device: str) -> "_Watcher":
    """Return a hook (``autodiff.hooks.hooked``) whose ``calls`` are the calls of ops, each a dict:
    ``op``, ``direction``, ``us``, ``launches``, ``bytes``, ``flops``."""
    return _OnCPU() if device == "numpy" else _OnGPU()


class _Watcher:
    """Records every call of an op in ``calls``, with its FLOPs, bytes and time."""

    def __init__(self):
        self.calls = []

    def __call__(self, op, direction, function):
        if op == "checkpoint":
            return function  # the ops in it are recorded

        def timed(*arguments, **given):
            def call():
                return function(*_fresh(arguments), **given)

            kind = op, direction, _kind(arguments), _kind({**given, "key": None})
            with hooked(None):
                result, us, launches = self.time(call, kind)
            self.calls.append({
                "op": op, "direction": "update" if op in op_work.UPDATES else direction, "us": us,
                "launches": launches,
                "bytes": op_work.moved(op, direction, arguments, given, result, function),
                "flops": op_work.flops(op, direction, arguments, given),
            })  # fmt: skip
            return result

        return timed


class _OnCPU(_Watcher):
    def time(self, call, kind):
        begin = time.perf_counter()
        result = call()
        return result, (time.perf_counter() - begin) * 1e6, None


class _OnGPU(_Watcher):
    def __init__(self):
        super().__init__()
        self._known = {}  # kind of call -> (microseconds, launches)

    def time(self, call, kind):
        result = call()
        if kind not in self._known:
            self._known[kind] = _time(call)
        return result, *self._known[kind]


def _kind(value):
    """Return a key that is equal for calls of equal time. Integer arrays count by address."""
    if is_array(value):
        where = op_work.address(value) if value.dtype.kind in "iu" else None
        return value.shape, str(value.dtype), value.strides, where
    if isinstance(value, dict):
        return tuple((name, _kind(part)) for name, part in value.items())
    if isinstance(value, tuple | list):
        return tuple(map(_kind, value))
    return value if isinstance(value, str | int | float | None) else type(value).__name__


def _fresh(value):
    """Return nested tuples with copies of their lists: some rules empty a list that they saved."""
    if isinstance(value, tuple):
        parts = (_fresh(part) for part in value)
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return list(value) if isinstance(value, list) else value


def _time(call):
    """Return (microseconds, launches) of a call, excluding the host."""
    (about,) = timing.sample(call, 1)
    count = max(1, min(GRAPH_CALLS, int(GRAPH_US / about)))
    graph = timing.Graph([*[call] * count, timing.captured])
    launches = graph.results[-1]
    if launches == 0:
        return 0.0, 0
    us = _median(graph) / count
    return us, None if launches is None else launches / count


def _median(launch):
    return timing.median(timing.sample(launch, SAMPLES))
