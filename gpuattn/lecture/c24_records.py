"""24. What cannot run here

Claim: figures of other machines, other data and other libraries stand here as printed; nothing is
judged.
Regime: none
Question: A paper reports 1.4 times. What would you need to know before you expect it on your own
machine?
Answer: The card, the shapes, the precision, what was compared, and whether the step was bound by
arithmetic, memory or launches: chapters 1 to 6. Then predict your own factor, and measure.
Vary: gpuattn doctor
"""

# %%
from gpuattn.lecture import lecture

say = lecture(__doc__)
# %% [markdown]
# Energy: gpuattn train measures the joules of a run on a GPU; a car's are another matter.
# %%
say.record("D01", "years of driving")
say.record("D03", "a table of features of libraries")
say.record("B01", "other chips")
say.record("C19", "another library; here gpuattn.fuse and gpuattn.capture do a part of it")
for id in ("D21", "D24", "D25"):
    say.record(id, "times as fast")
# %%
FACTORS = {
    "eight A100 and more": 1.12, "eight A100 and more, best": 1.41, "BERT on MRPC": 1.28,
    "BERT on MRPC, best": 1.44, "ViT on CIFAR-10": 1.2, "ViT on CIFAR-10, best": 1.7,
}  # fmt: skip
alt = "; ".join(f"{name}: {factor}" for name, factor in FACTORS.items())
say.bars("How many times as fast, as printed", alt, FACTORS, "times", grey=FACTORS)
