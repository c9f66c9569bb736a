"""13. A padded vocabulary

Claim: a table with a multiple of 64 rows lets its products run in whole, aligned tiles.
Regime: compute
Question: GPT-2 has 50,257 tokens. Which share of work does a table of 50,304 rows add, and what
does it change for the loss?
Answer: 47 rows, 0.09 percent. The loss does not change: padded rows are never read as tokens, and
their logits are left out of the softmax.
Vary: python -m gpuattn.lecture.c13_padding V=50257
"""

# %%
from functools import partial

import numpy as np

import gpuattn
from gpuattn.arrays import to_cpu
from gpuattn.lecture import lecture
from gpuattn.models.config import padded_rows

say = lecture(__doc__)
V, width, tokens = say.size("V", 1401, 201), 256, 128
say.exact("A07", "padded rows", padded_rows(50257))
config = gpuattn.models.GPT2Config()
layer, output = config.layer_weights() / config.layers, config.table_rows * config.d_model
what = "millions of weights that a token of GPT-2 meets: in a layer, in the output"
say.order("A08", what, layer / 1e6, output / 1e6)
say.record("A07", "before, ms")
say.record("A07", "after, ms")
# %% [markdown]
# The same loss and the same gradient with and without the padding.
# %%
rows = padded_rows(V)
states, table = say.normal(tokens, width), 0.1 * say.normal(rows, width)
labels = say.xp.asarray(say.rng.integers(0, V, tokens))
found = []
for count in (V, rows):
    weight = gpuattn.Tensor(table[:count], requires_grad=True)
    logits = gpuattn.linear(gpuattn.Tensor(states), weight)
    loss = gpuattn.cross_entropy(logits, labels, vocab_size=V)
    loss.backward()
    found.append((float(to_cpu(loss.data)), to_cpu(weight.grad)))
(plain, dplain), (padded, dpadded) = found
say.near("A07", "loss with padding: difference", abs(padded - plain), 1e-5)
say.near("A07", "gradient with padding: difference", abs(dpadded[:V] - dplain).max(), 1e-6)
say.near("A07", "gradient of padded rows", abs(dpadded[V:]).max() if rows > V else 0.0, 0)
# %% [markdown]
# The clock, on a GPU with the sizes of GPT-2. Rows of the logits begin at aligned addresses only
# if their length is a multiple.
# %%
dtype = "float32"
if say.device == "cuda":
    V, width, tokens, dtype = 50257, 768, 8192, "float16"
rows = padded_rows(V)
states = say.normal(tokens, width, dtype=dtype)
tables = {n: say.normal(n, width, dtype=dtype) for n in sorted({V - 1, V, V + 1, rows, rows + 1})}
us = say.times({str(n): partial(gpuattn.linear, states, weight) for n, weight in tables.items()})
what = f"time of the product with {rows:,} rows, with {V:,}"
say.order("A09", what, us[str(rows)], us[str(V)], "us", clock=True)
bars = {f"{n:,} rows": float(np.median(us[str(n)])) for n in tables}
alt = "; ".join(f"{name}: {time:.0f} us" for name, time in bars.items())
say.bars(f"Time of the product by the rows of the table, {tokens:,} tokens", alt, bars, "us")
