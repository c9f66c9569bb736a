"""The k most probable classes of each row and their log-probabilities, exact and in order.

log p = x - max x - log sum exp(x - max x), written for the k winners only. The search is
LightSeq's "hierarchical auto-regressive search" (Wang et al., 2021): the maxima of groups give a
lower bound for all winners (retrieve); the few numbers above it are ranked (re-rank).
Device code: ``rawkernels/sampling/topk_logprobs.cu``, ``rawkernels/common/logit_slice.cuh`` and
``topk.cuh``: each block searches a slice of a row, and the last block of a row merges the lists.
"""

import math

import numpy as np

from gpuattn import arrays
from gpuattn.arrays import LOWEST, check_floats, ctype, get_xp, wide
from gpuattn.autodiff.tape import op, raw
from gpuattn.cuda.kernels import kernel, kernel_refusal
from gpuattn.cuda.scratch import counters
from gpuattn.errors import problem
from gpuattn.impls import Call, Impl, Impls
from gpuattn.ops.arguments import integer, take_arrays
from gpuattn.ops.sampling.logit_slices import BLOCK, slices
from gpuattn.typing import Array

MAX_GRID = 65535  # blocks along the second and third axis
MAX_K, WIDE_BLOCK = 512, 1024  # winners; threads of a block for more than BLOCK / 2 of them
MAX_COLS = 1 << 30  # columns are counted in 32 bits
GROUP = 32  # columns of a group in the reference
UNGROUPED = 4096  # on NumPy, up to so many columns are searched without groups


@op
def topk_logprobs(
    logits: Array, k: int, *, vocab_size: int | None = None, impl: str | None = None
) -> Call[tuple[Array, Array]]:
    """Return (logprobs (..., k), indices (..., k)) of the k largest logits of each row.

    ``logits``: (..., C) float array or Tensor, any strides. ``k``: 0 to V. ``vocab_size``: V <= C;
    columns from V on are padding and never read. ``impl``: "raw-simt", "reference", or None for
    the first that accepts. Log-probabilities are natural, in float32 (float64 of float64), and
    normalised over the V columns; indices are int32. There is no gradient.

    Rows are sorted by logit, largest first; equal ones (-0 and +0 are equal) by index, lowest
    first. NaN counts as larger than +inf, and a row that holds either has NaN for all its
    log-probabilities. A row of -inf alone gives -inf. Raises TypeError for dtypes other than
    float32, float16, bfloat16 and float64, ValueError for k or vocab_size out of range.
    """
    (logits,) = take_arrays("topk_logprobs", {"logits": logits}, {}).values()
    x = raw(logits)
    check_floats("topk_logprobs", logits=x)
    if x.ndim == 0:
        raise ValueError(problem("topk_logprobs", "logits.shape", x.shape, "at least one axis"))
    vocab_size = checked_vocab_size("topk_logprobs", vocab_size, x.shape[-1])
    k = integer("topk_logprobs", "k", k, f"0 to {vocab_size}, the vocabulary", 0, vocab_size)
    return Call(IMPLS, (logits,), impl, k=k, vocab_size=vocab_size)


def checked_vocab_size(function: str, vocab_size: int | None, cols: int) -> int:
    """Return the number of columns that are not padding; None means all of ``cols``."""
    if vocab_size is None:
        return cols
    accepted = f"1 to {cols}, the columns of logits"
    return integer(function, "vocab_size", vocab_size, accepted, 1, cols)


def checked_banned(function: str, banned: Array | None, vocab_size: int) -> None:
    """Raise unless ``banned`` is None or a bool array (V,)."""
    if banned is not None and banned.dtype != np.bool_:
        raise TypeError(problem(function, "banned.dtype", banned.dtype, "bool"))
    if banned is not None and banned.shape != (vocab_size,):
        raise ValueError(problem(function, "banned.shape", banned.shape, f"({vocab_size},)"))


# ---- reference: NumPy or CuPy -------------------------------------------------------------------


def _forward_reference(logits, *, needs, k, vocab_size):
    shape, dtype = (*logits.shape[:-1], k), wide(logits.dtype)
    if math.prod(shape) == 0:
        return (arrays.empty(logits, shape, dtype), arrays.empty(logits, shape, np.int32)), None
    xp = get_xp(logits)
    x = strided_rows(logits)[0][:, :vocab_size].astype(dtype, copy=False)
    indices = largest(x, k)
    peak, log_total = log_sum(x)
    logprobs = x[xp.arange(len(x))[:, None], indices]
    logprobs -= peak
    logprobs -= log_total
    return (logprobs.reshape(shape), indices.astype(np.int32).reshape(shape)), None


def strided_rows(logits: Array) -> tuple[Array, int]:
    """Return (matrix with contiguous rows, elements from one to the next), copied if need be."""
    rows = logits.reshape(math.prod(logits.shape[:-1]), logits.shape[-1])
    if rows.shape[1] > 1 and rows.strides[1] != rows.itemsize:
        rows = get_xp(rows).ascontiguousarray(rows)
    return rows, rows.strides[0] // rows.itemsize


def log_sum(x: Array) -> tuple[Array, Array]:
    """Return (peak, log sum exp(x - peak)) of the rows of (rows, cols), each (rows, 1)."""
    xp = get_xp(x)
    # the bound keeps -inf - (-inf), a NaN, out of rows of -inf alone
    peak = xp.maximum(x.max(-1, keepdims=True), LOWEST[x.dtype])
    shifted = x - peak
    total = xp.exp(shifted, out=shifted).sum(-1, keepdims=True)
    total = xp.maximum(total, 1)  # 0 in rows of -inf alone, else at least exp(0)
    return peak, xp.log(total, out=total)


