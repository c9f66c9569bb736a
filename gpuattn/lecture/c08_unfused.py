"""8. Unfused attention and flash attention

Claim: unfused attention writes N x N matrices to memory and reads them again. Flash attention
never stores them.
Regime: memory
Question: N doubles. How much more memory do unfused attention and flash attention need?
Answer: Unfused attention four times as much, for its N x N matrices. Flash attention twice as much:
it holds arrays of N x d, one number a row, and tiles whose size does not depend on N.
Vary: python -m gpuattn.lecture.c08_unfused N=4096
"""

# %%
from functools import partial

import numpy as np

import gpuattn
from gpuattn.arrays import to_cpu
from gpuattn.lecture import lecture
from gpuattn.lecture.harness.counted import memory, moved
from gpuattn.lecture.harness.forms import both_ways, difference, doublings, host_peak

say = lecture(__doc__)
longest, d = say.size("N", 2048, 512, 8192), 64
# %% [markdown]
# The formula beside the fused op: the same result and the same gradients.
# %%


def formula(q, k, v):
    return gpuattn.softmax(q @ k.swapaxes(-1, -2), scale=d**-0.5, causal=True) @ v


fused = partial(gpuattn.scaled_dot_product_attention, is_causal=True)
data = [say.normal(1, 2, 64, d) for _ in range(3)]
(out, *grads), (right, *others) = both_ways(formula, *data), both_ways(fused, *data)
say.near("B09", "result: difference from the fused op", difference(out, right), 1e-5)
say.near("B09", "gradients: difference from the fused op", difference(grads, others), 1e-4)
# %% [markdown]
# The formula again on arrays that count their accesses: forward in three kernels, or in four with
# a mask, and backward.
# %%


def forward(m, mask=False):
    m["S"][:] = m["Q"][:] @ m["K"][:].T / np.sqrt(d)
    if mask:
        m["S"][:] = np.where(np.tri(N) > 0, m["S"][:], -np.inf)
    m["P"][:] = to_cpu(gpuattn.softmax(m["S"][:]))
    m["O"][:] = m["P"][:] @ m["V"][:]


def backward(m):
    m["dV"][:] = m["P"][:].T @ m["dO"][:]
    m["dP"][:] = m["dO"][:] @ m["V"][:].T
    dP, P = m["dP"][:], m["P"][:]
    m["dS"][:] = P * (dP - (dP * P).sum(-1, keepdims=True))
    m["dQ"][:] = m["dS"][:] @ m["K"][:] / np.sqrt(d)
    m["dK"][:] = m["dS"][:].T @ m["Q"][:] / np.sqrt(d)


N = 128
row, table = (N, d), (N, N)
for mask, name in ((True, "four with a mask"), (False, "three kernels")):
    forward(m := memory(say.rng, Q=row, K=row, V=row, S=table, P=table, O=row), mask)
    writes = sum(x.writes // x.array.size for x in m.values())
    say.exact("B10", f"arrays written, {name}", writes)
for name, size in (("S, over N^2", N * N), ("P, over N^2", N * N), ("O, over N d", N * d)):
    say.exact("C01", f"elements of {name}", m[name[0]].array.size / size)
inputs, outputs = (dict.fromkeys(names, row) for names in (("dO", *"QKV"), ("dQ", "dK", "dV")))
backward(b := memory(say.rng, P=table, dP=table, dS=table, **inputs, **outputs))
for id, used in (("C03", m), ("C11", b)):
    say.exact(id, "accesses to N x N matrices", moved(used, N * N))
    say.exact(id, "accesses to N x d arrays", moved(used, N * d))
# %% [markdown]
# With shared memory for M elements flash attention moves about N^2 d^2 / M (chapter 9 counts it).
# An A100 has room for 98,304 elements of 16 bits.
# %%
M, sizes = (192 << 10) // 2, (64, 128, 256, 512)
gain, other = ([size for size in sizes if size**2 < bound] for bound in (M, 1 / M))
say.exact("C13", "head sizes that gain", gain)
say.differs("C13", "what d^2 is compared with", "M" if len(gain) > len(other) else "1 / M")
# %% [markdown]
# Memory beyond the inputs, by length.
# %%
lines: dict[str, list] = {"unfused": [], "flash attention": []}
for N in doublings(256, longest):
    tensors = [gpuattn.Tensor(say.rng.standard_normal((1, 1, N, d), np.float32)) for _ in range(3)]
    for name, form in (("unfused", formula), ("flash attention", fused)):
        lines[name].append((N, host_peak(partial(form, *tensors)) / 2**20))
(first, last), (before, after) = ([mib for _, mib in line[-2:]] for line in lines.values())
say.order("A17", f"memory at N = {N:,}", {"flash attention": after, "unfused": last}, "MiB")
grown = abs(last / first / 4 - 1)
say.near("E04", "unfused, N doubled: relative difference of its memory from 4 times", grown, 0.1)
pair = {"twice the N": after, "2.2 times that of N": 2.2 * before}
say.order("C14", "memory of flash attention", pair, "MiB")
say.curves("Memory beyond the inputs, one head", lines, label="tokens N", unit="MiB", log="xy")
