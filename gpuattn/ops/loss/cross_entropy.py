"""Softmax cross entropy with label smoothing, ignored labels, a padded vocabulary, and z-loss.

With q the target probability of the label's class and u that of each other class,
loss = lse - (q - u) x[label] - u sum(x) + z lse^2, and its gradient is
(1 + 2 z lse) softmax(x) - u - (q - u) [label].
Both rules of smoothing have this form: "uniform" (Szegedy et al., "Rethinking the Inception
Architecture", 2016) spreads it over all classes, "others" over all but the label's. The z-loss
(Chowdhery et al., "PaLM", 2022) keeps lse near 0.
Device code: ``rawkernels/loss/cross_entropy.cu``, ``_short.cu`` and ``_cluster.cu``.
"""

import math
from typing import Any

import numpy as np

from gpuattn import arrays
from gpuattn.arrays import (
    as_array,
    check_floats,
    check_together,
    get_xp,
    wide,
)
from gpuattn.autodiff.tape import Box, op, raw
from gpuattn.cuda.kernels import kernel_refusal
from gpuattn.errors import GradientError, problem
from gpuattn.impls import Call, Impl, Impls
from gpuattn.ops.arguments import check_choice, check_flags, integer, number, take_arrays
from gpuattn.ops.loss import launch
from gpuattn.typing import Array


@op
def cross_entropy(
    logits: Array,
    labels: Array,
    *,
    label_smoothing: float = 0.0,
    smoothing: str = "uniform",
    z_loss: float = 0.0,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    reduction: str = "mean",
    accuracy: bool = False,
    donate: bool = False,
    dloss: Any = None,
    impl: str | None = None,
) -> Call[Any]:
    """Return the cross entropy of ``softmax(logits)`` and ``labels``, in nats and in float32.

    ``logits``: (..., C) float array or Tensor. ``labels``: integers (...,), or ``ignore_index``
    for a row to ignore. ``vocab_size``: V <= C; columns from V on are padding: not
    read, with gradient 0.
    ``label_smoothing``: 0 to 1, by the rule ``smoothing``: "uniform" gives each class 1 / V of it,
    "others" each class but the label's 1 / (V - 1). ``z_loss``: adds ``z_loss`` * lse^2.
    ``reduction``: "mean" over the rows not ignored (0 if there are none), "sum", or "none": (...,).
    ``accuracy``: also return how many rows are right, () int32: those whose label is the first of
    the largest logits. Ignored rows, and rows whose loss is NaN, are not.

    ``donate``: the memory of the logits may be overwritten, and finally holds their gradient;
    backward then works once. On a GPU "mean" and "sum" then compute the gradient in the forward
    pass, with one read and one write of the logits in all. ``dloss``: the gradient of the loss to
    do that for, a number or a () float32 array on the device (such as a loss scale); 1 by default,
    but float16 without ``dloss`` computes the gradient in backward, since it may need a scale.
    If backward gets another gradient, it rescales, which costs a pass over the logits.
    ``impl``: an implementation's name, or None for the fastest that accepts.

    float64 logits give a float64 loss. Raises IndexError for a label out of range: at once on
    NumPy, on a GPU at the next ``to_cpu`` or ``check_indices``. TypeError for other dtypes,
    ValueError for shapes or settings that do not fit.
    """
    (logits,) = take_arrays("cross_entropy", {"logits": logits}, {}).values()
    labels = as_array(raw(labels), "cross_entropy", "labels")
    x = raw(logits)
    check_together("cross_entropy", logits=x, labels=labels)
    check_floats("cross_entropy", logits=x)
    check_labels("cross_entropy", labels, x, "logits")
    check_choice("cross_entropy", "reduction", reduction, "mean", "sum", "none")
    check_flags("cross_entropy", donate=donate)
    target = settings(
        "cross_entropy", labels, x.shape[-1], "columns of logits", vocab_size=vocab_size,
        label_smoothing=label_smoothing, smoothing=smoothing, z_loss=z_loss,
        ignore_index=ignore_index, accuracy=accuracy,
    )  # fmt: skip
    inputs = logits, labels, scale_of_loss("cross_entropy", x, dloss)
    donated = (logits,) if donate and isinstance(logits, Box) else ()
    return Call(
        IMPLS, inputs, impl, donated=donated, reduction=reduction, donate=bool(donate), **target
    )


