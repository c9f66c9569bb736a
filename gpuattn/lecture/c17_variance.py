"""17. A reduction rewritten

Claim: E[x^2] - E[x]^2 saves a synchronisation and loses digits; a shift by one element saves it
without losing any.
Regime: overhead
Question: x has a deviation of 1 and a mean of 1,000. float32 has 7 digits. How many are left in
E[x^2] - E[x]^2?
Answer: One at best. Both terms are near 1,000,000, where numbers of float32 are 0.06 apart, and
the difference is 1. Subtract any element of the row first, and both terms are small again.
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
# Three ways to a variance in float32. How many sums wait for an earlier sum?
# %%


def two_passes(x):  # the sum of squares waits for the mean
    return ((x - x.mean(-1, keepdims=True)) ** 2).mean(-1)


def one_pass(x):  # both sums at the same time
    return (x * x).mean(-1) - x.mean(-1) ** 2


def shifted(x):  # the same after subtracting the row's first element
    return one_pass(x - x[..., :1])


forms = {"two passes": two_passes, "E[x^2] - E[x]^2": one_pass, "the same, shifted": shifted}
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
    say.record("D11", f"relative error at a mean of {mean:,}", at["E[x^2] - E[x]^2"][mean])
say.near("D11", "two passes at 1,000", at["two passes"][1_000], 1e-5)
say.near("D11", "shifted at 1,000", at["the same, shifted"][1_000], 1e-5)
say.near("D11", "layer_norm at 1,000", at["layer_norm"][1_000], 1e-5)
# %% [markdown]
# The gradient with two sums that do not wait for each other: dx = w dy / sigma + a S1 + b S2 with
# S1 = sum(w dy), S2 = sum(w dy x). In alpha, is it sigma or its square?
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
say.near("D12", "difference from the tape with sigma^2", errors[2], 1e-9)
say.record("D12", "difference as printed", errors[1])
# %%
alt = "E[x^2] - E[x]^2 loses two digits for each ten times the mean; the others lose none."
say.curves("Relative error of the variance, and error of layer_norm, over mean / deviation", alt,
           lines, label="mean / deviation", log=True, log_x=True)  # fmt: skip
