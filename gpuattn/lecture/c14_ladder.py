"""14. nanoGPT's ladder

Claim: attention first, then a vocabulary that fits the hardware: a step falls from 143 to 87 ms.
Regime: memory, then compute
Question: A step falls from 143 ms to 87 ms. Is that a gain of 39 percent or of 64?
Answer: Both. The time falls by 39 percent, the speed rises by 64: 143 / 87 = 1.64. The text gives
the second.
Vary: python -m gpuattn.lecture.c14_ladder width=512
"""

# %%
import gpuattn
from gpuattn.arrays import to_cpu
from gpuattn.lecture import lecture

say = lecture(__doc__)
# %% [markdown]
# The five printed times and the gains that follow. Three of the four gains were cut, not rounded.
# %%
STEPS = {"unfused": 134, "memory-efficient": 119, "flash": 113, "flash and padded": 87}
say.record("A14", "baseline, ms")
for name, ms in STEPS.items():
    gain, what = 100 * (143 / ms - 1), f"{name} at {ms} ms, %"
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
