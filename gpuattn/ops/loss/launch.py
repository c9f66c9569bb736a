"""Launches of ``rawkernels/loss/cross_entropy.cu``, ``_short.cu`` and ``_cluster.cu``."""

from typing import Any, NamedTuple

import numpy as np

from gpuattn import arrays
from gpuattn.arrays import ctype, get_xp
from gpuattn.cuda.gpu import gpu
from gpuattn.cuda.kernels import kernel
from gpuattn.cuda.sources import serves
from gpuattn.typing import Array

# (largest bytes of a row, its plan), in ascending order
SHORT = [  # threads that share a row, 16-byte vectors per thread
    (1 << 8, (8, 2)), (1 << 9, (16, 2)), (1 << 10, (32, 2)), (2 << 10, (32, 4)), (4 << 10, (32, 8)),
]  # fmt: skip
WHOLE_WARPS = [plan for plan in SHORT if plan[1][0] == 32]  # these also take unaligned rows
LONG = [  # blocks that share a row, threads per block
    (10 << 10, (1, 32)), (48 << 10, (1, 128)), (112 << 10, (1, 512)),
    (208 << 10, (2, 512)), (288 << 10, (6, 192)), (1 << 40, (8, 512)),
]  # fmt: skip
RESERVED_SHARED = 3 << 10  # bytes of shared memory of a block that are not for its row
WARPS = 4  # per block, for short rows
PREPARE = 32, 256  # blocks, and threads per block, of the kernel "prepare"
SUM = 1024  # threads of the one block of the kernel "sum"
MOST_COUNTED = 16 * SUM  # rows that this block counts about as fast as "prepare" does


class Labels(NamedTuple):
    """What kernels read of labels. ``values``: (rows,) int64 where ``wide``, else int32."""

    values: Any
    wide: bool
    ignore_index: int
    flag: Any  # of a label out of range


class Plan(NamedTuple):
    """What the launches of one call share. ``checked``: labels are targets, which are counted."""

    labels: Labels
    summary: Any  # struct Summary of loss/cross_entropy.cuh, as words
    mean: bool
    checked: bool = False

    @property
    def loss(self) -> Array:
        return self.summary[:1].view(np.float32).reshape(())

    @property
    def right(self) -> Array:
        return self.summary[2:3].reshape(())


def as_rows(logits: Array, count: int) -> Array:
    """Return logits as (count, columns), copied unless rows are contiguous and do not overlap."""
    rows = logits.reshape(count, logits.shape[-1])
    apart = count < 2 or abs(rows.strides[0]) >= rows.shape[1] * rows.itemsize
    fits = apart and rows.strides[1] == rows.itemsize
    return rows if fits else get_xp(rows).array(rows, order="C")


def checked_labels(labels: Array) -> Array:
    """Return labels as kernels take them: (rows,), contiguous, int32 or int64."""
    labels = labels.ravel()
    labels = labels if labels.dtype in (np.int32, np.int64) else labels.astype(np.int64)
    return get_xp(labels).ascontiguousarray(labels)


def plan_of(rows: Array, labels: Array, ignore_index: int, mean: bool) -> Plan:
    """Return the Plan of a call that only wants the loss."""
    labels = checked_labels(labels)
    flag = arrays.index_flag(rows, "cross_entropy: labels")
    given = Labels(labels, labels.dtype != np.int32, ignore_index, flag)
    return Plan(given, arrays.empty(rows, (3 + PREPARE[0],), np.int32), mean)


def prepare(rows: Array, plan: Plan, dloss: Array | None, vocab_size: int) -> Plan:
    """Return the Plan of a call with a gradient or a count of right rows.

    Its labels are int32 targets, -1 for an ignored row; its summary also holds the scale of the
    gradient.
    """
    blocks, threads = PREPARE
    targets = arrays.empty(rows, plan.labels.values.shape, np.int32)
    _kernel("prepare", rows)(
        (blocks,), (threads,), *plan.labels, targets, plan.summary, dloss, targets.size,
        vocab_size, plan.mean,
    )  # fmt: skip
    return plan._replace(labels=Labels(targets, False, -1, None), checked=True)


