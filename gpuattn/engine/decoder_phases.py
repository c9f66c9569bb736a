"""What the program of a ``DecoderStep`` is made of: the structs of its kernels, and streams."""

from typing import Any, NamedTuple

import numpy as np

EMBED, LINEAR, ATTEND, HEAD, SUM, WIDE = range(6)
NO_NORM, LAYER_NORM, RMS_NORM = range(3)
ACTIVATIONS = {None: 0, "relu": 1, "gelu": 2}
# as ``struct Phase`` and ``struct Layer`` of the kernels
PHASE = np.dtype([
    *((name, np.int32) for name in ("kind", "norm", "activation", "rotation", "outputs", "inputs")),
    *((name, np.float32) for name in ("eps", "scale")),
    *((name, np.uint64) for name in (
        "x", "weights", "residual", "statistics", "gain", "shift",
        "statistics_out", "out", "keys", "values", "counts", "slots", "shares",
    )),
    *((name, np.int32) for name in ("heads", "kv_heads", "room", "stride", "warps")),
    *((name, np.int32) for name in ("split", "split_keys")),
    *((name, np.float32) for name in ("per_beam", "per_head", "per_kv_head")),
    *((name, np.uint64) for name in ("added", "bias", "output_weights", "parts")),
    *((name, np.int32) for name in ("units", "each", "adds", "slicing")),
])  # fmt: skip
LAYER = np.dtype([
    *((name, np.uint64) for name in (
        "weight", "gain", "shift", "bias", "packed",
    )),
    *((name, np.int32) for name in ("outputs", "inputs", "first", "unused")),
])  # fmt: skip


class Added(NamedTuple):
    """Shares float32 (rows, adds, width), a bias, and the norm of the states to which they go."""

    parts: Any
    bias: Any
    norm: Any
    adds: int


class Stream(NamedTuple):
    """States (rows, width), or what ``norm`` makes of them.

    ``shares``: fields of a PHASE that say which rows are shares of the attention of a row, if any.
    ``added``: what is to be added to the states before ``norm``.
    """

    states: Any
    norm: Any = None
    shares: Any = None
    added: Added | None = None
