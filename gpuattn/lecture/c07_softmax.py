"""7. Softmax in three, two, one pass

Claim: softmax needs one pass over the row less when its sum is rescaled with a running maximum.
Regime: memory
Question: A safe softmax reads a row for its maximum, then for its sum, then for the result. Which
two of these passes can be one?
Answer: Maximum and sum: when a larger maximum is met, the sum so far is multiplied by
exp(old - new). Attention needs only a weighted sum of values, not the weights. This sum can be
rescaled too, so one pass is enough: this is flash attention.
Vary: python -m gpuattn.lecture.c07_softmax N=4096
"""

# %%
import math

import numpy as np

import gpuattn
from gpuattn.arrays import to_cpu
from gpuattn.lecture import lecture
from gpuattn.lecture.harness.counted import Counted, reductions
from gpuattn.lecture.harness.forms import difference
from gpuattn.ops.softmax import row_threads  # the rule by which rawkernels/softmax.cu is launched

say = lecture(__doc__)
N = say.size("N", 1024, 256)
# %% [markdown]
# Three algorithms. The row counts each read of an element.
# %%


def three_passes(x):
    top = max(float(x[i]) for i in range(N))
    total = sum(math.exp(x[i] - top) for i in range(N))
    return np.array([math.exp(x[i] - top) / total for i in range(N)])


def two_passes(x):
    top, total = -math.inf, 0.0
    for i in range(N):
        new = max(top, float(value := x[i]))
        total, top = total * math.exp(top - new) + math.exp(value - new), new
        for line, value in zip(lines.values(), (top, total), strict=True):
            line.append((i + 1, value))
    return np.array([math.exp(x[i] - top) / total for i in range(N)])


def one_pass(x, v):
    """Return the sum of v weighted by the softmax of x."""
    top, total, out = -math.inf, 0.0, 0.0
    for i in range(N):
        new = max(top, float(value := x[i]))
        rescale, p = math.exp(top - new), math.exp(value - new)
        top, total, out = new, total * rescale + p, out * rescale + p * v[i]
    return out / total


row, values = say.rng.standard_normal((2, N)) * 2
lines: dict[str, list] = {"maximum": [], "sum of exp(x - maximum)": []}
reads, ours = {}, gpuattn.softmax(say.array(row))
for id, name, passes in (("C05", "three passes", three_passes), ("C06", "two passes", two_passes)):
    x = Counted(row)
    say.near(id, "difference from softmax", difference(passes(x), ours), 1e-6)
    reads[name] = x.reads // N
    say.exact(id, "reads of a number", reads[name])
x = Counted(row)
error = abs(one_pass(x, values) - three_passes(Counted(row)) @ values)
reads["one pass, for a weighted sum"] = x.reads // N
say.near("B13", "weighted sum in one pass: difference from three passes", error, 1e-12)
# %% [markdown]
# Without the maximum exp overflows; with it nothing else changes.
# %%
large = say.array([1e4, 1e4 - 1, 0])
with np.errstate(over="ignore"):
    say.record("C04", "exp of 10,000 in float32", float(np.exp(to_cpu(large)[0])))
error = difference(gpuattn.softmax(large), np.array([math.e, 1, 0]) / (math.e + 1))
say.near("C04", "softmax of 10,000, 9,999 and 0: difference", error, 1e-6)
# %% [markdown]
# Attention over two halves of the keys, merged by their log-sum-exp; a causal mask; the number of
# reductions; and the threads that our kernel gives a row.
# %%
q, k, v = (say.normal(1, 64, 2, 32) for _ in range(3))
halves = slice(0, 32), slice(32, 64)
parts = [gpuattn.flash_attention(q, k[:, h], v[:, h], return_lse=True) for h in halves]
outs, sums = ([to_cpu(part[i]) for part in parts] for i in (0, 1))  # (B, T, H, D), (B, H, T)
shares = (np.exp(lse - np.logaddexp(*sums)).swapaxes(1, 2)[..., None] for lse in sums)
merged = sum(out * share for out, share in zip(outs, shares, strict=True))
error = difference(merged, gpuattn.flash_attention(q, k, v))
say.near("B13", "attention of two blocks merged: difference from all keys", error, 1e-6)
kept = to_cpu(gpuattn.softmax(say.normal(16, 16), causal=True)) > 0
say.differs("C02", "kept", "i >= j" if (kept == np.tri(16)).all() else "i > j")
rows = say.rng.standard_normal((4, N))
say.exact("D13", "reductions of softmax", reductions(gpuattn.softmax, rows))
plans = {"32 numbers of 16 bits": row_threads("forward", 32 * 2 // 16, False),
         "16,384 numbers": row_threads("forward", 16_384 * 2 // 16, False)}  # fmt: skip
say.order(
    "D14", "threads that share a row", {name: plan[0] for name, plan in plans.items() if plan}
)
say.bars("Reads of each element of the row, as counted", reads, "reads")
first = {name: line[:128] for name, line in lines.items()}
say.curves("Online softmax: running maximum and rescaled sum", first, label="elements so far")
