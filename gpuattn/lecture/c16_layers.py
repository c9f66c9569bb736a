"""16. Layers in few launches

Claim: all of a layer but its matrix products fuses into a few ops, the loss too.
Regime: memory, overhead
Question: The target of a class is smoothed: 1 - a goes to the right class and a is spread over all
V. What is the gradient of the loss at the logits?
Answer: q - p, the softmax minus the smoothed target. The plain rule q - 1 (right class) is what is
left at a = 0; so smoothing costs no more work, and forward and backward can share one pass.
Vary: python -m gpuattn.lecture.c16_layers V=32000
"""

# %%
from collections import Counter

import numpy as np

import gpuattn
from gpuattn.arrays import to_cpu
from gpuattn.lecture import lecture
from gpuattn.lecture.harness import counted

say = lecture(__doc__)
V, tokens, a = say.size("V", 1024, 128), 16, 0.1
# %% [markdown]
# The formula of the smoothed loss, beside the op.
# %%
logits, labels = say.rng.standard_normal((tokens, V)), say.rng.integers(0, V, tokens)
q = np.exp(logits - logits.max(-1, keepdims=True))
q /= q.sum(-1, keepdims=True)
p = (1 - a) * np.eye(V)[labels] + a / V
leaf = gpuattn.Tensor(say.array(logits, np.float64), requires_grad=True)
loss = gpuattn.cross_entropy(leaf, say.xp.asarray(labels), label_smoothing=a)
loss.backward()
say.near("D08", "loss: difference", abs(to_cpu(loss.data) + (p * np.log(q)).sum() / tokens), 1e-12)
gradient = abs(to_cpu(leaf.grad) - (q - p) / tokens).max()
say.near("D08", "gradient beside q - p: difference", gradient, 1e-15)
# %% [markdown]
# The ops of one layer of GPT-2, forward: products, and everything else in three ops.
# %%
layers = {}
for count in (1, 2):
    config = gpuattn.models.GPT2Config(vocab=64, d_model=64, heads=4, layers=count, block=16)
    model = gpuattn.models.GPT2(config)
    with counted.ops() as calls:
        model.states(np.zeros((2, 16), np.int32))
    layers[count] = Counter(call.op for call in calls if call.bytes)
ops = dict(layers[2] - layers[1])  # of one layer more
say.record("D05", "ops of a layer", [f"{count} x {name}" for name, count in ops.items()])
# %% [markdown]
# Where a layer's bytes go, op by op.
# %%
with counted.ops() as calls:
    model.loss(np.zeros((2, 16), np.int32), np.zeros((2, 16), np.int32)).backward()
moved: dict[str, float] = {}
for call in calls:
    name = f"{call.op}, {call.direction}"
    moved[name] = moved.get(name, 0) + call.bytes / 1e3
moved = {name: size for name, size in moved.items() if size}
alt = "; ".join(f"{name} {size:.0f} kB" for name, size in moved.items())
say.bars("Bytes that the ops of a small step read and write", alt, moved, "kB")
