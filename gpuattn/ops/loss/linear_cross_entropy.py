"""The last linear layer and its cross entropy, ``cross_entropy(linear(x, weight), labels)``.

The logits of all rows are never in memory at once. For a chunk of rows: compute the logits and the
loss, overwrite the logits by their gradient, and multiply that into the gradients of ``x`` and
``weight``. Where the gradients cannot be computed in the forward pass, or are asked for a second
time, the chunks are computed again.
"""

from functools import partial
from typing import Any

import numpy as np

from gpuattn import arrays
from gpuattn.arrays import as_array, check_floats, check_together, get_xp, on_gpu, wide
from gpuattn.autodiff.tape import op, raw
from gpuattn.cuda.kernels import kernel, kernel_refusal
from gpuattn.gemm.matmul import matmul
from gpuattn.impls import Call, Impl, Impls
from gpuattn.ops.arguments import check_choice, check_matrix, integer, take_arrays
from gpuattn.ops.loss import cross_entropy as whole
from gpuattn.ops.loss import launch
from gpuattn.ops.scalars import product
from gpuattn.typing import Array

CHUNK_BYTES = {True: 512 << 20, False: 32 << 20}  # of logits, by whether they are on a GPU
BLOCK, WARP = 1024, 32  # of the kernels that count labels, and add losses
LEAST_ROWS = {True: 2048, False: 64}  # of a chunk: with fewer, matmuls are slow


@op
def linear_cross_entropy(
    x: Array,
    weight: Array,
    labels: Array,
    *,
    label_smoothing: float = 0.0,
    smoothing: str = "uniform",
    z_loss: float = 0.0,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    reduction: str = "mean",
    accuracy: bool = False,
    chunk_rows: int | None = None,
    dloss: Any = None,
    impl: str | None = None,
) -> Call[Any]:
    """Return the cross entropy of ``softmax(x @ weight.T)`` and ``labels`` (float32, in nats).

    ``x``: (..., in) float array or Tensor. ``weight``: (C, in), of the same dtype.
    ``reduction``: "mean" or "sum". ``chunk_rows``: rows of a chunk; by default their logits
    take about 512 MiB on a GPU, 32 MiB on a CPU. The gradient of ``weight`` is summed over
    chunks in float32.
    Other arguments are as in ``cross_entropy``. With ``dloss`` float16 computes the gradients in
    the forward pass; without, it computes the logits twice.

    Raises IndexError for a label out of range (on a GPU at the next ``to_cpu``), TypeError for
    other or mixed dtypes, ValueError for shapes or settings that do not fit.
    """
    name = "linear_cross_entropy"
    x, weight = take_arrays(name, {"x": x, "weight": weight}, {}).values()
    labels = as_array(raw(labels), name, "labels")
    rows, matrix = raw(x), raw(weight)
    check_together(name, x=rows, weight=matrix, labels=labels)
    check_floats(name, x=rows, weight=matrix)
    check_matrix(name, rows, matrix, shape="(C, in)")
    whole.check_labels(name, labels, rows, "x")
    check_choice(name, "reduction", reduction, "mean", "sum")
    if chunk_rows is not None:
        chunk_rows = integer(name, "chunk_rows", chunk_rows, "1 or more, or None", 1)
    target = whole.settings(
        name, labels, len(matrix), "rows of weight", vocab_size=vocab_size,
        label_smoothing=label_smoothing, smoothing=smoothing, z_loss=z_loss,
        ignore_index=ignore_index, accuracy=accuracy,
    )  # fmt: skip
    inputs = x, weight, labels, whole.scale_of_loss(name, rows, dloss)
    return Call(IMPLS, inputs, impl, reduction=reduction, chunk_rows=chunk_rows, **target)


def rows_at_a_time(rows: int, cols: int, itemsize: int, gpu: bool) -> int:
    """Return the rows of a chunk, whose logits fill about CHUNK_BYTES."""
    fit = CHUNK_BYTES[gpu] // (cols * itemsize) // 64 * 64
    return max(1, min(rows, max(fit, LEAST_ROWS[gpu])))


def _forward(inner, x, weight, labels, dloss=None, *, needs, reduction, **params):
    if not any(needs) and 0 < labels.size <= _chunk(x, weight, labels, **params):
        return _whole(inner, x, weight, labels, reduction=reduction, **params), None
    at_once = any(needs) and (dloss is not None or x.dtype != np.float16)
    sums = inner.sums(x, labels, dloss, params["ignore_index"], reduction == "mean")
    scale = sums.scale if at_once else None
    gradients = _run(inner, x, weight, labels, scale, needs, sums.add, **params)
    out = (sums.loss, sums.right) if params["accuracy"] else sums.loss
    if not any(needs):
        return out, None
    return out, (x, weight, labels, sums.share, dloss, [gradients] if at_once else ())


def _whole(inner, x, weight, labels, *, chunk_rows, **params):
    """Return the loss of all rows at once: two launches fewer than by sums over chunks."""
    rows = x.reshape(labels.size, x.shape[-1])
    logits = matmul(rows, weight, transpose_b=True)
    none = (False, False, False)
    out, _ = inner.forward(logits, labels.ravel(), needs=none, donate=True, **params)
    return out


def _chunk(x, weight, labels, *, chunk_rows, **_):
    """Return the most rows whose logits are there at a time."""
    return chunk_rows or rows_at_a_time(labels.size, len(weight), x.itemsize, on_gpu(x))


