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
from dataclasses import replace

import numpy as np

import gpuattn
from gpuattn.arrays import to_cpu
from gpuattn.autodiff.hooks import hooked
from gpuattn.bench.profile import watch
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
say.record("D02", "ms here: forward, backward, update", [round(ms, 2) for ms in stages.values()])

# %% [markdown]
# The whole step of the translator of Vaswani et al., over the batch: with all that fuses, as a CUDA
# graph on a GPU, and without: the unfused form of attention, launch by launch.
# %%
base = MODELS["base"]
plain, curve = {"flash_attention": "unfused"}, []
counts = (8, 32, 128) if say.device == "cuda" else (2, 8)
for count in counts:
    case = replace(base, shape=(count, 64))
    rungs = {"after": Rung(case), "before": Rung(case, plain, graphs=False)}
    found = climb(say, rungs, shape=(count, 16))
    ms = {name: float(np.median(rung.us)) / 1e3 for name, rung in found.items()}
    curve.append((count, ms["before"] / ms["after"]))
    after, before = found["after"].us, found["before"].us
    say.order(
        "D18", f"step of {count} sentences, after and before", after, before, "us", clock=True
    )
for name in ("V100", "A100"):
    say.record(
        "D18", name, f"{min(y for _, y in curve):.1f} to {max(y for _, y in curve):.1f} here"
    )
for name in ("before", "after"):
    say.record("D19", f"{name}, ms", ms[name])
deep = replace(CELLS["deep"].case, shape=(32, 64))
rungs = {"after": Rung(deep), "before": Rung(deep, plain, graphs=False)}
found = climb(say, rungs, shape=(2, 16), layers=(4, 4))
after, before = found["after"].us, found["before"].us
say.order("D19", "step of a deep translator, after and before", after, before, "us", clock=True)
alt = "; ".join(f"{count} sentences: {gain:.2f}" for count, gain in curve)
say.curves("Step before over after, over the sentences of a batch", alt, {"here": curve},
           label="sentences", log_x=True)  # fmt: skip
alt = "; ".join(f"{name} {ms:.1f} ms" for name, ms in stages.items())
say.bars(f"Stages of a step of a translator, {layers} + {layers} layers", alt, stages, "ms")
# %% [markdown]
# Ops one by one: what is neither a product nor attention, with fused ops and with their formulas.
# %%
ROWS = ("layer_norm", "dropout_add_norm", "linear_dropout_add_norm")


def calls_of_a_step():
    """Return the calls of ops of a step; on a GPU each is timed as a CUDA graph."""
    with say.stream(), hooked(watcher := watch(say.device)):
        model.loss(batch).backward()
    return watcher.calls


calls = calls_of_a_step()
fused, products = (sum(c["us"] for c in calls if c["flops"] or every) for every in (True, False))
with gpuattn.use_impl(**dict.fromkeys(ROWS, "reference")):
    composed = sum(call["us"] for call in calls_of_a_step())
less, more = (100 * (1 - products / whole) for whole in (fused, composed))
say.order("D33", "share of ops but products and attention, fused and as formulas", less, more, "%",
          clock=True)  # fmt: skip
