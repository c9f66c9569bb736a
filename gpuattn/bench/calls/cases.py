"""The cells of single calls: ops on small and large arrays, loops of updates, first calls."""

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from gpuattn.bench.cases import Cell
from gpuattn.bench.train.cases import MODELS, small

HOST, WHOLE, COLD, WARM = "host", "end-to-end", "first-cold", "first-warm"
TIMED = {
    HOST: "the host alone: calls in a row that nobody waits for",
    WHOLE: "each call until its result is there",
    COLD: "the first call in a new process, with empty caches of kernels",
    WARM: "the first call in a new process, with kernels in the caches on disk",
}
FIRST = COLD, WARM
NETWORK = "network"  # the model of README's plain loop
LAYER = "layer"  # a TransformerEncoderLayer by gpuattn.capture
# PyTorch eager; a CUDA graph in PyTorch; an expression of CuPy's functions
EAGER, GRAPH, CUPY = "torch", "torch-graph", "cupy"


@dataclass(frozen=True)
class Called:
    """A call of ``op`` on arrays of ``shape``, whose axes are in ``AXES``; ``timed``: see TIMED.

    ``op`` "train": an update of ``model`` by a ``TrainingStep`` without graphs; "loop": by
    ``loss.backward()`` and ``optimizer.step()``; "layer": a captured TransformerEncoderLayer of
    HEADS heads on (batch, tokens, width).
    """

    op: str
    shape: tuple[int, ...]
    dtype: str
    timed: str
    model: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the "case" of a row of results."""
        flags = {"timed": self.timed} | ({"model": self.model} if self.model else {})
        return {"shape": list(self.shape), "dtype": self.dtype, "flags": flags}

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> "Called":
        """Return the case of a row of results, of its ``op`` and its ``case``."""
        case = row["case"]
        return cls(row["op"], tuple(case["shape"]), case["dtype"], **case["flags"])

    @property
    def problem(self) -> str:
        """Model and shape, for tables."""
        shape = "x".join(map(str, self.shape))
        return f"{self.model} {shape}" if self.model else shape

    def __str__(self):
        return f"{self.problem}, {self.timed}"


AXES = {
    "layer_norm": "rows x columns", "rms_norm": "rows x columns", "softmax": "rows x columns",
    "dropout": "rows x columns", "dropout_add_norm": "rows x columns",
    "gelu": "rows x columns", "relu": "rows x columns", "swiglu": "rows x columns",
    "add": "rows x columns", "linear": "rows x inputs x outputs",
    "linear_dropout_add_norm": "rows x inputs x outputs",
    "embedding": "tokens x vocabulary x width", "rotary": "batch x tokens x heads x head size",
    "flash_attention": "batch x tokens x heads x head size",
    "decode_attention": "batch x keys x heads x head size",
    "cross_entropy": "rows x vocabulary", "linear_cross_entropy": "rows x inputs x vocabulary",
    "topk_logprobs": "rows x vocabulary",
}  # fmt: skip
FORWARD_ONLY = "decode_attention", "topk_logprobs"
FIRST_OPS = "layer_norm", "softmax", "gelu", "linear", "cross_entropy", "flash_attention"
_LARGE = {  # on a GPU, by the number of axes; unless the op has a line of its own
    2: (8192, 1024), 3: (8192, 1024, 1024), 4: (8, 1024, 16, 64),
    "embedding": (8192, 32768, 512), "decode_attention": (16, 4096, 16, 64),
    "cross_entropy": (8192, 32000), "linear_cross_entropy": (8192, 512, 32000),
    "topk_logprobs": (256, 32000),
}  # fmt: skip
_SMALL = {2: (256, 512), 3: (256, 512, 512), 4: (2, 128, 4, 64)}
_NUMPY_LARGE = {2: (1024, 1024), 3: (1024, 512, 512), 4: (2, 256, 4, 64)}
_NUMPY_SMALL = {2: (64, 64), 3: (64, 64, 64), 4: (1, 64, 1, 64)}
STEPS = (
    ("train", "tiny"), ("train", "shakespeare"), ("loop", "tiny"), ("loop", "shakespeare"),
    ("loop", NETWORK),
)  # fmt: skip
NETWORK_ROWS = 256
_LAYER, _NUMPY_LAYER, HEADS = (2, 128, 512), (1, 64, 64), 8


def _shape(sizes, op):
    return sizes.get(op) or sizes[len(AXES[op].split(" x "))]


def _calls(sizes, dtype, timed, peers, differentiated_peers):
    for op in AXES:
        for size in sizes:
            shape = _shape(size, op)
            for how in timed:
                case = Called(op, shape, dtype, how)
                yield Cell(op, case, "forward", peers)
                if op not in FORWARD_ONLY:
                    yield Cell(op, case, "forward+backward", differentiated_peers)


def _first(size, dtype, peers):
    for op in FIRST_OPS:
        for how in peers:
            yield Cell(op, Called(op, _shape(size, op), dtype, how), "forward", peers[how])


def _steps(timed, peers, step_of):
    for op, model in STEPS:
        shape, dtype = (NETWORK_ROWS, 1), "float32"
        if model != NETWORK:
            step = step_of(MODELS[model])
            shape, dtype = step.shape, step.dtype
        for how in timed:
            yield Cell(op, Called(op, shape, dtype, how, model), "step", peers)


def _layer(shape, dtype, timed, peers):
    return [Cell(LAYER, Called(LAYER, shape, dtype, how), "forward", peers) for how in timed]


TABLE = [
    *_calls((_SMALL, _LARGE), "float16", (HOST, WHOLE), (EAGER, CUPY), (EAGER,)),
    *_layer(_LAYER, "float16", (HOST, WHOLE), (GRAPH,)),
    *_steps((HOST, WHOLE), (EAGER,), lambda step: step),
    *_first(_SMALL, "float16", {COLD: (CUPY,), WARM: (EAGER, CUPY)}),
]
"""On a GPU. CuPy has no gradients; PyTorch has no kernels to compile."""

NUMPY_TABLE = [
    *_calls((_NUMPY_SMALL, _NUMPY_LARGE), "float32", (WHOLE,), (), ()),
    *_layer(_NUMPY_LAYER, "float32", (WHOLE,), ()),
    *_steps((WHOLE,), (), small),
    *_first(_NUMPY_SMALL, "float32", {WARM: ()}),
]
OPS = tuple(dict.fromkeys(cell.op for cell in TABLE))


def table(xp: ModuleType) -> list[Cell]:
    """Return the cells for NumPy or for a GPU."""
    return NUMPY_TABLE if xp is np else TABLE
