"""Compare naive attention, which stores a T x T table of scores, with flash_attention.

Claim: the results agree; naive attention needs memory in proportion to T squared, flash to T.
"""

import argparse
import time
import tracemalloc

import numpy as np

import gpuattn

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--smoke", action="store_true", help="run quickly: T = 256 and 512")
parser.add_argument("--plot", metavar="FILE", help="also draw the curves into a PNG file")
options = parser.parse_args()
print(__doc__)


def naive(q, k, v):
    """softmax(q k^T / sqrt(d)) v, as the formula says; (T, d) each."""
    scores = q @ k.T / np.float32(np.sqrt(q.shape[-1]))
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


def flash(q, k, v):
    """The same by flash_attention, as a batch of one with one head."""
    return gpuattn.flash_attention(q[None, :, None], k[None, :, None], v[None, :, None])[0, :, 0]


def measure(fun, *arrays):
    """Return the result of ``fun``, its seconds and its peak memory in bytes."""
    begin = time.perf_counter()
    out = fun(*arrays)
    spent = time.perf_counter() - begin
    tracemalloc.start()
    fun(*arrays)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return out, spent, peak


rng = np.random.default_rng(0)
rows = []
for tokens in (256, 512) if options.smoke else (1024, 2048, 4096, 8192):
    arrays = [rng.standard_normal((tokens, 64), dtype=np.float32) for _ in range(3)]
    a, naive_time, naive_peak = measure(naive, *arrays)
    b, flash_time, flash_peak = measure(flash, *arrays)
    rows.append((tokens, naive_peak / 2**20, flash_peak / 2**20))
    print(
        f"T = {tokens:5}: naive {naive_time * 1e3:7.1f} ms {naive_peak / 2**20:7.1f} MiB, "
        f"flash {flash_time * 1e3:7.1f} ms {flash_peak / 2**20:6.1f} MiB, "
        f"largest difference {np.abs(a - b).max():.1e}"
    )
growth = rows[-1][0] / rows[0][0]
print(
    f"{growth:.0f} times the tokens: naive needs {rows[-1][1] / rows[0][1]:.0f} times the memory, "
    f"flash {rows[-1][2] / rows[0][2]:.0f} times"
)

if options.plot:
    import matplotlib.pyplot as plt

    tokens, slow, fast = zip(*rows, strict=True)
    figure, axes = plt.subplots(figsize=(6, 4))
    axes.loglog(tokens, slow, "o-", label="naive")
    axes.loglog(tokens, fast, "s-", label="flash_attention")
    axes.set(xlabel="tokens", ylabel="peak memory, MiB", title="Attention of one head, NumPy")
    axes.legend()
    figure.savefig(options.plot, dpi=150, bbox_inches="tight")
