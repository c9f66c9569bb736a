"""24. Energy, and figures of other machines

Claim: these figures are of other machines, data or libraries. They are shown as printed and not
judged.
Regime: none
Question: A paper reports that a step is 1.4 times as fast. What must you know before you expect
the same on your own machine?
Answer: The card, the shapes, the precision, what was compared, and whether the step was bound by
arithmetic, memory or launches: chapters 1 to 6. Then predict your own factor, and measure.
Vary: gpuattn doctor
"""

# %%
import math
import time

from gpuattn.cuda.power import Draw, PowerMeter
from gpuattn.lecture import lecture
from gpuattn.units import CO2_PER_KWH, co2_grams

say = lecture(__doc__)
# %% [markdown]
# Energy, where a GPU measures it, and CO2 by a stated factor, the world's mean for electricity.
# %%
say.record("D01", "years of driving")
say.record("D01", "grams of CO2 for a kWh, the factor used here", CO2_PER_KWH)
before = PowerMeter().read(now=True) if say.device == "cuda" else Draw()
if before.joules is not None:
    a, begin, products = say.normal(8192, 8192, dtype="float16"), time.perf_counter(), 0
    while time.perf_counter() - begin < 2:
        for _ in range(50):
            a @ a
        say.xp.cuda.Device().synchronize()
        products += 50
    joules = (PowerMeter().read(now=True).joules or math.nan) - before.joules
    say.record("D01", "GFLOPs a joule, products in 16 bits", products * 2 * 8192**3 / joules / 1e9)
    training = 3.14e23 / (products * 2 * 8192**3 / joules)  # FLOPs of GPT-3, as published
    say.record("D01", "tonnes of CO2 of GPT-3's FLOPs at that rate", co2_grams(training) / 1e6)
else:
    say.record("D01", "GFLOPs a joule", "not measured: no GPU that measures its energy")
say.record("D03", "features of other libraries")
say.record("B01", "times of other chips")
say.record("C19", "a part of it here", "gpuattn.fuse and gpuattn.capture")
for id in ("D21", "D24", "D25"):
    say.record(id, "times as fast")
# %%
FACTORS = {
    "eight A100 and more": 1.12, "eight A100 and more, best": 1.41, "BERT on MRPC": 1.28,
    "BERT on MRPC, best": 1.44, "ViT on CIFAR-10": 1.2, "ViT on CIFAR-10, best": 1.7,
}  # fmt: skip
say.bars("How many times as fast, as printed (D21, D24, D25)", FACTORS, "times", grey=FACTORS)
