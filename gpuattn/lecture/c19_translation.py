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
import time
from dataclasses import replace

import numpy as np

import gpuattn
from gpuattn.arrays import to_cpu
from gpuattn.bench.train.cases import CELLS, MODELS
from gpuattn.data.batching import PackedLoader
from gpuattn.lecture import lecture
from gpuattn.lecture.harness import counted
from gpuattn.lecture.harness.steps import Rung, climb
from gpuattn.runtime.device import batch_to

say = lecture(__doc__)
layers, width, heads = say.size("layers", 6, 3), say.size("width", 256, 64), 4


def now():
    """Return the seconds, when all work of a GPU has ended."""
    if say.device == "cuda":
        say.xp.cuda.Device().synchronize()
    return time.perf_counter()


# %% [markdown]
# One product, and one for each layer: the same keys and values.
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
say.near("D10", "one product and one a layer: difference", error, 1e-5)
one, many = (sum(call.op == "linear" for call in calls) for calls in (once, apart))
say.order("D10", "matrix products", {"together": one, "a layer at a time": many})
less, more = (sum(call.bytes for call in calls) / 1e6 for calls in (once, apart))
say.order("D10", "read and written", {"together": less, "a layer at a time": more}, "MB")
# %% [markdown]
# The stages of a step of a small translator, by the clock.
# %%
config = gpuattn.models.TranslationConfig(
    vocab=256, d_model=width, heads=heads, layers=(layers, layers), ffn=4 * width, dropout=0.0
)
model = gpuattn.models.TranslationModel(config).to(device=say.device)
optimizer = gpuattn.optim.AdamW(model, lr=1e-3)
pairs = [say.rng.integers(4, 256, 16).tolist() for _ in range(8)]
batch = batch_to(next(PackedLoader([(pair, pair) for pair in pairs], 256, 0).epoch(0)), say.xp)
stages: dict[str, float] = {}
for _ in range(2):  # the second is measured
    marks = [now()]
    loss = model.loss(batch)
    marks.append(now())
    loss.backward()
    marks.append(now())
    optimizer.step()
    marks.append(now())
    for name, begin, end in zip(("forward", "backward", "update"), marks, marks[1:], strict=False):
        stages[name] = (end - begin) * 1e3
for name, took in stages.items():
    say.record("D02", f"{name}, ms", took)
say.record("D02", "synchronise", "none: one process")

# %% [markdown]
# The whole step of the translator of Vaswani et al., over the batch. After: all fused ops, on a GPU
# as a CUDA graph. Before: unfused attention, launch by launch.
# %%
base = MODELS["base"]
plain, curve = {"flash_attention": "unfused"}, []
counts = (8, 32, 128) if say.device == "cuda" else (2, 8)
for count in counts:
    case = replace(base, shape=(count, 64))
    rungs = {"after": Rung(case), "before": Rung(case, plain, graphs=False)}
    found = climb(say, rungs, shape=(count, 16))
    us = {name: rung.us for name, rung in found.items()}  # "after" first
    ms = {name: float(np.median(samples)) / 1e3 for name, samples in us.items()}
    curve.append((count, ms["before"] / ms["after"]))
    say.order("D18", f"time of a step of {count} sentences", us, "us", clock=True)
least, most = (pick(y for _, y in curve) for pick in (min, max))
say.record("D18", "times as fast here", f"{least:.1f} to {most:.1f}")
for name in ("V100", "A100"):
    say.record("D18", f"times as fast, {name}")
for name in ("before", "after"):
    say.record("D19", f"{name}, ms", ms[name])
deep = replace(CELLS["deep"].case, shape=(32, 64))
rungs = {"after": Rung(deep), "before": Rung(deep, plain, graphs=False)}
us = {name: rung.us for name, rung in climb(say, rungs, shape=(2, 16), layers=(4, 4)).items()}
what = f"time of a step of {'24 + 24' if say.device == 'cuda' else '4 + 4'} layers"
say.order("D19", what, us, "us", clock=True)
alt = "; ".join(f"{count} sentences: {gain:.2f}" for count, gain in curve)
say.curves("How many times as fast the step is after as before", alt, {"here": curve},
           label="sentences of the batch", unit="times", log_x=True)  # fmt: skip
alt = "; ".join(f"{name} {took:.1f} ms" for name, took in stages.items())
say.bars(f"Stages of a step of a translator, {layers} + {layers} layers", alt, stages, "ms")
# %% [markdown]
# The end of a sublayer: a product, then dropout, the sum with the residual and LayerNorm. The share
# of the time that is not the product's, fused and op by op.
# %%
rows, D, dtype = (8192, 512, "float16") if say.device == "cuda" else (512, width, "float32")
x, residual = (say.normal(rows, D, dtype=dtype) for _ in range(2))
w, gain, bias = say.normal(D, D, dtype=dtype), *(say.normal(D, dtype=dtype) for _ in range(2))


def op_by_op():
    h = residual + gpuattn.dropout(gpuattn.linear(x, w), 0.1, seed=7)
    return gpuattn.layer_norm(h, gain, bias)


us = say.kernel_times({
    "product": lambda: gpuattn.linear(x, w),
    "fused": lambda: gpuattn.linear_dropout_add_norm(x, w, residual, gain, bias, p=0.1, seed=7),
    "op by op": op_by_op,
})  # fmt: skip
median = {name: float(np.median(samples)) for name, samples in us.items()}
pair = {name: 100 * (1 - median["product"] / median[name]) for name in ("fused", "op by op")}
say.order("D33", "share of the time that is not the product's", pair, "%", clock=True)
