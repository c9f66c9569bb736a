"""3. Arithmetic intensity: which limit comes first?

Claim: the FLOPs that a program does with each byte, its arithmetic intensity, decide whether
arithmetic or memory limits it.
Regime: compute or memory
Question: A matrix product does more FLOPs a byte the larger it is. Does unfused attention, with
heads of size 64, ever reach 161 FLOPs a byte, the ridge point of an A100?
Answer: Never. Each element of its N x N scores is written or read seven times, 14 bytes, for
4 D + 6 FLOPs. So the intensity rises towards (4 D + 6) / 14, which is below 19 for D = 64. Fused
attention keeps the scores on the chip: its intensity has no such bound.
Vary: python -m gpuattn.lecture.c03_intensity D=256
"""

# %%
from functools import partial

import numpy as np

from gpuattn.lecture import lecture
from gpuattn.lecture.harness.counted import product, unfused
from gpuattn.lecture.harness.forms import doublings

say = lecture(__doc__)
D, longest = say.size("D", 64, 64), say.size("N", 2_048, 512, 8_192)
ridge = 312e12 / 1.935e12  # of an A100: peak of 16-bit tensor cores over the rate of its memory
say.exact("E09", "ridge point, 312 TFLOP/s over 1.935 TB/s", ridge)
say.exact("E09", "ridge point, 312 TFLOP/s over 2.039 TB/s", 312e12 / 2.039e12)
# %% [markdown]
# A product of 16-bit matrices reads both and writes the result once.
# %%
SMALL, LARGE = (product(8192, 8192, cols, np.float16) for cols in (128, 8192))
say.exact("E11", "FLOPs a byte, 8192 x 8192 times 8192 x 128", SMALL.intensity)
say.exact("E11", "FLOPs a byte, 8192 x 8192 times 8192 x 8192", LARGE.intensity)
# %% [markdown]
# Unfused attention of one head in 16 bits, on arrays that count every access to memory.
# %%
N = 128
moved = unfused(say.rng, N, D)
say.exact("E08", "Q and K read, bytes over B N D", moved["Q and K"] / (N * D))
say.exact("E08", "Q K^T written, bytes over B N^2", moved["scores"] / N**2)
table = moved["mask, softmax, dropout"] / N**2
say.exact("E08", "mask, softmax, dropout read and written, bytes over B N^2", table)
say.exact("E08", "V read and out written, bytes over B N D", moved["V and out"] / (N * D))
flops = product(N, D, N, np.float16).flops
say.exact("E08", "FLOPs of a product, over B N^2 D", flops / (N * N * D))
# %% [markdown]
# So N^2 (4 D + 6) FLOPs (two products, six for an element of the table) for 8 N D + 14 N^2 bytes.
# %%


def intensity(N, D):
    return N**2 * (4 * D + 6) / (8 * N * D + 14 * N**2)


lengths = doublings(16, longest)
ran = [(N, N * N * (4 * D + 6) / sum(unfused(say.rng, N, D).values())) for N in lengths]
error = max(abs(got - intensity(N, D)) for N, got in ran)
say.near("E08", "intensity as counted: difference from the formula", error, 1e-9)
say.differs("E10", "intensity as N grows", "rises" if ran[0][1] < ran[-1][1] else "falls")
below = [N for N in range(1, 10_000) if intensity(N, 64) < ridge]
say.differs("E10", "N at D = 64 from which it is below the ridge point", below[0])
at = "memory-bound at every N" if len(below) == 9_999 else "more memory-bound"
say.differs("E12", "attention", at)
grows = "more" if SMALL.intensity < ridge < LARGE.intensity else "less"
say.exact("E12", "matrix product", f"{grows} compute-bound")
for N in (500, 1000, 4000):
    say.exact("E23", f"MB at N = {N}", np.empty((N, N), np.float16).nbytes / 1e6)
say.differs("E23", "memory of one multiprocessor, MB", (192 << 10) / 1e6)
# %% [markdown]
# The clock of a GPU agrees: a product with few columns reaches fewer FLOP/s.
# %%
side = 8192 if say.device == "cuda" else 1024
a = say.normal(side, side, dtype=say.dtype)
factors = {"few": say.xp.ascontiguousarray(a[:, : side // 64]), "all": a}
us = say.times({name: partial(say.xp.matmul, a, x) for name, x in factors.items()})
slow, fast = (2 * a.size * x.shape[1] / np.array(us[name]) / 1e3 for name, x in factors.items())
pair = {f"{side // 64} columns": slow, f"{side:,} columns": fast}
say.order("E12", f"rate of a product of side {side:,}", pair, "GFLOP/s", clock=True)
square = [(n, product(n, n, n, np.float16).intensity) for n in lengths]
lines = {f"attention, D = {D}": ran, "product N x N x N": square}
say.curves("Arithmetic intensity over N, in 16 bits", lines, label="N", unit="FLOPs a byte",
           log="xy", levels=[(ridge, "ridge point of an A100, 161")])  # fmt: skip
