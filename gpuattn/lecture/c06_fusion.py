"""6. Fusion and launches

Claim: one kernel in place of several leaves out the reads and writes between them.
Regime: memory, overhead
Question: E = A + B + C as D = A + B and E = D + C. How many arrays are read and written, and how
many in one kernel?
Answer: Four reads and two writes, against three reads and one write: D never leaves the chip. On
small arrays the second launch costs more than its bytes.
Vary: python -m gpuattn.lecture.c06_fusion rows=4096
"""

# %%
import numpy as np

import gpuattn
from gpuattn.arrays import to_cpu
from gpuattn.lecture import lecture
from gpuattn.lecture.harness import counted

say = lecture(__doc__)
rows, width = say.size("rows", 512, 64), say.size("width", 768, 256)
# %% [markdown]
# Two kernels and one, each over whole arrays of a memory that counts.
# %%


def in_two(m):
    m["D"][:] = m["A"][:] + m["B"][:]
    m["E"][:] = m["D"][:] + m["C"][:]


def in_one(m):
    m["E"][:] = m["A"][:] + m["B"][:] + m["C"][:]


for add, name in ((in_two, "two kernels"), (in_one, "one kernel")):
    add(m := counted.memory(say.rng, **dict.fromkeys("ABCDE", (rows,))))
    say.exact("D04", f"loads, {name}", sum(x.reads for x in m.values()) // rows)
    say.exact("D04", f"stores, {name}", sum(x.writes for x in m.values()) // rows)
# %% [markdown]
# The end of a Transformer's branch: dropout, sum with the residual, LayerNorm. One op beside three,
# with the bytes that each op call reads and writes.
# %%
shape = rows, width
x, residual = (gpuattn.Tensor(say.normal(*shape)) for _ in range(2))
weight, bias = say.array(np.ones(width)), say.array(np.zeros(width))


def composed():
    h = residual + gpuattn.dropout(x, 0.1, seed=7)
    return gpuattn.layer_norm(h, weight, bias), h


def fused():
    return gpuattn.dropout_add_norm(x, residual, weight, bias, p=0.1, seed=7)


moved, calls, outs = {}, {}, []
for name, form in (("three ops", composed), ("dropout_add_norm", fused)):
    with counted.ops() as ran:
        outs.append([to_cpu(out.data) for out in form()])
    moved[name] = sum(call.bytes for call in ran) / (4 * rows * width)
    calls[name] = len(ran)
errors = [abs(a - b).max() for a, b in zip(*outs, strict=True)]
say.near("B11", "the same numbers: difference", max(errors), 1e-5)
say.order("B11", "arrays moved, fused and not", moved["dropout_add_norm"], moved["three ops"])
say.order("B11", "calls, fused and not", calls["dropout_add_norm"], calls["three ops"])
# %% [markdown]
# What the printed times of ten fused sines and cosines give.
# %%
say.differs("C20", "0.0157 s over 0.0025 s", 0.0157 / 0.0025)
us = say.times({"fused": fused, "composed": composed})
what = "time, fused and not"
say.order("B11", what, us["fused"], us["composed"], "us", clock=True)
alt = "; ".join(f"{name}: {count:.1f} arrays" for name, count in moved.items())
title = f"Arrays of {rows:,} x {width} read and written, as counted"
say.bars(title, alt, moved, "arrays")
