"""14. nanoGPT's ladder

Claim: flash attention and a padded vocabulary take a step of nanoGPT from 143 to 87 ms.
Regime: memory, then compute
Question: A step falls from 143 ms to 87 ms. Is that a gain of 39 percent or of 64?
Answer: Both. The time falls by 39 percent, and the speed rises by 64 percent: 143 / 87 = 1.64. The
text gives the second figure.
Vary: python -m gpuattn.lecture.c14_ladder width=512
"""

# %%
import numpy as np

import gpuattn
from gpuattn.bench.train.cases import CELLS, MODELS, UNPADDED
from gpuattn.lecture import lecture
from gpuattn.lecture.harness.forms import difference
from gpuattn.lecture.harness.say import ratio
from gpuattn.lecture.harness.steps import Rung, climb

say = lecture(__doc__)
# %% [markdown]
# The five printed times, and the gains that follow from them.
# %%
STEPS = {"unfused": 134, "memory-efficient": 119, "flash": 113, "flash and padded": 87}
say.record("A14", "before, ms")
for name, printed in STEPS.items():
    state = say.exact if name == "flash and padded" else say.differs
    state("A02", f"gain of {name}, {printed} ms, %", 100 * (143 / printed - 1))
    say.record("A14", f"{name}, ms")
say.record("A15", "a step on eight A100 SXM4 of 80 GB")
# %% [markdown]
# Multi-head attention in three lines: a linear layer, attention, a linear layer.
# %%
width, heads = say.size("width", 128, 64), 4
layer = gpuattn.nn.MultiHeadAttention(width, heads, causal=True)
x = say.rng.standard_normal((2, 32, width)).astype("float32")


qkv = gpuattn.linear(x, layer.qkv.weight, layer.qkv.bias).reshape(2, 32, 3, heads, -1)
o = gpuattn.flash_attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], causal=True)
three_lines = gpuattn.linear(o.reshape(2, 32, width), layer.out.weight, layer.out.bias)
say.near("A04", "three lines: difference from the module", difference(layer(x), three_lines), 1e-6)
# %% [markdown]
# The same steps here, of a GPT-2 with the same batch each; on a GPU as CUDA graphs. Memory is
# that of steps launched op by op: a CUDA graph keeps its own.
# %%
gpt = MODELS["gpt2-124m"]
rungs = {
    "unfused": Rung(UNPADDED, {"flash_attention": "unfused"}), "flash": Rung(UNPADDED),
    "flash and padded": Rung(gpt), "flash and padded, op by op": Rung(gpt, graphs=False),
}  # fmt: skip
T = say.size("T", 256, 64)
smaller = {"shape": (2, T), "heads": 4, "width": 64, "hidden": 256, "layers": (2,)}
found = climb(say, rungs, **smaller)
steps = {name: found[name].us for name in rungs}
ms = {name: float(np.median(us)) / 1e3 for name, us in steps.items()}
error = abs(found["flash"].loss - found["unfused"].loss)
say.near("A01", "loss of the first step, flash and unfused: difference", error, 0.02)
for name in ("unfused", "flash", "flash and padded"):
    say.record("A01", f"{name}, ms", ms[name])
for name, slower in (("flash", "unfused"), ("flash and padded", "flash")):
    pair = {name: steps[name], slower: steps[slower]}
    say.faster("A01", f"time of a step, {name}", pair)
say.record("A03", "gain by flash attention, %", 100 * (ms["unfused"] / ms["flash"] - 1))
say.record("A03", "gain by both, %", 100 * (ms["unfused"] / ms["flash and padded"] - 1))
peaks = {name: found[name].peak / 1e6 for name in ("flash", "unfused")}
say.order("A03", "memory of a step", peaks, "MB")
large = CELLS["gpt2-large"].case
rungs = {"flash": Rung(large), "unfused": Rung(large, {"flash_attention": "unfused"})}
us = {name: rung.us for name, rung in climb(say, rungs, **smaller).items()}
called = "GPT-2 large" if say.device == "cuda" else "a small GPT-2"
say.faster("D23", f"time of a step of {called}", us)
what = "flash attention, times as fast as unfused"
say.record("D23", what, ratio(us["unfused"], us["flash"]))
say.bars("A step of GPT-2 here", ms, "ms")
# %% [markdown]
# Days of training as ratios. The other figures of these tables are of other machines.
# %%
for size, days, faster in (("small", 9.5, 4.7), ("small", 9.5, 2.7),
                           ("medium", 21.0, 11.5), ("medium", 21.0, 6.9)):  # fmt: skip
    say.exact("B14", f"GPT-2 {size}, {days} over {faster} days, times", days / faster)
say.record("B14", "GPT-2 small, perplexity")
say.record("E20", "days of training")
say.record("E21", "faster by, %")
bars = {"before": 143.0, **{name: float(ms) for name, ms in STEPS.items()}}
say.bars("A step of nanoGPT on eight A100, as printed", bars, "ms", grey=bars)
