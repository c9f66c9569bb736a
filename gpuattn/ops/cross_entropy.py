"""Softmax cross entropy with label smoothing, ignored labels and a padded vocabulary.

With q the share of the label's class and u that of each other one,
loss = lse - (q - u) x[label] - u sum(x), and its gradient is softmax(x) - u - (q - u) [label].
Both rules of smoothing fit: "uniform" (Szegedy et al., "Rethinking the Inception Architecture",
2016) spreads it over all classes, "others" over all but the label's.
Device code: ``rawkernels/cross_entropy.cu``.
"""

import numpy as np

from gpuattn import arrays
from gpuattn.arrays import (
    as_array,
    check_floats,
    check_together,
    ctype,
    get_xp,
    wide,
)
from gpuattn.autodiff import tape
from gpuattn.errors import GradientError, problem
from gpuattn.impls import Impl, Impls
from gpuattn.kernels import kernel, kernel_refusal

BLOCK = 256
REDUCTIONS = ("mean", "sum", "none")


def cross_entropy(
    logits,
    labels,
    *,
    label_smoothing=0.0,
    smoothing="uniform",
    ignore_index=-100,
    vocab_size=None,
    reduction="mean",
    donate=False,
    impl=None,
):
    """Return the cross entropy of ``softmax(logits)`` and ``labels``, in nats and in float32.

    ``logits``: (..., C) float array or Tensor. ``labels``: integers (...,), or ``ignore_index``
    for a row that counts for nothing. ``vocab_size``: V <= C; columns from V on are padding, never
    read, with gradient zero.
    ``label_smoothing``: 0 to 1, by the rule ``smoothing``: "uniform" gives each class 1 / V of it,
    "others" each class but the label's 1 / (V - 1).
    ``reduction``: "mean" over the rows that count (0 if none does), "sum", or "none" for (...,).
    ``donate``: the logits' memory may be overwritten, in the end by their gradient; backward then
    works once. ``impl``: an implementation's name, or None for the fastest that accepts.

    float64 logits give a float64 loss. Raises IndexError for a label out of range: at once on
    NumPy, on a GPU at the next ``to_cpu`` or ``check_indices``. TypeError for other dtypes,
    ValueError for shapes or settings that do not fit.
    """
    logits = logits if isinstance(logits, tape.Box) else as_array(logits, "cross_entropy", "logits")
    labels = as_array(tape.raw(labels), "cross_entropy", "labels")
    x = tape.raw(logits)
    check_together("cross_entropy", logits=x, labels=labels)
    check_floats("cross_entropy", logits=x)
    if labels.dtype.kind not in "iu":
        raise TypeError(problem("cross_entropy", "labels.dtype", labels.dtype, "an integer dtype"))
    if x.ndim == 0 or labels.shape != x.shape[:-1]:
        accepted = f"logits.shape[:-1], for logits.shape {x.shape}"
        raise ValueError(problem("cross_entropy", "labels.shape", labels.shape, accepted))
    vocab_size = x.shape[-1] if vocab_size is None else vocab_size
    if not 1 <= vocab_size <= x.shape[-1]:
        accepted = f"1 to {x.shape[-1]}, the columns of logits"
        raise ValueError(problem("cross_entropy", "vocab_size", vocab_size, accepted))
    if not 0 <= label_smoothing <= 1:
        raise ValueError(problem("cross_entropy", "label_smoothing", label_smoothing, "0 to 1"))
    if smoothing not in ("uniform", "others"):
        raise ValueError(problem("cross_entropy", "smoothing", repr(smoothing), "uniform, others"))
    if reduction not in REDUCTIONS:
        accepted = ", ".join(REDUCTIONS)
        raise ValueError(problem("cross_entropy", "reduction", repr(reduction), accepted))
    label_share, other_share = _shares(vocab_size, label_smoothing, smoothing)
    loss = tape.apply(
        IMPLS,
        (logits, labels),
        impl,
        vocab_size=int(vocab_size),
        label_share=label_share,
        other_share=other_share,
        ignore_index=int(ignore_index),
        reduction=reduction,
        donate=bool(donate),
    )
    if donate and isinstance(logits, tape.Box):
        logits.version[0] += 1  # whoever saved them for a gradient will notice
    return loss


def _shares(vocab_size, label_smoothing, smoothing):
    """Return (q, u): what the target distribution gives the label's class and each other one."""
    if smoothing == "uniform":
        u = label_smoothing / vocab_size
        return 1 - label_smoothing + u, u
    if vocab_size == 1:
        return 1.0, 0.0
    return 1 - label_smoothing, label_smoothing / (vocab_size - 1)


# ---- reference: NumPy or CuPy ----------------------------------------------------------------