def settings(
    function: str, labels: Array, columns: int, of: str, *, vocab_size: int | None,
    label_smoothing: float, smoothing: str, z_loss: float, ignore_index: int, accuracy: bool,
) -> dict[str, Any]:  # fmt: skip
    """Check the arguments that cross entropies share; return the parameters they stand for.

    ``columns``: the classes of the logits, which are ``of``, in words.
    """
    if labels.dtype.kind not in "iu":
        raise TypeError(problem(function, "labels.dtype", labels.dtype, "an integer dtype"))
    vocab_size = columns if vocab_size is None else vocab_size
    accepted = f"1 to {columns}, the {of}"
    vocab_size = integer(function, "vocab_size", vocab_size, accepted, 1, columns)
    label_smoothing = number(
        function, "label_smoothing", label_smoothing, "0 to 1", lambda share: 0 <= share <= 1
    )
    check_choice(function, "smoothing", smoothing, "uniform", "others")
    accepted = "a finite number >= 0, such as 1e-4"
    z_loss = number(function, "z_loss", z_loss, accepted, lambda z: 0 <= z < math.inf)
    ignore_index = integer(function, "ignore_index", ignore_index, "an integer", -math.inf)
    check_flags(function, accuracy=accuracy)
    label_share, other_share = _shares(vocab_size, label_smoothing, smoothing)
    return {
        "vocab_size": vocab_size, "label_share": label_share, "other_share": other_share,
        "z_loss": z_loss, "ignore_index": ignore_index, "accuracy": bool(accuracy),
    }  # fmt: skip


def check_labels(function: str, labels: Array, x: Array, name: str) -> None:
    """Raise ValueError unless ``labels`` has one label for each row of ``x``, named ``name``."""
    if x.ndim == 0 or labels.shape != x.shape[:-1]:
        accepted = f"{name}.shape[:-1], for {name}.shape {x.shape}"
        raise ValueError(problem(function, "labels.shape", labels.shape, accepted))


def scale_of_loss(function: str, x: Array, dloss: Any) -> Array | None:
    """Return ``dloss`` as a () array on the device of ``x``, or None if it is None."""
    if dloss is None:
        return None
    if isinstance(dloss, int | float):
        if not dloss:
            raise ValueError(problem(function, "dloss", dloss, "a number other than 0"))
        return get_xp(x).full((), dloss, wide(x.dtype))
    dloss = as_array(raw(dloss), function, "dloss")
    check_together(function, logits=x, dloss=dloss)
    accepted = f"a number, or a () array of {wide(x.dtype)}"
    if dloss.dtype != wide(x.dtype):
        raise TypeError(problem(function, "dloss.dtype", dloss.dtype, accepted))
    if dloss.shape != ():
        raise ValueError(problem(function, "dloss.shape", dloss.shape, accepted))
    return dloss


def _shares(vocab_size, label_smoothing, smoothing):
    """Return (q, u): the target probabilities of the label's class and of each other class."""
    if smoothing == "uniform":
        u = label_smoothing / vocab_size
        return 1 - label_smoothing + u, u
    if vocab_size == 1:
        return 1.0, 0.0
    return 1 - label_smoothing, label_smoothing / (vocab_size - 1)


# ---- reference: NumPy or CuPy ----------------------------------------------------------------


