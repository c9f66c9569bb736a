"""Call ops on NumPy or CuPy arrays and get arrays back: any strides, no framework.

Claim: attention over 4,096 keys stores a few blocks of scores, never a 4,096 x 4,096 table.
"""

import argparse
import tracemalloc

import numpy as np

import gpuattn

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--smoke", action="store_true", help="run quickly: 1,024 keys")
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
normalized, h = gpuattn.dropout_add_norm(x, x, weight, bias, p=0.1, seed=1)
spread = float(normalized.std())
print(f"dropout_add_norm: {normalized.shape}, standard deviation {spread:.3f}, as a norm gives")

values, indices = gpuattn.topk_logprobs(x, 3)
best = zip(gpuattn.to_cpu(indices)[-1], gpuattn.to_cpu(values)[-1], strict=True)
print("topk_logprobs of the last row:", ", ".join(f"{p:.2f} at {i}" for i, p in best))

if not options.cuda:
    table = heads * tokens * tokens * 4
    print(
        f"flash_attention took {peak / 2**20:.0f} MiB at its peak; "
        f"a table of all scores alone would take {table / 2**20:.0f} MiB"
    )
