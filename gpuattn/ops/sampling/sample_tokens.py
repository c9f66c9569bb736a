"""Sampling a token from each row of logits, with temperature, top-k, top-p and min-p.

Top-p: Holtzman et al., "The curious case of neural text degeneration" (2020). Weights are integers,
exp((x - max x) / T) in units of 2**-40: their sums do not depend on the order of additions, so a
sampled token does not either. The cumulative sum runs in the order of tokens: nothing is sorted.
Device code: ``rawkernels/sampling/sample_tokens.cu``, for long rows ``sample_tokens_cluster.cu``.
"""

import math
import operator
from typing import Any

import numpy as np

from gpuattn import arrays, rng
from gpuattn.arrays import as_array, check_floats, check_together, ctype, get_xp, wide
from gpuattn.autodiff.tape import op, raw
from gpuattn.cuda.gpu import gpu
from gpuattn.cuda.kernels import kernel, kernel_refusal
from gpuattn.cuda.sources import serves
from gpuattn.errors import problem
from gpuattn.impls import Call, Impl, Impls
from gpuattn.ops.arguments import integer, number, seed_key
from gpuattn.ops.sampling.topk_logprobs import (
    checked_banned,
    checked_vocab_size,
    in_order,
    largest,
    log_sum,
    strided_rows,
)
from gpuattn.typing import Array

NARROW, NARROW_BLOCK, BLOCK = 2048, 128, 1024  # columns of a narrow row; threads for it, and else
SHARED_BYTES = 32768  # for top-k and top-p
CLUSTER, CLUSTER_BLOCK = 8, 256  # blocks of a long row, and their threads
CHOSEN = 64  # candidates that a block sends to the first one
# bytes of shared memory that a block has besides its part of a row
EXCHANGE, STATIC = 20 * CLUSTER_BLOCK + (8 * CHOSEN + 36) * CLUSTER + 32, 4 << 10
MAX_COLS = 1 << 22  # so that the sum of the weights fits 64 bits
ONE = 1 << 40  # the weight of the most probable token
COARSE = 9  # bits that weights are shifted right by where they are summed for top-p


@op
def sample_tokens(
    logits: Array,
    *,
    seed: Any = None,
    numbers: Array | None = None,
    keys: Array | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
    banned: Array | None = None,
    vocab_size: int | None = None,
    impl: str | None = None,
) -> Call[tuple[Array, Array]]:
    """Return (tokens (rows,) int32, log-probabilities (rows,)): a sampled token for each row.

    ``logits``: (rows, C) float array, any strides. ``seed``: int or ``rng.Key``; None draws one.
    Row r uses the first word of Philox counter (numbers[r], 0, stream, step), on every backend and
    independent of the other rows. ``numbers``: int32 (rows,), 0 or more; None: 0, 1, 2... With a
    number of its own a row draws the same wherever it is in a batch. ``keys``, instead of ``seed``:
    contiguous uint32 (rows, 4), for each row the seed (low and high word), stream and step, read on
    the device: a CUDA graph draws anew when they change. ``temperature``: > 0; logits
    are divided by it. Then, in this order: ``top_k``: only the k most probable tokens are kept;
    None or more than V: all. ``top_p``: 0 < p <= 1; of those only the most probable ones that
    together reach p. ``min_p``: 0 to 1; of those only tokens with at least p times the probability
    of the most probable one. Of equally probable tokens the lowest are kept.
    ``banned``: bool (V,), True for tokens whose logit is taken as -inf. ``vocab_size``: V <= C;
    columns from V on are padding and never read. ``impl``: "raw-simt", "reference", or None.

    The log-probabilities are those of the logits at temperature 1 among all tokens not banned, in
    float32 (float64 of float64). A row with NaN or +inf, or of -inf alone, gives its first token by
    ``topk_logprobs``, with NaN or -inf. There is no gradient. Raises ValueError for
    settings out of range, TypeError for dtypes.
    """
    logits = as_array(raw(logits), "sample_tokens", "logits")
    banned = None if banned is None else as_array(banned, "sample_tokens", "banned")
    numbers = None if numbers is None else as_array(numbers, "sample_tokens", "numbers")
    keys = None if keys is None else as_array(keys, "sample_tokens", "keys")
    check_together("sample_tokens", logits=logits, banned=banned, numbers=numbers, keys=keys)
    check_floats("sample_tokens", logits=logits)
    if logits.ndim != 2:
        raise ValueError(problem("sample_tokens", "logits.shape", logits.shape, "(rows, C)"))
    vocab_size = checked_vocab_size("sample_tokens", vocab_size, logits.shape[1])
    if vocab_size == 0:
        raise ValueError(problem("sample_tokens", "the vocabulary", 0, "1 or more"))
    checked_banned("sample_tokens", banned, vocab_size)
    if numbers is not None and numbers.dtype != np.int32:
        raise TypeError(problem("sample_tokens", "numbers.dtype", numbers.dtype, "int32"))
    if numbers is not None and numbers.shape != logits.shape[:1]:
        accepted = f"({len(logits)},), one for each row"
        raise ValueError(problem("sample_tokens", "numbers.shape", numbers.shape, accepted))
    if keys is not None:
        _check_keys(keys, len(logits), seed)
    check_settings("sample_tokens", temperature, top_k, top_p, min_p)
    key = seed_key("sample_tokens", seed) if keys is None else None
    inputs = logits, banned, numbers, keys
    return Call(
        IMPLS, inputs, impl, vocab_size=vocab_size, temperature=float(temperature),
        top_k=0 if top_k is None or top_k >= vocab_size else operator.index(top_k),
        top_p=0 if top_p == 1 else min(max(round(top_p * 2**32), 1), 2**32 - 1),
        min_p=round(min_p * ONE), key=key,
    )  # fmt: skip


