"""7. Softmax in three, two, one pass

Claim: a running maximum and a sum that is rescaled save a pass over the row.
Regime: memory
Question: A safe softmax reads a row for its maximum, then for its sum, then for the result. Which
two of these passes can be one?
Answer: Maximum and sum: when a larger maximum turns up, the sum so far is multiplied by
exp(old - new). Where only a weighted sum of values is wanted, that is rescaled too, and one pass
is left: flash attention.
Vary: python -m gpuattn.lecture.c07_softmax N=4096
"""

# %%
import importlib.util
import math

import numpy as np

import gpuattn
from gpuattn.arrays import to_cpu
from gpuattn.lecture import lecture
from gpuattn.lecture.harness.counted import Counted, Reductions

say = lecture(__doc__)
N = say.size("N", 1024, 256)
# %% [markdown]
# Three ways to read a row. The arrays count each access.
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
        running.append((i + 1, top, total))
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
running: list = []
reads, ours = {}, to_cpu(gpuattn.softmax(say.array(row)))
for id, name, passes in (("C05", "three passes", three_passes), ("C06", "two passes", two_passes)):
    x = Counted(row)
    error, reads[name] = abs(passes(x) - ours).max(), x.reads // N
    say.exact(id, "reads of a number", reads[name])
    say.near(id, "difference from softmax", error, 1e-6)
x = Counted(row)
error = abs(one_pass(x, values) - three_passes(Counted(row)) @ values)
reads["one pass, for a weighted sum"] = x.reads // N
say.near("B13", "weighted sum in one pass: difference", error, 1e-12)
# %% [markdown]
# Without the maximum exp overflows; with it nothing else changes.
# %%
large = say.array([1e4, 1e4 - 1, 0])
with np.errstate(over="ignore"):
    say.record("C04", "exp of 10,000 in float32", float(np.exp(to_cpu(large)[0])))
error = abs(to_cpu(gpuattn.softmax(large)) - np.array([math.e, 1, 0]) / (math.e + 1)).max()
say.near("C04", "softmax of 10,000, 9,999 and 0: difference", error, 1e-6)
# %% [markdown]
# Two halves of the keys by themselves, merged by their log-sums; a causal mask; reductions counted.
# %%
q, k, v = (say.normal(1, 64, 2, 32) for _ in range(3))
halves = [slice(0, 32), slice(32, 64)]
parts = [gpuattn.flash_attention(q, k[:, h], v[:, h], return_lse=True) for h in halves]
outs, sums = ([to_cpu(part[i]) for part in parts] for i in (0, 1))  # (B, T, H, D), (B, H, T)
shares = [np.exp(lse - np.logaddexp(*sums)).swapaxes(1, 2)[..., None] for lse in sums]
merged = outs[0] * shares[0] + outs[1] * shares[1]
error = abs(merged - to_cpu(gpuattn.flash_attention(q, k, v))).max()
say.near("B13", "two blocks merged: difference from all keys", error, 1e-6)
kept = to_cpu(gpuattn.softmax(say.normal(16, 16), causal=True)) > 0
i, j = np.indices(kept.shape)
rules = {"i > j": i > j, "i >= j": i >= j}
say.differs("C02", "kept", next(name for name in rules if (rules[name] == kept).all()))
Reductions.counts.clear()
gpuattn.softmax(say.rng.standard_normal((4, N)).view(Reductions))
say.exact("D13", "reductions of softmax", sum(Reductions.counts.values()))
if importlib.util.find_spec("numba"):  # the readable form chooses the threads of a row here
    from gpuattn.numbakernels.reduce import layout

    few, many = (layout(cols * 2 // 16)[0] for cols in (32, 16384))  # vectors of 16 bytes
    say.order("D14", "threads of a 16-bit row of 32 numbers, of 16,384", few, many, "threads")
say.bars("Reads of a number of the row, as counted", "Three, two and one.", reads, "reads")
lines = {"maximum": [(n, top) for n, top, _ in running[:128]],
         "sum of exp(x - maximum)": [(n, total) for n, _, total in running[:128]]}  # fmt: skip
say.curves("Over the numbers read so far: running maximum, rescaled sum",
           "The sum falls whenever the maximum rises: it is rescaled.",
           lines, label="numbers read")  # fmt: skip
