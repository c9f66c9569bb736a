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
error = abs(to_cpu(loss.data) + (p * np.log(q)).sum() / tokens)
say.near("D08", "loss: difference from the formula", error, 1e-12)
gradient = abs(to_cpu(leaf.grad) - (q - p) / tokens).max()
say.near("D08", "gradient: difference from q - p", gradient, 1e-15)
# %% [markdown]
# The ops of one layer of GPT-2, forward: matrix products with what is fused into them, attention,
# and a norm.
# %%
layers = {}
for count in (1, 2):
    config = gpuattn.models.GPT2Config(vocab=64, d_model=64, heads=4, layers=count, block=16)
    model = gpuattn.models.GPT2(config)
    with counted.ops() as calls:
        model.states(np.zeros((2, 16), np.int32))
    layers[count] = Counter(call.op for call in calls if call.bytes)
ops = [f"{count} x {name}" for name, count in (layers[2] - layers[1]).items()]
say.record("D05", "ops of a layer", ops)
# %% [markdown]
# Composed of NumPy's functions, and as one op: calls, and bytes read and written, counted while
# they run forward and backward; the time, and on a GPU the launches.
# %%
N, D = say.size("N", 4096 if say.device == "cuda" else 512, 64), say.size("D", 768, 64)
ids, wanted = (say.xp.asarray(say.rng.integers(0, V, N)) for _ in range(2))
ones, zeros, places = say.array(np.ones(D)), say.array(np.zeros(D)), say.normal(N, D)
draws, kept = say.xp.random.default_rng(0), say.array(say.rng.random((N, D)) < 0.9) / 0.9


def logs(z):
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def mask():  # what dropout multiplies by, drawn by the generator of NumPy or CuPy
    return (draws.random((N, D), dtype="float32") < 0.9) * np.float32(1 / 0.9)


def norm(x):
    d = x - x.mean(-1, keepdims=True)
    return d / np.sqrt((d * d).mean(-1, keepdims=True) + 1e-5) * ones + zeros


FORMS = {  # name: shape of the input, composed, as one op
    "embedding": ((V, D), lambda w: (w[ids] * 16.0 + places) * kept, lambda w: gpuattn.embedding(
        ids, w, scale=16.0, position_weight=places, p=0.1, seed=1, deterministic=False)),
    "loss": ((N, V), lambda z: -logs(z)[say.xp.arange(N), wanted].mean(),
             lambda z: gpuattn.cross_entropy(z, wanted)),
    "layer norm": ((N, D), norm, lambda x: gpuattn.layer_norm(x, ones, zeros)),
    "softmax": ((N, D), lambda x: np.exp(logs(x)), gpuattn.softmax),
    "dropout": ((N, D), lambda x: x * mask(), lambda x: gpuattn.dropout(x, 0.1, seed=1)),
}  # fmt: skip


def both_ways(form, x):
    """Return the result and the gradient of a form."""
    leaf = gpuattn.Tensor(x, requires_grad=True)
    out = form(leaf)
    out.backward(say.xp.ones(out.shape, out.data.dtype))
    return out.data, leaf.grad


gains = {}
for name, (shape, *forms) in FORMS.items():
    x, outs = say.normal(*shape), []
    found: list[list[float]] = []  # composed, one op
    for form in forms:
        with counted.ops() as calls:
            outs.append([to_cpu(y) for y in both_ways(form, x)])
        ways = ("forward", "backward")
        found.append([sum(call.direction == way for call in calls) for way in ways])
        found[-1].append(sum(call.bytes for call in calls) / 1e6)
    us = say.kernel_times({"one op": partial(both_ways, forms[1], x),
                           "composed": partial(both_ways, forms[0], x)})  # fmt: skip
    gains[name] = float(np.median(us["composed"]) / np.median(us["one op"]))
    id = {"embedding": "D06", "loss": "D09"}.get(name, "D20")
    if name in ("loss", "layer norm", "softmax"):
        error = max(abs(a - b).max() for a, b in zip(*outs, strict=True))
        say.near(id, f"{name}, composed and as one op: difference", error, 1e-3)
    if name == "embedding":
        for part, way, i in (("D06", "forward", 0), ("D07", "backward", 1)):
            pair = {"one op": found[1][i], "composed": found[0][i]}
            say.order(part, f"calls of ops, embedding, {way}", pair)
        if say.device == "cuda":
            counts = [say.launches(partial(both_ways, form, x)) for form in forms]
            launches = {"one op": counts[1], "composed": counts[0]}
            say.order("D07", "launches, embedding, forward and backward", launches)
    elif name != "dropout":  # drawing the mask is no op that counts
        pair = {"one op": found[1][2], "composed": found[0][2]}
        say.order(id, f"{name}: read and written, forward and backward", pair, "MB")
    say.order(id, f"{name}: time, forward and backward", us, "us", clock=True)
alt = "; ".join(f"{name} {gain:.1f} times" for name, gain in gains.items())
say.bars("How many times as fast one op is as its composed form, here", alt, gains, "times")
# %% [markdown]
# The bytes that each op of a training step reads and writes.
# %%
with counted.ops() as calls:
    model.loss(np.zeros((2, 16), np.int32), np.zeros((2, 16), np.int32)).backward()
moved: dict[str, float] = defaultdict(float)
for call in (call for call in calls if call.bytes):
    moved[f"{call.op}, {call.direction}"] += call.bytes / 1e3
alt = "; ".join(f"{name} {size:.0f} kB" for name, size in moved.items())
say.bars("Read and written by the ops of a step of a small GPT-2", alt, moved, "kB")