def _backward(inner, saved, dloss, dright=None, *, needs, into, reduction, **params):
    x, weight, labels, share, done_for, ready = saved
    if ready:
        dx, dweight = ready.pop()
        for gradient in (dx, dweight):
            if gradient is not None:
                inner.rescale(gradient, done_for, dloss)
    else:
        scale = product(dloss, share)
        dx, dweight = _run(
            inner, x, weight, labels, scale, needs, lambda *_: None, **params, kept=into[1] is None
        )  # fmt: skip
    if dweight is not None and into[1]:
        out, accumulate = into[1]
        if accumulate:
            dweight += out
        out[...] = dweight
        dweight = None
    elif dweight is not None:
        dweight = dweight.astype(weight.dtype, copy=False)
    return None if dx is None else dx.reshape(x.shape), dweight, None, None


def _run(
    inner, x, weight, labels, scale, needs, add, *, accuracy, chunk_rows, kept=False, **target
):  # fmt: skip
    """Return (dx, dweight) times ``scale``; None: no gradients.

    ``add(loss, right)``: called with the sum of losses of each chunk, and the count of its right
    rows or None. ``kept``: dweight is the result as it is, so that of a single chunk has the dtype
    of the weight at once.
    """
    rows, labels = x.reshape(labels.size, x.shape[-1]), labels.ravel()
    size = _chunk(x, weight, labels, chunk_rows=chunk_rows)
    dtype = x.dtype if kept and on_gpu(x) and 0 < len(rows) <= size else wide(x.dtype)
    buffer = arrays.empty(x, (min(size, len(rows)), len(weight)))
    wanted = scale is not None
    dx = arrays.empty(x, rows.shape) if wanted and needs[0] else None
    new = arrays.empty if len(rows) else arrays.zeros  # the first chunk overwrites it
    dweight = new(x, weight.shape, dtype) if wanted and needs[1] else None
    params = {**target, "accuracy": accuracy, "reduction": "sum", "donate": True}
    for start in range(0, len(rows), size):
        part = slice(start, min(start + size, len(rows)))
        logits = matmul(rows[part], weight, transpose_b=True, out=buffer[: part.stop - start])
        wants = (wanted, False, False)
        out, saved = inner.forward(logits, labels[part], scale, needs=wants, **params)
        add(*(out if accuracy else (out, None)))
        if not wanted:
            continue
        none = (None, None, None)
        dlogits, _, _ = inner.backward(saved, scale, needs=wants, into=none, **params)
        if dx is not None:
            matmul(dlogits, weight, out=dx[part])
        if dweight is not None:
            matmul(dlogits, rows[part], transpose_a=True, out=dweight, accumulate=start > 0)
    return dx, dweight


class _Sums:
    """Sums over chunks: ``loss`` () float, ``right`` () int32.

    ``share``: what the loss of a row is multiplied by. ``scale``: the share times ``dloss``.
    """

    def __init__(self, x, labels, dloss, ignore_index, mean):
        xp, dtype = get_xp(x), wide(x.dtype)
        self.share = xp.ones((), dtype)
        if mean:
            self.share = 1 / xp.maximum((labels != ignore_index).sum().astype(dtype), 1)
        self.scale = self.share if dloss is None else dloss * self.share
        self.sum, self.right = xp.zeros((), dtype), xp.zeros((), np.int32)

    def add(self, loss, right):
        self.sum = self.sum + loss
        if right is not None:
            self.right = self.right + right

    @property
    def loss(self):
        return get_xp(self.sum).asarray(self.sum * self.share)


class _RawSums:
    """The same by kernels, in ``words``: struct Sums of ``rawkernels/loss/``."""

    def __init__(self, x, labels, dloss, ignore_index, mean):
        labels = launch.checked_labels(labels)
        self.words = arrays.empty(x, 5, np.float32)
        self.share, self.scale, _, self.loss, right = (
            self.words[i : i + 1].reshape(()) for i in range(5)
        )
        self.right = right.view(np.int32)
        self.constants = {"label": "int" if labels.dtype == np.int32 else "long long"}
        self._run("share", BLOCK, labels, dloss, self.words, labels.size, ignore_index, mean)

    def add(self, loss, right):
        self._run("add", WARP, self.words, loss, right)

    def _run(self, verb, threads, *args):
        file = "loss/linear_cross_entropy.cu"
        kernel(file, f"linear_cross_entropy_{verb}", **self.constants)((1,), (threads,), *args)


class _Inner:
    """An implementation of cross_entropy, its function that rescales gradients in place, and the
    class of its sums."""

    def __init__(self, name, rescale, sums):
        impl = next(impl for impl in whole.IMPLS if impl.name == name)
        self.forward, self.backward = impl.forward, impl.backward
        self.rescale, self.sums = rescale, sums


def _rescale_reference(gradient, done_for, dloss):
    gradient[...] = gradient * (dloss if done_for is None else dloss / done_for)


def _refuse_raw(x, *_, **__):
    return kernel_refusal(x)


RAW = _Inner("raw-simt", launch.rescale, _RawSums)
REFERENCE = _Inner("reference", _rescale_reference, _Sums)
IMPLS = Impls(
    "linear_cross_entropy",
    Impl("raw-simt", partial(_forward, RAW), partial(_backward, RAW), _refuse_raw),
    Impl("reference", partial(_forward, REFERENCE), partial(_backward, REFERENCE)),
)
