"""A captured layer: what a replay with its copies costs, beside a CUDA graph in PyTorch."""

import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np

import gpuattn
from gpuattn import nn
from gpuattn.autodiff.tape import raw
from gpuattn.bench.calls.cases import HEADS, Called
from gpuattn.bench.correctness import TOLERANCE, compare
from gpuattn.bench.peers.calls import GraphedLayer
from gpuattn.bench.peers.timing import noting, reasons
from gpuattn.bench.samples import DTYPES

WARM_UPS = 3  # a call is captured at its second


def calls(
    case: Called, xp: ModuleType, names: Sequence[str]
) -> tuple[str, dict[str, Callable], dict[str, str]]:
    """Return ("graph" or "calls", {name: a call}, {name: why there is none}) of ours and of peers.

    A call is that of a frozen pre-norm TransformerEncoderLayer on an array of ``case.shape``, so
    nothing is recorded for gradients. On NumPy, and where a capture is refused, it runs op by op.
    Raises AssertionError where a replay's result is not that of the layer's own call.
    """
    width = case.shape[-1]
    random, dtype = np.random.default_rng(0), DTYPES[case.dtype]
    layer = nn.TransformerEncoderLayer(width, HEADS, 4 * width, rng=random).eval()
    layer.freeze("*").to(dtype, "numpy" if xp is np else "cuda")
    x = xp.asarray(random.standard_normal(case.shape, dtype=np.float32).astype(dtype))
    captured: Any = gpuattn.capture(layer)

    wanted = raw(layer(x)).astype(np.float32)
    for _ in range(WARM_UPS):
        found = captured(x)
    tolerance = TOLERANCE[case.dtype]
    compare(raw(found).astype(np.float32), wanted, tolerance, f"a captured layer {case}, result")
    runs: dict[str, Callable] = {"ours": functools.partial(captured, x)}
    missing: dict[str, str] = {}
    for name in names:
        with noting(missing, name):
            with reasons():
                peer = GraphedLayer(layer, x)
                theirs = peer.result().astype(np.float32)
            compare(theirs, wanted, 2 * tolerance, "differs from ours in result")
            runs[name] = peer
    return "graph" if captured.graphs else "calls", runs, missing
