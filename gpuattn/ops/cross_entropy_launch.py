"""Launches of ``rawkernels/cross_entropy.cu`` and ``rawkernels/cross_entropy_cluster.cu``."""

from typing import Any, NamedTuple

import numpy as np

from gpuattn import arrays
from gpuattn.arrays import ctype, get_xp
from gpuattn.kernels import gpu, kernel

CLUSTERS = [
    (112 << 10, 1),
    (144 << 10, 2),
    (288 << 10, 4),
    (1 << 40, 8),
]  # (bytes of a row, blocks)
BLOCKS = [(24 << 10, 128), (1 << 40, 512)]  # (bytes of a row, threads)
SHARED = {
    "80": 160,
    "86": 96,
    "89": 96,
    "90": 224,
    "100": 224,
}  # KiB that a block may keep a row in
ONE_BLOCK = 1024  # threads of prepare and sum


class Plan(NamedTuple):
    """What the launches for one call share: arrays on the device."""

    targets: Any  # (rows,) int32: the label, -1 for a row that does not count
    summary: Any  # struct Summary of common/cross_entropy.cuh, as words

    @property
    def loss(self):
        return self.summary[:1].view(np.float32).reshape(())

    @property
    def right(self):
        return self.summary[3:].reshape(())


def as_rows(logits, count):
    """Return logits as (count, columns), each row by itself and contiguous: a copy if need be."""
    rows = logits.reshape(count, logits.shape[-1])
    apart = count < 2 or abs(rows.strides[0]) >= rows.shape[1] * rows.itemsize
    fits = apart and rows.strides[1] == rows.itemsize
    return rows if fits else get_xp(rows).array(rows, order="C")


def prepare(rows, labels, dloss, vocab_size, ignore_index, mean):
    """Return the Plan: labels checked, rows counted, what the gradient is multiplied by."""
    labels = labels.ravel()
    labels = labels if labels.dtype in (np.int32, np.int64) else labels.astype(np.int64)
    plan = Plan(arrays.empty(rows, labels.shape, np.int32), arrays.empty(rows, (4,), np.int32))
    word = "int" if labels.dtype == np.int32 else "long"
    _kernel(f"prepare_{word}", rows)(
        (1,), (ONE_BLOCK,), get_xp(rows).ascontiguousarray(labels), plan.targets, plan.summary,
        dloss, labels.size, vocab_size, ignore_index, mean,
        arrays.index_flag(rows, "cross_entropy: labels"),
    )  # fmt: skip
    return plan


def run_rows(rows, plan, statistics, with_gradient, goal):
    """Return the losses (rows,); the gradient overwrites ``rows`` where asked for.

    ``statistics``: None, or (rows, 2) for ``run_gradient``.
    """
    losses = arrays.empty(rows, rows.shape[:1], np.float32)
    vectors = -(-goal["vocab_size"] * rows.itemsize // 16)
    capability, _ = gpu(rows.device.id)
    cluster = _first(CLUSTERS, 16 * vectors) if int(capability) >= 90 else 1
    room = min(-(-vectors // cluster), SHARED[capability] << 6)
    if cluster == 1:
        block, launch = _block(rows), _kernel("rows", rows)
    else:
        constants, block = {"scalar": ctype(rows.dtype), "CLUSTER": cluster}, 512
        launch = kernel("cross_entropy_cluster.cu", "cross_entropy_rows_cluster", **constants)
    launch(
        (len(rows) * cluster,), (block,), rows, plan.targets, losses, statistics, plan.summary,
        _stride(rows), goal["vocab_size"], rows.shape[1], room, goal["label_share"],
        goal["other_share"], goal["z_loss"], with_gradient, shared_bytes=16 * room,
    )  # fmt: skip
    return losses


def run_sum(rows, losses, plan):
    """Write the sum of losses, or their mean where ``prepare`` was told so, into ``plan.loss``."""
    _kernel("sum", rows)((1,), (ONE_BLOCK,), losses, plan.summary, losses.size)


def run_gradient(rows, out, statistics, plan, dloss, each, goal):
    """Write the gradient into ``out``, for one float32 ``dloss`` or, with ``each``, one a row."""
    _kernel("gradient", rows)(
        (len(rows),), (_block(rows),), rows, out, plan.targets, statistics, plan.summary, dloss,
        each, _stride(rows), _stride(out), goal["vocab_size"], rows.shape[1],
        goal["label_share"], goal["other_share"], goal["z_loss"],
    )  # fmt: skip


def rescale(x, done_for, dloss):
    """Multiply the rows ``x`` by dloss / done_for in place: nothing is read where that is 1."""
    _kernel("rescale", x)((len(x),), (_block(x),), x, done_for, dloss, _stride(x), x.shape[1])


def _kernel(verb, rows):
    constants = {"scalar": ctype(rows.dtype), "BLOCK": _block(rows)}
    return kernel("cross_entropy.cu", f"cross_entropy_{verb}", **constants)


def _block(rows):
    return _first(BLOCKS, rows.shape[1] * rows.itemsize)


def _first(table, size):
    return next(value for limit, value in table if size <= limit)


def _stride(rows):
    return rows.strides[0] // rows.itemsize
