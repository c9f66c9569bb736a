"""14. nanoGPT's ladder

Claim: attention first, then a vocabulary that fits the hardware: a step falls from 143 to 87 ms.
Regime: memory, then compute
Question: A step falls from 143 ms to 87 ms. Is that a gain of 39 percent or of 64?
Answer: Both. The time falls by 39 percent, the speed rises by 64: 143 / 87 = 1.64. The text gives
the second.
Vary: python -m gpuattn.lecture.c14_ladder width=512
"""

# %%
import numpy as np

import gpuattn
from gpuattn.arrays import to_cpu
from gpuattn.bench.train.cases import CELLS, MODELS, UNPADDED
from gpuattn.lecture import lecture
from gpuattn.lecture.harness.steps import Rung, climb

say = lecture(__doc__)
# %% [markdown]
# The five printed times and the gains that follow. Three of the four gains were cut, not rounded.
# %%
STEPS = {"unfused": 134, "memory-efficient": 119, "flash": 113, "flash and padded": 87}
say.record("A14", "baseline, ms")
for name, printed in STEPS.items():
    gain, what = 100 * (143 / printed - 1), f"{name} at {printed} ms, %"
    (say.exact if name == "flash and padded" else say.differs)("A02", what, gain)
    say.record("A14", f"{name}, ms")
say.record("A15", "eight A100 SXM4 of 80 GB, no dropout")
# %% [markdown]
# Multi-head attention in three lines: a linear layer, attention, a linear layer.
# %%
width, heads = say.size("width", 128, 64), 4
layer = gpuattn.nn.MultiHeadAttention(width, heads, causal=True)
x = say.rng.standard_normal((2, 32, width)).astype("float32")


def three_lines(x):
    q, k, v = (
        gpuattn.linear(x, layer.qkv.weight, layer.qkv.bias)
        .reshape(2, 32, 3, heads, -1)
        .swapaxes(0, 2)
    )
    o = gpuattn.flash_attention(q.swapaxes(0, 1), k.swapaxes(0, 1), v.swapaxes(0, 1), causal=True)
    return gpuattn.linear(o.reshape(2, 32, width), layer.out.weight, layer.out.bias)


error = abs(to_cpu(layer(x).data) - to_cpu(three_lines(x).data)).max()
say.near("A04", "three lines: difference from the module", error, 1e-6)
# %% [markdown]
# The same ladder here: a step of GPT-2, all rungs with the same batch and as CUDA graphs on a GPU.
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
difference = abs(found["flash"].loss - found["unfused"].loss)
say.near("A01", "losses of the first step, flash and unfused: difference", difference, 0.02)
for name in ("unfused", "flash", "flash and padded"):
    say.record("A01", f"{name}, ms", ms[name])
for name, slower in (("flash", "unfused"), ("flash and padded", "flash")):
    what = f"time of a step, {name} and {slower}"
    say.order("A01", what, steps[name], steps[slower], "us", clock=True)
gains = {name: 100 * (ms["unfused"] / ms[name] - 1) for name in ("flash", "flash and padded")}
say.record("A03", "gain by attention here, %", gains["flash"])
say.record("A03", "gain by both here, %", gains["flash and padded"])
less, more = (found[name].peak / 1e6 for name in ("flash", "unfused"))
say.order("A03", "memory of a step, flash and unfused", less, more, "MB")
large = CELLS["gpt2-large"].case
rungs = {"unfused": Rung(large, {"flash_attention": "unfused"}), "flash": Rung(large)}
bigger = {name: rung.us for name, rung in climb(say, rungs, **smaller).items()}
what = "time of a step of GPT-2 large, flash and unfused"
say.order("D23", what, bigger["flash"], bigger["unfused"], "us", clock=True)
times = float(np.median(bigger["unfused"]) / np.median(bigger["flash"]))
say.record("D23", "unfused over flash, times", times)
alt = "; ".join(f"{name} {time:.3g} ms" for name, time in ms.items())
say.bars("A step of GPT-2 here, by what is switched on", alt, ms, "ms")
# %% [markdown]
# Days of training, in ratios; the rest of these tables stands on other machines.
# %%
for size, days, faster in (("small", 9.5, 4.7), ("small", 9.5, 2.7),
                           ("medium", 21.0, 11.5), ("medium", 21.0, 6.9)):  # fmt: skip
    say.exact("B14", f"{size}, {days} over {faster} days", days / faster)
say.record("B14", "small, perplexity")
say.record("E20", "the same table as B14")
say.record("E21", "%")
bars = {"baseline": 143.0, **{name: float(ms) for name, ms in STEPS.items()}}
alt = "; ".join(f"{name} {ms:.0f} ms" for name, ms in bars.items())
say.bars("A step of nanoGPT on eight A100, as printed", alt, bars, "ms", grey=bars)
