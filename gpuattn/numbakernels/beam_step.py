"""The top-k of beam search, in readable form: LightSeq's hierarchical auto-regressive search.

Wang et al. (2021): *retrieve* a bound from the best of each group, keep the elements that reach it,
and *re-rank* those few. A group is the elements of one thread, a stride apart. Two launches: each
block searches a slice of a row, then one block per sentence scores and searches the candidates.

Of two elements, pairs of a value and an index, the greater value comes first, NaN before all, and
of equal ones the lower index. Log-softmax keeps the order of a row, so slices compare logits.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from gpuattn.numbakernels.device import SIMULATED, cuda, jit
from gpuattn.numbakernels.reduce import NEG_INF, THREADS, ZERO, block_max, block_sum
from gpuattn.typing import Array

MAX_BEAM = 16
CAPACITY = 2 * MAX_BEAM**2  # candidates of a sentence, which are ranked together
WORDS = 32 * THREADS  # 64-bit words of a slice, at most
NO_TOKEN = np.int32(2**30)  # an index after all tokens; each thread adds its own number
LOWEST = np.float32(-3.4028235e38)
MASK = np.uint64(0xFFFFFFFF)


@jit(device=True)
def beats(value: float, index: int, other_value: float, other_index: int) -> bool:
    """Return whether (value, index) comes before the other."""
    if value != value or other_value != other_value:  # NaN
        return value != value and (other_value == other_value or index < other_index)
    return value > other_value or (value == other_value and index < other_index)


# ---- the steps of the search ---------------------------------------------------------------------


@jit(device=True)
def retrieve(value: float, index: int, k: int, group_value: Array, group_index: Array) -> Any:
    """Return the k-th best of the groups' bests: k elements reach it, so every winner does."""
    me = cuda.threadIdx.x
    bound_value = cuda.shared.array(1, np.float32)
    bound_index = cuda.shared.array(1, np.int32)
    group_value[me], group_index[me] = value, index
    cuda.syncthreads()
    place = 0
    for other in range(cuda.blockDim.x):
        if beats(group_value[other], group_index[other], value, index):
            place += 1
    if place == k - 1:
        bound_value[0], bound_index[0] = value, index
    cuda.syncthreads()
    return bound_value[0], bound_index[0]


@jit(device=True)
def keep(value: float, index: int, count: int, kept_value: Array, kept_index: Array) -> None:
    """Append a candidate to the list; beyond its capacity only count it."""
    place = cuda.atomic.add(count, 0, 1)
    if place < CAPACITY:
        kept_value[place], kept_index[place] = value, index


@jit(device=True)
def re_rank(c: Array, count: int, kept_value: Array, kept_index: Array) -> int:
    """Return the rank of candidate ``c``: how many of ``count`` come before it."""
    place = 0
    for other in range(count):
        if beats(kept_value[other], kept_index[other], kept_value[c], kept_index[c]):
            place += 1
    return place


# ---- slices of rows ------------------------------------------------------------------------------


if SIMULATED:

    def float_of(bits):
        return np.uint32(bits).view(np.float32)

else:

    @jit(device=True)
    def float_of(bits):
        """Return the float32 of 32 bits."""
        return cuda.libdevice.int_as_float(np.int32(bits))


@jit(device=True)
def of_two(word: int, e: int) -> float:
    """Return float32 number ``e`` of the two in a word."""
    return float_of((word >> np.uint64(32 * e)) & MASK)


@jit(device=True)
def of_four(word: int, e: int) -> float:
    """Return bfloat16 number ``e`` of the four in a word."""
    return float_of(((word >> np.uint64(16 * e)) << np.uint64(16)) & MASK)


@functools.cache
def search_slices(per_word: int) -> Callable:
    """Return the kernel for words of two float32 or four bfloat16 numbers."""
    number = of_two if per_word == 2 else of_four

    @jit(device=True)
    def logit_at(words, banned, row, w, e):
        """Return the logit and its token; -inf where banned. Padding after V comes last."""
        token = np.int32(w * per_word + e)
        if token >= banned.shape[0] or banned[token]:
            return NEG_INF, token
        return number(words[row, w], e), token

    @jit
    def search(words, scores, banned, slice_words, normalisers, logits, tokens):
        """Write the normaliser and, in order, the k best of each slice of each row.

        ``words``: uint64 (rows, V / per_word rounded up), -inf behind V; ``scores``: float32
        (rows,), -inf for a dead beam, whose logits are not read; ``banned``: bool (V,).
        ``normalisers``: float32 (rows, slices, 2), peak and sum of exp(logit - peak); ``logits``:
        float32, ``tokens``: int32 (rows, slices, k), token V or more where there are fewer.
        Launch: grid = (rows, slices), block = (THREADS,).
        """
        group_value = cuda.shared.array(THREADS, np.float32)
        group_index = cuda.shared.array(THREADS, np.int32)
        kept_value = cuda.shared.array(CAPACITY, np.float32)
        kept_index = cuda.shared.array(CAPACITY, np.int32)
        partial = cuda.shared.array(32, np.float32)
        count = cuda.shared.array(1, np.int32)
        row, part, me, step = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x, cuda.blockDim.x
        vocab, k = banned.shape[0], tokens.shape[2]
        first, last = part * slice_words, min((part + 1) * slice_words, words.shape[1])
        if scores[row] == NEG_INF:  # return its first tokens, at -inf
            for r in range(me, k, step):
                logits[row, part, r] = NEG_INF
                tokens[row, part, r] = r if part == 0 else vocab
            if me == 0:
                normalisers[row, part, 0], normalisers[row, part, 1] = ZERO, ZERO
            return

        # one pass: the normaliser (online), and the best of the group
        peak, total = LOWEST, ZERO
        value, index = NEG_INF, NO_TOKEN + me
        for w in range(first + me, last, step):
            word = words[row, w]
            higher = peak
            for e in range(per_word):
                higher = max(higher, number(word, e))
            total *= math.exp(peak - higher)
            peak = higher
            for e in range(per_word):
                total += math.exp(number(word, e) - peak)
                logit, token = logit_at(words, banned, row, w, e)
                if beats(logit, token, value, index):
                    value, index = logit, token
        highest = block_max(peak, partial)
        total = block_sum(total * math.exp(peak - highest), partial)
        if me == 0:
            normalisers[row, part, 0], normalisers[row, part, 1] = highest, total
            count[0] = 0

        bound_value, bound_index = retrieve(value, index, k, group_value, group_index)
        if not beats(bound_value, bound_index, value, index):
            for w in range(first + me, last, step):
                for e in range(per_word):
                    logit, token = logit_at(words, banned, row, w, e)
                    if not beats(bound_value, bound_index, logit, token):
                        keep(logit, token, count, kept_value, kept_index)
        cuda.syncthreads()
        if count[0] <= CAPACITY:
            for c in range(me, count[0], step):
                place = re_rank(c, count[0], kept_value, kept_index)
                if place < k:
                    logits[row, part, place] = kept_value[c]
                    tokens[row, part, place] = kept_index[c]
            for r in range(count[0] + me, k, step):
                logits[row, part, r], tokens[row, part, r] = NEG_INF, vocab
            return

        # too many candidates, as a few groups have most of the best: select the winners one by one
        for r in range(k):
            value, index = NEG_INF, NO_TOKEN + me
            for w in range(first + me, last, step):
                for e in range(per_word):
                    logit, token = logit_at(words, banned, row, w, e)
                    later = r == 0 or beats(bound_value, bound_index, logit, token)
                    if later and beats(logit, token, value, index):
                        value, index = logit, token
            bound_value, bound_index = retrieve(value, index, 1, group_value, group_index)
            if me == 0:
                logits[row, part, r], tokens[row, part, r] = bound_value, bound_index

    return search


