"""15. Larger batches

Claim: without stored N x N matrices more texts fit into memory, and the gradient of a larger batch
has less noise.
Regime: memory
Question: A batch four times as large: how much less noise does its gradient have?
Answer: Half as much. Texts are drawn independently, so the noise of their mean falls with the
square root of their number. Once the noise is small beside the gradient, more texts help little.
Vary: python -m gpuattn.lecture.c15_batches texts=256
"""

# %%
import numpy as np

import gpuattn
from gpuattn.lecture import lecture
from gpuattn.lecture.harness.forms import doublings, gradients
from gpuattn.lecture.harness.training import curve

say = lecture(__doc__)
texts, T = say.size("texts", 128, 32), 1024
# %% [markdown]
# GPT-2 with 124 M parameters on a GPU of 80 GB, in 16 bits: the memory of activations as the
# trainer predicts it, and the same with the N x N weights of each head and layer stored.
# %%
config = gpuattn.models.GPT2Config()
parameters = 16 * (config.layer_weights() + config.table_rows * config.d_model)
fused = config.activation_bytes(T, 2, "none")
stored = fused + 2 * config.layers * config.heads * T * T
fits = {name: int((80e9 - parameters) // size)
        for name, size in (("unfused attention", stored), ("flash attention", fused))}  # fmt: skip
say.record("A10", "largest batch before")
say.record("A10", "largest batch with flash")
say.order("A10", "texts of 1,024 tokens that fit, as predicted", fits)
printed = {"before, as printed": 24, "flash attention, as printed": 39}
say.bars("Largest batch of GPT-2 124M in 80 GB: predicted here, and as printed for nanoGPT",
         fits | printed, "texts", grey=printed)  # fmt: skip
# %% [markdown]
# The gradient of each text alone. A small GPT-2 learns texts that count upwards with some errors.
# %%
small = gpuattn.models.GPT2Config(vocab=32, d_model=32, heads=2, layers=1, block=64)
model = gpuattn.models.GPT2(small)
starts = say.rng.integers(0, 32, (texts, 1))
counting = (starts + np.arange(17)) % 32
wrong = say.rng.random(counting.shape) < 0.2
tokens = np.where(wrong, say.rng.integers(0, 32, counting.shape), counting)
each = np.stack([gradients(model, text[None, :-1], text[None, 1:]) for text in tokens])
whole, noise = each.mean(0), []
for batch in doublings(1, texts // 8):
    means = each[: texts // batch * batch].reshape(-1, batch, whole.size).mean(1)
    off = np.linalg.norm(means - whole, axis=-1).mean() / np.linalg.norm(whole)
    noise.append((batch, float(off)))
(first, most), (last, least) = noise[0], noise[-1]
pair = {f"{last} texts": least, "one text": most}
say.order("B02", "noise over size of the gradient", pair)
fall = abs(most / least / (last / first) ** 0.5 - 1)
say.near("B02", "fall of the noise: relative difference from the square root", fall, 0.3)
lines = {"as computed": noise, "square root": [(b, most / b**0.5) for b, _ in noise]}
say.curves("Noise over size of the gradient", lines, label="texts of the batch", unit="ratio",
           log="xy")  # fmt: skip
# %% [markdown]
# Training on texts of eight topics, each with its own distribution of words. A longer text shows
# its topic, so the next word is easier to predict. In the same time a larger batch sees more texts.
# %%
topics = say.rng.dirichlet(np.full(32, 0.3), 8)


def draw(count, length):
    of = say.rng.integers(0, 8, count)
    return np.stack([say.rng.choice(32, length, p=topics[topic]) for topic in of])


def train(batch, length, until):
    data, unseen = (draw(count, length + 1) for count in (1024, 128))
    return curve(say, small, data, unseen, batch, until)


updates = say.size("updates", 101, 41)
losses = {T: train(256 // T, T, lambda n, _: n >= updates)[-1][1] for T in (4, 32)}
pair = {f"texts of {length} tokens": losses[length] for length in (32, 4)}
say.order("E22", f"loss after {updates} updates of 256 tokens", pair, "nats")
seconds = say.size("tenths", 20, 4, 600) / 10  # the text's hour, for a tiny model
curves = {f"{batch} texts": train(batch, 16, lambda _, s: s > seconds) for batch in (4, 32)}
pair = {name: curves[name][-1][1] for name in ("32 texts", "4 texts")}
say.order("A11", f"loss after {seconds} s", pair, "nats", clock=True)
say.curves("Loss of unseen texts, by the texts of a batch", curves, label="seconds", unit="nats")
