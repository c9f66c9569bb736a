"""The tape listens to NumPy's own functions, on NumPy and on CuPy data.

Claim: the gradient of a fused op agrees with central differences to nine digits.
"""

import argparse

import numpy as np

import gpuattn
from gpuattn import Tensor

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--smoke", action="store_true", help="a small size, for the tests")
parser.add_argument("--cuda", action="store_true", help="run on CuPy arrays")
options = parser.parse_args()
place = gpuattn.to_gpu if options.cuda else np.asarray

rng = np.random.default_rng(0)
x, y = place(rng.standard_normal((64, 3))), place(rng.standard_normal((64, 1)))
w1 = Tensor(place(rng.standard_normal((3, 32)) * 0.5), requires_grad=True)
w2 = Tensor(place(rng.standard_normal((32, 1)) * 0.2), requires_grad=True)

for step in range(20 if options.smoke else 200):
    loss = np.mean((np.tanh(x @ w1) @ w2 - y) ** 2)
    loss.backward()
    for w in (w1, w2):
        w[...] = w.data - 0.1 * w.grad
        w.grad = None
    if step % 50 == 0:
        print(f"step {step:3}  loss {loss.item():.4f}")

third = gpuattn.grad(gpuattn.grad(gpuattn.grad(np.sin)))
print(f"third derivative of sin at 1: {float(third(1.0)):+.6f}, -cos(1) = {-np.cos(1.0):+.6f}")

q, k, v = (rng.standard_normal((1, 7, 2, 4)) for _ in range(3))
error = gpuattn.gradcheck(lambda *a: gpuattn.flash_attention(*a, causal=True), q, k, v)
print(f"flash_attention against central differences: relative error {error:.1e}")