def _forward_reference(
    logits, labels, dloss=None, *, needs, vocab_size, label_share, other_share, z_loss,
    ignore_index, reduction, accuracy, donate,
):  # fmt: skip
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

    right = counts & (x.argmax(-1) == index) if accuracy else None
    peak = x.max(-1, keepdims=True)
    e = xp.subtract(x, peak, out=x if donate or dtype != logits.dtype else None)
    at_label = e[xp.arange(len(e)), index]
    total = e.sum(-1) if other_share else None
    xp.exp(e, out=e)
    sums = e.sum(-1)
    loss = xp.log(sums)
    lse = loss + peak[:, 0]
    loss -= (label_share - other_share) * at_label
    if other_share:
        loss -= other_share * total
    if z_loss:
        loss += z_loss * lse * lse
    loss = xp.where(counts, loss, 0)

    weight = counts.astype(dtype)
    if reduction == "mean":
        weight /= xp.maximum(weight.sum(), 1)
    out = loss.reshape(shape) if reduction == "none" else xp.asarray((loss * weight).sum())
    if accuracy:
        out = out, xp.asarray((right & (loss == loss)).sum(dtype=np.int32))
    if not any(needs):
        return out, None
    kept = e, rows if donate else None
    kept = [kept] if donate else kept
    slope = (1 + 2 * z_loss * lse) / sums
    return out, (kept, slope, weight, index, counts, rows.dtype, logits.shape)


def _backward_reference(
    saved, dloss, dright=None, *, needs, into, vocab_size, label_share, other_share, donate, **_
):
    kept, slope, weight, index, counts, dtype, shape = saved
    e, rows = take(kept)
    xp = get_xp(e)
    if rows is None:
        rows = arrays.empty(e, (len(e), shape[-1]), dtype)
    rows[:, vocab_size:] = 0
    # if the logits were donated, `e` shares their memory
    inside = rows[:, :vocab_size] if rows.dtype == e.dtype else e if donate else None
    weight = weight * dloss.ravel()
    dx = xp.multiply(e, (weight * slope)[:, None], out=inside)
    if other_share:
        dx -= (weight * other_share)[:, None]
    dx[xp.arange(len(dx)), index] -= weight * (label_share - other_share)
    dx[~counts] = 0
    if rows.dtype != dx.dtype:
        rows[:, :vocab_size] = dx
    return rows.reshape(shape), None, None


def take(kept: Any) -> Any:
    """Return what the gradient is computed from. Donated logits, in a list, can be taken once."""
    if not isinstance(kept, list):
        return kept
    if not kept:
        raise GradientError(
            "cross_entropy: backward a second time, but with donate=True the first has "
            "overwritten the logits. Pass donate=False."
        )
    return kept.pop()


# ---- raw: rawkernels/loss/cross_entropy.cu ------------------------------------------------------


def _refuse_raw(logits, *_, **__):
    return kernel_refusal(logits, "logits")


def _forward_raw(
    logits, labels, dloss=None, *, needs, reduction, ignore_index, accuracy, donate, **goal
):
    rows = launch.as_rows(logits, labels.size)
    plan = launch.plan_of(rows, labels, ignore_index, reduction == "mean")
    if needs[0] or accuracy or len(rows) > launch.MOST_COUNTED:
        plan = launch.prepare(rows, plan, dloss, goal["vocab_size"])
    at_once = donate and needs[0] and reduction != "none"
    at_once = at_once and (dloss is not None or logits.dtype != np.float16)
    later = needs[0] and not at_once
    statistics = arrays.empty(rows, (len(rows), 2), np.float32) if later else None
    losses = launch.run_rows(rows, plan, statistics, at_once, goal)
    out = losses.reshape(labels.shape)
    if reduction != "none":
        launch.run_sum(rows, losses, plan)
        out = plan.loss
    if accuracy:
        out = out, plan.right
    kept = [rows] if donate else rows
    return out, ((kept, statistics, plan, dloss, logits.shape) if needs[0] else None)


def _backward_raw(
    saved, dloss, dright=None, *, needs, into, reduction, ignore_index, accuracy, donate, **goal
):
    kept, statistics, plan, done_for, shape = saved
    rows = take(kept)
    dloss = get_xp(rows).ascontiguousarray(dloss.astype(np.float32, copy=False))
    if statistics is None:
        launch.rescale(rows, done_for, dloss)
        return rows.reshape(shape), None, None
    out = rows if donate else arrays.empty(rows, rows.shape)
    launch.run_gradient(rows, out, statistics, plan, dloss, reduction == "none", goal)
    return out.reshape(shape), None, None


IMPLS = Impls(
    "cross_entropy",
    Impl("raw-simt", _forward_raw, _backward_raw, _refuse_raw),
    Impl("reference", _forward_reference, _backward_reference),
)