# ---- sentences -----------------------------------------------------------------------------------


@jit(device=True)
def place_in_row(logits: Array, tokens: Array, part: int, r: int) -> int:
    """Return how many elements of a row's lists (slices, k) precede element ``r`` of ``part``."""
    place = r
    for other in range(tokens.shape[0]):
        if other != part:
            for c in range(tokens.shape[1]):
                if not beats(logits[other, c], tokens[other, c], logits[part, r], tokens[part, r]):
                    break  # the list is sorted
                place += 1
    return place


@jit
def merge_slices(
    normalisers: Array,
    logits: Array,
    tokens: Array,
    vocab: int,
    scores: Array,
    row_logits: Array,
    row_tokens: Array,
    found: Array,
    flat: Array,
) -> None:
    """Write the 2K best of each sentence: scores and flat indices, beam * 2K + rank in the row.

    ``normalisers``, ``logits``, ``tokens``: by ``search_slices``, with a first axis of sentences;
    ``scores``: (B, K). ``row_logits``, ``row_tokens``: (B, K, 2K), the best of each row in order,
    ``found``, ``flat``: (B, 2K), written. Launch: grid = (B,), block = (THREADS,).
    """
    group_value = cuda.shared.array(THREADS, np.float32)
    group_index = cuda.shared.array(THREADS, np.int32)
    kept_value = cuda.shared.array(CAPACITY, np.float32)
    kept_index = cuda.shared.array(CAPACITY, np.int32)
    rows = cuda.shared.array((MAX_BEAM, 3), np.float32)  # peak, log of the sum, score
    count = cuda.shared.array(1, np.int32)
    s, me, step = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x
    beam, parts, k = tokens.shape[1:]

    for b in range(me, beam, step):
        peak = LOWEST
        for part in range(parts):
            peak = max(peak, normalisers[s, b, part, 0])
        total = ZERO
        for part in range(parts):
            total += normalisers[s, b, part, 1] * math.exp(normalisers[s, b, part, 0] - peak)
        rows[b, 0], rows[b, 1], rows[b, 2] = peak, ZERO, scores[s, b]
        if total != ZERO:
            rows[b, 1] = math.log(total)
    for i in range(me, beam * parts * k, step):
        b, part, r = i // (parts * k), i // k % parts, i % k
        if tokens[s, b, part, r] < vocab:
            place = place_in_row(logits[s, b], tokens[s, b], part, r)
            if place < k:
                row_logits[s, b, place] = logits[s, b, part, r]
                row_tokens[s, b, place] = tokens[s, b, part, r]
    if me == 0:
        count[0] = 0
    cuda.syncthreads()

    each = min(k, vocab)  # of a row; they are in order, so lower places come first
    value, index = NEG_INF, NO_TOKEN + me
    for i in range(me, beam * each, step):
        b, place = i // each, i % each
        score = NEG_INF
        if row_logits[s, b, place] != NEG_INF:
            score = row_logits[s, b, place] - rows[b, 0] - rows[b, 1] + rows[b, 2]
        row_logits[s, b, place] = score
        if beats(score, b * k + place, value, index):
            value, index = score, np.int32(b * k + place)
    bound_value, bound_index = retrieve(value, index, k, group_value, group_index)
    for i in range(me, beam * each, step):
        b, place = i // each, i % each
        score = row_logits[s, b, place]
        if not beats(bound_value, bound_index, score, b * k + place):
            keep(score, np.int32(b * k + place), count, kept_value, kept_index)
    cuda.syncthreads()
    for c in range(me, count[0], step):
        place = re_rank(c, count[0], kept_value, kept_index)
        if place < k:
            found[s, place], flat[s, place] = kept_value[c], kept_index[c]
