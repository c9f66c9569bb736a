"""20. A cache of keys and values

Claim: with a cache of the keys and values of earlier tokens, a step computes one token, not all.
Regime: overhead, then memory
Question: Four tokens are generated one by one. How many rows do the layers compute in all, without
a cache and with one?
Answer: 1 + 2 + 3 + 4 = 10 rows without, 4 with. For n tokens it is n (n + 1) / 2 and n. Each new
query still attends to all keys.
Vary: python -m gpuattn.lecture.c20_cache n=512 width=128
"""

# %%
from functools import partial

import numpy as np

import gpuattn
from gpuattn.lecture import lecture
from gpuattn.lecture.harness import counted
from gpuattn.lecture.harness.forms import cache_bytes, doublings, generate
from gpuattn.lecture.harness.say import ratio
from gpuattn.lecture.harness.training import translator
from gpuattn.models.flops import decoder_weights

say = lecture(__doc__)
longest, width = say.size("n", 192, 32, 1000), say.size("width", 64, 64)
config = gpuattn.models.GPT2Config(vocab=64, d_model=width, heads=4, layers=1, block=1024)
model, first = gpuattn.models.GPT2(config), np.array([[3]])
# %% [markdown]
# Texts with and without the cache. Calls of ops are counted while they run. On NumPy the cache
# computes attention itself, which is no op: its FLOPs follow from the keys in it after each step.
# %%


def count(n, kv_cache):
    """Return (rows through the layers, FLOPs so far after each token, tokens) of n tokens."""
    stepper, tokens, rows, flops = model.stepper(first, n, kv_cache=kv_cache), [3], [], []
    for position in range(n):
        logits, calls = counted.run(stepper.step, np.array(tokens[-1:]), position)
        tokens.append(int(logits.argmax()))
        rows.append(sum(c.flops for c in calls if c.op == "linear_dropout_add_norm"))
        flops.append(sum(call.flops for call in calls))
        if kv_cache:
            flops[-1] += sum(4 * width * cache.length for cache in stepper.caches)
    return int(sum(rows) / rows[0]), np.cumsum(flops), tokens


say.exact("B17", "rows computed for 4 tokens, no cache", count(4, False)[0])
say.exact("B17", "rows computed for 4 tokens, cache", count(4, True)[0])
(_, cached, mine), (_, uncached, plain) = count(longest, True), count(longest, False)
say.exact("B18", "tokens that differ", sum(np.not_equal(mine, plain).tolist()))
config = gpuattn.models.GPT2Config(vocab=64, d_model=64, heads=4, layers=1, block=1024)
model, width = gpuattn.models.GPT2(config), 64
_, flops, _ = count(1000, True)
times = float(flops[999] / flops[9])
say.differs("B19", "FLOPs at n = 1,000 over those at n = 10, width 64", times)
# %% [markdown]
# Memory of the cache of one layer: keys and values, each B x n x H x d numbers of 4 bytes.
# %%
say.differs("B21", "bytes at B = 8, n = 1,024, H = 12, d = 64", cache_bytes(12, 12, 1024))
small, _ = translator(say, layers=1, width=32, heads=2)
translating = small.stepper(small.pack([[5, 6, 7]]), 4)
translating.step(say.xp.ones(1, np.int32), 0)
say.differs("B22", "caches of a translator's step", len(translating.caches))
# %% [markdown]
# Attention for a prompt has many queries, for a new token one, so their intensities differ. For one
# query a GPU splits the keys over its multiprocessors (decode_attention).
# %%
S, heads = (8192, 16) if say.device == "cuda" else (512, 4)
k, v = (say.normal(2, S, heads, 64, dtype=say.dtype) for _ in range(2))
flops_a_byte = {}
for T, name in ((1, "one query"), (S, f"a prompt of {S:,} tokens")):
    q = say.normal(2, T, heads, 64, dtype=say.dtype)
    found = gpuattn.traffic(gpuattn.flash_attention, q, k, v)
    moved = sum(found.reads[x] for x in "qkv") + found.writes["out"]
    flops_a_byte[name] = 4 * 2 * heads * 64 * T * S / moved
say.order("C17", "FLOPs a byte of attention", flops_a_byte)
if say.device == "cuda":
    one, lengths = q[:, -1:], say.xp.full(2, S, np.int32)
    us = say.kernel_times({
        "keys split": partial(gpuattn.decode_attention, one, k, v, lengths),
        "one block a head": partial(gpuattn.flash_attention, one, k, v, impl="raw-ampere"),
    })  # fmt: skip
    say.faster("C17", f"time of one query and {S:,} keys", us)
# %% [markdown]
# The gain over the length: in FLOPs, and in time by the clock. Time gains less than FLOPs, because
# launches and reading the weights take time too. As printed, ten steps in 11.885 s would be 1.2 s a
# token; a T4 reads all weights of GPT-2 in 1.5 ms.
# %%
say.exact("B20", "56.197 s over 11.885 s, times", 56.197 / 11.885)
least = 4 * decoder_weights(gpuattn.models.GPT2Config()) / 320e9  # float32, 320 GB/s
pair = {"reading all weights of GPT-2": least, "11.885 s / 10": 1.1885}
say.order("B20", "time for a token on a T4", pair, "s")
ratios = [(n, float(uncached[n - 1] / cached[n - 1])) for n in range(1, longest + 1)]
model, first = model.to(device=say.device), say.xp.asarray(first)
gains = []
for n in doublings(4, longest):
    whole = partial(generate, model, first, first[0], n)
    us = say.times({"cache": whole, "no cache": partial(whole, kv_cache=False)})
    gains.append((n, ratio(us["no cache"], us["cache"])))
say.record("B20", f"times as fast with a cache here, {n} tokens", gains[-1][1])
say.curves("What a cache saves: without it over with it", {"FLOPs": ratios, "time here": gains},
           label="tokens of the text", unit="times", log="xy",
           levels=[(4.73, "time as printed: 4.73, length not given")])  # fmt: skip
