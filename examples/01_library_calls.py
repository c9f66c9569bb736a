"""Arrays in, arrays out: the same calls on NumPy and on CuPy, any strides, no framework.

Claim: attention over 4,096 keys needs memory for a few blocks, not for a 4,096 x 4,096 table.
"""

import argparse
import tracemalloc

import numpy as np

import gpuattn

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--smoke", action="store_true", help="a small size, for the tests")
parser.add_argument("--cuda", action="store_true", help="run on CuPy arrays")
options = parser.parse_args()
print(__doc__)

tokens, heads = 1024 if options.smoke else 4096, 4
rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((1, tokens, heads, 64), dtype=np.float32) for _ in range(3))
if options.cuda:
    q, k, v = (gpuattn.to_gpu(x) for x in (q, k, v))

tracemalloc.start()
out, lse = gpuattn.flash_attention(q, k, v, causal=True, return_lse=True)
peak = tracemalloc.get_traced_memory()[1]
tracemalloc.stop()
print(f"flash_attention: {out.shape} {out.dtype}, log-sum-exp {lse.shape}")

x = out.reshape(tokens, heads * 64)
xp = gpuattn.get_xp(x)
weight, bias = xp.ones(heads * 64, "float32"), xp.zeros(heads * 64, "float32")
normed, h = gpuattn.dropout_add_norm(x, x, weight, bias, p=0.1, seed=1)
print(f"dropout_add_norm: {normed.shape}, standard deviation {float(normed.std()):.3f}")

values, indices = gpuattn.topk_logprobs(x, 3)
print(f"topk_logprobs of the last row: {gpuattn.to_cpu(indices)[-1]} {gpuattn.to_cpu(values)[-1]}")

if not options.cuda:
    table = heads * tokens * tokens * 4
    print(f"peak memory {peak / 2**20:.0f} MiB; ", end="")
    print(f"the table of scores alone would be {table / 2**20:.0f} MiB")
