"""11. Which kernel runs

Claim: an op has several kernels. The first one that accepts the arguments runs, and the caller can
ask for another.
Regime: compute
Question: A library has a fast kernel and a slow one, and your call is slow. What should the library
be able to tell you?
Answer: Which kernel ran, and why not the fast one. Here explain() gives the reason of each kernel
that refuses. use_impl() asks for one kernel, and fails with its reason where it cannot run.
Vary: gpuattn kernels --why flash_attention
"""

# %%
import numpy as np

import gpuattn
from gpuattn.errors import UnsupportedError
from gpuattn.lecture import lecture
from gpuattn.lecture.harness import attention
from gpuattn.lecture.harness.forms import difference

say = lecture(__doc__)
T, D = say.size("T", 1024, 128), 64
q, k, v = (say.normal(1, 64, 2, D) for _ in range(3))
# %% [markdown]
# All implementations, and the reasons of those that do not run here.
# %%
found = gpuattn.explain(gpuattn.flash_attention, q, k, v)
reasons = dict(found.reasons)
say.record("A05", "chosen here", found.chosen)
for name in filter(reasons.get, reasons):
    say.record("A05", f"{name} refuses", reasons[name])
with gpuattn.use_impl(flash_attention="reference"):
    inside = gpuattn.explain(gpuattn.flash_attention, q, k, v)
say.near("A16", "calls under use_impl of another kernel", int(inside.chosen != "reference"), 0)
# %% [markdown]
# Those that run agree with the reference.
# %%
right = gpuattn.flash_attention(q, k, v, impl="reference")
for name in reasons:
    try:
        error = difference(gpuattn.flash_attention(q, k, v, impl=name), right)
    except UnsupportedError:
        continue
    say.near("A16", f"{name}: difference from the reference", error, 1e-4)
# %% [markdown]
# An explicit mask: does it take another kernel than the causal flag?
# %%
q, k, v = (say.normal(1, 512, 2, D, dtype=say.dtype) for _ in range(3))
mask = say.array(np.tri(512) > 0, bool)
plain, masked = (gpuattn.explain(gpuattn.flash_attention, q, k, v, **given).chosen
                 for given in ({"causal": True}, {"bias": mask}))  # fmt: skip
say.record("A06", "kernel with the causal flag", plain)
say.record("A06", "kernel with the same mask as an array", masked)
say.near("A06", "explicit masks that take another kernel", int(plain != masked), 0)
# %% [markdown]
# TFLOP/s over the length: the fused kernels that run here, and unfused attention.
# %%
lines: dict[str, list] = {}
kernels: tuple[str, ...] = ("reference", "unfused")
shape = T, 2, 128
if say.device == "cuda":
    kernels, shape = ("raw-hopper", "raw-ampere", "unfused"), (8192, 16, 128)
for causal in (False, True):
    us, curves = attention.rates(say, kernels, shape, causal)
    lines |= curves
    what = f"time, {shape[0]:,} tokens, head size 128, {'causal' if causal else 'full'}"
    best, *_, unfused = us.values()
    say.faster("B15", what, {"fused": best, "unfused": unfused})
    if "raw-hopper" in us:
        pair = {f"kernel for {name}": us[f"raw-{name.lower()}"] for name in ("Hopper", "Ampere")}
        say.faster("B16", what, pair)
say.curves("Attention over the length, head size 128", lines, label="tokens", unit="TFLOP/s",
           log="xy")  # fmt: skip
# %% [markdown]
# 48 heads of size 64, forward and backward, until memory ends. The reference computes the formula
# block by block: it needs less memory, but writes and reads as many scores as unfused attention.
# %%
longest, heads, n = (32768, 48, 2048) if say.device == "cuda" else (T, 4, 1024)
tokens = [longest // 64, longest // 16, longest // 4, longest]
held = {name: attention.memory(say, tokens, heads, impl)
        for name, impl in (("fused", None), ("unfused", "unfused"))}  # fmt: skip
fit = max(count for count, size in held["unfused"] if np.isfinite(size))
less, more = (dict(line)[fit] for line in held.values())
say.order("C15", f"memory, {fit:,} tokens", {"fused": less, "unfused": more}, "MiB")
ended = "most tokens that fit" if fit < longest else "tokens that fit, most tried"
say.record("C15", f"unfused: {ended}", fit)
forms = {"block by block": "reference", "whole": "unfused"}
held_by = {name: attention.memory(say, [n], heads, impl)[0][1] for name, impl in forms.items()}
say.order("C16", f"memory, {n:,} tokens", held_by, "MiB")
q = say.xp.empty((1, n, heads, 64), np.float32)
few, many = (gpuattn.traffic(gpuattn.flash_attention, q, q, q, impl=impl).bytes
             for impl in forms.values())  # fmt: skip
what = "bytes by the byte model, block by block: relative difference from whole"
say.near("C16", what, abs(few / many - 1), 0.2)
say.curves(f"Memory of forward and backward, {heads} heads of size 64", held, label="tokens",
           unit="MiB", log="xy")  # fmt: skip
