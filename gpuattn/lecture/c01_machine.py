"""1. The machine: a ratio decides

Claim: two rates describe a machine, FLOPs and bytes a second; their ratio tells which one a
program waits for.
Regime: compute or memory
Question: An A100 does 312 TFLOP/s in 16 bits and moves 1.935 TB/s. How many FLOPs must a program
do with each byte to keep its arithmetic busy?
Answer: 161. A sum of two arrays does a sixth of a FLOP a byte, so it runs at a thousandth of the
peak, and no better arithmetic helps it.
Vary: gpuattn bench machine
"""

# %%
import numpy as np

from gpuattn.lecture import lecture
from gpuattn.lecture.harness.machine import here

say = lecture(__doc__)
# %% [markdown]
# This machine, as gpuattn bench machine measures it, beside what the texts print of an A100.
# %%
machine = here(say.device)
copy, on_chip, units = machine["copy_tbs"][1], machine["on_chip_tbs"], machine["units"]
products = {kind: rate for kind, rate in machine["products"].items() if isinstance(rate, float)}
halves = max(products.get(kind, 0) for kind in ("FP16", "BF16"))
for kind in ("FP64", "FP32", "TF32", "INT8"):
    say.record("E06", kind, products.get(kind))
say.record("E06", "FP16 and BF16", halves)
say.record("B08", "multiprocessors", units.get("multiprocessors", units.get("cores")))
say.record("B08", "memory, TB/s", copy)
say.record("B08", "on chip, KB each", units.get("KB of shared memory each"))
say.record("B08", "on chip, TB/s", on_chip)
say.order("E05", "rate of the memory, of memory on the chip", copy, on_chip, "TB/s", clock=True)
say.record("B07", "a figure over the years")
# %% [markdown]
# What follows from the printed figures.
# %%
say.differs("E05", "memory of one multiprocessor, MB", (192 << 10) / 1e6)
say.order(
    "E13", "threads that 108 multiprocessors hold, and by the formula", 108 * 2048, 108 * 32 * 1024
)
say.differs("E13", "threads of an A100", 108 * 2048)
sizes = [np.empty(1024, dtype).nbytes for dtype in (np.float16, np.float32)]
say.exact("D15", "bytes, 16 over 32 bits", sizes[0] / sizes[1])
if say.device == "cuda":  # NumPy multiplies 16-bit numbers one by one
    single = products.get("FP32", 0.0)
    say.order("D15", "products of 32 and of 16 bits", single, halves, "TFLOP/s", clock=True)
# %% [markdown]
# The roof: the fastest product and the copy.
# %%
peak = halves if say.device == "cuda" else products["FP32"]
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
alt = "; ".join(f"{kind}: {rate:,.4g} TFLOP/s" for kind, rate in products.items())
say.bars("Products of matrices here, by the kind of number", alt, products, "TFLOP/s")
