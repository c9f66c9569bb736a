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

LENGTH = 64  # tokens of a row
SKIPPED = 4  # updates that are not timed: allocation, on a GPU compilation and capture


class Block(nn.Module):
    """A residual sum and the norm behind it are one op, so a block is given the norm after it."""

    def __init__(self, width, heads):
        self.attention = nn.MultiHeadAttention(width, heads, causal=True, bias=False)
        self.norm = nn.LayerNorm(width, bias=False)
        self.feed_forward = nn.FeedForward(width, 4 * width, activation="gelu", bias=False)
        self.dropout = nn.Dropout(0.0)

    def __call__(self, n, x, following):
        """Take and return (norm(x), x) for the residual stream x."""
        attention, forward = self.attention, self.feed_forward
        n, x = self.norm.add(attention.attend(n), attention.out, x, self.dropout)
        return following.add(forward.activated(n), forward.out, x, self.dropout)


class GPT(nn.Module):
    def __init__(self, vocab, width=128, heads=4, layers=4, length=LENGTH):
        self.vocab = vocab
        rows = -(-vocab // 64) * 64  # products of such a table are faster on a GPU
        self.embedding = nn.Embedding(
            rows, width, used=vocab, positions="learned", max_length=length
        )
        self.blocks = [Block(width, heads) for _ in range(layers)]
        self.norms = [nn.LayerNorm(width, bias=False) for _ in range(layers + 1)]

    def __call__(self, tokens, order=None):
        n, x = self.norms[0].and_residual(self.embedding(tokens, order=order))
        for block, following in zip(self.blocks, self.norms[1:], strict=True):
            n, x = block(n, x, following)
        return gpuattn.linear(n, self.embedding.weight)


def loss(model, tokens, labels, order):
    logits = model(tokens, order)
    return gpuattn.cross_entropy(logits, labels, vocab_size=model.vocab, donate=True)


def new_model(vocab, device, updates):
    """Return (model, optimizer), the same each time."""
    gpuattn.manual_seed(0)
    model = GPT(vocab).to(device=device)
    rate = optim.Schedule("cosine", 3e-3, warmup=updates // 10, total=updates)
    return model, optim.AdamW(model, lr=rate, weight_decay=0.1, max_norm=1.0, precision="auto")


def batches(ids, updates, size):
    """Yield the same random parts of the text each time: tokens, the next tokens, their order."""
    rng = np.random.default_rng(1)
    for _ in range(updates):
        starts = rng.integers(0, len(ids) - LENGTH, size)
        parts = ids[starts[:, None] + np.arange(LENGTH + 1)]
        tokens, labels = parts[:, :-1].copy(), parts[:, 1:].copy()
        yield tokens, labels, token_order(tokens.ravel()).order


def one_call(model, optimizer):
    """Return a step that is one call."""
    return gpuattn.training_step(model, loss, optimizer)


def plain_loop(model, optimizer):
    """Return a step that is the plain loop's."""
    xp = gpuattn.get_xp(optimizer.loss_scale)  # NumPy, or CuPy for a model on a GPU

    def step(*batch):
        value = loss(model, *map(xp.asarray, batch))
        value.backward(optimizer.loss_scale)
        optimizer.step()
        return value.data

    return step


def train(kind, model, optimizer, batches):
    """Train a model by steps of a kind; return its losses."""
    step, losses = kind(model, optimizer), []
    for update, batch in enumerate(batches):
        if update == SKIPPED:
            _, begin = float(losses[-1]), time.perf_counter()  # float waits for a GPU
        losses.append(step(*batch))
    losses = [float(value) for value in losses]
    rate = (len(losses) - SKIPPED) * batch[0].size / (time.perf_counter() - begin)
    print(f"{kind.__name__:10}  loss {losses[0]:.4f} to {losses[-1]:.4f}  {rate:9,.0f} tokens/s")
    return losses


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="run quickly: 8 small updates")
    parser.add_argument("--text", type=Path, metavar="FILE",
                        help="learn this, not spelled-out numbers")  # fmt: skip
    parser.add_argument("--updates", type=int, default=300)
    parser.add_argument("--cuda", action="store_true", help="run on CuPy arrays, in bf16")
    options = parser.parse_args()
    print(__doc__)
    updates, size = (8, 2) if options.smoke else (options.updates, 12)
    if options.text:
        text = options.text.read_text(encoding="utf-8")
    else:
        numbers = np.random.default_rng(0).integers(0, 10**6, 5000)
        text = "\n".join(number_en(int(n)) for n in numbers)
    letters = sorted(set(text))
    ids = np.searchsorted(letters, list(text)).astype(np.int32)

    made = len(letters), "cuda" if options.cuda else "numpy", updates
    print(new_model(*made)[0])
    one, plain = (
        train(kind, *new_model(*made), batches(ids, updates, size))
        for kind in (one_call, plain_loop)
    )
    difference = max(abs(a - b) for a, b in zip(one, plain, strict=True))
    allowed = 0.05 if options.cuda else 0  # attention may add gradients in another order on a GPU
    assert difference <= allowed, f"losses differ by {difference}; accepted: {allowed}"
    print(f"{updates} losses of one call an update and of the plain loop differ by {difference:g}")


if __name__ == "__main__":
    main()
