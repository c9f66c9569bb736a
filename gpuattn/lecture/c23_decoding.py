"""23. Decoding as a whole

Claim: a cache and batches make generation many times as fast, and their gains multiply.
Regime: overhead, then memory
Question: A cache makes the generation of n tokens faster, and so does a batch of B texts. Which of
the two gains grows with n, and which with B?
Answer: The cache's gain grows with n: it saves computing the text so far again. The batch's gain
grows with B, until arithmetic limits it (chapter 4). They multiply: with a cache a step has one row
a text, which alone does not keep a machine busy.
Vary: python -m gpuattn.lecture.c23_decoding n=128 B=8
"""

# %%
import numpy as np

import gpuattn
from gpuattn.lecture import lecture
from gpuattn.lecture.harness.forms import generate
from gpuattn.lecture.harness.say import ratio

say = lecture(__doc__)
n, B, width = say.size("n", 32, 8), say.size("B", 8, 4), say.size("width", 128, 32)
config = gpuattn.models.GPT2Config(vocab=256, d_model=width, heads=4, layers=2, block=256)
model = gpuattn.models.GPT2(config).to(device=say.device)
prompts = say.xp.asarray(say.rng.integers(0, 256, (B, 1)))
# %% [markdown]
# The same B texts of n tokens: one by one without a cache, one by one with it, together with it.
# %%


def one_by_one(kv_cache):
    alone = (prompts[i : i + 1] for i in range(B))
    return [generate(model, one, one[:, 0], n, kv_cache=kv_cache)[0, -1] for one in alone]


def together():
    return generate(model, prompts, prompts[:, 0], n)[:, -1]


differ = sum(np.not_equal(one_by_one(False), together()))
say.near("D35", "GPT-2: last tokens that differ", differ, 0)
us = say.times({
    "one by one, no cache": lambda: one_by_one(False),
    "one by one, cache": lambda: one_by_one(True),
    f"{B} texts together, cache": together,
})  # fmt: skip
names = list(us)
pair = {name: us[name] for name in (names[-1], names[0])}
say.faster("D35", "GPT-2: time of all texts", pair)
say.record("D35", "times as fast, up to", ratio(us[names[0]], us[names[-1]]))
rates = {name: n * B / float(np.median(samples)) * 1e6 for name, samples in us.items()}
# %% [markdown]
# The same of a translator: sources one by one without a cache, and together with one.
# %%
small = gpuattn.models.TranslationConfig(256, width, 4, (2, 2), 4 * width, 0.0)
translator = gpuattn.models.TranslationModel(small).to(device=say.device)
sources = say.rng.integers(8, 256, (4, 16)).tolist()


def translate(sources, kv_cache):
    first = say.xp.ones(len(sources), np.int32)
    return generate(translator, translator.pack(sources), first, n, kv_cache=kv_cache)[:, -1]


def apart():
    return [translate([source], False)[0] for source in sources]


wrong = sum(np.not_equal(apart(), translate(sources, True)))
say.near("D34", "translation: last tokens that differ", wrong, 0)
on, off = "together, cache", "one by one, no cache"
both = say.times({on: lambda: translate(sources, True), off: apart})
say.faster("D34", "translation: time of all sentences", both)
say.record("D34", "times as fast, up to", ratio(both[off], both[on]))
say.bars(f"Throughput of GPT-2, {B} texts of {n} tokens", rates, "tokens/s")