def run_rows(
    rows: Array, plan: Plan, statistics: Array | None, with_gradient: bool, goal: dict[str, Any]
) -> Array:
    """Return the losses (rows,); with ``with_gradient`` the gradient overwrites ``rows``.

    ``statistics``: None, or (rows, 2) for ``run_gradient``.
    """
    losses = arrays.empty(rows, rows.shape[:1], np.float32)
    vocab, columns = goal["vocab_size"], rows.shape[1]
    head = rows, *plan.labels, losses, statistics, plan.summary, _stride(rows)
    tail = goal["label_share"], goal["other_share"], goal["z_loss"], with_gradient
    size = vocab * rows.itemsize
    constants: dict[str, Any] = {"scalar": ctype(rows.dtype), "CHECKED": plan.checked}
    if size <= SHORT[-1][0]:
        aligned = (rows.data.ptr | rows.strides[0]) % 16 == 0
        lanes, vectors = _first(SHORT if aligned else WHOLE_WARPS, size)
        constants |= {"LANES": lanes, "VECTORS": vectors}
        launch = kernel("loss/cross_entropy_short.cu", "cross_entropy_rows_short", **constants)
        grid, block = -(-len(rows) * lanes // (32 * WARPS)), 32 * WARPS
        launch((grid,), (block,), *head, len(rows), vocab, columns, *tail)
        return losses
    device = gpu(rows.device.id)
    cluster, block = _first(LONG, size)
    if cluster > 1 and not serves("loss/cross_entropy_cluster.cu", device.capability):
        cluster, block = 1, 512
    room = min(-(-size // (16 * cluster)), (device.shared_bytes - RESERVED_SHARED) // 16)
    constants["BLOCK"] = block
    if cluster == 1:
        launch = kernel("loss/cross_entropy.cu", "cross_entropy_rows", **constants)
    else:
        constants["CLUSTER"] = cluster
        launch = kernel("loss/cross_entropy_cluster.cu", "cross_entropy_rows_cluster", **constants)
    grid = len(rows) * cluster
    launch((grid,), (block,), *head, vocab, columns, room, *tail, shared_bytes=16 * room)
    return losses


def run_sum(rows: Array, losses: Array, plan: Plan) -> None:
    """Write the sum of losses, or with ``plan.mean`` their mean, to ``plan.loss``."""
    labels, *how = plan.labels
    _kernel("sum", rows, plan.checked)(
        (1,), (SUM,), losses, plan.summary, None if plan.checked else labels, *how, losses.size,
        plan.mean,
    )  # fmt: skip


def run_gradient(
    rows: Array,
    out: Array,
    statistics: Array | None,
    plan: Plan,
    dloss: Array,
    each: bool,
    goal: dict[str, Any],
) -> None:
    """Write the gradient to ``out``, for one float32 ``dloss`` or, with ``each``, one per row."""
    _kernel("gradient", rows)(
        (len(rows),), (_block(rows),), rows, out, plan.labels.values, statistics, plan.summary,
        dloss, each, _stride(rows), _stride(out), goal["vocab_size"], rows.shape[1],
        goal["label_share"], goal["other_share"], goal["z_loss"],
    )  # fmt: skip


def rescale(x: Array, done_for: Array | None, dloss: Array) -> None:
    """Multiply the rows ``x`` by dloss / done_for in place; if that is 1, nothing is read."""
    grid = (min(len(x), 1024),)
    _kernel("rescale", x)(grid, (_block(x),), x, done_for, dloss, _stride(x), len(x), x.shape[1])


def _kernel(verb, rows, checked=True):
    constants = {"scalar": ctype(rows.dtype), "BLOCK": _block(rows), "CHECKED": checked}
    return kernel("loss/cross_entropy.cu", f"cross_entropy_{verb}", **constants)


def _block(rows):
    return 128 if rows.shape[1] * rows.itemsize <= 24 << 10 else 512


def _first(table, size):
    return next(value for limit, value in table if size <= limit)


def _stride(rows):
    return rows.strides[0] // rows.itemsize
