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
from typing import Any

import numpy as np

import gpuattn
from gpuattn.arrays import to_cpu
from gpuattn.lecture import lecture
from gpuattn.lecture.harness import counted
from gpuattn.lecture.harness.machine import here

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
us = say.kernel_times({"fused": fused, "composed": composed})
say.order("B11", "time, fused and not", us["fused"], us["composed"], "us", clock=True)
# %% [markdown]
# A compiler in small: gpuattn.fuse traces a formula and makes one kernel of it. Ten times sine and
# cosine, as in the text; what its printed times give.
# %%
say.differs("C20", "0.0157 s over 0.0025 s", 0.0157 / 0.0025)
side = say.size("side", 1024, 128)
y = gpuattn.Tensor(say.normal(side, side))


def waves(y):
    return sum((np.sin(y + i) + np.cos(y + i) for i in range(10)), 0.0)


traced, forms = gpuattn.fuse(waves), {}
for name, tried in (("formula", waves), ("fused formula", traced)):
    with counted.ops() as ran:
        result = to_cpu(tried(y).data)
    forms[name] = result, len(ran), sum(call.bytes for call in ran) / y.data.nbytes
(one, few, less), (other, many, more) = forms["fused formula"], forms["formula"]
say.near("B12", "ten sines and cosines, fused: difference", abs(one - other).max(), 1e-5)
say.order("B12", "ops, fused and not", few, many)
say.order("B12", "arrays moved, fused and not", less, more)
us = say.kernel_times({"fused": lambda: traced(y), "formula": lambda: waves(y)})
say.order("C20", "time of the formula, fused and not", us["fused"], us["formula"], "us", clock=True)
# %% [markdown]
# Launches: the same formula by launches and as a CUDA graph, which is one launch of all.
# %%
launch = here(say.device)["launch_us"]
say.record("D04", "a launch here, us", launch["alone"])
if say.device == "cuda":
    small = say.normal(64, 64)
    kernels = say.launches(lambda: waves(small))
    graph: Any = gpuattn.capture(waves)
    for _ in range(3):  # captured at the second call
        graph(small)
    say.record("C18", "launches of the formula", kernels)
    say.near("C18", "functions of which no graph was made", 1 - graph.graphs, 0)
    us = say.times({"graph": lambda: graph(small), "launches": lambda: waves(small)})
    say.order("C18", "time as a graph, by launches", us["graph"], us["launches"], "us", clock=True)
    one_kernel = gpuattn.capture(gpuattn.softmax)
    for _ in range(3):
        one_kernel(small)
    us = say.times({"graph": lambda: one_kernel(small), "call": lambda: gpuattn.softmax(small)})
    times = float(np.median(us["graph"]) / np.median(us["call"]))
    say.record("C21", "time of one small kernel as a graph over its call", times)
alt = "; ".join(f"{name}: {count:.1f} arrays" for name, count in moved.items())
say.bars(f"Arrays of {rows:,} x {width} moved, as counted", alt, moved, "arrays")
