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
import math

import numpy as np

from gpuattn.lecture import lecture
from gpuattn.lecture.harness.counted import Counted, product

say = lecture(__doc__)
D, longest = say.size("D", 64, 64), say.size("N", 2_048, 512, 8_192)
ridge = 312e12 / 1.935e12  # of an A100: peak of 16-bit tensor cores over the rate of its memory
say.exact("E09", "ridge point, 312 TFLOP/s over 1.935 TB/s", ridge)
say.exact("E09", "ridge point, 312 TFLOP/s over 2.039 TB/s", 312e12 / 2.039e12)
# %% [markdown]
# A product of 16-bit matrices reads both and writes the result once.
# %%
SMALL, LARGE = (product(8192, 8192, cols, np.float16) for cols in (128, 8192))
say.exact("E11", "FLOPs a byte, 8192 x 8192 times 8192 x 128", SMALL.flops / SMALL.bytes)
say.exact("E11", "FLOPs a byte, 8192 x 8192 times 8192 x 8192", LARGE.flops / LARGE.bytes)
# %% [markdown]
# Unfused attention of one head in 16 bits. The arrays count every access to memory.
# %%


def unfused(N):
    """Return the bytes of each step of softmax(dropout(mask(Q K^T))) V."""
    q, k, v = (Counted(say.rng.standard_normal((N, D)).astype(np.float16)) for _ in range(3))
    table, out = Counted(np.empty((N, N), np.float16)), Counted(np.empty((N, D), np.float16))
    keep, read = say.rng.random((N, N)) > 0.1, np.float32
    table[:] = q[:].astype(read) @ k[:].T.astype(read) / math.sqrt(D)
    moved = {"Q and K": q.bytes + k.bytes, "scores": table.bytes}
    table[:] = np.where(np.tri(N, dtype=bool), table[:], -np.inf)
    weights = np.exp(table[:].astype(read) - table.array.max(-1, keepdims=True))
    table[:] = weights / weights.sum(-1, keepdims=True)
    table[:] = table[:] * keep
    moved["mask, softmax, dropout"] = table.bytes - moved["scores"]
    out[:] = table.array.astype(read) @ v[:].astype(read)  # reads the table again: not in the notes
    return moved | {"V and out": v.bytes + out.bytes}


N = 128
moved, flops = unfused(N), product(N, D, N, np.float16).flops
say.exact("E08", "Q and K read, bytes over B N D", moved["Q and K"] / (N * D))
say.exact("E08", "Q K^T written, bytes over B N^2", moved["scores"] / N**2)
table_bytes = moved["mask, softmax, dropout"] / N**2
say.exact("E08", "mask, softmax, dropout read and written, bytes over B N^2", table_bytes)
say.exact("E08", "V read and out written, bytes over B N D", moved["V and out"] / (N * D))
say.exact("E08", "FLOPs of a product, over B N^2 D", flops / (N * N * D))
# %% [markdown]
# So N^2 (4 D + 6) FLOPs (two products, six for an element of the table) for 8 N D + 14 N^2 bytes.
# %%


def intensity(N, D):
    return N**2 * (4 * D + 6) / (8 * N * D + 14 * N**2)


lengths = [2**n for n in range(4, int(math.log2(longest)) + 1)]
ran = [(N, N * N * (4 * D + 6) / sum(unfused(N).values())) for N in lengths]
rises = all(a < b for (_, a), (_, b) in zip(ran, ran[1:], strict=False))
below = [N for N in range(1, 10_000) if intensity(N, 64) < ridge]
error = max(abs(got - intensity(N, D)) for N, got in ran)
say.near("E08", "intensity as counted: difference from the formula", error, 1e-9)
say.differs("E10", "intensity as N grows", "rises" if rises else "falls")
say.differs("E10", "N at D = 64 from which it is below the ridge point", below[0])
always = len(below) == 9_999
say.differs("E12", "attention", "memory-bound at every N" if always else "more memory-bound")
square = [(n, (work := product(n, n, n, np.float16)).flops / work.bytes) for n in lengths]
grows = SMALL.flops / SMALL.bytes < ridge < LARGE.flops / LARGE.bytes
say.exact("E12", "matrix product", "more compute-bound" if grows else "less compute-bound")
for N in (500, 1000, 4000):
    say.exact("E23", f"MB at N = {N}", np.empty((N, N), np.float16).nbytes / 1e6)
say.differs("E23", "memory of one multiprocessor, MB", (192 << 10) / 1e6)
# %% [markdown]
# The clock of a GPU agrees: a product with few columns reaches fewer FLOP/s.
# %%
side = 8192 if say.device == "cuda" else 1024
a = say.normal(side, side, dtype=np.float16 if say.device == "cuda" else np.float32)
few = say.xp.ascontiguousarray(a[:, : side // 64])
us = say.times({"few": lambda: a @ few, "all": lambda: a @ a})
rates = {name: 2 * side**2 * cols / np.array(us[name]) / 1e3
         for name, cols in (("few", side // 64), ("all", side))}  # fmt: skip
pair = {f"{side // 64} columns": rates["few"], f"{side:,} columns": rates["all"]}
say.order("E12", f"rate of a product of side {side:,}", pair, "GFLOP/s", clock=True)
alt = f"Attention stays below {intensity(1e9, D):.0f} FLOPs a byte; a square product crosses 161."
say.curves("Arithmetic intensity over N, in 16 bits", alt,
           {f"attention, D = {D}": ran, "product N x N x N": square}, label="N",
           unit="FLOPs a byte", log=True, log_x=True,
           levels=[(ridge, "ridge point of an A100, 161")])  # fmt: skip
