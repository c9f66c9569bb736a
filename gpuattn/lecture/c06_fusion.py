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
say.near("B11", "fused and composed: difference of the results", max(errors), 1e-5)
for what, count in (("arrays read and written", moved), ("calls of ops", calls)):
    pair = {"fused": count["dropout_add_norm"], "composed": count["three ops"]}
    say.order("B11", what, pair)
say.order("B11", "time", say.kernel_times({"fused": fused, "composed": composed}), "us", clock=True)
# %% [markdown]
# A small compiler: gpuattn.fuse traces a formula and makes one kernel of it. The formula is the
# text's, ten times sine and cosine. Its printed times give 6.28, not 6.32.
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
say.near("B12", "fused and op by op: difference of the results", abs(one - other).max(), 1e-5)
say.order("B12", "calls of ops", {"fused": few, "op by op": many})
say.order("B12", "arrays read and written", {"fused": less, "op by op": more})
us = say.kernel_times({"fused": lambda: traced(y), "op by op": lambda: waves(y)})
say.order("C20", "time of the formula", us, "us", clock=True)
# %% [markdown]
# The same formula on a small array, by one launch after the other and as a CUDA graph, which is
# launched as a whole.
# %%
launch = here(say.device)["launch_us"]
say.record("D04", "a launch, us", launch["alone"])
if say.device == "cuda":
    small = say.normal(64, 64)
    kernels = say.launches(lambda: waves(small))
    graph: Any = gpuattn.capture(waves)
    for _ in range(3):  # captured at the second call
        graph(small)
    say.order("C18", "launches", {"CUDA graph": graph.graphs, "op by op": kernels})
    us = say.times({"CUDA graph": lambda: graph(small), "op by op": lambda: waves(small)})
    say.order("C18", "time of the formula on 64 x 64 numbers", us, "us", clock=True)
    one_kernel = gpuattn.capture(gpuattn.softmax)
    for _ in range(3):
        one_kernel(small)
    us = say.times({"graph": lambda: one_kernel(small), "call": lambda: gpuattn.softmax(small)})
    times = float(np.median(us["graph"]) / np.median(us["call"]))
    say.record("C21", "one small kernel: time as a CUDA graph over time of its call", times)
alt = "; ".join(f"{name}: {count:.1f} arrays" for name, count in moved.items())
say.bars(f"Arrays of {rows:,} x {width} read and written, as counted", alt, moved, "arrays")
