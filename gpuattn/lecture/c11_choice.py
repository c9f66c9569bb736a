"""11. Which kernel runs

Claim: an op has several implementations; what they accept decides which one runs, and a block can
choose another.
Regime: compute
Question: A library has a fast kernel and a plain one, and a call is slow. What would you ask it?
Answer: Which one ran, and why not the other: here explain() gives the sentence of each one that
refuses, and use_impl() forces one, which fails with that sentence where it cannot run.
Vary: gpuattn kernels --why flash_attention
"""

# %%
import numpy as np

import gpuattn
from gpuattn.arrays import to_cpu
from gpuattn.errors import UnsupportedError
from gpuattn.lecture import lecture

say = lecture(__doc__)
T, D = say.size("T", 1024, 128), 64
q, k, v = (say.normal(1, 64, 2, D) for _ in range(3))
# %% [markdown]
# All implementations, and the reasons of those that do not run here.
# %%
found = gpuattn.explain(gpuattn.flash_attention, q, k, v)
reasons = dict(found.reasons)
say.record("A05", "chosen here", found.chosen)
for name, reason in reasons.items():
    if reason:
        say.record("A05", f"{name} refuses", reason)
with gpuattn.use_impl(flash_attention="reference"):
    inside = gpuattn.explain(gpuattn.flash_attention, q, k, v)
say.near("A16", "calls in a block that ran another", int(inside.chosen != "reference"), 0)
# %% [markdown]
# Those that run agree with the reference.
# %%
right = to_cpu(gpuattn.flash_attention(q, k, v, impl="reference"))
ran = []
for name in reasons:
    try:
        out = to_cpu(gpuattn.flash_attention(q, k, v, impl=name))
    except UnsupportedError:
        continue
    ran.append(name)
    say.near("A16", f"{name}: difference from the reference", abs(out - right).max(), 1e-4)
# %% [markdown]
# GFLOP/s over the length, of each that runs here.
# %%
lines: dict[str, list] = {name: [] for name in ran}
for length in (2**n for n in range(5, int(np.log2(T)) + 1)):
    data = [say.normal(1, length, 4, D) for _ in range(3)]
    flops = 4 * D * 4 * length**2

    def call(name, data=data):
        return lambda: gpuattn.flash_attention(*data, impl=name)

    us = say.times({name: call(name) for name in ran})
    for name in ran:
        lines[name].append((length, flops / float(np.median(us[name])) / 1e3))
alt = "; ".join(f"{name}: {line[-1][1]:,.1f} GFLOP/s at {T}" for name, line in lines.items())
say.curves("GFLOP/s of attention over the tokens, 4 heads of 64", alt, lines, label="tokens",
           log=True, log_x=True)  # fmt: skip
