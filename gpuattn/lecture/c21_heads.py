"""21. Fewer KV heads

Claim: when r query heads share one KV head, the cache is r times smaller.
Regime: memory
Question: 12 query heads share one KV head, one head of keys and values. How much smaller is the
cache, and how many FLOPs does attention save?
Answer: The cache is a twelfth. Attention saves no FLOPs: each query head still attends to every
key. It saves reading the cache, which limits a step of decoding.
Vary: python -m gpuattn.lecture.c21_heads heads=32 n=8192
"""

# %%
from functools import partial
from types import SimpleNamespace

import gpuattn
from gpuattn.lecture import lecture
from gpuattn.lecture.harness.forms import cache_bytes, difference
from gpuattn.models.flops import layer_weights

say = lecture(__doc__)
heads, n, head_size = say.size("heads", 12, 12), say.size("n", 1024, 1024), 64
# %% [markdown]
# The cache of eight texts, for each number of KV heads that divides the query heads.
# %%
say.exact("B23", "bytes with 1 KV head for 12", cache_bytes(12, 1, 1024))
whole = cache_bytes(12, 12, 1024)
for r in (3, 12):
    share = whole / cache_bytes(12, 12 // r, 1024)
    say.near("B25", f"groups of {r}: difference from a cache {r} times smaller", abs(share - r), 0)
sizes = {k: cache_bytes(heads, k, n) for k in range(1, heads + 1) if heads % k == 0}
# %% [markdown]
# A group gives the same result as a copy of its keys and values for each of its query heads.
# %%
q, (k, v) = say.normal(2, 12, 32, head_size), (say.normal(2, 4, 32, head_size) for _ in range(2))
grouped = gpuattn.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
k, v = (say.xp.repeat(x, 3, axis=1) for x in (k, v))
repeated = gpuattn.scaled_dot_product_attention(q, k, v, is_causal=True)
error = difference(grouped, repeated)
say.near("B25", "groups of 3: difference from copied keys and values", error, 1e-6)
# %% [markdown]
# The six models of the MQA table have fewer or smaller heads and a wider feed-forward network. With
# width 1,024 all six layers have equally many weights. (The text does not give the width.)
# %%
TABLE = {
    "8 heads of 128": (8, 8, 128, 8192), "8 heads of 128, 1 KV head": (8, 1, 128, 9088),
    "1 head of 128": (1, 1, 128, 9984), "2 heads of 64": (2, 2, 64, 9984),
    "4 heads of 32": (4, 4, 32, 9984), "8 heads of 16": (8, 8, 16, 9984),
}  # fmt: skip
for name, (queries, keys, size, ffn) in TABLE.items():
    layer = SimpleNamespace(d_model=1024, heads=queries, kv_heads=keys, head_size=size, ffn=ffn,
                            activation="relu", stacks=((1, False),))  # fmt: skip
    say.exact("B24", f"weights, {name}", layer_weights(layer))
# %% [markdown]
# A step of decoding reads the whole cache: what it moves, and its time by the clock.
# %%
keys = 8192 if say.device == "cuda" else n
q, lengths = say.normal(8, 1, heads, head_size, dtype=say.dtype), say.xp.full(8, keys, "int32")
calls, moved = {}, {}
for name, count in (("one", 1), ("all", heads)):
    k_cache, v_cache = (say.normal(8, keys, count, head_size, dtype=say.dtype) for _ in "kv")
    calls[name] = partial(gpuattn.decode_attention, q, k_cache, v_cache, lengths)
    moved[name] = gpuattn.traffic(gpuattn.decode_attention, q, k_cache, v_cache, lengths).bytes
names = {"one": "1 KV head", "all": f"{heads} KV heads"}
pair = {names[name]: size / 1e6 for name, size in moved.items()}
say.order("B26", "read and written in a step of attention", pair, "MB")
pair = {names[name]: us for name, us in say.kernel_times(calls).items()}
say.faster("B26", "time of a step of attention", pair)
# %%
bars = {f"{k} KV heads for {heads} query heads": size / 2**20 for k, size in sizes.items()}
say.bars(f"Cache of a layer, 8 texts of {n:,} tokens, float32", bars, "MiB")
