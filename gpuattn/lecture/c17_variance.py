"""17. A reduction rewritten

Claim: the variance as E[x^2] - E[x]^2 saves a synchronisation but loses digits. Subtracting one
element of the row first keeps them.
Regime: overhead
Question: x has a deviation of 1 and a mean of 1,000. float32 has 7 digits. How many are left in
E[x^2] - E[x]^2?
Answer: One at best. Both terms are near 1,000,000, where float32 numbers are 0.06 apart, and their
difference is 1. After any element of the row is subtracted, both terms are small.
Vary: python -m gpuattn.lecture.c17_variance D=8192
"""

# %%
import numpy as np

import gpuattn
from gpuattn.arrays import to_cpu
from gpuattn.lecture import lecture

say = lecture(__doc__)
rows, D = say.size("rows", 64, 16), say.size("D", 1024, 256)
# %% [markdown]
# Three forms of the variance in float32. In which of them must a sum wait for another sum?
# %%


def two_passes(x):  # the sum of squares waits for the mean
    return ((x - x.mean(-1, keepdims=True)) ** 2).mean(-1)


def one_pass(x):  # both sums at the same time
    return (x * x).mean(-1) - x.mean(-1) ** 2


def shifted(x):  # the same after subtracting the row's first element
    return one_pass(x - x[..., :1])


forms = {"two passes": two_passes, "E[x^2] - E[x]^2": one_pass, "shifted": shifted}
lines: dict[str, list] = {name: [] for name in [*forms, "layer_norm"]}
noise = say.rng.standard_normal((rows, D))
for mean in (1, 10, 100, 1_000, 10_000):
    x = (noise + mean).astype(np.float32)
    right = x.astype(np.float64).var(-1)
    for name, form in forms.items():
        lines[name].append((mean, float(abs(form(x) / right - 1).max())))
    wide = x.astype(np.float64)
    normal = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(right + 1e-5)[:, None]
    error = abs(to_cpu(gpuattn.layer_norm(say.array(x))) - normal).max()
    lines["layer_norm"].append((mean, float(error)))
at = {name: dict(line) for name, line in lines.items()}
same = at["E[x^2] - E[x]^2"][1_000] < 1e-4
say.differs("D11", "the same digits at a mean of 1,000 deviations", same)
for mean in (10, 1_000):
    what = f"E[x^2] - E[x]^2, mean {mean:,}: relative error"
    say.record("D11", what, at["E[x^2] - E[x]^2"][mean])
for name in ("two passes", "shifted", "layer_norm"):
    say.near("D11", f"{name}, mean 1,000: relative error", at[name][1_000], 1e-5)
# %% [markdown]
# The gradient with two sums that do not wait for each other:
# dx = w dy / sigma + alpha S1 + beta S2, S1 = sum(w dy), S2 = sum(w dy x).
# Does alpha contain sigma or sigma^2?
# %%
row, dy = noise + 0.5, say.rng.standard_normal((rows, D))
weight, bias, eps = say.rng.standard_normal(D), np.zeros(D), 1e-12
leaf = gpuattn.Tensor(say.array(row, np.float64), requires_grad=True)
out = gpuattn.layer_norm(leaf, say.array(weight, np.float64), say.array(bias, np.float64), eps=eps)
out.backward(say.array(dy, np.float64))
mu, sigma = row.mean(-1, keepdims=True), row.std(-1, keepdims=True)
first, second = ((weight * dy * factor).sum(-1, keepdims=True) for factor in (1, row))
errors = {}
for power in (1, 2):
    alpha = ((row - mu) * mu - sigma**power) / (D * sigma**3)
    beta = (mu - row) / (D * sigma**3)
    dx = weight * dy / sigma + alpha * first + beta * second
    errors[power] = float(abs(dx - to_cpu(leaf.grad)).max())
power = min(errors, key=errors.__getitem__)
say.differs("D12", "the power of sigma that gives the gradient", power)
say.near("D12", "with sigma^2: difference from the gradient of layer_norm", errors[2], 1e-9)
say.record("D12", "with sigma, as printed: difference", errors[1])
# %%
alt = "E[x^2] - E[x]^2 loses two digits for each ten times the mean; the others lose none."
say.curves("Errors of the variance and of layer_norm in float32", lines, alt=alt,
           label="mean over standard deviation", unit="relative error", log="xy")  # fmt: skip
