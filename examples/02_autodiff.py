"""Differentiate code that calls NumPy functions: a Tensor records them, on CPU and GPU.

Claim: the gradient of a fused op agrees with central differences to nine digits.
"""

import argparse

import numpy as np

import gpuattn
from gpuattn import Tensor

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--smoke", action="store_true", help="run quickly: 201 steps")
parser.add_argument("--cuda", action="store_true", help="run on CuPy arrays")
options = parser.parse_args()
to_device = gpuattn.to_gpu if options.cuda else np.asarray
print(__doc__)

rng = np.random.default_rng(0)
x = rng.uniform(-2, 2, (256, 1))
x, y = to_device(x), to_device(np.sin(3 * x))
print("A network of 32 hidden units learns y = sin(3 x):")
w1 = Tensor(to_device(rng.standard_normal((1, 32)) * 2), requires_grad=True)
b1 = Tensor(to_device(rng.standard_normal(32)), requires_grad=True)
w2 = Tensor(to_device(rng.standard_normal((32, 1)) * 0.2), requires_grad=True)

for step in range(201 if options.smoke else 1001):
    loss = np.mean((np.tanh(x @ w1 + b1) @ w2 - y) ** 2)
    loss.backward()
    if step % 200 == 0:
        print(f"step {step:4}  loss {loss.item():.4f}")
    for w in (w1, b1, w2):
        w[...] = w.data - 0.05 * w.grad
        w.grad = None

third = gpuattn.grad(gpuattn.grad(gpuattn.grad(np.sin)))
print(f"third derivative of sin at 1: {float(third(1.0)):+.6f}, -cos(1) = {-np.cos(1.0):+.6f}")

q, k, v = (to_device(rng.standard_normal((1, 7, 2, 4))) for _ in range(3))
error = gpuattn.gradcheck(lambda *a: gpuattn.flash_attention(*a, causal=True), q, k, v)
print(f"gradient of flash_attention beside central differences: relative error {error:.1e}")
