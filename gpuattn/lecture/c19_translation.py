"""19. A translation step

Claim: the keys and values of the source for all decoder layers come from one matrix product.
Regime: compute
Question: A decoder of 6 layers attends to a source of S tokens. How many products make its keys
and values, and which of their inputs is read again and again?
Answer: Twelve products, two a layer, each of which reads the same encoder output. Side by side
their weights are one matrix, and one product makes them all. The FLOPs are the same.
Vary: python -m gpuattn.lecture.c19_translation layers=12
"""

# %%
import time

import numpy as np

import gpuattn
from gpuattn.arrays import to_cpu
from gpuattn.data.batching import PackedLoader
from gpuattn.lecture import lecture
from gpuattn.lecture.harness import counted

say = lecture(__doc__)
layers, width, heads = say.size("layers", 6, 3), say.size("width", 256, 64), 4
# %% [markdown]
# One product beside one for each layer: the same keys and values.
# %%
project = gpuattn.nn.MemoryProjection(width, heads, layers)
memory = say.rng.standard_normal((2, 32, width)).astype(np.float32)
weights, biases = (np.split(p.data, layers) for p in (project.kv.weight, project.kv.bias))
with counted.ops() as once:
    together = project(memory)
with counted.ops() as apart:
    each = [gpuattn.linear(memory, w, b) for w, b in zip(weights, biases, strict=True)]
error = 0.0
for (k, v), kv in zip(together, each, strict=True):
    both = np.concatenate([to_cpu(x.data).reshape(2, 32, width) for x in (k, v)], -1)
    error = max(error, float(abs(both - to_cpu(kv)).max()))
say.near("D10", "one product beside one a layer: difference", error, 1e-5)
one, many = (sum(call.op == "linear" for call in calls) for calls in (once, apart))
say.order("D10", "products, together and apart", one, many)
less, more = (sum(call.bytes for call in calls) / 1e6 for calls in (once, apart))
say.order("D10", "bytes, together and apart", less, more, "MB")
# %% [markdown]
# The stages of a step of a small translator, by the clock.
# %%
config = gpuattn.models.TranslationConfig(
    vocab=256, d_model=width, heads=heads, layers=(layers, layers), ffn=4 * width, dropout=0.0
)
model = gpuattn.models.TranslationModel(config)
optimizer = gpuattn.optim.AdamW(model, lr=1e-3)
pairs = [say.rng.integers(4, 256, 16).tolist() for _ in range(8)]
batch = next(PackedLoader([(pair, pair) for pair in pairs], 256, 0).epoch(0))
stages: dict[str, float] = {}
for _ in range(2):  # the second is measured
    marks = [time.perf_counter()]
    loss = model.loss(batch)
    marks.append(time.perf_counter())
    loss.backward()
    marks.append(time.perf_counter())
    optimizer.step()
    marks.append(time.perf_counter())
    for name, begin, end in zip(("forward", "backward", "update"), marks, marks[1:], strict=False):
        stages[name] = (end - begin) * 1e3
say.record("D02", "ms here: forward, backward, update", [round(ms, 2) for ms in stages.values()])
alt = "; ".join(f"{name} {ms:.1f} ms" for name, ms in stages.items())
say.bars(f"Stages of a step of a translator, {layers} + {layers} layers", alt, stages, "ms")
