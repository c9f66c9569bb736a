"""4. Batching has a knee

Claim: a batch costs less than its rows one by one, until the machine is full.
Regime: memory, then compute
Question: A product of one row with a matrix reads the whole matrix for 2 FLOPs a number. What does
a second row cost?
Answer: Hardly anything: the matrix is read once for both. Rows are nearly free until arithmetic
takes as long as reading; from there on time grows with the batch. That point is the knee.
Vary: python -m gpuattn.lecture.c04_batching width=256
"""

# %%
from functools import partial

import numpy as np

import gpuattn
from gpuattn.arrays import to_cpu
from gpuattn.lecture import lecture

say = lecture(__doc__)
most, width, tokens = say.size("B", 64, 8, 512), say.size("width", 128, 32), 8
# %% [markdown]
# B rows in one product are the rows one by one.
# %%
x, weight = say.normal(16, width), say.normal(width, width)
together = to_cpu(gpuattn.linear(x, weight))
one_by_one = np.concatenate([to_cpu(gpuattn.linear(x[i : i + 1], weight)) for i in range(16)])
say.near("B05", "rows together and one by one: difference", abs(together - one_by_one).max(), 1e-4)
# %% [markdown]
# B texts that a small GPT-2 continues by some tokens, all at a time: the same tokens as alone.
# %%
config = gpuattn.models.GPT2Config(vocab=256, d_model=width, heads=4, layers=2, block=64)
model = gpuattn.models.GPT2(config).to(device=say.device)
prompts = say.xp.asarray(say.rng.integers(0, 256, (most, 1)))


def generate(prompts):
    stepper, text = model.stepper(prompts, tokens), [prompts[:, 0]]
    for position in range(tokens):
        text.append(stepper.step(text[-1], position).argmax(-1))
    return to_cpu(say.xp.stack(text, 1))


whole = generate(prompts)
same = sum((generate(prompts[i : i + 1])[0] == whole[i]).all() for i in range(min(most, 8)))
say.near("B05", "texts that differ from those generated alone", min(most, 8) - same, 0)
# %% [markdown]
# Time by the clock: a GPU's is judged.
# %%
sizes = [2**n for n in range(int(np.log2(most)) + 1)]
us = say.times({str(B): partial(generate, prompts[:B]) for B in sizes})
median = {B: float(np.median(us[str(B)])) / tokens for B in sizes}
what = f"time of a step with {most} texts, and {most} times that with one"
say.order("B03", what, median[most], most * median[1], "us", clock=True)
rates = {B: B / median[B] * 1e6 for B in sizes}
what = f"tokens a second with one text, with {most}"
say.order("B06", what, rates[1], rates[most], "tokens/s", clock=True)
alt = f"From {rates[1]:,.0f} tokens a second with one text to {rates[most]:,.0f} with {most}."
lines = {"here": list(rates.items()), "in proportion": [(B, B * rates[1]) for B in sizes]}
say.curves("Tokens a second over the batch", alt, lines, label="texts", log=True, log_x=True)
