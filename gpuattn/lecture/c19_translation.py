"""19. A translation step

Claim: one matrix product gives the keys and values of the source for all decoder layers.
Regime: compute
Question: Each of 6 decoder layers attends to a source of S tokens. How many matrix products compute
the keys and values of the source, and which input do they share?
Answer: Twelve, two a layer, or six with K and V in one. All read the output of the encoder. With
their weights side by side in one matrix, one product computes all. The FLOPs are the same.
Vary: python -m gpuattn.lecture.c19_translation layers=12
"""

# %%
from dataclasses import replace
from functools import partial

import numpy as np

import gpuattn
from gpuattn.bench.train.cases import CELLS, MODELS
from gpuattn.lecture import lecture
from gpuattn.lecture.harness import counted
from gpuattn.lecture.harness.forms import difference
from gpuattn.lecture.harness.say import ratio
from gpuattn.lecture.harness.steps import Rung, climb
from gpuattn.lecture.harness.training import stages, translator

say = lecture(__doc__)
layers, width, heads = say.size("layers", 6, 3), say.size("width", 256, 64), 4
# %% [markdown]
# One product, and one for each layer: the same keys and values.
# %%
project = gpuattn.nn.MemoryProjection(width, heads, layers)
memory = say.rng.standard_normal((2, 32, width)).astype(np.float32)
weights, biases = (np.split(p.data, layers) for p in (project.kv.weight, project.kv.bias))


def a_layer_at_a_time():
    each = [gpuattn.linear(memory, w, b) for w, b in zip(weights, biases, strict=True)]
    return [np.split(kv, 2, -1) for kv in each]


(pairs, once), (others, apart) = counted.run(project, memory), counted.run(a_layer_at_a_time)
error = difference([[x.reshape(2, 32, width) for x in pair] for pair in pairs], others)
say.near("D10", "one product and one a layer: difference", error, 1e-5)
calls = {"together": once, "a layer at a time": apart}
products = {name: sum(call.op == "linear" for call in ran) for name, ran in calls.items()}
say.order("D10", "matrix products", products)
moved = {name: sum(call.bytes for call in ran) / 1e6 for name, ran in calls.items()}
say.order("D10", "read and written", moved, "MB")
# %% [markdown]
# The stages of a step of a small translator, by the clock.
# %%
taken = stages(say, *translator(say, layers, width, heads))
for name, took in taken.items():
    say.record("D02", f"{name}, ms", took)
say.record("D02", "synchronise", "none: one process")
say.bars(f"Stages of a step of a translator, {layers} + {layers} layers", taken, "ms")
# %% [markdown]
# The whole step of the translator of Vaswani et al., over the batch: with unfused attention before,
# with fused attention after, both as CUDA graphs on a GPU. Without dropout: here only fused
# attention draws it in its kernel.
# %%


def step(case, **smaller):
    """Return the microseconds of a step after and before."""
    case = replace(case, dropout=0.0)
    rungs = {"after": Rung(case), "before": Rung(case, {"flash_attention": "unfused"})}
    return {name: rung.us for name, rung in climb(say, rungs, **smaller).items()}


gains = []
for count in (8, 32, 128) if say.device == "cuda" else (2, 8):
    us = step(replace(MODELS["base"], shape=(count, 64)), shape=(count, 16))
    gains.append((count, ratio(us["before"], us["after"])))
    say.faster("D18", f"time of a step of {count} sentences", us)
least, *_, most = sorted(gain for _, gain in gains)
say.record("D18", "times as fast here", f"{least:.1f} to {most:.1f}")
say.record("D18", "times as fast, V100")
say.record("D18", "times as fast, A100")
for name in ("before", "after"):
    say.record("D19", f"{name}, ms", float(np.median(us[name])) / 1e3)
what = f"time of a step of {'24 + 24' if say.device == 'cuda' else '4 + 4'} layers"
deep = replace(CELLS["deep"].case, shape=(32, 64))
say.faster("D19", what, step(deep, shape=(2, 16), layers=(4, 4)))
say.curves("How many times as fast the step is after as before", {"here": gains},
           label="sentences of the batch", unit="times", log="x")  # fmt: skip
# %% [markdown]
# The end of a sublayer: a product, then dropout, the sum with the residual and LayerNorm. The share
# of the time that is not the product's, fused and op by op.
# %%
rows, D = (8192, 512) if say.device == "cuda" else (512, width)
x, residual, w = (say.normal(count, D, dtype=say.dtype) for count in (rows, rows, D))
gain, bias = (say.normal(D, dtype=say.dtype) for _ in range(2))
product = partial(gpuattn.linear, x, w)
us = say.kernel_times({
    "product": product,
    "fused": lambda: gpuattn.linear_dropout_add_norm(x, w, residual, gain, bias, p=0.1, seed=7),
    "op by op": lambda: gpuattn.layer_norm(
        residual + gpuattn.dropout(product(), 0.1, seed=7), gain, bias),
})  # fmt: skip
pair = {name: 100 * (1 - ratio(us["product"], us[name])) for name in ("fused", "op by op")}
say.order("D33", "share of the time that is not the product's", pair, "%", clock=True)
