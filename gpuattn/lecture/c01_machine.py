"""1. The machine: a ratio decides

Claim: a machine has two rates, FLOP/s of its arithmetic and bytes a second of its memory. Their
ratio, the ridge point, tells which of the two limits a program.
Regime: compute or memory
Question: An A100 does 312 TFLOP/s in 16 bits and moves 1.935 TB/s. How many FLOPs must a program
do with each byte to keep its arithmetic busy?
Answer: 161, its ridge point. The sum of two arrays in 16 bits does one FLOP for 6 bytes, a sixth
of a FLOP a byte. It reaches a thousandth of the peak, and faster arithmetic does not help it.
Vary: gpuattn bench machine
"""

# %%
import numpy as np

from gpuattn.lecture import lecture
from gpuattn.lecture.harness.machine import here

say = lecture(__doc__)
# %% [markdown]
# This machine, as gpuattn bench machine measures it, beside what the texts print of an A100. On a
# CPU these are rates of one core.
# %%
machine = here(say.device)
copy, on_chip, units = machine["copy_tbs"][1], machine["on_chip_tbs"], machine["units"]
products = {kind: rate for kind, rate in machine["products"].items() if isinstance(rate, float)}
halves = max(products.get(kind, 0) for kind in ("FP16", "BF16"))
for kind in ("FP64", "FP32", "TF32", "INT8"):
    say.record("E06", f"{kind}, TFLOP/s", products.get(kind))
say.record("E06", "FP16 and BF16, TFLOP/s", halves or None)
say.record("B08", "multiprocessors", units.get("multiprocessors"))
say.record("B08", "memory, TB/s", copy)
say.record("B08", "shared memory of each, KB", units.get("KB of shared memory each"))
say.record("B08", "shared memory of all, TB/s", on_chip)
chip = "shared memory" if say.device == "cuda" else "cache"
say.order("E05", "rates", {"memory": copy, chip: on_chip}, "TB/s", clock=True)
say.record("B07", "rates of other machines over the years")
# %% [markdown]
# What follows from the printed figures.
# %%
say.differs("E05", "memory of one multiprocessor, MB", (192 << 10) / 1e6)
by_hardware, by_formula = 108 * 2048, 108 * 32 * 1024  # 32 blocks of 1,024 threads
say.order("E13", "threads", {"what 108 multiprocessors hold": by_hardware,
                             "the formula": by_formula})  # fmt: skip
say.differs("E13", "threads of an A100", by_hardware)
sizes = [np.empty(1024, dtype).nbytes for dtype in (np.float16, np.float32)]
say.exact("D15", "bytes, 16 over 32 bits", sizes[0] / sizes[1])
single = products.get("FP32")
if say.device == "cuda" and single and halves:  # NumPy multiplies 16-bit numbers one by one
    say.order("D15", "matrix products", {"32 bits": single, "16 bits": halves}, "TFLOP/s",
              clock=True)  # fmt: skip
# %% [markdown]
# The roof: the fastest product and the copy.
# %%
peak = halves if say.device == "cuda" else products["FP32"]
say.record("E07", "TFLOP/s", peak)
say.record("E07", "TB/s", copy)
say.record("E07", "ridge point, FLOPs a byte", peak / copy)
work = [2.0**n for n in range(-4, 13)]
lines = {"here, as measured": [(x, min(peak, x * copy) * 1e12) for x in work],
         "an A100, as printed": [(x, min(312, x * 1.935) * 1e12) for x in work]}  # fmt: skip
alt = f"A roof that rises to {peak:.3g} TFLOP/s at {peak / copy:.0f} FLOPs a byte, and an A100's."
say.curves("The roofline: FLOP/s that a program can reach, by its FLOPs a byte", lines, alt=alt,
           label="FLOPs a byte", unit="FLOP/s", log="xy")  # fmt: skip
say.bars("Matrix products here, by the kind of number", products, "TFLOP/s")
