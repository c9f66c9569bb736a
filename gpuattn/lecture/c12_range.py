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

import numpy as np

import gpuattn
from gpuattn.arrays import to_cpu
from gpuattn.lecture import lecture

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


forms = {"late": late, "early": early, "ours": ours}
NAMES = {"late": "scaled late", "early": "scaled early", "ours": "flash_attention"}
data = say.rng.standard_normal((3, T, D))
right = late(*data)
errors = {}
for dtype, bound in ((np.float32, 1e-5), (np.float16, 1e-2)):
    for name, form in forms.items():
        out = form(*data.astype(dtype)).astype(np.float64)
        errors[name, np.dtype(dtype).name] = error = abs(out - right).max()
        what = f"{np.dtype(dtype).name}, {NAMES[name]}: error"
        say.near("A12", what, error, bound)
fused = ours(*data.astype(np.float32))
for name in ("late", "early"):
    same = bool(np.allclose(fused, forms[name](*data.astype(np.float32))))
    what = f"allclose(attention, scaled {name})"
    (say.exact if name == "late" else say.differs)("A12", what, same)
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
say.near("A12", "flash_attention, all 40: difference from 40", abs(outs["ours"] - 40), 0)
late_out = "NaN" if math.isnan(outs["late"]) else outs["late"]
say.record("A12", "scaled late, all 40: the result", late_out)
# %% [markdown]
# In the fused kernel the scale is a factor of the exponent: no extra work. The clock of a GPU
# judges it, with room for 5 percent of noise.
# %%
q, k, v = (say.normal(4, T, 4, D) for _ in range(3))
us = say.times({
    "scale=1": lambda: gpuattn.flash_attention(q, k, v, scale=1.0),
    "scaled": lambda: gpuattn.flash_attention(q, k, v),
})  # fmt: skip
most = [1.05 * t for t in us["scale=1"]]
pair = {"scaled": us["scaled"], "1.05 times that of scale=1": most}
say.order("A13", "time of attention", pair, "us", clock=True)
# %%
curves: dict[str, list] = {NAMES[name]: [] for name in forms}
with np.errstate(all="ignore"):
    for size in (1, 2, 4, 8, 16, 32, 64, 128):
        q, k, v = data * [[[size]], [[size]], [[1]]]
        halves = [x.astype(np.float16) for x in (q, k, v)]
        wide = late(*(x.astype(np.float64) for x in halves))
        for name, form in forms.items():
            curves[NAMES[name]].append((size, float(abs(form(*halves) - wide).max())))
ends = {name: [x for x, y in line if not np.isfinite(y)] for name, line in curves.items()}
alt = "; ".join(
    f"{name} overflows from {x[0]}" if x else f"{name}: never" for name, x in ends.items()
)
say.curves("Error in float16. A line ends where its form overflows", alt, curves,
           label="standard deviation of q and k", unit="largest error", log=True,
           log_x=True)  # fmt: skip
