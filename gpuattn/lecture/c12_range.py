"""12. Scaling and the range of numbers

Claim: scaling q and k before their product is not more exact, but it keeps float16 from overflow.
Regime: compute
Question: q and k are 40 everywhere, the head size is 64. Which of (q k) / 8 and
(q / 2.83) (k / 2.83) overflows float16, whose largest number is 65,504?
Answer: The first: 40 x 40 x 64 = 102,400 overflows before it is divided. The second gives 12,800.
A fused kernel multiplies float16 numbers and sums in float32, so it does not overflow here.
Vary: python -m gpuattn.lecture.c12_range T=512
"""

# %%
import math
from functools import partial

import numpy as np

import gpuattn
from gpuattn.arrays import to_cpu
from gpuattn.lecture import lecture
from gpuattn.lecture.harness.forms import difference, doublings

say = lecture(__doc__)
T, D = say.size("T", 256, 128), 64
# %% [markdown]
# The product scaled late, and q and k scaled early. Each step is rounded to the dtype.
# %%


def softmax_times(s, v, dtype):
    p = np.exp(s - s.max(-1, keepdims=True))
    return (p / p.sum(-1, keepdims=True)).astype(dtype) @ v


def late(q, k, v):
    s = (q @ k.T) / q.dtype.type(math.sqrt(D))
    return softmax_times(s, v, q.dtype)


def early(q, k, v):
    root = q.dtype.type(D**0.25)
    return softmax_times((q / root) @ (k / root).T, v, q.dtype)


def ours(q, k, v):
    q, k, v = (say.array(x, x.dtype)[None, :, None] for x in (q, k, v))
    return to_cpu(gpuattn.flash_attention(q, k, v))[0, :, 0]


forms = {"scaled late": late, "scaled early": early, "flash_attention": ours}
data = say.rng.standard_normal((3, T, D))
right = late(*data)
for dtype, bound in (("float32", 1e-5), ("float16", 1e-2)):
    for name, form in forms.items():
        error = difference(form(*data.astype(dtype)).astype(np.float64), right)
        say.near("A12", f"{dtype}, {name}: error", error, bound)
single = data.astype(np.float32)
same = {form: bool(np.allclose(ours(*single), form(*single))) for form in (late, early)}
say.exact("A12", "allclose(attention, scaled late)", same[late])
say.differs("A12", "allclose(attention, scaled early)", same[early])
# %% [markdown]
# The range. All of q, k and v are 40: the answer is 40.
# %%
with np.errstate(all="ignore"):
    full = np.full((16, D), 40, np.float16)
    product = float((full @ full.T)[0, 0])
    root = np.float16(D**0.25)
    scaled = float(((full / root) @ (full / root).T)[0, 0])
    outs = {name: float(form(full, full, full)[0, 0]) for name, form in forms.items()}
gains = "range" if math.isinf(product) and np.isfinite(scaled) else "digits"
say.differs("A12", "what scaling early gains", gains)
error = abs(scaled / 12_800 - 1)
say.near("A12", "scaled early, all 40: relative difference of q k from 12,800", error, 1e-2)
error = abs(outs["flash_attention"] - 40)
say.near("A12", "flash_attention, all 40: difference from 40", error, 0)
overflown = outs["scaled late"]
say.record("A12", "scaled late, all 40: the result", "NaN" if overflown != overflown else overflown)
# %% [markdown]
# In the fused kernel the scale is a factor of the exponent: no extra work. The clock of a GPU
# judges it, with room for 5 percent of noise.
# %%
attention = partial(gpuattn.flash_attention, *(say.normal(4, T, 4, D) for _ in "qkv"))
us = say.kernel_times({"scaled": attention, "scale=1": partial(attention, scale=1.0)})
most = [1.05 * t for t in us["scale=1"]]
say.faster("A13", "time of attention", {"scaled": us["scaled"], "1.05 times that of scale=1": most})
# %%
curves: dict[str, list] = {name: [] for name in forms}
with np.errstate(all="ignore"):
    for size in doublings(1, 128):
        halves = (data * [[[size]], [[size]], [[1]]]).astype(np.float16)
        wide = late(*halves.astype(np.float64))
        for name, form in forms.items():
            curves[name].append((size, difference(form(*halves), wide)))
say.curves("Error in float16. A line ends where its form overflows", curves,
           label="standard deviation of q and k", unit="largest error", log="xy")  # fmt: skip
