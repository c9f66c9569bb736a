"""Write a GPT of your own, and train it by the step that `gpuattn train` runs.

Claim: one call an update gives the losses of the plain loop, loss.backward() and optimizer.step().
"""

import argparse
import time
from pathlib import Path

import numpy as np

import gpuattn
from gpuattn import nn, optim
from gpuattn.data.batching import token_order
from gpuattn.data.lexicon import number_en

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--smoke", action="store_true", help="run quickly: 8 small updates")
parser.add_argument("--text", type=Path, metavar="FILE", help="learn this, not spelled-out numbers")
parser.add_argument("--updates", type=int, default=300)
parser.add_argument("--cuda", action="store_true", help="run on CuPy arrays, in bf16")
options = parser.parse_args()
print(__doc__)

WIDTH, HEADS, LAYERS, LENGTH = 128, 4, 4, 64
UPDATES, BATCH = (8, 2) if options.smoke else (options.updates, 12)
SKIPPED = 4  # updates that are not timed: allocation, on a GPU compilation and capture


class Block(nn.Module):
    def __init__(self, width, heads):
        self.norms = [nn.LayerNorm(width, bias=False) for _ in range(2)]
        self.attention = nn.MultiHeadAttention(width, heads, causal=True, bias=False)
        self.feed_forward = nn.FeedForward(width, 4 * width, activation="gelu", bias=False)

    def __call__(self, x):
        x = x + self.attention(self.norms[0](x))
        return x + self.feed_forward(self.norms[1](x))


class GPT(nn.Module):
    def __init__(self, vocab):
        self.vocab = vocab
        rows = -(-vocab // 64) * 64  # products of such a table are faster on a GPU
        self.embedding = nn.Embedding(
            rows, WIDTH, used=vocab, positions="learned", max_length=LENGTH
        )
        self.blocks = [Block(WIDTH, HEADS) for _ in range(LAYERS)]
        self.norm = nn.LayerNorm(WIDTH, bias=False)

    def __call__(self, tokens, order=None):
        x = self.embedding(tokens, order=order)
        for block in self.blocks:
            x = block(x)
        return gpuattn.linear(self.norm(x), self.embedding.weight)


def loss(model, tokens, labels, order):
    logits = model(tokens, order)
    return gpuattn.cross_entropy(logits, labels, vocab_size=model.vocab, donate=True)


def new_model():
    """Return (model, optimizer), the same each time."""
    gpuattn.manual_seed(0)
    model = GPT(len(letters)).to(device="cuda" if options.cuda else "numpy")
    rate = optim.Schedule("cosine", 3e-3, warmup=UPDATES // 10, total=UPDATES)
    return model, optim.AdamW(model, lr=rate, weight_decay=0.1, max_norm=1.0, precision="auto")


def batches():
    """Yield the same random parts of the text each time: tokens, the next tokens, their order."""
    rng = np.random.default_rng(1)
    for _ in range(UPDATES):
        starts = rng.integers(0, len(ids) - LENGTH, BATCH)
        parts = ids[starts[:, None] + np.arange(LENGTH + 1)]
        tokens, labels = parts[:, :-1].copy(), parts[:, 1:].copy()
        yield tokens, labels, token_order(tokens.ravel()).order


def one_call(model, optimizer):
    """Return a step that is one call."""
    return gpuattn.training_step(model, loss, optimizer)


def plain_loop(model, optimizer):
    """Return a step that is the plain loop's."""

    def step(*batch):
        value = loss(model, *map(gpuattn.to_gpu if options.cuda else np.asarray, batch))
        value.backward(optimizer.loss_scale)
        optimizer.step()
        return value.data

    return step


def train(kind):
    """Train a new model by steps of a kind; return its losses."""
    step, losses = kind(*new_model()), []
    for update, batch in enumerate(batches()):
        if update == SKIPPED:
            _, begin = float(losses[-1]), time.perf_counter()  # float waits for a GPU
        losses.append(step(*batch))
    losses = [float(value) for value in losses]
    rate = (UPDATES - SKIPPED) * BATCH * LENGTH / (time.perf_counter() - begin)
    print(f"{kind.__name__:10}  loss {losses[0]:.4f} to {losses[-1]:.4f}  {rate:9,.0f} tokens/s")
    return losses


if options.text:
    text = options.text.read_text(encoding="utf-8")
else:
    text = "\n".join(number_en(int(n)) for n in np.random.default_rng(0).integers(0, 10**6, 5000))
letters = sorted(set(text))
ids = np.searchsorted(letters, list(text)).astype(np.int32)

print(new_model()[0])
one, plain = train(one_call), train(plain_loop)
difference = max(abs(a - b) for a, b in zip(one, plain, strict=True))
allowed = 0.05 if options.cuda else 0  # attention may add gradients in another order on a GPU
assert difference <= allowed, f"losses differ by {difference}; accepted: {allowed}"
print(f"{UPDATES} losses of one call an update and of the plain loop differ by {difference:g}")
