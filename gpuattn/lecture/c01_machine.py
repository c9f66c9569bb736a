"""1. The machine: a ratio decides

Claim: two rates describe a machine, FLOPs and bytes a second; their ratio tells which one a
program waits for.
Regime: compute or memory
Question: An A100 does 312 TFLOP/s in 16 bits and moves 1.935 TB/s. How many FLOPs must a program
do with each byte to keep its arithmetic busy?
Answer: 161. A sum of two arrays does a sixth of a FLOP a byte, so it runs at a thousandth of the
peak, and no better arithmetic helps it.
Vary: python -m gpuattn.lecture.c01_machine side=2048
"""

# %%
import numpy as np

from gpuattn.cuda.ceilings import ceilings
from gpuattn.lecture import lecture

say = lecture(__doc__)
side, count = say.size("side", 1024, 128), say.size("count", 1 << 23, 1 << 16)
# %% [markdown]
# What the texts print of an A100, and what follows.
# %%
for name in ("FP64", "FP32", "TF32", "FP16 and BF16", "INT8"):
    say.record("E06", name)
for name in ("multiprocessors", "memory, TB/s", "on chip, KB each", "on chip, TB/s"):
    say.record("B08", name)
say.record("B07", "a figure over the years")
say.differs("E05", "memory of one multiprocessor, MB", (192 << 10) / 1e6)
say.order(
    "E13", "threads that 108 multiprocessors hold, and by the formula", 108 * 2048, 108 * 32 * 1024
)
say.differs("E13", "threads of an A100", 108 * 2048)
halves, singles = (np.empty(count, dtype).nbytes for dtype in (np.float16, np.float32))
say.exact("D15", "bytes, 16 over 32 bits", halves / singles)
# %% [markdown]
# This machine: a product of matrices and a copy, by the clock.
# %%
rates: dict[str, float]
if say.device == "cuda":
    rates = ceilings(say.xp, np.float16) or {
        "copy_tbs": float("nan"),
        "matmul_tflops": float("nan"),
    }
else:
    a, source = say.normal(side, side), say.normal(count)
    target = np.empty_like(source)
    us = say.times({"product": lambda: a @ a, "copy": lambda: np.copyto(target, source)})
    best = {name: min(samples) for name, samples in us.items()}
    rates = {"copy_tbs": 2 * source.nbytes / best["copy"] / 1e6,
             "matmul_tflops": 2 * side**3 / best["product"] / 1e6}  # fmt: skip
peak, copy = rates["matmul_tflops"], rates["copy_tbs"]
say.record("E07", "TFLOP/s", peak)
say.record("E07", "TB/s", copy)
say.record("E07", "FLOPs a byte at the turn", peak / copy)
work = [2.0**n for n in range(-4, 13)]
lines = {"here": [(x, min(peak, x * copy) * 1e12) for x in work],
         "an A100, as printed": [(x, min(312, x * 1.935) * 1e12) for x in work]}  # fmt: skip
alt = (
    f"A roof that rises to {peak:.3g} TFLOP/s at {peak / copy:.0f} FLOPs a byte, beside an A100's."
)
say.curves("FLOP/s that a machine allows, over the FLOPs a byte of a program", alt, lines,
           label="FLOPs a byte", log=True, log_x=True)  # fmt: skip
