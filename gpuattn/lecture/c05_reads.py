"""5. Tiles and coalesced reads

Claim: threads that share a tile read each element from memory once for all of them.
Regime: memory
Question: Four threads compute a product of two 2 x 2 matrices, one element each. How many elements
does each thread read, and how many do they read together with a shared tile?
Answer: Four each, sixteen in all: every element is read twice. With a shared tile each element is
read once, eight in all. Tiles of t x t divide the reads by t.
Vary: python -m gpuattn.lecture.c05_reads N=64
"""

# %%
import numpy as np

from gpuattn.lecture import lecture
from gpuattn.lecture.harness import attention
from gpuattn.lecture.harness.counted import Counted, by_tiles
from gpuattn.lecture.harness.forms import doublings
from gpuattn.lecture.harness.machine import here
from gpuattn.lecture.harness.say import ratio

say = lecture(__doc__)
N = say.size("N", 32, 16)
# %% [markdown]
# The arrays are in global memory and count each read. A tile is a copy in shared memory.
# %%


def alone(a, b):
    """Each thread reads its row and its column."""
    span = range(len(a))
    return np.array([[sum(a[i, k] * b[k, j] for k in span) for j in span] for i in span])


def shared(a, b, tile):
    """The threads of a block copy two tiles, then all read the copies."""
    n, out = len(a), np.zeros((len(a), len(a)))
    for i in range(0, n, tile):
        for j in range(0, n, tile):
            for k in range(0, n, tile):
                rows, cols = slice(i, i + tile), slice(j, j + tile)
                out[rows, cols] += a[rows, k : k + tile] @ b[k : k + tile, cols]
    return out


def reads(n, product, *given):
    """Return how often each element is read, and the error."""
    a, b = (Counted(say.rng.standard_normal((n, n))) for _ in range(2))
    error = abs(product(a, b, *given) - a.array @ b.array).max()
    return (a.reads + b.reads) / (2 * n * n), error


each, error = reads(2, alone)
say.exact("E15", "reads of an element, each thread alone", int(each))
together, other = reads(2, shared, 2)
say.exact("E15", "reads of an element, shared tile", int(together))
say.near("E15", "both products: difference from NumPy's", max(error, other), 1e-12)
curve = [(tile, reads(N, shared, tile)[0]) for tile in doublings(1, N)]
say.curves(f"Reads of an element, product of two {N} x {N} matrices", {"counted": curve},
           label="side of the tile", unit="reads", log="xy")  # fmt: skip
pair = {f"tiles of side {tile}": N / count for tile, count in (curve[0], curve[-1])}
say.order("E17", "FLOPs for each element read", pair)
if found := by_tiles(say):  # on a GPU, by the kernels of numbakernels/matmul.py
    tile, fewer, times = found
    what = f"reads alone over reads by tiles: difference from {tile}"
    say.near("E15", what, abs(fewer - tile), 0)
    what = "product of side 1,024: times as fast by tiles as alone"
    say.record("E15", what, times)  # less than the reads: the L1 cache shares them too
# %% [markdown]
# Coalesced reads: memory is fetched in sectors of neighbours. A copy of every n-th element fetches
# those between, too, up to the size of a sector.
# %%
rates = {step: 1e3 * tbs for step, tbs in here(say.device)["copy_tbs"].items()}
pair = {"every 32nd element": rates[32], "each element": rates[1]}
say.order("E14", "rate of a copy", pair, "GB/s", clock=True)
say.curves("Rate of a copy of every n-th element, only those counted",
           {"here": list(rates.items())}, label="n", unit="GB/s", log="xy")  # fmt: skip
# %% [markdown]
# Tensor cores multiply whole tiles: attention in 16 bits with them and on CUDA cores.
# %%
if say.device == "cuda":
    impls, lead = {"tensor cores": "raw-ampere", "CUDA cores": "raw-simt"}, []
    for D in (32, 64, 128):
        us = attention.times(say, impls, (1, 4096, 16, D))
        lead.append((D, ratio(us["CUDA cores"], us["tensor cores"])))
    say.faster("E16", "time of attention, head size 128", us)
    say.record("E16", "times as fast, head sizes 32, 64, 128", [x for _, x in lead])
    say.curves("How many times as fast attention is on tensor cores as on CUDA cores",
               {"attention in 16 bits": lead}, label="head size", unit="times",
               log="x")  # fmt: skip