def _check_keys(keys, rows, seed):
    if keys.dtype != np.uint32:
        raise TypeError(problem("sample_tokens", "keys.dtype", keys.dtype, "uint32"))
    if keys.shape != (rows, 4) or not keys.flags.c_contiguous:
        got, accepted = f"of shape {keys.shape}", f"contiguous, ({rows}, 4)"
        raise ValueError(problem("sample_tokens", "keys", got, accepted))
    if seed is not None:
        raise ValueError(problem("sample_tokens", "seed", "given with keys", "one of the two"))


def check_settings(
    function: str, temperature: float, top_k: int | None, top_p: float, min_p: float
) -> None:
    """Raise ValueError for sampling settings out of range, TypeError for what is no number."""
    accepted = "a finite number above 0 (0 would mean greedy decoding: gpuattn.decode.greedy)"
    number(function, "temperature", temperature, accepted, lambda t: 0 < t < math.inf)
    if top_k is not None:
        integer(function, "top_k", top_k, "None, or 1 or more", 1)
    number(function, "top_p", top_p, "0 < top_p <= 1", lambda p: 0 < p <= 1)
    number(function, "min_p", min_p, "0 <= min_p <= 1", lambda p: 0 <= p <= 1)


def inverse(temperature: float) -> np.float32:
    """Return 1 / temperature, which scales differences of logits, as a finite float32 above 0."""
    least, most = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
    return np.float32(min(max(1 / temperature, least), most))


# ---- reference: NumPy or CuPy -------------------------------------------------------------------


def _forward_reference(
    logits, banned, numbers, keys, *, needs, vocab_size, temperature, top_k, top_p, min_p, key
):  # fmt: skip
    xp, rows = get_xp(logits), len(logits)
    x = logits[:, :vocab_size].astype(wide(logits.dtype), order="C")
    if rows == 0:
        return (arrays.empty(x, 0, np.int32), arrays.empty(x, 0)), None
    if banned is not None:
        x = xp.where(banned, x.dtype.type(-np.inf), x)
    peak, log_total = log_sum(x)
    scaled = ((x - peak) * inverse(temperature)).astype(np.float64)
    weights = xp.nan_to_num(xp.rint(xp.exp(scaled) * ONE), nan=0).astype(np.uint64)
    if top_k or top_p:
        weights = xp.where(_kept(xp, x, weights, top_k, top_p), weights, 0)
    weights = xp.where(weights >= min_p, weights, 0)
    reached = xp.cumsum(weights, axis=-1, dtype=np.uint64)
    total = reached[:, -1:]
    target = _share(total, _words(xp, key, keys, numbers, rows)[:, None])
    tokens = (reached <= target).sum(-1, keepdims=True)
    tokens = xp.where(total == 0, largest(x, 1), tokens)
    logprobs = (xp.take_along_axis(x, tokens, -1) - peak - log_total)[:, 0]
    return (tokens[:, 0].astype(np.int32), logprobs), None


