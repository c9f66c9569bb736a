"""The beam-search top-k, to read: the hierarchical auto-regressive search of LightSeq.

Wang et al. (2021): retrieve a bound from the best of each group, filter what is above it, re-rank
those few. A thread is a group: its elements are a stride apart. An element is a pair of a value
and an index; the greater value comes first, NaN before all, and of equal ones the lower index.
"""

import math

import numpy as np

from gpuattn.numbakernels.device import cuda, jit
from gpuattn.numbakernels.reduce import NEG_INF, THREADS, ZERO, block_max, block_sum

CAPACITY = 4 * THREADS  # candidates that are ranked together


@jit
def score_continuations(logits, scores, banned, totals):
    """totals[row, j] = scores[row] + log softmax(logits[row])[j], -inf where banned or dead.

    ``logits``, ``totals``: float32 (rows, V); ``scores``: float32 (rows,); ``banned``: bool (V,).
    Launch: grid = (rows,).
    """
    partial = cuda.shared.array(32, np.float32)
    row, first, step = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x
    vocab, score = logits.shape[1], scores[row]
    if score == NEG_INF:  # a dead beam: its logits are not read
        for j in range(first, vocab, step):
            totals[row, j] = NEG_INF
        return

    peak = NEG_INF
    for j in range(first, vocab, step):
        peak = max(peak, logits[row, j])
    peak = block_max(peak, partial)
    if peak == NEG_INF:
        peak = ZERO  # nothing but -inf: exp(-inf - 0) = 0

    total = ZERO
    for j in range(first, vocab, step):
        total += math.exp(logits[row, j] - peak)
    total = block_sum(total, partial)
    log_total = ZERO
    if total != ZERO:
        log_total = math.log(total)

    for j in range(first, vocab, step):
        totals[row, j] = NEG_INF if banned[j] else logits[row, j] - peak - log_total + score


@jit(device=True)
def beats(value, index, other_value, other_index):
    """Return whether (value, index) comes before the other."""
    if value != value or other_value != other_value:  # NaN
        return value != value and (other_value == other_value or index < other_index)
    return value > other_value or (value == other_value and index < other_index)


@jit(device=True)
def retrieve(values, k, group_value, group_index):
    """Return the k-th best of the groups' bests: k elements reach it, so every winner does."""
    me, n = cuda.threadIdx.x, values.shape[0]
    value, index = NEG_INF, n + me  # comes after all elements, if the group has none
    for j in range(me, n, cuda.blockDim.x):
        if beats(values[j], j, value, index):
            value, index = values[j], j
    group_value[me], group_index[me] = value, index
    cuda.syncthreads()
    return kth_best(group_value, group_index, k)


@jit(device=True)
def kth_best(value, index, k):
    """Return the k-th of as many elements as there are threads."""
    bound_value = cuda.shared.array(1, np.float32)
    bound_index = cuda.shared.array(1, np.int32)
    me = cuda.threadIdx.x
    if place_of(me, value, index, cuda.blockDim.x) == k - 1:
        bound_value[0], bound_index[0] = value[me], index[me]
    cuda.syncthreads()
    return bound_value[0], bound_index[0]


@jit(device=True)
def place_of(c, value, index, count):
    """Return how many of ``count`` elements come before element ``c``."""
    place = 0
    for other in range(count):
        if beats(value[other], index[other], value[c], index[c]):
            place += 1
    return place


@jit(device=True)
def keep_above(values, bound_value, bound_index, count, kept_value, kept_index):
    """Filter: list the elements that reach the bound, in any order, and count them."""
    if cuda.threadIdx.x == 0:
        count[0] = 0
    cuda.syncthreads()
    for j in range(cuda.threadIdx.x, values.shape[0], cuda.blockDim.x):
        if not beats(bound_value, bound_index, values[j], j):
            place = cuda.atomic.add(count, 0, 1)
            if place < CAPACITY:
                kept_value[place], kept_index[place] = values[j], j
    cuda.syncthreads()


@jit(device=True)
def re_rank(count, kept_value, kept_index, best):
    """Write the winners in order: a place is the number of candidates that come before."""
    for c in range(cuda.threadIdx.x, count, cuda.blockDim.x):
        place = place_of(c, kept_value, kept_index, count)
        if place < best.shape[0]:
            best[place] = kept_index[c]


@jit(device=True)
def fetch_one_by_one(values, best, group_value, group_index):
    """Write the winners in order by one search for each, where too many reached the bound."""
    me, n = cuda.threadIdx.x, values.shape[0]
    last = -1
    for r in range(best.shape[0]):
        value, index = NEG_INF, n + me
        for j in range(me, n, cuda.blockDim.x):
            later = last < 0 or beats(values[last], last, values[j], j)
            if later and beats(values[j], j, value, index):
                value, index = values[j], j
        group_value[me], group_index[me] = value, index
        cuda.syncthreads()
        _, last = kth_best(group_value, group_index, 1)
        if me == 0:
            best[r] = last
        cuda.syncthreads()  # `group_value` is read above


@jit
def search_best(totals, best):
    """best[b] = where the k best of totals[b] are, in order; k <= THREADS.

    ``totals``: float32 (B, n); ``best``: int32 (B, k). Launch: grid = (B,), block = (THREADS,).
    """
    group_value = cuda.shared.array(THREADS, np.float32)
    group_index = cuda.shared.array(THREADS, np.int32)
    kept_value = cuda.shared.array(CAPACITY, np.float32)
    kept_index = cuda.shared.array(CAPACITY, np.int32)
    count = cuda.shared.array(1, np.int32)
    values, mine = totals[cuda.blockIdx.x], best[cuda.blockIdx.x]

    bound_value, bound_index = retrieve(values, mine.shape[0], group_value, group_index)
    keep_above(values, bound_value, bound_index, count, kept_value, kept_index)
    if count[0] <= CAPACITY:
        re_rank(count[0], kept_value, kept_index, mine)
    else:
        fetch_one_by_one(values, mine, group_value, group_index)
