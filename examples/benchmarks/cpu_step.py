"""A training step of nanoGPT's CPU-size model on NumPy, and in PyTorch where it is installed.

The model: 4 layers, 4 heads, d 128, block 64, batch 12, vocabulary 65, no biases, no dropout
(Karpathy's README of nanoGPT). A step is forward, backward, clipping and AdamW, in float32.
It prints the median time of a step in milliseconds. Run it on an idle machine.
"""

import argparse
import statistics
import time

from gpuattn.environment import usable_cores  # first: it sets variables that NumPy's BLAS reads

# isort: split
import numpy as np

from gpuattn.models import GPT2, GPT2Config
from gpuattn.optim import AdamW

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--smoke", action="store_true", help="few steps, for the tests")
options = parser.parse_args()
WARM_UP, STEPS = (1, 2) if options.smoke else (10, 30)
VOCAB, WIDTH, HEADS, LAYERS, BLOCK, BATCH = 65, 128, 4, 4, 64, 12
LEARNING_RATE, BETAS, WEIGHT_DECAY, CLIP = 1e-3, (0.9, 0.99), 0.1, 1.0


def median_ms(step):
    """Return the median time of a step in milliseconds."""
    times = []
    for _ in range(WARM_UP + STEPS):
        begin = time.perf_counter()
        step()
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times[WARM_UP:])


def gpuattn_step(tokens, labels):
    """Return a training step of the model by gpuattn, on NumPy."""
    shape = GPT2Config(VOCAB, d_model=WIDTH, heads=HEADS, layers=LAYERS, block=BLOCK, bias=False)
    model = GPT2(shape)
    optimizer = AdamW(
        model, lr=LEARNING_RATE, betas=BETAS, eps=1e-8, weight_decay=WEIGHT_DECAY, max_norm=CLIP
    )

    def step():
        model.loss(tokens, labels).backward()
        optimizer.step()

    return step


def torch_step(torch, tokens, labels):
    """Return a training step of the same model, built of PyTorch's own layers."""
    nn, functional = torch.nn, torch.nn.functional

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(WIDTH, bias=False) for _ in range(2))
            sizes = {"qkv": (1, 3), "out": (1, 1), "inner": (1, 4), "last": (4, 1)}
            self.linear = nn.ModuleDict({
                name: nn.Linear(n * WIDTH, m * WIDTH, bias=False) for name, (n, m) in sizes.items()
            })  # fmt: skip

        def forward(self, x):
            qkv = self.linear["qkv"](self.norms[0](x)).split(WIDTH, dim=2)
            heads = (part.view(BATCH, BLOCK, HEADS, -1).transpose(1, 2) for part in qkv)
            attended = functional.scaled_dot_product_attention(*heads, is_causal=True)
            x = x + self.linear["out"](attended.transpose(1, 2).reshape(x.shape))
            inner = functional.gelu(self.linear["inner"](self.norms[1](x)), approximate="tanh")
            return x + self.linear["last"](inner)

    table, places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(BLOCK, WIDTH)
    layers, norm = nn.Sequential(*[Layer() for _ in range(LAYERS)]), nn.LayerNorm(WIDTH, bias=False)
    parameters = [p for m in (table, places, layers, norm) for p in m.parameters()]
    optimizer = torch.optim.AdamW(
        parameters, LEARNING_RATE, BETAS, weight_decay=WEIGHT_DECAY, fused=True
    )
    tokens, labels = torch.from_numpy(tokens).long(), torch.from_numpy(labels).long()

    def step():
        states = norm(layers(table(tokens) + places(torch.arange(BLOCK))))
        logits = functional.linear(states, table.weight).view(-1, VOCAB)
        optimizer.zero_grad(set_to_none=True)
        functional.cross_entropy(logits, labels.view(-1)).backward()
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()

    return step


text = np.random.default_rng(0).integers(0, VOCAB, (BATCH, BLOCK + 1)).astype(np.int32)
pair = np.ascontiguousarray(text[:, :-1]), np.ascontiguousarray(text[:, 1:])
print(f"{usable_cores()} cores; median of {STEPS} steps")
print(f"gpuattn on NumPy {np.__version__}: {median_ms(gpuattn_step(*pair)):.1f} ms")
try:
    import torch
except ImportError:
    print("PyTorch is not installed, so it is not compared")
else:
    print(f"PyTorch {torch.__version__}: {median_ms(torch_step(torch, *pair)):.1f} ms")
