"""18. One workspace

Claim: all parameters are in one buffer, gradients and moments in others like it, and one kernel
updates them.
Regime: memory
Question: AdamW in float32. How many bytes does a parameter take, without the activations?
Answer: Sixteen: the parameter, its gradient and two moments, 4 bytes each. With 16-bit parameters
and float32 masters it is 2 + 2 + 4 + 8 = 16 as well, and without masters 12.
Vary: python -m gpuattn.lecture.c18_workspace width=256
"""

# %%
from functools import partial

import gpuattn
from gpuattn.bench.train.cases import MODELS
from gpuattn.lecture import lecture
from gpuattn.lecture.harness import counted
from gpuattn.lecture.harness.forms import both_ways
from gpuattn.lecture.harness.steps import Rung, climb
from gpuattn.runtime.workspace import Workspace

say = lecture(__doc__)
width = say.size("width", 128, 64)
# %% [markdown]
# The buffers of a small GPT-2, and their bytes for each parameter.
# %%


def model():
    config = gpuattn.models.GPT2Config(vocab=256, d_model=width, heads=4, layers=2, block=64)
    return gpuattn.models.GPT2(config)


each = {}
for name, given in (
    ("float32", {}), ("16 bits, float32 masters", {"dtype": "bfloat16"}),
    ("16 bits, no masters", {"dtype": "bfloat16", "masters": False}),
):  # fmt: skip
    space = Workspace(model(), **given)
    distinct = {id(x): x for x in (space.params, space.grads, *space.buffers().values())}
    each[name] = sum(x.nbytes for x in distinct.values()) / space.size
space = Workspace(model())
buffers = (space.params, space.grads, *(getattr(space, name) for name in space.moments))
what = "buffers: parameters, gradients, two moments, numbers each over the parameters"
say.exact("D16", what, max(x.size for x in buffers) / space.size)
padding = space.size / sum(p.size for p in space.tensors.values())
say.order("D16", "length of a buffer over parameters", {"here": padding, "10 % of padding": 1.1})
# %% [markdown]
# Two launches update all of them: the norm of the gradients, and AdamW.
# %%
optimizer = gpuattn.optim.AdamW(small := model(), lr=1e-3)
tokens = say.rng.integers(0, 256, (2, 65))
small.loss(tokens[:, :-1], tokens[:, 1:]).backward()
_, ran = counted.run(optimizer.step)
say.record("D16", "ops of an update", [call.op for call in ran])
say.record("D30", "bytes a parameter, 16 bits without masters", each["16 bits, no masters"])
# %% [markdown]
# What attention holds for its backward pass. Unfused: L x L matrices for each head. Fused: arrays
# of B L H elements and one number a row.
# %%
L = say.size("L", 2048 if say.device == "cuda" else 512, 256)
data, held = [say.normal(2, L, 4, 32, dtype=say.dtype) for _ in "qkv"], {}
for name, impl in (("fused", None), ("unfused", "unfused")):
    step = partial(both_ways, partial(gpuattn.flash_attention, impl=impl), *data)
    step()  # compiles
    held[name] = say.peak(step)
array, table = data[0].nbytes, 2 * 4 * L * L * data[0].itemsize
pair = {"three arrays B L H": 3 * array / 1e6, "scores B L^2 N": table / 1e6}
say.order("D17", "sizes of the text's buffers", pair, "MB")
pair = {"the scores": table / 1e6, "all that unfused attention holds": held["unfused"] / 1e6}
say.order("D17", "sizes here", pair, "MB")
pair = {name: size / 1e6 for name, size in held.items()}
say.order("D17", "memory that attention holds", pair, "MB")
# %% [markdown]
# A whole step of GPT-2 with fused and with unfused attention.
# %%
gpt = MODELS["gpt2-124m"]
rungs = {"fused": Rung(gpt), "unfused": Rung(gpt, {"flash_attention": "unfused"})}
found = climb(say, rungs, shape=(2, L), width=32, heads=4, layers=(2,))
peaks = {name: rung.peak / 1e9 for name, rung in found.items()}
say.order("D22", "memory of a step", peaks, "GB")
say.record("D22", "less memory, GB", peaks["unfused"] - peaks["fused"])
say.bars("Bytes a parameter with AdamW", each, "bytes")
