"""8. Naive attention against flash attention

Claim: the formula stores tables of N x N numbers and moves them to and fro; the fused kernel never
stores them.
Regime: memory
Question: N doubles. How do the memory of the formula and of the fused kernel grow?
Answer: The formula's four times, by its N x N tables. The fused kernel's twice: it holds arrays of
N x d, one number a row, and tiles of a size that does not depend on N.
Vary: python -m gpuattn.lecture.c08_unfused N=4096
"""

# %%
import math
import tracemalloc

import numpy as np

import gpuattn
from gpuattn.arrays import to_cpu
from gpuattn.lecture import lecture
from gpuattn.lecture.harness.counted import memory, moved

say = lecture(__doc__)
longest, d = say.size("N", 2048, 512, 8192), 64
# %% [markdown]
# The formula on the tape, in a few words, beside the op: the same result and the same gradients.
# %%


def formula(q, k, v):
    return gpuattn.softmax(q @ k.swapaxes(-1, -2), scale=d**-0.5, causal=True) @ v


def fused(q, k, v):
    return gpuattn.scaled_dot_product_attention(q, k, v, is_causal=True)


data, outs = [say.normal(1, 2, 64, d) for _ in range(3)], []
for form in (formula, fused):
    leaves = [gpuattn.Tensor(x, requires_grad=True) for x in data]
    out = form(*leaves)
    (out * out).sum().backward()
    outs.append([to_cpu(x) for x in (out.data, *(leaf.grad for leaf in leaves))])
errors = [abs(a - b).max() for a, b in zip(*outs, strict=True)]
say.near("B09", "result: difference from the op", errors[0], 1e-5)
say.near("B09", "gradients: difference from the op", max(errors[1:]), 1e-4)
# %% [markdown]
# Its arrays in a memory that counts: forward in three kernels, or four with a mask, and backward.
# %%


def forward(m, mask=False):
    m["S"][:] = m["Q"][:] @ m["K"][:].T / math.sqrt(d)
    if mask:
        m["S"][:] = np.where(np.tri(N) > 0, m["S"][:], -np.inf)
    m["P"][:] = to_cpu(gpuattn.softmax(m["S"][:]))
    m["O"][:] = m["P"][:] @ m["V"][:]


def backward(m):
    m["dV"][:] = m["P"][:].T @ m["dO"][:]
    m["dP"][:] = m["dO"][:] @ m["V"][:].T
    dP, P = m["dP"][:], m["P"][:]
    m["dS"][:] = P * (dP - (dP * P).sum(-1, keepdims=True))
    m["dQ"][:] = m["dS"][:] @ m["K"][:] / math.sqrt(d)
    m["dK"][:] = m["dS"][:].T @ m["Q"][:] / math.sqrt(d)


N = 128
row, table = (N, d), (N, N)
for mask, name in ((False, "three kernels"), (True, "four with a mask")):
    forward(m := memory(say.rng, Q=row, K=row, V=row, S=table, P=table, O=row), mask)
    writes = sum(x.writes // x.array.size for x in m.values())
    say.exact("B10", f"arrays written, {name}", writes)
forward(m := memory(say.rng, Q=row, K=row, V=row, S=table, P=table, O=row))
for name, size in (("S, over N^2", N * N), ("P, over N^2", N * N), ("O, over N d", N * d)):
    say.exact("C01", f"numbers of {name}", m[name[0]].array.size / size)
inputs, outputs = (dict.fromkeys(names, row) for names in (("dO", *"QKV"), ("dQ", "dK", "dV")))
backward(b := memory(say.rng, P=table, dP=table, dS=table, **inputs, **outputs))
for id, used in (("C03", m), ("C11", b)):
    say.exact(id, "N x N tables moved", moved(used, N * N))
    say.exact(id, "N x d arrays moved", moved(used, N * d))
# %% [markdown]
# With M numbers on the chip flash attention moves about N^2 d^2 / M (chapter 9 counts it). An A100:
# 98,304 of 16 bits.
# %%
M, sizes = (192 << 10) // 2, (64, 128, 256, 512)
gain = {name: [s for s in sizes if s * s < bound] for name, bound in (("M", M), ("1 / M", 1 / M))}
say.exact("C13", "head sizes that gain", gain["M"])
fits = next(name for name, found in gain.items() if found == [64, 128, 256])
say.differs("C13", "what d^2 is compared with", fits)
# %% [markdown]
# Memory beyond inputs and the work, by length.
# %%
lines: dict[str, list] = {"formula": [], "fused": []}
for N in (2**n for n in range(8, int(math.log2(longest)) + 1)):
    arrays = [say.rng.standard_normal((1, 1, N, d), np.float32) for _ in range(3)]
    for name, form in (("formula", formula), ("fused", fused)):
        tracemalloc.start()
        form(*map(gpuattn.Tensor, arrays))
        lines[name].append((N, tracemalloc.get_traced_memory()[1] / 2**20))
        tracemalloc.stop()
first, last = (mib for _, mib in lines["formula"][-2:])
before, after = (mib for _, mib in lines["fused"][-2:])
say.order("A17", "memory, fused and by the formula", after, last, "MiB")
say.near("E04", "formula, twice the tokens: memory beside 4 times", abs(last / first / 4 - 1), 0.1)
say.order("C14", "fused, twice the tokens: memory, and 2.2 times", after, 2.2 * before, "MiB")
alt = f"At {N:,} tokens the formula takes {last:.1f} MiB and the fused op {after:.1f}."
say.curves("Memory beyond the inputs, MiB, over the tokens of one head", alt, lines,
           label="tokens", log=True, log_x=True)  # fmt: skip
