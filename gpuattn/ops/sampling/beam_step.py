"""One step of beam search: log-softmax, running scores, and the 2K best continuations.

2K, because at most K of them end the sentence and K must remain; of E > 1 end marks (1 + E) K are
needed. The search over K x V scores is
LightSeq's "hierarchical auto-regressive search" (Wang et al., 2021), see ``topk_logprobs``. A
log-softmax keeps the order of its logits, so the best of each row are selected by logit in one
read, and scored when those of all rows of a sentence are known.
Device code: ``rawkernels/sampling/beam_step.cu``, ``beam_step_block.cu`` where a sentence has
little to read; to read: ``numbakernels/beam_step.py``.
"""

import math

import numpy as np

from gpuattn import arrays
from gpuattn.arrays import (
    as_array,
    check_floats,
    check_together,
    checked_index,
    ctype,
    get_xp,
    index_flag,
    wide,
)
from gpuattn.autodiff.tape import op, raw
from gpuattn.cuda.gpu import gpu
from gpuattn.cuda.kernels import dtype_refusal, kernel, kernel_refusal
from gpuattn.cuda.scratch import counters
from gpuattn.cuda.sources import serves
from gpuattn.errors import problem
from gpuattn.impls import Call, Impl, Impls
from gpuattn.numbakernels import device
from gpuattn.ops.arguments import check_flags, described, integer
from gpuattn.ops.sampling.topk_logprobs import (
    checked_banned,
    checked_vocab_size,
    largest,
    log_sum,
    strided_rows,
)
from gpuattn.typing import Array

MAX_BEAM = 64
MAX_COUNT = 128  # of continuations
MAX_COLS = 1 << 26  # a token and its beam share 32 bits
RAW_COLS = 1 << 21  # what the last block of a sentence compares fits its shared memory
MAX_GRID = 65535
BLOCK = 128  # threads of the kernel; twice as many for beams above a quarter of them
STAGE, STAGES = 4, 4  # vectors that a thread loads at a time, and how often, if it has to be
LOADED = 16 * STAGE  # bytes of a thread's vectors in the search among the best groups
BLOCKS = 1056  # above this many, blocks take more stages: eight on each of 132 multiprocessors
TEAMS = 8  # of a block that has a sentence, each of BLOCK threads
# stages of a team at most: where less than half of the multiprocessors have a block, and else
FEW_STAGES, MOST_STAGES = 1, 2
GROUPS = 1024  # of a sentence of up to 16 beams, at most: its last block compares their best
FILE, WHOLE = "sampling/beam_step.cu", "sampling/beam_step_block.cu"
WHAT = "beam_step: penalties and banned"
MAX_LISTED = 32  # banned tokens that are listed; every block reads all of them


