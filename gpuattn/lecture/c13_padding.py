"""13. A padded vocabulary

Claim: with a multiple of 64 rows in the embedding table, its matrix products run in whole tiles on
aligned addresses.
Regime: compute
Question: GPT-2 has 50,257 tokens. Its table is padded to 50,304 rows. How much work does this add,
and how does it change the loss?
Answer: 47 rows are 0.09 percent more work. The loss does not change: no token has these rows, and
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
pair = {"one layer": layer / 1e6, "the output layer": output / 1e6}
say.order("A08", "weights of GPT-2 that a token is multiplied with", pair, "M")
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
say.near("A07", "loss, padded and not: difference", abs(padded - plain), 1e-5)
error = abs(dpadded[:V] - dplain).max()
say.near("A07", "gradient of the table, padded and not: difference", error, 1e-6)
say.near("A07", "largest gradient of a padded row", abs(dpadded[V:]).max() if rows > V else 0.0, 0)
# %% [markdown]
# The time of the output layer, on a GPU with the sizes of GPT-2. A row of logits has one number for
# each row of the table, so all rows of logits are aligned only if that is a multiple of 8.
# %%
if say.device == "cuda":
    V, width, tokens = 50257, 768, 8192
rows = padded_rows(V)
states = say.normal(tokens, width, dtype=say.dtype)
tables = {
    n: say.normal(n, width, dtype=say.dtype) for n in sorted({V - 1, V, V + 1, rows, rows + 1})
}
us = say.times({str(n): partial(gpuattn.linear, states, weight) for n, weight in tables.items()})
times = {f"{rows:,} rows": us[str(rows)], f"{V:,} rows": us[str(V)]}
say.faster("A09", "time of the output layer", times)
bars = {f"{n:,} rows": float(np.median(us[str(n)])) for n in tables}
say.bars(f"Time of the output layer by the rows of its table, {tokens:,} tokens", bars, "us")
