"""The last linear layer and its cross entropy, ``cross_entropy(linear(x, weight), labels)``.

The logits of all rows never exist: a chunk of rows is multiplied, its loss taken, its logits
overwritten by their gradient, and that multiplied into the gradients of ``x`` and ``weight``.
Where these cannot be had in the forward pass, or are asked for again, the chunks run once more.
"""

import math
from functools import partial

import numpy as np

from gpuattn import arrays
from gpuattn.arrays import as_array, check_floats, check_together, get_xp, on_gpu, wide
from gpuattn.autodiff.tape import op, raw
from gpuattn.cuda.kernels import kernel_refusal
from gpuattn.errors import problem
from gpuattn.gemm.matmul import matmul
from gpuattn.impls import Call, Impl, Impls
from gpuattn.ops.arguments import check_choice, check_flags, integer, take_arrays
from gpuattn.ops.loss import cross_entropy as whole
from gpuattn.ops.loss import launch

CHUNK_BYTES = {True: 512 << 20, False: 32 << 20}  # of logits: on a GPU, in a processor's cache
LEAST_ROWS = {True: 2048, False: 64}  # with fewer, products are slow


@op
def linear_cross_entropy(
    x,
    weight,
    labels,
    *,
    label_smoothing=0.0,
    smoothing="uniform",
    z_loss=0.0,
    ignore_index=-100,
    vocab_size=None,
    reduction="mean",
    accuracy=False,
    chunk_rows=None,
    dloss=None,
    impl=None,
):
    """Return the cross entropy of ``softmax(x @ weight.T)`` and ``labels`` (float32, in nats).

    ``x``: (..., in) float array or Tensor. ``weight``: (C, in), of the same dtype.
    ``reduction``: "mean" or "sum". ``chunk_rows``: how many rows have logits at a time, about
    512 MB of them unless given. The gradient of ``weight`` is summed over chunks in float32.
    All else is as in ``cross_entropy``; ``dloss``, too: with it the gradients come out of the
    forward pass, where float16 otherwise computes the logits twice.

    Raises IndexError for a label out of range (on a GPU at the next ``to_cpu``), TypeError for
    other or mixed dtypes, ValueError for shapes or settings that do not fit.
    """
    name = "linear_cross_entropy"
    x, weight = take_arrays(name, {"x": x, "weight": weight}, {}).values()
    labels = as_array(raw(labels), name, "labels")
    rows, matrix = raw(x), raw(weight)
    check_together(name, x=rows, weight=matrix, labels=labels)
    check_floats(name, x=rows, weight=matrix)
    if matrix.ndim != 2:
        raise ValueError(problem(name, "weight.shape", matrix.shape, "(C, in)"))
    if rows.ndim == 0 or rows.shape[-1] != matrix.shape[1]:
        accepted = f"(..., {matrix.shape[1]}), for weight.shape {matrix.shape}"
        raise ValueError(problem(name, "x.shape", rows.shape, accepted))
    if labels.shape != rows.shape[:-1]:
        accepted = f"x.shape[:-1], for x.shape {rows.shape}"
        raise ValueError(problem(name, "labels.shape", labels.shape, accepted))
    vocab_size = len(matrix) if vocab_size is None else vocab_size
    accepted = f"1 to {len(matrix)}, the rows of weight"
    vocab_size = integer(name, "vocab_size", vocab_size, accepted, 1, len(matrix))
    check_choice(name, "reduction", reduction, "mean", "sum")
    if chunk_rows is not None:
        chunk_rows = integer(name, "chunk_rows", chunk_rows, "1 or more, or None", 1)
    check_flags(name, accuracy=accuracy)
    return Call(
        IMPLS,
        (x, weight, labels, whole.scale_of_loss(name, rows, dloss)),
        impl,
        **whole.settings(name, labels, vocab_size, label_smoothing, smoothing, z_loss),
        ignore_index=integer(name, "ignore_index", ignore_index, "an integer", -math.inf),
        reduction=reduction,
        accuracy=bool(accuracy),
        chunk_rows=chunk_rows,
    )


def rows_at_a_time(rows, cols, itemsize, gpu):
    """Return how many rows to take so that their logits fill about CHUNK_BYTES."""
    fit = CHUNK_BYTES[gpu] // (cols * itemsize) // 64 * 64
    return max(1, min(rows, max(fit, LEAST_ROWS[gpu])))


