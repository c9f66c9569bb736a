"""18. One workspace

Claim: parameters, gradients and moments are one buffer each, and one kernel updates them.
Regime: memory
Question: AdamW in float32. How many bytes does a parameter take, before any activation?
Answer: Sixteen: the number, its gradient and two moments, 4 bytes each. With 16-bit parameters and
float32 masters it is 2 + 2 + 4 + 8 = 16 as well; without masters twelve.
Vary: python -m gpuattn.lecture.c18_workspace width=256
"""

# %%
import gpuattn
from gpuattn.lecture import lecture
from gpuattn.lecture.harness import counted
from gpuattn.runtime.workspace import Workspace

say = lecture(__doc__)
width = say.size("width", 128, 64)
# %% [markdown]
# The buffers of a small GPT-2, and their bytes for each number of the model.
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
say.order("D16", "numbers of a buffer over those of the model, and 1.1", padding, 1.1)
# %% [markdown]
# One call updates all of them.
# %%
optimizer = gpuattn.optim.AdamW(small := model(), lr=1e-3)
tokens = say.rng.integers(0, 256, (2, 65))
small.loss(tokens[:, :-1], tokens[:, 1:]).backward()
with counted.ops() as calls:
    optimizer.step()
say.record("D16", "calls of an update", [call.op for call in calls])
say.record("D30", "bytes of a number with 16 bits and without masters", each["16 bits, no masters"])
alt = "; ".join(f"{name}: {size:.0f}" for name, size in each.items())
say.bars("Bytes a parameter takes with AdamW", alt, each, "bytes")
