"""5. Tiles and reads

Claim: threads that share a tile read each number once for all of them.
Regime: memory
Question: Four threads compute a 2 x 2 product, one number each. How many reads does each make
alone, and how many together with a shared tile?
Answer: Four each, sixteen in all: every number is read twice. With a shared tile each number is
read once, eight in all. With tiles of t x t, reads fall by t.
Vary: python -m gpuattn.lecture.c05_reads N=64
"""

# %%
import importlib.util
from functools import partial

import numpy as np

import gpuattn
from gpuattn.lecture import lecture
from gpuattn.lecture.harness.counted import Counted
from gpuattn.lecture.harness.machine import here

say = lecture(__doc__)
N = say.size("N", 32, 16)
# %% [markdown]
# The large memory counts; a tile, once copied, is on the chip.
# %%


def alone(a, b):
    """Each thread reads its row and its column."""
    n = len(a)
    return np.array(
        [[sum(a[i, k] * b[k, j] for k in range(n)) for j in range(n)] for i in range(n)]
    )


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
    """Return how often each number is read, and the error."""
    a, b = (Counted(say.rng.standard_normal((n, n))) for _ in range(2))
    error = abs(product(a, b, *given) - a.array @ b.array).max()
    return (a.reads + b.reads) / (2 * n * n), error


each, error = reads(2, alone)
say.exact("E15", "reads of an element, each thread alone", int(each))
together, other = reads(2, shared, 2)
say.exact("E15", "reads of an element, shared tile", int(together))
say.near("E15", "products: difference from NumPy's", max(error, other), 1e-12)
tiles = [2**n for n in range(int(np.log2(N)) + 1)]
curve = [(tile, reads(N, shared, tile)[0]) for tile in tiles]
alt = f"Reads of a number fall from {N} with tiles of 1 to 1 with one tile."
say.curves(f"Reads of a number over the side of the tile, product of {N} x {N}", alt,
           {"counted": curve}, label="side of the tile", log=True, log_x=True)  # fmt: skip
work = {tile: 2 * N**3 / (count * 2 * N * N) for tile, count in curve}  # FLOPs a number read
few, many = work[1], work[16]
say.order("E17", "FLOPs for a number read, with tiles of 1 and of 16", few, many)
if say.device == "cuda" and importlib.util.find_spec("numba"):  # to read: numbakernels/matmul.py
    from gpuattn.numbakernels.matmul import TILE, product

    a, b = say.normal(1024, 1024), say.normal(1024, 1024)
    (_, every), (_, once) = product(a, b, shared=False), product(a, b)
    say.near("E15", f"reads by threads alone over those by tiles: beside {TILE}",
             abs(every / once / TILE - 1), 0)  # fmt: skip
    us = say.times({"tiles": partial(product, a, b), "alone": partial(product, a, b, shared=False)})
    say.order("E15", "time of the product, by tiles and alone", us["tiles"], us["alone"], "us",
              clock=True)  # fmt: skip
# %% [markdown]
# Reads of neighbours: a copy of every n-th number fetches the numbers between, too.
# %%
copies = here(say.device)["copy_tbs"]
rates = {step: 1e3 * tbs for step, tbs in copies.items()}
say.order("E14", "copy of every 32nd number, of each", rates[32], rates[1], "GB/s", clock=True)
alt = f"From {rates[1]:,.3g} GB/s for neighbours to {rates[32]:,.3g} for every 32nd number."
say.curves("GB/s of the numbers copied, over the step from one to the next", alt,
           {"here": list(rates.items())}, label="step", log=True, log_x=True)  # fmt: skip
# %% [markdown]
# The same tiles on tensor cores: attention in 16 bits by them and without, over the head size.
# %%
if say.device == "cuda":
    lead = []
    for D in (32, 64, 128):
        q, k, v = (say.normal(1, 4096, 16, D, dtype="float16") for _ in range(3))

        def call(name, q=q, k=k, v=v):
            return lambda: gpuattn.flash_attention(q, k, v, impl=name)

        us = say.kernel_times({name: call(name) for name in ("raw-ampere", "raw-simt")})
        lead.append((D, float(np.median(us["raw-simt"]) / np.median(us["raw-ampere"]))))
    what = "time of attention with heads of 128, on tensor cores and on CUDA cores"
    say.order("E16", what, us["raw-ampere"], us["raw-simt"], "us", clock=True)
    say.record("E16", "lead of tensor cores with heads of 32, 64, 128", [x for _, x in lead])
    alt = "; ".join(f"heads of {D}: {times:.1f} times" for D, times in lead)
    say.curves("Lead of tensor cores over CUDA cores, over the head size", alt,
               {"attention in 16 bits": lead}, label="head size", log_x=True)  # fmt: skip
