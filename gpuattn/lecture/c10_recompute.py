"""10. The gradient of attention: recomputation

Claim: the backward pass needs no stored weights P. It computes them again, tile by tile, from one
stored number a row.
Regime: memory
Question: dS = P (dP - rowsum(dP P)) seems to need whole rows of dP and P. Which sum over the stored
O and dO equals rowsum(dP P)?
Answer: rowsum(dO O). O = P V and dP = dO V^T, so both sums are the same. This one reads only N d
elements. So tiles of P and dP can be computed again, used and dropped.
Vary: python -m gpuattn.lecture.c10_recompute layers=12
"""

# %%
from functools import partial

import numpy as np

import gpuattn
from gpuattn.bench import hbm
from gpuattn.lecture import lecture
from gpuattn.lecture.harness import attention, counted
from gpuattn.lecture.harness.forms import both_ways, difference, gradients, host_peak

say = lecture(__doc__)
T, D = say.size("T", 128, 64), 32
# %% [markdown]
# The five formulas in float64, beside the gradients of the fused op.
# %%
q, k, v, dO = (say.rng.standard_normal((T, D)) for _ in range(4))
S = q @ k.T / np.sqrt(D)
P = np.exp(S - S.max(-1, keepdims=True))
P /= P.sum(-1, keepdims=True)
O = P @ v  # noqa: E741 the letter of the formulas
dV, dP = P.T @ dO, dO @ v.T
dS = P * (dP - (dP * P).sum(-1, keepdims=True))
dQ, dK = dS @ k / np.sqrt(D), dS.T @ q / np.sqrt(D)
heads = [say.array(x, np.float64)[None, :, None] for x in (q, k, v)]
_, *ours = both_ways(gpuattn.flash_attention, *heads, grad=say.array(dO, np.float64)[None, :, None])
for name, formula, grad in zip(("dQ", "dK", "dV"), (dQ, dK, dV), ours, strict=True):
    error = difference(formula, grad[0, :, 0])
    say.near("C09", f"{name}: difference from the fused op", error, 1e-12)
jacobian, step = np.diag(P[0]) - np.outer(P[0], P[0]), 1e-6 * np.eye(T)
up, down = (e / e.sum(-1, keepdims=True) for e in (np.exp(S[0] + step), np.exp(S[0] - step)))
error = difference(jacobian, (up - down) / 2e-6)
say.near("C09", "diag(P) - P P^T: difference from finite differences", error, 1e-8)
error = difference((dP * P).sum(-1), (dO * O).sum(-1))
say.near("C10", "row sums of dP P: difference from those of dO O", error, 1e-12)
# %% [markdown]
# So flash attention does more FLOPs, moves fewer bytes and takes less time: as printed, by the byte
# model (gpuattn.traffic), by the clock, and by the counters of a GPU where ncu can read them.
# %%
ratios = {"more FLOPs, %": 100 * (75.2 / 66.6 - 1), "fewer bytes, times": 40.3 / 4.4}
for name, ratio in (ratios | {"less time, times": 41.7 / 7.3}).items():
    say.exact("E19", name, round(ratio))
gigabytes = 2 * 64 * 16 * (18 * 1024**2 + 12 * 1024 * 64) / 1e9  # masks and dropout included
error = abs(gigabytes / 40.3 - 1)
say.near("E19", "18 N^2 + 12 N d elements: relative difference from 40.3 GB", error, 0.01)
shape = (64, 1024, 16, 64) if say.device == "cuda" else (1, 256, 2, 64)
arrays, moved = [say.xp.empty(shape, say.dtype)] * 3, {}
for name, impl in (impls := {"fused": None, "unfused": "unfused"}).items():
    there, back = (
        gpuattn.traffic(gpuattn.flash_attention, *arrays, direction=way, impl=impl).bytes
        for way in ("forward", "backward")
    )
    moved[name] = there + back
    measured, reason = hbm.measure("flash_attention", shape, impl, say.device)
    if measured:
        what = f"{name}: relative difference of the bytes measured from the byte model"
        say.near("E19", what, abs(measured / there - 1), 0.1)
    else:
        say.record("E19", f"{name}: bytes measured", f"none: {reason}")
times = moved["unfused"] / moved["fused"]
say.record("E19", "bytes by the byte model, unfused over fused, times", times)
say.faster("E19", "time, forward", attention.times(say, impls, shape))
# %% [markdown]
# The same trade for whole layers: store all activations, or only the input of each layer.
# %%
layers, width = say.size("layers", 6, 4), say.size("width", 128, 64)
tokens = say.rng.integers(0, 256, (4, 129))
config = gpuattn.models.GPT2Config(
    vocab=256, d_model=width, heads=4, layers=layers, block=128, pad_vocab=False
)
model = gpuattn.models.GPT2(config)


def step_of(kept):
    """Return the peak memory of a step in MiB, its gradients, and its MFLOPs."""
    model.checkpoint = kept
    step = partial(gradients, model, tokens[:, :-1], tokens[:, 1:])
    found, calls = counted.run(step)
    return host_peak(step) / 2**20, found, sum(call.flops for call in calls) / 1e6


(stored, right, least), (again, found, most) = step_of("none"), step_of("block")
say.order("E03", "peak memory of a step", {"recomputed": again, "stored": stored}, "MiB")
say.near("E03", "gradients, recomputed and stored: difference", difference(found, right), 1e-6)
say.order("E18", "the price: work of a step", {"stored": least, "recomputed": most}, "MFLOP")
peaks = {"all activations stored": stored, "recomputed, layer by layer": again}
say.bars(f"Peak memory of a training step, {layers} layers", peaks, "MiB")
