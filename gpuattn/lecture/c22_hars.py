"""22. Beam search without sorting

Claim: a step of beam search finds the k largest of k V logits by sorting a few candidates, not all.
Regime: memory
Question: Each of two beams has eight words, in two groups of four. How many of the sixteen logits
must be sorted to find the two best of each beam?
Answer: Five. R is the smaller maximum of a beam's two groups. At least two logits are R or larger,
so no logit below R is among the two best. Only 4 4 5 and 7 8 are left to sort.
Vary: python -m gpuattn.lecture.c22_hars V=250000 K=8
"""

# %%
import numpy as np

import gpuattn
from gpuattn.arrays import to_cpu
from gpuattn.lecture import lecture

say = lecture(__doc__)
K, V = say.size("K", 4, 4), say.size("V", 32_000, 4_000, 128_000)
rows = say.size("rows", 256, 32)  # beams of which means are taken
# %% [markdown]
# The worked example of the slides. A row holds the logits of a beam.
# %%
example = say.array([[2, 4, 2, 4, 3, 5, 1, 2], [1, 3, 7, 4, 1, 5, 8, 6]])
maxima = example.reshape(2, 2, 4).max(-1)
least = maxima.min(-1, keepdims=True)  # R of each beam
kept = example >= least
say.exact("D29", "R of each beam", [int(r) for r in least.ravel()])
say.exact("D29", "candidates", sorted(int(x) for x in example[kept]))
say.differs("D28", "candidates with > R", int((example > least).sum()))
best, words = gpuattn.topk_logprobs(example, 2)
found = to_cpu(example)[[1, 1], to_cpu(words)[1]]
say.exact("D29", "best two of both", [int(x) for x in found])
for beam, digits in enumerate(to_cpu(example).astype(int), 1):
    weights = np.where(to_cpu(kept)[beam - 1], 1.0, 0.15)[None]
    alt = f"Logits {' '.join(map(str, digits))} of beam {beam}; dark: those that are sorted."
    say.maps(f"Logits of beam {beam}: R = {int(least[beam - 1, 0])}; dark: sorted", alt, weights,
             ["logits"], digits)  # fmt: skip
# %% [markdown]
# A whole step in plain NumPy: log-probabilities, sums with the scores so far, the best K of K V.
# %%
logits = 3 * say.normal(K, V)
scores = say.normal(1, K)
x = to_cpu(logits).astype(np.float64)
logprobs = x - x.max(-1, keepdims=True)
logprobs -= np.log(np.exp(logprobs).sum(-1, keepdims=True))
totals = (to_cpu(scores)[0, :, None] + logprobs).ravel()
order = np.argsort(-totals, kind="stable")[:K]  # the plain step sorts all of them
_, parents, tokens = gpuattn.beam_step(logits, scores, count=K)
ours = (to_cpu(parents)[0] * V + to_cpu(tokens)[0]).tolist()
say.exact("D26", "choices that differ from beam_step", len(set(ours) - set(order.tolist())))
width = 8 * V if say.device == "cuda" else V
wide = say.normal(K, width)


def plain_step():
    x = wide - wide.max(-1, keepdims=True)
    total = x - say.xp.log(say.xp.exp(x).sum(-1, keepdims=True)) + scores.T
    return say.xp.argsort(total.ravel())[-K:]


us = say.times({"beam_step": lambda: gpuattn.beam_step(wide, scores, count=K),
                "sorting all": plain_step})  # fmt: skip
say.faster("D27", f"time of a step over {width:,} words", us)
# %% [markdown]
# How many logits of a row are at least R, with more and more groups? K is the least possible.
# %%
rows_of_logits = say.rng.standard_normal((rows, V), np.float32)
curve = []
for groups in (K * n for n in (1, 2, 4, 8, 32, 128) if K * n <= V // 2):
    size = V // groups
    grouped = rows_of_logits[:, : groups * size].reshape(rows, groups, size)
    bound = np.sort(grouped.max(-1), -1)[:, -K]  # the K-th largest maximum
    curve.append((groups, float((rows_of_logits >= bound[:, None]).sum(-1).mean())))
pair = {f"candidates, {K} groups": curve[0][1], "all": float(V)}
say.order("D27", "logits of a beam that are sorted", pair)
theory = K * sum(1 / n for n in range(1, K + 1))
say.curves("Candidates of a beam, the mean over many", {f"V = {V:,}": curve}, label="groups",
           unit="candidates", log="x",
           points=[(K, theory, f"expected: K (1 + 1/2 + ... + 1/K) = {theory:.1f}")],
           levels=[(K, f"K = {K}, the least")])  # fmt: skip
