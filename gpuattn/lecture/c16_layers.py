"""16. Layers in few launches

Claim: all ops of a layer except its matrix products can be fused into a few, and the loss too.
Regime: memory, overhead
Question: Labels are smoothed: the right class gets 1 - a, and a is spread over all V classes. What
is the gradient of the loss with respect to the logits?
Answer: q - p, the softmax minus the smoothed target. With a = 0 it is the usual gradient of cross
entropy. So smoothing adds hardly any work, and one kernel can compute the loss and its gradient.
Vary: python -m gpuattn.lecture.c16_layers V=32000
"""

# %%
from collections import Counter, defaultdict
from functools import partial

import numpy as np

import gpuattn
from gpuattn.lecture import lecture
from gpuattn.lecture.harness import counted
from gpuattn.lecture.harness.composed import pairs
from gpuattn.lecture.harness.forms import both_ways, difference, gradients
from gpuattn.lecture.harness.say import ratio

say = lecture(__doc__)
V, tokens, a = say.size("V", 1024, 128), 16, 0.1
# %% [markdown]
# The formula of the smoothed loss, beside the op.
# %%
logits, labels = say.rng.standard_normal((tokens, V)), say.rng.integers(0, V, tokens)
q = np.exp(logits - logits.max(-1, keepdims=True))
q /= q.sum(-1, keepdims=True)
p = (1 - a) * np.eye(V)[labels] + a / V
smoothed = partial(gpuattn.cross_entropy, labels=say.xp.asarray(labels), label_smoothing=a)
one = say.array(1, np.float64)
loss, dlogits = both_ways(smoothed, say.array(logits, np.float64), grad=one)
error = difference(loss, -(p * np.log(q)).sum() / tokens)
say.near("D08", "loss: difference from the formula", error, 1e-12)
error = difference(dlogits, (q - p) / tokens)
say.near("D08", "gradient: difference from q - p", error, 1e-15)
# %% [markdown]
# The ops of one layer of GPT-2, forward: matrix products with what is fused into them, attention,
# and a norm.
# %%
layers, words = {}, np.zeros((2, 16), np.int32)
for count in (1, 2):
    config = gpuattn.models.GPT2Config(vocab=64, d_model=64, heads=4, layers=count, block=16)
    model = gpuattn.models.GPT2(config)
    _, ran = counted.run(model.states, words)
    layers[count] = Counter(call.op for call in ran if call.bytes)
ops = [f"{count} x {name}" for name, count in (layers[2] - layers[1]).items()]
say.record("D05", "ops of a layer", ops)
# %% [markdown]
# Composed of NumPy's functions, and as one op: calls, and bytes read and written, counted while
# they run forward and backward; the time, and on a GPU the launches.
# %%
N, D = say.size("N", 4096 if say.device == "cuda" else 512, 64), say.size("D", 768, 64)
gains = {}
for name, (shape, composed, one_op) in pairs(say, N, D, V).items():
    x, id = say.normal(*shape), {"embedding": "D06", "loss": "D09"}.get(name, "D20")
    dy = say.xp.asarray(composed(x))  # as good as any other
    steps = {form: partial(both_ways, function, x, grad=dy)
             for form, function in (("one op", one_op), ("composed", composed))}  # fmt: skip
    outs, calls = {}, {}
    for form, step in steps.items():
        outs[form], calls[form] = counted.run(step)
    if name == "embedding":
        for part, way in (("D06", "forward"), ("D07", "backward")):
            pair = {form: sum(x.direction == way for x in ran) for form, ran in calls.items()}
            say.order(part, f"calls of ops, embedding, {way}", pair)
        if say.device == "cuda":
            launches = {form: say.launches(step) for form, step in steps.items()}
            say.order("D07", "launches, embedding, forward and backward", launches)
    elif name != "dropout":  # drawing the mask is no op that counts
        error = difference(*outs.values())
        say.near(id, f"{name}, composed and as one op: difference", error, 1e-3)
        size = {form: sum(x.bytes for x in ran) / 1e6 for form, ran in calls.items()}
        say.order(id, f"{name}: read and written, forward and backward", size, "MB")
    us = say.kernel_times(steps)
    gains[name] = ratio(us["composed"], us["one op"])
    say.faster(id, f"{name}: time, forward and backward", us)
say.bars("How many times as fast one op is as its composed form, here", gains, "times")
# %% [markdown]
# The bytes that each op of a training step reads and writes.
# %%
_, ran = counted.run(gradients, model, words, words)
moved: dict[str, float] = defaultdict(float)
for call in filter(lambda call: call.bytes, ran):
    moved[f"{call.op}, {call.direction}"] += call.bytes / 1e3
say.bars("Read and written by the ops of a step of a small GPT-2", moved, "kB")
