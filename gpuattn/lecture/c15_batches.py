"""15. Larger batches

Claim: without stored tables more texts fit into memory, and a larger batch has a steadier gradient.
Regime: memory
Question: A batch four times as large: how much less noise does its gradient have?
Answer: Half. Texts are drawn independently, so the noise of their mean falls with the square root
of their number. Beyond the batch where noise is small beside the gradient, more texts buy little.
Vary: python -m gpuattn.lecture.c15_batches texts=256
"""

# %%
import time

import numpy as np

import gpuattn
from gpuattn.arrays import to_cpu
from gpuattn.lecture import lecture

say = lecture(__doc__)
texts, T = say.size("texts", 128, 32), 1024
# %% [markdown]
# GPT-2 with 124 M parameters on a card of 80 GB, in 16 bits: the plan of activations that the
# trainer uses, and the same with the table of weights of each head and layer kept for backward.
# %%
config = gpuattn.models.GPT2Config()
parameters = 16 * (config.layer_weights() + config.table_rows * config.d_model)
fused = config.activation_bytes(T, 2, "none")
stored = fused + 2 * config.layers * config.heads * T * T
fits = {name: int((80e9 - parameters) // size)
        for name, size in (("stored tables", stored), ("flash attention", fused))}  # fmt: skip
say.record("A10", "largest batch before")
say.record("A10", "largest batch with flash")
few, many = fits["stored tables"], fits["flash attention"]
say.order("A10", "texts of 1,024 tokens by the plan, with tables and without", few, many)
printed = {"printed: before": 24, "printed: with flash": 39}
alt = "; ".join(f"{name}: {count}" for name, count in (fits | printed).items())
say.bars("Texts of a batch of GPT-2 124M in 80 GB, by plan; as printed, by other programs", alt,
         fits | printed, "texts", grey=printed)  # fmt: skip
# %% [markdown]
# The gradient of each text by itself, of a small GPT-2 on texts that count upwards with errors.
# %%
small = gpuattn.models.GPT2Config(vocab=32, d_model=32, heads=2, layers=1, block=16)
model = gpuattn.models.GPT2(small)
starts = say.rng.integers(0, 32, (texts, 1))
counting = (starts + np.arange(17)) % 32
wrong = say.rng.random(counting.shape) < 0.2
tokens = np.where(wrong, say.rng.integers(0, 32, counting.shape), counting)
gradients = []
for text in tokens:
    for parameter in model.parameters():
        parameter.grad = None
    model.loss(text[None, :-1], text[None, 1:]).backward()
    gradients.append(np.concatenate([parameter.grad.ravel() for parameter in model.parameters()]))
whole = np.mean(gradients, 0)
noise = []
for batch in (2**n for n in range(int(np.log2(texts)) - 2)):
    means = np.reshape(gradients[: texts // batch * batch], (-1, batch, whole.size)).mean(1)
    noise.append(
        (batch, float(np.linalg.norm(means - whole, axis=-1).mean() / np.linalg.norm(whole)))
    )
(first, most), (last, least) = noise[0], noise[-1]
say.order("B02", f"noise over gradient with {last} texts, with {first}", least, most)
fall = most / least / (last / first) ** 0.5
say.near("B02", "noise falls as the square root: beside 1", abs(fall - 1), 0.3)
alt = f"Noise falls from {most:.2f} of the gradient with one text to {least:.2f} with {last}."
lines = {"counted": noise, "square root": [(b, most / b**0.5) for b, _ in noise]}
say.curves("Noise of the gradient over its size, over the batch", alt, lines, label="texts",
           log=True, log_x=True)  # fmt: skip
# %% [markdown]
# Training on texts of eight topics, each with words of its own. A longer text tells its topic, so
# the next word is easier; and in the same time a larger batch sees more texts.
# %%
topics = say.rng.dirichlet(np.full(32, 0.3), 8)


def draw(count, length):
    of = say.rng.integers(0, 8, count)
    return np.stack([say.rng.choice(32, length, p=topics[topic]) for topic in of])


def train(batch, length, until):
    """Train until ``until(updates, seconds)``; return [(seconds, loss of unseen texts)]."""
    config = gpuattn.models.GPT2Config(vocab=32, d_model=32, heads=2, layers=1, block=64)
    model = gpuattn.models.GPT2(config).to(device=say.device)
    optimizer, curve, n = gpuattn.optim.AdamW(model, lr=1e-2), [], 0
    data, unseen = (say.xp.asarray(draw(count, length + 1)) for count in (1024, 128))
    begin = time.perf_counter()
    while not until(n, seconds := time.perf_counter() - begin):
        if n % 10 == 0:
            with gpuattn.no_grad():
                loss = model.loss(unseen[:, :-1], unseen[:, 1:])
            curve.append((max(seconds, 1e-3), float(to_cpu(loss.data))))
        part = data[n * batch % (1025 - batch) :][:batch]
        model.loss(part[:, :-1], part[:, 1:]).backward()
        optimizer.step()
        n += 1
    return curve


updates = say.size("updates", 101, 41)
losses = {T: train(256 // T, T, lambda n, _: n >= updates)[-1][1] for T in (4, 32)}
say.order("E22", "loss with texts of 32 tokens, and of 4", losses[32], losses[4], "nats")
seconds = say.size("tenths", 20, 4, 600) / 10  # the text's hour, for a tiny model
curves = {f"{batch} texts": train(batch, 16, lambda _, s: s > seconds) for batch in (4, 32)}
few, many = (curve[-1][1] for curve in curves.values())
say.order("A11", f"loss after {seconds} s, 32 texts and 4", many, few, "nats", clock=True)
alt = f"After {seconds} s the loss is {few:.3f} with 4 texts and {many:.3f} with 32."
say.curves("Loss of unseen texts over the seconds, by the batch", alt, curves, label="seconds")
