"""9. Flash attention, tile by tile

Claim: with tiles of queries, keys and values in shared memory, the N x N scores are never stored.
Regime: memory
Question: N queries are computed in blocks of B_r. How often is each key read from memory, and what
would reduce that?
Answer: Once for each block of queries, N / B_r times. Larger blocks of queries read each key less
often, until their tiles fill the shared memory. With room for M elements the bytes fall as 1 / M.
Vary: python -m gpuattn.lecture.c09_tiles N=1024 rows=128
"""

# %%
import math

import numpy as np

import gpuattn
from gpuattn.lecture import lecture
from gpuattn.lecture.harness.counted import Counted
from gpuattn.lecture.harness.forms import difference, doublings
from gpuattn.ops.attention import ampere

say = lecture(__doc__)
N, D = say.size("N", 512, 256), say.size("D", 64, 64)
rows, cols = say.size("rows", 64, 64), say.size("keys", 64, 64)
# %% [markdown]
# The whole algorithm. q, k, v and out are in memory and count each access. All other variables are
# in registers and shared memory.
# %%


def flash(q, k, v, out, rows, cols, causal=False, seen=None):
    for first in range(0, N, rows):
        mine = q[first : first + rows] / math.sqrt(D)
        top, total, sums = np.full((len(mine), 1), -np.inf), 0.0, 0.0
        for start in range(0, min(N, first + rows) if causal else N, cols):
            keys, values = k[start : start + cols], v[start : start + cols]
            s = mine @ keys.T
            if causal:
                s += np.where(np.tri(*s.shape, first - start, dtype=bool), 0, -np.inf)
            new = np.maximum(top, s.max(-1, keepdims=True))
            p, rescale = np.exp(s - new), np.exp(top - new)
            total = total * rescale + p.sum(-1, keepdims=True)
            sums, top = sums * rescale + p @ values, new
            if seen is not None:
                seen.append((first // rows, start // cols, s.size + sums.size))
        out[first : first + rows] = sums / total


def run(rows, cols, **given):
    arrays = [Counted(x) for x in (*data, np.empty((N, D), np.float32))]
    flash(*arrays, rows, cols, **given)
    return arrays


data = [say.rng.standard_normal((N, D), np.float32) for _ in range(3)]
for causal in (False, True):
    *_, out = run(rows, cols, causal=causal)
    q, k, v = (say.array(x)[None, :, None] for x in data)
    ours = gpuattn.flash_attention(q, k, v, causal=causal)[0, :, 0]
    error, name = difference(out.array, ours), "causal" if causal else "full"
    say.near("C07", f"{name}: difference from flash_attention", error, 1e-6)
q, k, v, out = run(N, cols)  # one block of all queries
say.exact("C07", "reads of a key by a block of queries", k.reads // k.array.size)
# %% [markdown]
# The blocks of the text for a shared memory of M elements, and the tile of our kernel, which is
# smaller: several blocks of threads share a multiprocessor.
# %%
M, d = (192 << 10) // 2, 64  # numbers of 16 bits in the shared memory of an A100
say.exact("C08", "keys of a block, M = 98,304, d = 64", math.ceil(M / (4 * d)))
say.exact("C08", "queries of a block, M = 98,304, d = 64", min(math.ceil(M / (4 * d)), d))
tile = ampere.forward_tile(64, 2, extras=False, dropout=False, capability=80)
say.record("C08", "our tile on an A100: queries, keys", list(tile))
shared = ampere.forward_shared_bytes(64, 2, *tile) / 1024
pair = {"our tile": shared, "of a multiprocessor": 192.0}
say.order("C08", "shared memory of an A100", pair, "KB")
# %% [markdown]
# Bytes that are read and written, over the size of the block of queries. Unfused attention instead
# writes and reads S and P. A block of B_r queries takes M = 4 d B_r elements of shared memory, so
# the reads of K and V are 8 N^2 d^2 / M elements.
# %%
curve, table, worst = [], [], 0.0
for block in doublings(8, N):
    arrays = run(block, cols)
    curve.append((block, sum(x.bytes for x in arrays)))
    again = arrays[1].reads + arrays[2].reads
    worst = max(worst, abs(again * (4 * block * D) / (8 * N * N * D * D) - 1))
    table.append((block, 4 * N * D * 4 + 4 * N * N * 4))  # written, read, written, read
say.near("C12", "K and V read: relative difference from 8 N^2 d^2 / M", worst, 1e-9)
pair = {f"blocks of {block} queries": dict(curve)[block] / 1e6 for block in (64, 8)}
say.order("C12", "read and written by flash attention", pair, "MB")
seen: list = []
run(rows, cols, causal=True, seen=seen)
i, j, held = np.transpose(seen)
pair = {"a tile, with its output": held.max(), "all scores": N * N}
say.order("C07", "elements held at a time", pair)
when = np.zeros((i.max() + 1, j.max() + 1))
when[i, j] = np.linspace(0, 1, len(seen) + 1)[1:]
title = "Causal: tiles of queries (rows) by keys (columns). The later, the darker; white: skipped"
alt = "Tiles on and below the diagonal, computed row by row."
say.maps(title, alt, when, range(0, N, rows), range(0, N, cols))
lines = {"flash attention": curve, "unfused": table}
say.curves("Bytes read and written, as counted, over the size of the block of queries", lines,
           label="queries of a block", unit="bytes", log="xy")  # fmt: skip