def _forward_reference(
    logits, labels, *, needs, vocab_size, label_share, other_share, ignore_index, reduction, donate
):
    xp, dtype = get_xp(logits), wide(logits.dtype)
    if donate and xp is np and not logits.flags.writeable:
        raise ValueError(
            "cross_entropy: donate=True, but the logits are read-only, or kept by the op that made "
            "them for its own gradient. Pass donate=False."
        )
    labels, shape = labels.ravel(), labels.shape
    counts = labels != ignore_index
    index = arrays.checked_index(xp.where(counts, labels, 0), vocab_size, "cross_entropy: labels")
    rows = logits.reshape(labels.size, logits.shape[-1])
    x = rows[:, :vocab_size].astype(dtype, copy=False)

    peak = x.max(-1, keepdims=True)
    e = xp.subtract(x, peak, out=x if donate or dtype != logits.dtype else None)
    at_label = e[xp.arange(len(e)), index]
    total = e.sum(-1) if other_share else None
    xp.exp(e, out=e)
    sums = e.sum(-1)
    loss = xp.log(sums)
    loss -= (label_share - other_share) * at_label
    if other_share:
        loss -= other_share * total
    loss = xp.where(counts, loss, 0)

    weight = counts.astype(dtype)
    if reduction == "mean":
        weight /= xp.maximum(weight.sum(), 1)
    out = loss.reshape(shape) if reduction == "none" else xp.asarray((loss * weight).sum())
    if not any(needs):
        return out, None
    kept = e, rows if donate else None
    return out, ([kept] if donate else kept, sums, weight, index, counts, rows.dtype, logits.shape)


def _backward_reference(
    saved, dloss, *, needs, into, vocab_size, label_share, other_share, donate, **_
):
    kept, sums, weight, index, counts, dtype, shape = saved
    e, rows = _take(kept)
    xp = get_xp(e)
    if rows is None:
        rows = arrays.empty(e, (len(e), shape[-1]), dtype)
    rows[:, vocab_size:] = 0
    # of donated logits, `e` is the same memory
    inside = rows[:, :vocab_size] if rows.dtype == e.dtype else e if donate else None
    weight = weight * dloss.ravel()
    dx = xp.multiply(e, (weight / sums)[:, None], out=inside)
    if other_share:
        dx -= (weight * other_share)[:, None]
    dx[xp.arange(len(dx)), index] -= weight * (label_share - other_share)
    dx[~counts] = 0
    if rows.dtype != dx.dtype:
        rows[:, :vocab_size] = dx
    return rows.reshape(shape), None


def _take(kept):
    """Return what the gradient is computed from; of donated logits (in a list) it is there once."""
    if not isinstance(kept, list):
        return kept
    if not kept:
        raise GradientError(
            "cross_entropy: backward a second time, but with donate=True the first has "
            "overwritten the logits. Pass donate=False."
        )
    return kept.pop()


# ---- raw: rawkernels/cross_entropy.cu --------------------------------------------------------


def _refuse_raw(logits, *_, **__):
    return kernel_refusal(logits, "logits")


def _forward_raw(
    logits, labels, *, needs, vocab_size, label_share, other_share, ignore_index, reduction, donate
):
    rows = logits.reshape(labels.size, logits.shape[-1])
    index = labels if labels.dtype in (np.int32, np.int64) else labels.astype(np.int64)
    index = get_xp(logits).ascontiguousarray(index)
    loss = arrays.empty(logits, labels.shape, np.float32)
    statistics = arrays.empty(logits, (labels.size, 2), np.float32)
    flag = arrays.index_flag(logits, "cross_entropy: labels")
    forward, rows = _kernel("forward", rows, index)
    forward(
        (labels.size,), (BLOCK,), rows, index, loss, statistics, _row_stride(rows), vocab_size,
        label_share, other_share, ignore_index, flag,
    )  # fmt: skip
    divisor, out = None, loss
    if reduction != "none":
        divisor, out = (arrays.empty(logits, (), np.float32) for _ in range(2))
        reduce, _ = _kernel("reduce", rows, index)
        mean = reduction == "mean"
        reduce((1,), (BLOCK,), loss, index, divisor, out, labels.size, ignore_index, mean)
    kept = [logits] if donate else logits
    return out, ((kept, index, statistics, divisor) if any(needs) else None)


def _backward_raw(
    saved, dloss, *, needs, into, vocab_size, label_share, other_share, ignore_index, donate, **_
):
    kept, index, statistics, divisor = saved
    logits = _take(kept)
    rows = logits.reshape(index.size, logits.shape[-1])
    backward, rows = _kernel("backward", rows, index)
    out = rows if donate else arrays.empty(rows, rows.shape)
    dloss = get_xp(rows).ascontiguousarray(dloss.astype(np.float32, copy=False))
    backward(
        (index.size,), (BLOCK,), rows, index, statistics, dloss, divisor, out, _row_stride(rows),
        _row_stride(out), vocab_size, rows.shape[1], label_share, other_share, ignore_index,
    )  # fmt: skip
    return out.reshape(logits.shape), None


def _kernel(verb, rows, index):
    """Return the kernel, and the rows with their columns next to each other: a copy if need be."""
    label = "int" if index.dtype == np.int32 else "long long"
    constants = {"scalar": ctype(rows.dtype), "label": label, "BLOCK": BLOCK}
    if rows.strides[1] != rows.itemsize:
        rows = get_xp(rows).ascontiguousarray(rows)
    return kernel("cross_entropy.cu", f"cross_entropy_{verb}", **constants), rows


def _row_stride(rows):
    return rows.strides[0] // rows.itemsize


IMPLS = Impls(
    "cross_entropy",
    Impl("raw-simt", _forward_raw, _backward_raw, _refuse_raw),
    Impl("reference", _forward_reference, _backward_reference),
)