def _kept(xp, x, weights, top_k, top_p):
    """Return a bool mask of the tokens that top-k and then top-p keep in each row."""
    order = in_order(x, x.shape[1])
    kept = xp.broadcast_to(xp.arange(x.shape[1]) < (top_k or x.shape[1]), x.shape)
    if top_p:
        masses = xp.where(kept, xp.take_along_axis(weights, order, -1) >> COARSE, 0)
        reached = xp.cumsum(masses, axis=-1, dtype=np.uint64)
        goal = xp.maximum(_share(reached[:, -1:], np.uint64(top_p)), 1)
        kept = kept & (reached - masses < goal)
    return xp.take_along_axis(kept, xp.argsort(order, -1), -1)


def _share(total, share):
    """Return total * share // 2**32 of uint64, without overflow of the product."""
    low, bits = np.uint64(0xFFFFFFFF), np.uint64(32)
    return (total >> bits) * share + ((total & low) * share >> bits)


def _words(xp, key, keys, numbers, rows):
    """Return the first word of Philox counter (number, 0, stream, step) for each row, as uint64."""
    first = xp.arange(rows) if numbers is None else numbers.astype(np.uint32)
    first = first.astype(np.uint64)
    if keys is not None:
        low, high, stream, step = keys.astype(np.uint64).T
        return rng.philox(low | high << np.uint64(32), first, 0, stream, step)[0]
    return rng.philox(key.seed, first, 0, *rng.counters(xp, key))[0]


# ---- raw: rawkernels/sampling/sample_tokens.cu --------------------------------------------------


def _refuse_raw(logits, *_, vocab_size, **__):
    if reason := kernel_refusal(logits, "logits"):
        return reason
    if vocab_size > MAX_COLS:
        return f"the vocabulary is {vocab_size}, the kernel takes at most {MAX_COLS}"
    return None


def _forward_raw(
    logits, banned, numbers, keys, *, needs, vocab_size, temperature, top_k, top_p, min_p, key
):  # fmt: skip
    rows, stride = strided_rows(logits)
    tokens = arrays.empty(logits, len(rows), np.int32)
    logprobs = arrays.empty(logits, len(rows), np.float32)
    contiguous = get_xp(logits).ascontiguousarray
    banned, numbers = (None if x is None else contiguous(x) for x in (banned, numbers))
    seed_low, seed_high, stream, step, device_step = rng.device_arguments(key or rng.Key(0))
    inputs = (
        rows, banned, numbers, keys, tokens, logprobs, device_step, stride, vocab_size,
        inverse(temperature), top_k, top_p, min_p, seed_low, seed_high, stream, step,
    )  # fmt: skip
    constants: dict[str, Any] = {"scalar": ctype(logits.dtype)}
    size = _vectors_of_a_block(logits, vocab_size)
    if size:
        constants |= {"CLUSTER": CLUSTER, "BLOCK": CLUSTER_BLOCK}
        name = "sample_tokens_cluster"
        forward = kernel(f"sampling/{name}.cu", name, **constants)
        grid, shared = len(rows) * CLUSTER, EXCHANGE + 16 * size
        forward((grid,), (CLUSTER_BLOCK,), *inputs, size, shared_bytes=shared)
    else:
        block = NARROW_BLOCK if vocab_size <= NARROW else BLOCK
        constants["BLOCK"] = block
        forward = kernel("sampling/sample_tokens.cu", "sample_tokens_forward", **constants)
        shared = SHARED_BYTES if top_k or top_p else 0
        forward((len(rows),), (block,), *inputs, shared_bytes=shared)
    return (tokens, logprobs), None


def _vectors_of_a_block(logits, vocab_size):
    """Return the 16-byte vectors of a row that a block of its cluster holds, 0 without clusters."""
    device = gpu(logits.device.id)
    size = -(-vocab_size * logits.itemsize // (16 * CLUSTER))
    fits = 16 * size + EXCHANGE + STATIC <= device.shared_bytes
    in_clusters = serves("sampling/sample_tokens_cluster.cu", device.capability)
    return size if in_clusters and fits and vocab_size > NARROW else 0


IMPLS = Impls(
    "sample_tokens",
    Impl("raw-simt", _forward_raw, refuse=_refuse_raw),
    Impl("reference", _forward_reference),
)
