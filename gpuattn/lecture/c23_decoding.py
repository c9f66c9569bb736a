"""23. Decoding as a whole

Claim: a cache, batches and their order multiply: together they make generation many times as fast.
Regime: overhead, then memory
Question: A cache makes a text of n tokens some times as fast, a batch of B texts some times more.
Which of the two gains grows with n, and which with B?
Answer: The cache's with n: what is not computed again is the text so far. The batch's with B, until
its knee (chapter 4). They multiply, because the cache leaves one row a text: too little to fill
a machine alone.
Vary: python -m gpuattn.lecture.c23_decoding n=128 B=8
"""

# %%
import numpy as np

import gpuattn
from gpuattn.lecture import lecture

say = lecture(__doc__)
n, B, width = say.size("n", 32, 8), say.size("B", 8, 4), say.size("width", 128, 32)
config = gpuattn.models.GPT2Config(vocab=256, d_model=width, heads=4, layers=2, block=256)
model = gpuattn.models.GPT2(config).to(device=say.device)
prompts = say.xp.asarray(say.rng.integers(0, 256, (B, 1)))
# %% [markdown]
# The same B texts of n tokens, with more and more switched on: time by the clock.
# %%


def generate(prompts, kv_cache):
    stepper, tokens = model.stepper(prompts, n, kv_cache=kv_cache), prompts[:, 0]
    for position in range(n):
        tokens = stepper.step(tokens, position).argmax(-1)
    return tokens


def one_by_one(kv_cache):
    return [int(generate(prompts[i : i + 1], kv_cache)[0]) for i in range(B)]


def together():
    return [int(token) for token in generate(prompts, True)]


say.near("D35", "last tokens that differ", sum(np.not_equal(one_by_one(False), together())), 0)
us = say.times({
    "one by one, no cache": lambda: one_by_one(False),
    "one by one, cache": lambda: one_by_one(True),
    f"{B} texts together, cache": together,
})  # fmt: skip
names = list(us)
what = "time of the texts, all switched on and all off"
say.order("D35", what, us[names[-1]], us[names[0]], "us", clock=True)
say.record("D35", "times as fast, up to", float(np.median(us[names[0]]) / np.median(us[names[-1]])))
rates = {name: n * B / float(np.median(samples)) * 1e6 for name, samples in us.items()}
# %% [markdown]
# The same of a translator: sources one by one without a cache, and together with one.
# %%
small = gpuattn.models.TranslationConfig(256, width, 4, (2, 2), 4 * width, 0.0)
translator = gpuattn.models.TranslationModel(small).to(device=say.device)
sources = say.rng.integers(8, 256, (4, 16)).tolist()


def translate(sources, kv_cache):
    stepper = translator.stepper(translator.pack(sources), n, kv_cache=kv_cache)
    tokens = say.xp.ones(len(sources), np.int32)
    for position in range(n):
        tokens = stepper.step(tokens, position).argmax(-1)
    return tokens


def apart():
    return [int(translate([source], False)[0]) for source in sources]


wrong = sum(np.not_equal(apart(), [int(token) for token in translate(sources, True)]))
say.near("D34", "last tokens that differ", wrong, 0)
both = say.times({"all on": lambda: translate(sources, True), "all off": apart})
what = "time of the translations, all switched on and all off"
say.order("D34", what, both["all on"], both["all off"], "us", clock=True)
times = float(np.median(both["all off"]) / np.median(both["all on"]))
say.record("D34", "times as fast, up to", times)
alt = "; ".join(f"{name}: {rate:,.0f} tokens/s" for name, rate in rates.items())
say.bars(f"Tokens a second, {B} texts of {n} tokens", alt, rates, "tokens/s")
