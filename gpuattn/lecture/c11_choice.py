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
from functools import partial

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
say.near("A16", "calls under use_impl of another kernel", int(inside.chosen != "reference"), 0)
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
# An explicit mask: does it take another kernel than the causal flag?
# %%
dtype = "float16" if say.device == "cuda" else "float32"
q, k, v = (say.normal(1, 512, 2, D, dtype=dtype) for _ in range(3))
mask = say.array(np.tri(512) > 0, bool)
plain, masked = (gpuattn.explain(gpuattn.flash_attention, q, k, v, **given).chosen
                 for given in ({"causal": True}, {"bias": mask}))  # fmt: skip
say.record("A06", "kernel with the causal flag", plain)
say.record("A06", "kernel with the same mask as an array", masked)
say.near("A06", "explicit masks that take another kernel", int(plain != masked), 0)
# %% [markdown]
# TFLOP/s over the length: the fused kernels that run here, and unfused attention.
# %%
names: tuple[str, ...]
if say.device == "cuda":
    names, T, heads, D = ("raw-hopper", "raw-ampere", "unfused"), 8192, 16, 128
else:
    names, heads, D = ("reference", "unfused"), 2, 128
lines: dict[str, list] = {}
for causal in (False, True):
    for length in (2**n for n in range(int(np.log2(T)) - 3, int(np.log2(T)) + 1)):
        data = [say.normal(1, length, heads, D, dtype=dtype) for _ in range(3)]
        calls = {}
        for name in names:
            call = partial(gpuattn.flash_attention, *data, causal=causal, impl=name)
            told = gpuattn.explain(gpuattn.flash_attention, *data, causal=causal, impl=name)
            if told.chosen:
                calls[name] = call
        us = say.kernel_times(calls)
        for name, samples in us.items():
            rate = 4 * D * heads * length**2 / (1 + causal) / float(np.median(samples)) / 1e6
            lines.setdefault(f"{name}{', causal' * causal}", []).append((length, rate))
    what = f"time, {T:,} tokens, head size 128, {'causal' if causal else 'full'}"
    best, *_, unfused = us.values()
    say.order("B15", what, {"fused": best, "unfused": unfused}, "us", clock=True)
    if "raw-hopper" in us:
        pair = {f"kernel for {name}": us[f"raw-{name.lower()}"] for name in ("Hopper", "Ampere")}
        say.order("B16", what, pair, "us", clock=True)
alt = "; ".join(f"{name}: {line[-1][1]:,.3g} TFLOP/s at {T}" for name, line in lines.items())
say.curves("Attention over the length, head size 128", alt, lines, label="tokens",
           unit="TFLOP/s", log=True, log_x=True)  # fmt: skip
# %% [markdown]
# 48 heads of size 64, forward and backward, until memory ends. The reference computes the formula
# block by block: it needs less memory, but writes and reads as many scores as unfused attention.
# %%
longest, heads, n = (32768, 48, 2048) if say.device == "cuda" else (T, 4, 1024)
held: dict[str, list] = {"fused": [], "unfused": []}


def draw(length):
    shape = 1, length, heads, 64
    return [gpuattn.Tensor(say.normal(*shape, dtype=dtype), requires_grad=True) for _ in "qkv"]


def peak(leaves, impl):
    """Return the MiB that forward and backward hold."""

    def both():
        out = gpuattn.flash_attention(*leaves, impl=impl)
        out.backward(out.data)

    return say.peak(both) / 2**20


for length in (longest // 64, longest // 16, longest // 4, longest):
    leaves = draw(length)
    for name, impl in (("fused", None), ("unfused", "unfused")):
        held[name].append((length, peak(leaves, impl)))
    say.clear()
fit = [length for length, size in held["unfused"] if np.isfinite(size)]
less, more = (dict(held[name])[fit[-1]] for name in ("fused", "unfused"))
say.order("C15", f"memory, {fit[-1]:,} tokens", {"fused": less, "unfused": more}, "MiB")
ended = "most tokens that fit" if fit[-1] < longest else "tokens that fit, most tried"
say.record("C15", f"unfused: {ended}", fit[-1])
leaves = draw(n)
pieces, whole = peak(leaves, "reference"), peak(leaves, "unfused")
say.order("C16", f"memory, {n:,} tokens", {"block by block": pieces, "whole": whole}, "MiB")
q = say.xp.empty((1, n, heads, 64), np.float32)
moved = [gpuattn.traffic(gpuattn.flash_attention, q, q, q, impl=name).bytes
         for name in ("reference", "unfused")]  # fmt: skip
what = "bytes by the byte model, block by block: relative difference from whole"
say.near("C16", what, abs(moved[0] / moved[1] - 1), 0.2)
alt = f"At {fit[-1]:,} tokens: fused {less:,.0f} MiB, unfused {more:,.0f} MiB."
say.curves(f"Memory of forward and backward, {heads} heads of size 64", alt, held,
           label="tokens", unit="MiB", log=True, log_x=True)  # fmt: skip