def _forward(inner, x, weight, labels, dloss=None, *, needs, reduction, **params):
    xp, dtype = get_xp(x), wide(x.dtype)
    share = xp.ones((), dtype)
    if reduction == "mean":
        count = (labels != params["ignore_index"]).sum().astype(dtype)
        share = 1 / xp.maximum(count, 1)
    at_once = any(needs) and (dloss is not None or x.dtype != np.float16)
    scale = (share if dloss is None else dloss * share) if at_once else None
    loss, right, gradients = _run(inner, x, weight, labels, scale, needs, **params)
    out = xp.asarray(loss * share)
    out = (out, right) if params["accuracy"] else out
    if not any(needs):
        return out, None
    return out, (x, weight, labels, share, dloss, [gradients] if at_once else [])


def _backward(inner, saved, dloss, dright=None, *, needs, into, reduction, **params):
    x, weight, labels, share, done_for, ready = saved
    if ready:
        dx, dweight = ready.pop()
        for gradient in (dx, dweight):
            if gradient is not None:
                inner.rescale(gradient, done_for, dloss)
    else:
        _, _, (dx, dweight) = _run(inner, x, weight, labels, dloss * share, needs, **params)
    if dweight is not None and into[1]:
        out, accumulate = into[1]
        if accumulate:
            dweight += out
        out[...] = dweight
        dweight = None
    elif dweight is not None:
        dweight = dweight.astype(weight.dtype, copy=False)
    return None if dx is None else dx.reshape(x.shape), dweight, None, None


def _run(inner, x, weight, labels, scale, needs, *, accuracy, chunk_rows, **target):
    """Return the sum of losses, the count of right rows, and (dx, dweight) times ``scale``.

    ``scale`` None: no gradients.
    """
    xp, dtype = get_xp(x), wide(x.dtype)
    rows, labels = x.reshape(labels.size, x.shape[-1]), labels.ravel()
    size = chunk_rows or rows_at_a_time(len(rows), len(weight), x.itemsize, on_gpu(x))
    buffer = arrays.empty(x, (min(size, len(rows)), len(weight)))
    wanted = scale is not None
    dx = arrays.empty(x, rows.shape) if wanted and needs[0] else None
    dweight = arrays.zeros(x, weight.shape, dtype) if wanted and needs[1] else None
    loss, right = xp.zeros((), dtype), xp.zeros((), np.int32)
    params = {**target, "accuracy": accuracy, "reduction": "sum", "donate": True}
    for start in range(0, len(rows), size):
        part = slice(start, min(start + size, len(rows)))
        logits = matmul(rows[part], weight, transpose_b=True, out=buffer[: part.stop - start])
        wants = (wanted, False, False)
        out, saved = inner.forward(logits, labels[part], scale, needs=wants, **params)
        loss = loss + (out[0] if accuracy else out)
        right = right + out[1] if accuracy else right
        if not wanted:
            continue
        none = (None, None, None)
        dlogits, _, _ = inner.backward(saved, scale, needs=wants, into=none, **params)
        if dx is not None:
            matmul(dlogits, weight, out=dx[part])
        if dweight is not None:
            matmul(dlogits, rows[part], transpose_a=True, out=dweight, accumulate=start > 0)
    return loss, right, (dx, dweight)


class _Inner:
    """One of cross_entropy's implementations, and how its gradients are multiplied in place."""

    def __init__(self, name, rescale):
        impl = next(impl for impl in whole.IMPLS if impl.name == name)
        self.forward, self.backward, self.rescale = impl.forward, impl.backward, rescale


def _rescale_reference(gradient, done_for, dloss):
    gradient[...] = gradient * (dloss if done_for is None else dloss / done_for)


def _refuse_raw(x, *_, **__):
    return kernel_refusal(x)


RAW = _Inner("raw-simt", launch.rescale)
REFERENCE = _Inner("reference", _rescale_reference)
IMPLS = Impls(
    "linear_cross_entropy",
    Impl("raw-simt", partial(_forward, RAW), partial(_backward, RAW), _refuse_raw),
    Impl("reference", partial(_forward, REFERENCE), partial(_backward, REFERENCE)),
)