@op
def beam_step(
    logits: Array,
    scores: Array,
    *,
    banned: Array | None = None,
    penalties: tuple[Array, Array] | None = None,
    count: int | None = None,
    vocab_size: int | None = None,
    settled: bool = False,
    impl: str | None = None,
) -> Call[tuple[Array, Array, Array]]:
    """Return (scores, parents, tokens) of the 2K best continuations of each sentence's K beams.

    ``logits``: (B * K, C) float array, any strides; row b * K + i belongs to beam i of sentence b.
    ``scores``: (B, K), log-probabilities so far in float32 (float64 with float64 logits); a beam
    at -inf is dead, and its logits are ignored. ``banned``: tokens not to be chosen, int32 (n,), or
    a mask of them, bool (V,); a few listed tokens cost nothing, a mask is read for each row.
    ``penalties``: (tokens, amounts), int32 and the dtype of the scores, each (B * K, L):
    the amount is subtracted from the score of its token in that row; inf bans the token, amounts of
    one token add up, and -1 lists no token. Probabilities of other tokens are not renormalised.
    ``count``: of continuations to return, up to K * V; None: 2K.
    ``vocab_size``: V <= C, at least 2; columns from V on are padding and never read. ``settled``:
    that the launch before this one writes neither ``scores`` nor ``banned``; they may then be
    loaded while it still runs. ``impl``: "raw-simt", "numba", "reference", or None for the first
    that accepts. There is no gradient.

    Returned are, each (B, count): the new scores, sorted; the beam that each continues (int32, 0 to
    K - 1); the token it adds (int32). Of equal scores the lower beam comes first, within a beam the
    greater logit (less its penalty), of equal ones the lower token. Tokens that are banned, of a
    dead beam or with a logit of -inf score -inf, and come last. A NaN score, from logits with NaN
    or +inf, comes first, so that it is noticed. Raises TypeError for other dtypes, ValueError for
    shapes, a count or a vocab_size that do not fit, IndexError for tokens out of range (from a GPU:
    at the next ``to_cpu``).
    """
    logits = as_array(raw(logits), "beam_step", "logits")
    scores = as_array(raw(scores), "beam_step", "scores")
    banned = None if banned is None else as_array(banned, "beam_step", "banned")
    listed, amounts = None, None
    if penalties is not None:
        listed, amounts = _pair(penalties)
    given = {"logits": logits, "scores": scores, "banned": banned}
    check_together("beam_step", **given, tokens=listed, amounts=amounts)
    check_floats("beam_step", logits=logits)
    if logits.ndim != 2 or scores.ndim != 2 or len(logits) != scores.size or scores.shape[1] == 0:
        accepted = f"(B, K) with K >= 1 and B * K rows in logits, which is {logits.shape}"
        raise ValueError(problem("beam_step", "scores.shape", scores.shape, accepted))
    if scores.dtype != wide(logits.dtype):
        accepted = f"{wide(logits.dtype)} with {logits.dtype} logits"
        raise TypeError(problem("beam_step", "scores.dtype", scores.dtype, accepted))
    vocab_size = checked_vocab_size("beam_step", vocab_size, logits.shape[1])
    if vocab_size < 2:
        accepted = "2 or more: K beams must have 2K continuations"
        raise ValueError(problem("beam_step", "the vocabulary", vocab_size, accepted))
    beam = scores.shape[1]
    count = 2 * beam if count is None else count
    integer("beam_step", "count", count, f"1 to K * V, {beam * vocab_size}", 1, beam * vocab_size)
    if banned is None or banned.dtype != np.int32 or banned.ndim != 1:
        checked_banned("beam_step", banned, vocab_size)
    _check_penalties(listed, amounts, len(logits), scores.dtype)
    check_flags("beam_step", settled=settled)
    inputs = logits, scores, banned, listed, amounts
    return Call(IMPLS, inputs, impl, vocab_size=vocab_size, count=count, settled=settled)


def _are_tokens(banned):
    """Return whether bans are a list of tokens instead of a mask."""
    return banned is not None and banned.dtype != np.bool_


def _pair(penalties):
    if not isinstance(penalties, tuple | list) or len(penalties) != 2:
        accepted = "None, or (tokens, amounts)"
        raise TypeError(problem("beam_step", "penalties", described(penalties), accepted))
    return [as_array(raw(x), "beam_step", "penalties") for x in penalties]


def _check_penalties(listed, amounts, rows, dtype):
    if listed is None:
        return
    for name, x, wanted in (("tokens", listed, np.dtype(np.int32)), ("amounts", amounts, dtype)):
        if x.dtype != wanted:
            raise TypeError(
                problem("beam_step", f"the dtype of penalties' {name}", x.dtype, wanted)
            )
    if listed.ndim != 2 or len(listed) != rows or amounts.shape != listed.shape:
        got = f"{listed.shape} and {amounts.shape}"
        raise ValueError(problem("beam_step", "the shapes of penalties", got, f"({rows}, L) twice"))


# ---- reference: NumPy or CuPy -------------------------------------------------------------------


def _forward_reference(
    logits, scores, banned, listed, amounts, *, needs, vocab_size, count, settled=False
):  # fmt: skip
    if len(logits) == 0:
        return _outputs(scores, count), None
    xp, dtype, beam = get_xp(logits), scores.dtype, scores.shape[1]
    logits = logits[:, :vocab_size].astype(dtype, order="C", copy=False)
    scores, nothing = scores.reshape(-1, 1), dtype.type(-np.inf)
    dead, on_host = scores == nothing, xp is np
    adjusted = logits.copy() if on_host and not dead.any() else xp.where(dead, nothing, logits)
    if listed is not None:
        hidden = listed == -1
        tokens = checked_index(xp.where(hidden, 0, listed), vocab_size, WHAT)
        rows = xp.broadcast_to(xp.arange(len(logits))[:, None], tokens.shape)
        # CuPy has no subtract.at for floats
        less = -xp.where(hidden, 0, amounts).astype(dtype)
        xp.add.at(adjusted, (rows, tokens), less)
    if _are_tokens(banned):
        adjusted[:, checked_index(banned, vocab_size, WHAT)] = nothing
    elif banned is not None and on_host:
        np.copyto(adjusted, nothing, where=banned)
    elif banned is not None:
        adjusted = xp.where(banned, nothing, adjusted)
    normalisers = (*log_sum(logits), scores)
    search = _best_on_host if on_host else _best_of_rows
    return search(adjusted, normalisers, beam, count), None


