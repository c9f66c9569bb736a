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
import numpy as np

from gpuattn.lecture import lecture
from gpuattn.lecture.harness.counted import Counted

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
