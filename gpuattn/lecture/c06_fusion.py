"""6. Fusion and launches

Claim: one kernel in place of several leaves out the reads and writes between them.
Regime: memory, overhead
Question: E = A + B + C as D = A + B and E = D + C. How many arrays are read and written, and how
many in one kernel?
Answer: Four reads and two writes, against three reads and one write: D stays in registers. On
small arrays the second launch costs more than its bytes.
Vary: python -m gpuattn.lecture.c06_fusion rows=4096
"""

# %%
import numpy as np

import gpuattn
from gpuattn.lecture import lecture
from gpuattn.lecture.harness import counted
from gpuattn.lecture.harness.forms import captured
from gpuattn.lecture.harness.machine import here
from gpuattn.lecture.harness.say import ratio

say = lecture(__doc__)
rows, width = say.size("rows", 512, 64), say.size("width", 768, 256)
# %% [markdown]
# Two kernels and one, each over whole arrays that count their accesses.
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
# The end of a Transformer's sublayer: dropout, sum with the residual, LayerNorm. One op beside
# three, with the bytes that each call reads and writes.
# %%
x, residual = (gpuattn.Tensor(say.normal(rows, width)) for _ in range(2))
weight, bias = say.array(np.ones(width)), say.array(np.zeros(width))


def composed():
    h = residual + gpuattn.dropout(x, 0.1, seed=7)
    return gpuattn.layer_norm(h, weight, bias), h


def fused():
    return gpuattn.dropout_add_norm(x, residual, weight, bias, p=0.1, seed=7)


forms = {"fused": fused, "composed": composed}
moved = counted.compare(say, "B11", forms)
say.faster("B11", "time", say.kernel_times(forms))
# %% [markdown]
# A small compiler: gpuattn.fuse traces a formula and makes one kernel of it. The formula is the
# text's, ten times sine and cosine. Its printed times give 6.28, not 6.32.
# %%
say.differs("C20", "0.0157 s over 0.0025 s", 0.0157 / 0.0025)
side = say.size("side", 1024, 128)
y = gpuattn.Tensor(say.normal(side, side))


def waves(y):
    return sum((np.sin(y + i) + np.cos(y + i) for i in range(10)), 0.0)


traced = gpuattn.fuse(waves)
counted.compare(say, "B12", {"fused": traced, "op by op": waves}, y)
us = say.kernel_times({"fused": lambda: traced(y), "op by op": lambda: waves(y)})
say.faster("C20", "time of the formula", us)
# %% [markdown]
# The same formula on a small array, launch by launch and as a CUDA graph, launched as a whole.
# %%
say.record("D04", "a launch, us", here(say.device)["launch_us"]["alone"])
if say.device == "cuda":
    small = say.normal(64, 64)
    kernels = say.launches(lambda: waves(small))
    graph, one_kernel = captured(waves, small), captured(gpuattn.softmax, small)
    say.order("C18", "launches", {"CUDA graph": graph.graphs, "op by op": kernels})
    us = say.times({"CUDA graph": lambda: graph(small), "op by op": lambda: waves(small)})
    say.faster("C18", "time of the formula on 64 x 64 numbers", us)
    us = say.times({"graph": lambda: one_kernel(small), "call": lambda: gpuattn.softmax(small)})
    what = "one small kernel: time as a CUDA graph over time of its call"
    say.record("C21", what, ratio(us["graph"], us["call"]))
say.bars(f"Arrays of {rows:,} x {width} read and written, as counted", moved, "arrays")
