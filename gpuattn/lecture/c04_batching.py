"""4. Batching: nearly free, up to a point

Claim: a batch takes less time than its rows one by one, until arithmetic limits it.
Regime: memory, then compute
Question: A product of one row with a matrix reads the whole matrix for 2 FLOPs a number. What does
a second row cost?
Answer: Hardly anything: the matrix is read once for both. More rows are nearly free until the
arithmetic takes as long as reading the matrix. From there on time grows with the batch.
Vary: python -m gpuattn.lecture.c04_batching width=256
"""

# %%
from functools import partial

import numpy as np

import gpuattn
from gpuattn.lecture import lecture
from gpuattn.lecture.harness.forms import difference, doublings, generate

say = lecture(__doc__)
most, width, tokens = say.size("B", 64, 8, 512), say.size("width", 128, 32), 8
# %% [markdown]
# One product of B rows gives the same rows as B products of one.
# %%
x, weight = say.normal(16, width), say.normal(width, width)
one_by_one = [gpuattn.linear(x[i : i + 1], weight)[0] for i in range(16)]
error = difference(list(gpuattn.linear(x, weight)), one_by_one)
say.near("B05", "rows together and one by one: difference", error, 1e-4)
# %% [markdown]
# A small GPT-2 continues B texts at once. Each gets the tokens that it gets alone.
# %%
config = gpuattn.models.GPT2Config(vocab=256, d_model=width, heads=4, layers=2, block=64)
model = gpuattn.models.GPT2(config).to(device=say.device)
prompts = say.xp.asarray(say.rng.integers(0, 256, (most, 1)))


def continued(prompts):
    return generate(model, prompts, prompts[:, 0], tokens)


whole = continued(prompts)
same = sum((continued(prompts[i : i + 1])[0] == whole[i]).all() for i in range(min(most, 8)))
say.near("B05", "texts that differ from those generated alone", min(most, 8) - same, 0)
# %% [markdown]
# The time of a step by the clock, which is judged on a GPU.
# %%
sizes = doublings(1, most)
us = say.times({str(B): partial(continued, prompts[:B]) for B in sizes})
median = {B: float(np.median(us[str(B)])) / tokens for B in sizes}
pair = {f"{most} texts": median[most], f"{most} times that of one text": most * median[1]}
say.faster("B03", "time of a step", pair)
rates = {B: B / median[B] * 1e6 for B in sizes}
pair = {"one text": rates[1], f"{most} texts": rates[most]}
say.order("B06", "throughput", pair, "tokens/s", clock=True)
lines = {"here": list(rates.items()),
         "B times one text": [(B, B * rates[1]) for B in sizes]}  # fmt: skip
say.curves("Throughput over the batch", lines, label="texts of the batch", unit="tokens/s",
           log="xy")  # fmt: skip