def _totals(found, peak, log_total, scores):
    """Return the scores of texts that end in adjusted logits (rows, n); others are (rows, 1)."""
    return get_xp(found).where(found == -np.inf, found, found - peak - log_total + scores)


def _best_of_rows(adjusted, normalisers, beam, count):
    """Return (scores, parents, tokens) of the best: first those of each row, then of K rows."""
    xp, each = get_xp(adjusted), min(count, adjusted.shape[1])
    tokens = largest(adjusted, each)
    totals = _totals(xp.take_along_axis(adjusted, tokens, -1), *normalisers)
    totals, tokens = (x.reshape(-1, beam * each) for x in (totals, tokens))
    best = largest(totals, count)  # of equal ones the first; each row is sorted
    totals, tokens = (xp.take_along_axis(x, best, -1) for x in (totals, tokens))
    return totals, (best // each).astype(np.int32), tokens.astype(np.int32)


def _best_on_host(adjusted, normalisers, beam, count):
    """Return what ``_best_of_rows`` does, with less work, from NumPy arrays.

    The ``count``-th largest of the maxima of groups of columns is a lower bound for the winners of
    a sentence. Only groups that reach it are searched; how many numbers are found depends on
    values.
    """
    rows, vocab = adjusted.shape
    groups = vocab // math.isqrt(vocab)  # group g: columns g, g + groups, g + 2 * groups ...
    if count > beam * groups:
        return _best_of_rows(adjusted, normalisers, beam, count)
    lines, rest = divmod(vocab, groups)
    peaks = adjusted[:, : vocab - rest].reshape(rows, lines, groups).max(1)
    np.maximum(peaks[:, :rest], adjusted[:, vocab - rest :], out=peaks[:, :rest])
    peaks = _totals(peaks, *normalisers).reshape(-1, beam * groups)
    bounds = np.partition(peaks, -count)[:, -count, None]
    usual = np.isfinite(bounds[:, 0]) & np.isfinite(peaks.max(1))
    bounds[~usual] = np.nan  # which nothing reaches
    sentence, at = np.nonzero(peaks >= bounds)
    row = sentence * beam + at // groups
    columns = (at % groups)[:, None] + groups * np.arange(lines + 1)
    found = adjusted.ravel().take(row[:, None] * vocab + np.minimum(columns, vocab - 1))
    found[columns >= vocab] = -np.inf
    totals = _totals(found, *[x[row] for x in normalisers])
    reached = np.nonzero(totals >= bounds[sentence])
    row, columns, found, totals = row[reached[0]], columns[reached], found[reached], totals[reached]
    order = np.lexsort((columns, -found, row, -totals, row // beam))
    first = np.searchsorted((row // beam)[order], np.flatnonzero(usual))
    winners = order[first[:, None] + np.arange(count)]
    best = (
        totals[winners],
        (row % beam)[winners].astype(np.int32),
        columns[winners].astype(np.int32),
    )
    if usual.all():
        return best
    found = tuple(np.empty((len(usual), count), x.dtype) for x in best)
    odd = np.repeat(~usual, beam)  # dead sentences, those with NaN, or with too few finite numbers
    others = _best_of_rows(adjusted[odd], [x[odd] for x in normalisers], beam, count)
    for target, x, other in zip(found, best, others, strict=True):
        target[usual], target[~usual] = x, other
    return found


def _outputs(scores, count):
    """Return new arrays for the scores, parents and tokens, each (B, count)."""
    shape = (len(scores), count)
    return tuple(arrays.empty(scores, shape, t) for t in (scores.dtype, np.int32, np.int32))


# ---- numba: gpuattn/numbakernels/beam_step.py ---------------------------------------------------


def _refuse_numba(logits, scores, banned, listed, amounts, *, vocab_size, count, **_):
    if reason := device.refusal(logits, "logits") or dtype_refusal(logits, "logits"):
        return reason
    if listed is not None:
        return "penalties are given, the kernel takes bans only"
    if _are_tokens(banned):
        return "banned is a list of tokens, the kernel takes a mask"
    if count != 2 * scores.shape[1]:
        return f"count is {count}, the kernel takes 2 * {scores.shape[1]}"
    from gpuattn.numbakernels.beam_step import MAX_BEAM

    if scores.shape[1] > MAX_BEAM:
        return f"the beam is {scores.shape[1]}, the kernel takes at most {MAX_BEAM}"
    if vocab_size > MAX_COLS:
        return f"the vocabulary is {vocab_size}, the kernel takes at most {MAX_COLS}"
    return None


def _forward_numba(
    logits, scores, banned, listed, amounts, *, needs, vocab_size, count, settled=False
):  # fmt: skip
    outputs = _outputs(scores, count)
    if len(logits) == 0:
        return outputs, None
    from gpuattn.numbakernels.beam_step import WORDS, merge_slices, search_slices
    from gpuattn.numbakernels.reduce import THREADS

    xp, (sentences, beam) = get_xp(logits), scores.shape
    words = _words(logits, vocab_size)
    per_word = 4 if logits.dtype == arrays.BFLOAT16 else 2
    parts = -(-words.shape[1] // WORDS)
    size = -(-words.shape[1] // parts)
    shape = sentences, beam, parts
    normalisers = arrays.empty(logits, (*shape, 2), np.float32)
    found = arrays.empty(logits, (*shape, 2 * beam), np.float32)
    tokens = arrays.empty(logits, (*shape, 2 * beam), np.int32)
    scores, flat = xp.ascontiguousarray(scores), outputs[1]
    banned = arrays.zeros(logits, vocab_size, np.bool_) if banned is None else banned
    slices_of_rows = [x.reshape(-1, *x.shape[2:]) for x in (normalisers, found, tokens)]
    inputs = words, scores.ravel(), xp.ascontiguousarray(banned), size
    grid = len(logits), parts
    device.launch(search_slices(per_word), grid, (THREADS,), *inputs, *slices_of_rows)
    row_logits = arrays.empty(logits, (sentences, beam, 2 * beam), np.float32)
    row_tokens = arrays.empty(logits, row_logits.shape, np.int32)
    lists = normalisers, found, tokens, vocab_size, scores, row_logits, row_tokens
    device.launch(merge_slices, (sentences,), (THREADS,), *lists, outputs[0], flat)
    tokens = xp.take_along_axis(row_tokens.reshape(sentences, -1), flat, -1)
    return (outputs[0], flat // np.int32(2 * beam), tokens), None


def _words(logits, vocab_size):
    """Return the logits as 64-bit words (rows, ...), with -inf from column V on: a view or a copy.

    float16 is cast to float32, as Numba cannot convert its bits to a number.
    """
    xp = get_xp(logits)
    dtype = logits.dtype if logits.dtype == arrays.BFLOAT16 else np.dtype(np.float32)
    per_word = 8 // dtype.itemsize
    fits = logits.dtype == dtype and vocab_size % per_word == 0 and logits.flags.c_contiguous
    if fits and logits.shape[1] == vocab_size and _address(logits) % 8 == 0:
        return logits.view(np.uint64)
    cols = -(-vocab_size // per_word) * per_word
    padded = xp.full((len(logits), cols), -np.inf, dtype)
    padded[:, :vocab_size] = logits[:, :vocab_size]
    return padded.view(np.uint64)


def _address(x):
    return x.ctypes.data if isinstance(x, np.ndarray) else x.data.ptr


# ---- raw: rawkernels/sampling/beam_step.cu, beam_step_block.cu ----------------------------------


def _refuse_raw(logits, scores, banned, *_, vocab_size, count, **__):
    if reason := kernel_refusal(logits, "logits"):
        return reason
    if _are_tokens(banned) and len(banned) > MAX_LISTED:
        return f"{len(banned)} banned tokens are listed, the kernel takes {MAX_LISTED}, or a mask"
    sentences, beam = scores.shape
    if beam > MAX_BEAM:
        return f"the beam is {beam}, the kernel takes at most {MAX_BEAM}"
    if count > MAX_COUNT:
        return f"count is {count}, the kernel takes at most {MAX_COUNT}"
    if vocab_size > RAW_COLS:
        return f"the vocabulary is {vocab_size}, the kernel takes at most {RAW_COLS}"
    if sentences > MAX_GRID:
        return f"there are {sentences} sentences, the kernel takes at most {MAX_GRID}"
    return None


def _forward_raw(
    logits, scores, banned, listed, amounts, *, needs, vocab_size, count, settled=False
):  # fmt: skip
    xp, (sentences, beam) = get_xp(logits), scores.shape
    outputs = _outputs(scores, count)
    if sentences == 0:
        return outputs, None
    rows, stride = strided_rows(logits)
    mask, bans = (None, banned) if _are_tokens(banned) else (banned, None)
    hooks = mask is not None or listed is not None
    copied = not all(x is None or x.flags.c_contiguous for x in (scores, bans))  # by launches
    extras = [None if x is None else xp.ascontiguousarray(x) for x in (bans, mask, listed, amounts)]
    scores = xp.ascontiguousarray(scores)
    tokens = 0 if bans is None else len(bans)
    length = 0 if listed is None else listed.shape[1]
    flag = index_flag(logits, WHAT) if length or tokens else None
    sizes = vocab_size, logits.itemsize
    card = gpu(logits.device.id)
    whole = not hooks and sentences <= card.multiprocessors and serves(WHOLE, card.capability)
    most = MOST_STAGES if 2 * sentences >= card.multiprocessors else FEW_STAGES
    if whole and (teams := _teams(beam, *sizes, most)):
        threads, slices, stages, parts = teams
        constants = {"scalar": ctype(logits.dtype), "BLOCK": threads}
        constants["SETTLED"] = int(settled and not copied)
        kernel(WHOLE, "beam_step_block", **constants)(
            (sentences,), (threads,), rows, scores, extras[0], flag, *outputs, stride, vocab_size,
            beam, tokens, slices, -(-256 // slices), stages, count, shared_bytes=8 * beam * parts,
        )  # fmt: skip
        return outputs, None
    block = BLOCK if count <= BLOCK // 2 else 2 * BLOCK
    slices, stages, fold, parts = _slices(len(rows), beam, *sizes, block)
    groups = arrays.empty(logits, (len(rows), slices, block >> fold), np.uint64)
    normalisers = arrays.empty(logits, (len(rows), parts, 2), np.float32)
    constants = {"scalar": ctype(logits.dtype), "HOOKS": hooks, "BLOCK": block}
    step = kernel(FILE, "beam_step_forward", **constants)
    keys, marks = 4 * beam * slices * groups.shape[2], _bits_of_a_slice(stages, block, logits)
    step(
        (slices, beam, sentences), (block,), rows, scores, *extras, flag,
        groups, normalisers, counters(sentences), *outputs, stride, vocab_size, tokens,
        length, stages, fold, count, shared_bytes=max(keys, marks if hooks else 0, LOADED * block),
    )  # fmt: skip
    return outputs, None


def _bits_of_a_slice(stages, block, logits):
    """Return the bytes of a bit for each element of a slice, and of one more word."""
    return 2 * stages * STAGE * block // logits.itemsize + 4


def _stages_of_row(vocab_size, itemsize, block):
    return -(-vocab_size * itemsize // (16 * STAGE * block))


def _teams(beam, vocab_size, itemsize, most):
    """Return (threads, slices of a row, stages of a slice, normalisers of a row) of the block of a
    sentence, whose teams of BLOCK threads have a slice each; None for more than ``most`` stages."""
    stages_of_row = _stages_of_row(vocab_size, itemsize, BLOCK)
    if beam > TEAMS:
        return None
    stages = -(-stages_of_row // (TEAMS // beam))
    if stages > most:
        return None
    slices = -(-stages_of_row // stages)
    threads = max(2 * BLOCK, BLOCK << (beam * slices - 1).bit_length())
    return threads, slices, stages, stages_of_row * BLOCK // 32


def _slices(rows, beam, vocab_size, itemsize, block):
    """Return (slices of a row, stages of a slice, log2 of the threads of a group, normalisers).

    The number of rows decides them. Results do not depend on them.
    """
    stages_of_row = _stages_of_row(vocab_size, itemsize, block)
    most = GROUPS * max(1, beam // 16)
    stages = min(-(-rows * stages_of_row // BLOCKS), STAGES)
    # no group is larger than a warp's part of a slice
    stages = max(stages, -(-beam * stages_of_row * block // (32 * most)))
    stages = min(1 << (stages - 1).bit_length(), 1 << (stages_of_row - 1).bit_length())
    slices = -(-stages_of_row // stages)
    fold = min(((beam * slices * block - 1) // most).bit_length(), 5)
    return slices, stages, fold, stages_of_row * block // 32


IMPLS = Impls(
    "beam_step",
    Impl("raw-simt", _forward_raw, refuse=_refuse_raw),
    Impl("numba", _forward_numba, refuse=_refuse_numba),
    Impl("reference", _forward_reference),
)
