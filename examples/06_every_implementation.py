"""Run one attention call by every implementation that accepts it, and compare with the formula.

Claim: all agree with the formula, and with dropout all drop the same probabilities.
"""

import argparse

import numpy as np

import gpuattn
from gpuattn.ops.attention.dropout import attention_keep_mask
from gpuattn.rng import as_key

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--smoke", action="store_true", help="run quickly: 48 tokens")
parser.add_argument("--cuda", action="store_true", help="run on CuPy arrays of float16")
options = parser.parse_args()
print(__doc__)

B, T, H, D = (2, 48, 4, 32) if options.smoke else (2, 512, 8, 64)
rng = np.random.default_rng(0)
dtype = np.float16 if options.cuda else np.float32
q, k, v = (rng.standard_normal((B, T, H, D)).astype(dtype) for _ in range(3))


def formula(q, k, v, factor=1.0):
    """Causal attention in float64 with a T x T table; ``factor`` scales the probabilities."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    logits = np.einsum("bthd,bshd->bhts", q, k) / np.sqrt(D)
    weights = np.exp(logits) * np.tri(T)
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("bhts,bshd->bthd", weights * factor, v)


kept = attention_keep_mask(np, (B, H, T, T), 0.25, as_key(1))  # kept by seed=1
arrays = [gpuattn.to_gpu(x) if options.cuda else x for x in (q, k, v)]
worst = 0.0
for kwargs, want in (
    ({}, formula(q, k, v)),
    ({"dropout_p": 0.25, "seed": 1}, formula(q, k, v, kept / 0.75)),
):
    answer = gpuattn.explain(gpuattn.flash_attention, *arrays, causal=True, **kwargs)
    asked = ", ".join(f"{name}={value}" for name, value in kwargs.items())
    print(f"causal attention, {asked or 'no dropout'}\n{answer}")
    results = {"formula": want}
    for name in [name for name, refusal in answer.reasons if refusal is None]:
        with gpuattn.use_impl(flash_attention=name):
            out = gpuattn.flash_attention(*arrays, causal=True, **kwargs)
        results[name] = gpuattn.to_cpu(out).astype(np.float64)
    spread = max(np.abs(a - b).max() for a in results.values() for b in results.values())
    print(f"largest difference between {', '.join(results)}: {spread:.1e}\n")
    worst = max(worst, spread)

allowed = 1e-2 if options.cuda else 1e-5  # rounding
assert worst < allowed, f"implementations differ by {worst:.1e}; accepted: less than {allowed:g}"
print(f"dropout kept {kept.mean():.1%} of the probabilities, the same in every implementation")
print(f"largest difference in {np.dtype(dtype)}: {worst:.1e}, less than {allowed:g}: all agree")
