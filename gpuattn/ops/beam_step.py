"""One step of beam search: log-softmax, running scores, and the 2K best continuations.

2K, because at most K of them end a sentence and K must go on. The search over K x V scores is
LightSeq's "hierarchical auto-regressive search" (Wang et al., 2021), see ``topk_logprobs``.
Device code: ``rawkernels/beam_step.cu`` and, to read, ``gpuattn/numbakernels/beam_step.py``.
"""

import numpy as np

from gpuattn import arrays
from gpuattn.arrays import as_array, check_floats, check_together, ctype, get_xp, wide
from gpuattn.autodiff.tape import apply, raw
from gpuattn.errors import problem
from gpuattn.impls import Impl, Impls
from gpuattn.kernels import dtype_refusal, kernel, kernel_refusal
from gpuattn.numbakernels import device
from gpuattn.ops.topk_logprobs import checked_vocab_size, largest, log_sum, strided_rows

MAX_BEAM = 32
MAX_SCORES = 2**31 - 1024  # K x V is counted in 32 bits
BLOCK = 256


def beam_step(logits, scores, *, banned=None, vocab_size=None, impl=None):
    """Return (scores, parents, tokens) of the 2K best continuations of each sentence's K beams.

    ``logits``: (B * K, C) float array, any strides; row b * K + i belongs to beam i of sentence b.
    ``scores``: (B, K), log-probabilities so far in float32 (float64 with float64 logits); a beam
    at -inf is dead, its logits are not read. ``banned``: bool (V,), True for tokens that may not
    come; the others are not scaled up. ``vocab_size``: V <= C, at least 2; columns from V on are
    padding and never read. ``impl``: "raw-simt", "numba", "reference", or None for the first that
    accepts. There is no gradient.

    Returned are, each (B, 2K): the new scores, sorted; the beam each continues (int32, 0 to K - 1);
    the token it adds (int32). Equal scores come in the order of beam * V + token. What is banned
    or dead scores -inf, and fills up where there is nothing better. NaN, from logits that hold NaN
    or +inf, comes first, so that it is seen. Raises TypeError for other dtypes, ValueError for
    shapes or a vocab_size that do not fit.
    """
    logits = as_array(raw(logits), "beam_step", "logits")
    scores = as_array(raw(scores), "beam_step", "scores")
    banned = None if banned is None else as_array(banned, "beam_step", "banned")
    check_together("beam_step", logits=logits, scores=scores, banned=banned)
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
    if banned is not None and banned.dtype != np.bool_:
        raise TypeError(problem("beam_step", "banned.dtype", banned.dtype, "bool"))
    if banned is not None and banned.shape != (vocab_size,):
        raise ValueError(problem("beam_step", "banned.shape", banned.shape, f"({vocab_size},)"))
    return apply(IMPLS, (logits, scores, banned), impl, vocab_size=vocab_size)


# ---- reference: NumPy or CuPy -------------------------------------------------------------------


def _forward_reference(logits, scores, banned, *, needs, vocab_size):
    if len(logits) == 0:
        return _outputs(scores), None
    xp, (sentences, beam) = get_xp(logits), scores.shape
    totals = logits[:, :vocab_size].astype(scores.dtype, order="C")
    peak, log_total = log_sum(totals)
    totals -= peak
    totals -= log_total
    totals += scores.reshape(-1, 1)
    hidden = scores.reshape(-1, 1) == -np.inf
    if banned is not None:
        hidden = hidden | banned
    totals = xp.where(hidden, totals.dtype.type(-np.inf), totals)
    return _best(totals.reshape(sentences, beam * vocab_size), beam, vocab_size, largest), None


def _outputs(scores):
    """Return room for the scores, parents and tokens, each (B, 2K)."""
    shape = (len(scores), 2 * scores.shape[1])
    return tuple(arrays.empty(scores, shape, t) for t in (scores.dtype, np.int32, np.int32))


def _best(totals, beam, vocab_size, search):
    """Return the scores, beams and tokens that ``search(totals, 2K)`` finds in (B, K * V)."""
    flat = search(totals, 2 * beam)
    best = get_xp(totals).take_along_axis(totals, flat, -1)
    return best, (flat // vocab_size).astype(np.int32), (flat % vocab_size).astype(np.int32)


# ---- numba: gpuattn/numbakernels/beam_step.py ---------------------------------------------------


def _refuse(logits, scores, vocab_size):
    if reason := dtype_refusal(logits, "logits"):
        return reason
    beam = scores.shape[1]
    if beam > MAX_BEAM:
        return f"the beam is {beam}, the kernel takes at most {MAX_BEAM}"
    if beam * vocab_size > MAX_SCORES:
        return f"beam * vocabulary is {beam * vocab_size}, the kernel takes at most {MAX_SCORES}"
    return None


def _refuse_numba(logits, scores, banned, *, vocab_size):
    if reason := device.refusal(logits):
        return reason
    from gpuattn.numbakernels.reduce import THREADS

    if 2 * scores.shape[1] > THREADS:
        return f"the beam is {scores.shape[1]}, the kernel takes at most {THREADS // 2}"
    return _refuse(logits, scores, vocab_size)


def _forward_numba(logits, scores, banned, *, needs, vocab_size):
    if len(logits) == 0:
        return _outputs(scores), None
    from gpuattn.numbakernels.beam_step import score_continuations, search_best
    from gpuattn.numbakernels.reduce import THREADS

    xp, (sentences, beam) = get_xp(logits), scores.shape
    rows = xp.ascontiguousarray(logits[:, :vocab_size], np.float32)
    banned = arrays.zeros(logits, vocab_size, np.bool_) if banned is None else banned
    totals = arrays.empty(logits, rows.shape, np.float32)
    each_row, each_sentence = (len(rows),), (sentences,)
    numbers = rows, scores.ravel(), xp.ascontiguousarray(banned), totals
    device.launch(score_continuations, each_row, (THREADS,), *numbers)

    def search(totals, k):
        best = arrays.empty(totals, (sentences, k), np.int32)
        device.launch(search_best, each_sentence, (THREADS,), totals, best)
        return best

    return _best(totals.reshape(sentences, beam * vocab_size), beam, vocab_size, search), None


# ---- raw: rawkernels/beam_step.cu ---------------------------------------------------------------


def _refuse_raw(logits, scores, banned, *, vocab_size):
    return kernel_refusal(logits, "logits") or _refuse(logits, scores, vocab_size)


def _forward_raw(logits, scores, banned, *, needs, vocab_size):
    xp, (sentences, beam) = get_xp(logits), scores.shape
    rows, stride = strided_rows(logits)
    banned = None if banned is None else xp.ascontiguousarray(banned)
    lists = arrays.empty(logits, (len(rows), 2 * beam), np.uint64)
    outputs = _outputs(scores)
    constants = {"scalar": ctype(logits.dtype), "BLOCK": BLOCK}
    search = kernel("beam_step.cu", "beam_step_rows", **constants)
    merge = kernel("beam_step.cu", "beam_step_merge", **constants)
    scores = xp.ascontiguousarray(scores)
    search((len(rows),), (BLOCK,), rows, scores, banned, lists, stride, vocab_size, beam)
    merge((sentences,), (BLOCK,), lists, *outputs, vocab_size, beam)
    return outputs, None


IMPLS = Impls(
    "beam_step",
    Impl("raw-simt", _forward_raw, refuse=_refuse_raw),
    Impl("numba", _forward_numba, refuse=_refuse_numba),
    Impl("reference", _forward_reference),
)