def largest(x: Array, k: int) -> Array:
    """Return the columns (rows, k) of the k largest of each row, ordered as by ``topk_logprobs``.

    The k groups with the largest maxima contain them all: these k maxima beat every element of any
    other group. Shapes do not depend on values, so nothing is read back from a GPU.
    """
    xp, (rows, cols) = get_xp(x), x.shape
    if xp is np and k == 1:
        return x.argmax(-1)[:, None]  # the first, and NaN before all
    if xp is np and x.dtype == np.float32:
        grouped = cols > max(UNGROUPED, 8 * k * GROUP)
        return _largest_by_keys(x, k) if grouped else in_order(x, k)
    if cols <= 2 * k * GROUP:
        return in_order(x, k)
    groups = cols // GROUP
    grouped = x[:, : groups * GROUP].reshape(rows, groups, GROUP)
    retrieved = xp.sort(in_order(grouped.max(-1), k), -1)
    candidates = (retrieved[:, :, None] * GROUP + xp.arange(GROUP)).reshape(rows, k * GROUP)
    rest = xp.broadcast_to(xp.arange(groups * GROUP, cols), (rows, cols - groups * GROUP))
    candidates = xp.concatenate([candidates, rest], axis=1)
    winners = in_order(xp.take_along_axis(x, candidates, -1), k)
    return xp.take_along_axis(candidates, winners, -1)


def in_order(x: Array, k: int) -> Array:
    """Return the columns of the k largest, sorted; of equal ones the first, and NaN before all."""
    xp, cols = get_xp(x), x.shape[1]
    if xp is np and x.dtype == np.float32:
        return _columns_by_keys(x, np.arange(cols - 1, -1, -1), k, cols)
    backwards = xp.argsort(x[:, ::-1], -1, kind="stable")[:, ::-1]
    return cols - 1 - backwards[:, :k]


def _columns_by_keys(x, following, k, cols):
    """Return the columns of the k largest of some numbers, float32 (rows, n), as ``in_order`` does.

    ``following``: how many of the ``cols`` columns come after that of each number. The numbers are
    sorted by int64 keys: the high half orders as the floats do, the low half is ``following``.
    NumPy sorts integers many times as fast as it finds the stable order of floats.
    """
    bits = (x + np.float32(0)).view(np.int32)  # of -0 those of +0
    bits ^= (bits >> 31) & 0x7FFFFFFF  # negative floats are ordered by magnitude
    nan = np.isnan(x)
    if nan.any():
        bits[nan] = 0x7FFFFFFF
    keys = bits.astype(np.int64)
    keys <<= 32
    keys |= following
    count = x.shape[1]
    if count > 8 * k:
        keys.partition(count - k, -1)
        keys = keys[:, count - k :]
    keys.sort(-1)
    return cols - 1 - (keys[:, : -k - 1 : -1] & 0xFFFFFFFF)


def _largest_by_keys(x, k):
    """As ``largest``. Group g is columns g, g + groups, ...: their maxima are vector operations.

    Where the k-th and the next maximum are equal, the group left out may hold the first column of
    that number; all columns of such rows are searched.
    """
    (rows, cols), row = x.shape, np.arange(len(x))[:, None]
    groups = cols // GROUP
    peaks = x[:, : groups * GROUP].reshape(rows, GROUP, groups).max(1)
    found = in_order(peaks, k + 1)
    last, following = peaks[row, found[:, k - 1 :]].T
    columns = found[:, None, :k] + groups * np.arange(GROUP)[:, None]
    rest = np.broadcast_to(np.arange(groups * GROUP, cols), (rows, cols - groups * GROUP))
    columns = np.concatenate([columns.reshape(rows, GROUP * k), rest], axis=1)
    winners = _columns_by_keys(x[row, columns], cols - 1 - columns, k, cols)
    tied = (last == following) | np.isnan(following)
    if tied.any():
        winners[tied] = in_order(x[tied], k)
    return winners


# ---- raw: rawkernels/sampling/topk_logprobs.cu --------------------------------------------------


def _refuse_raw(logits, *, k, vocab_size, **_):
    if reason := kernel_refusal(logits, "logits"):
        return reason
    if k > MAX_K:
        return f"k is {k}, the kernel takes at most {MAX_K}"
    if vocab_size > MAX_COLS:
        return f"the vocabulary is {vocab_size}, the kernel takes at most {MAX_COLS}"
    return None


def _forward_raw(logits, *, needs, k, vocab_size):
    shape, block = (*logits.shape[:-1], k), BLOCK if 2 * k <= BLOCK else WIDE_BLOCK
    logprobs = arrays.empty(logits, shape, np.float32)
    indices = arrays.empty(logits, shape, np.int32)
    if math.prod(shape) == 0:
        return (logprobs, indices), None
    rows, stride = strided_rows(logits)
    parts, size = slices(vocab_size, logits.itemsize)
    shared = None, None, None
    if parts > 1:
        lists = arrays.empty(logits, (len(rows), k, parts), np.uint64)
        normalisers = arrays.empty(logits, (len(rows), parts, 2), np.float32)
        shared = lists, normalisers, counters(len(rows))
    forward = kernel(
        "sampling/topk_logprobs.cu",
        "topk_logprobs_forward",
        scalar=ctype(logits.dtype),
        BLOCK=block,
    )
    across = min(len(rows), MAX_GRID)
    forward(
        (parts, across, -(-len(rows) // across)), (block,), rows, *shared, logprobs, indices,
        len(rows), stride, vocab_size, k, size, shared_bytes=16 * max(size + 1, block),
    )  # fmt: skip
    return (logprobs, indices), None


IMPLS = Impls(
    "topk_logprobs",
    Impl("raw-simt", _forward_raw, refuse=_refuse_raw),
    Impl("reference", _forward_reference),
)
