"""The states that a decoding step begins with, and what the norm behind them needs.

Those of a text's first step are made by a launch of their own, all later ones by the launch that
updates the texts: it has the new tokens at hand, so the step after it begins one launch earlier.
Device code: ``rawkernels/embedding_row.cuh``, ``row_embedding.cu``, ``sampling/beam_update.cu``,
``sampling/text_update.cu``.
"""

from typing import Any

import numpy as np

from gpuattn import arrays
from gpuattn.arrays import ctype
from gpuattn.cuda.kernels import kernel

FILE = "row_embedding.cu"
WARPS, COLUMNS = 4, 256  # rows of a block, columns of a row in one pass of its warp
EMBEDDING = np.dtype([  # as ``struct Embedding`` of the kernels
    *((name, np.uint64) for name in (
        "weight", "position_weight", "y", "statistics", "token_flag", "position_flag",
    )),
    *((name, np.int64) for name in ("stride", "position_stride")),
    *((name, np.int32) for name in ("width", "vocabulary", "places")),
    ("scale", np.float32),
])  # fmt: skip
NO_STATES = {"STATES": "void", "PACKS": 1, "POSITIONS": False}  # of updates that make none
NOTHING = np.zeros((), EMBEDDING).view(f"V{EMBEDDING.itemsize}")


class RowEmbedding:
    """``states`` (rows, width) of the last tokens of ``rows`` texts, and their ``statistics``.

    ``states`` are ``scale * weight[tokens] + position_weight[positions]``. ``weight``,
    ``position_weight``: tables with rows of the same width, a multiple of 64 up to 768, or None;
    ``used``: how many of ``weight`` are tokens. ``measured``: whether there are statistics, float32
    (rows, 1, 2), as ``row_linear`` has them. ``record``, ``scalar``, ``constants``: for kernels.
    """

    def __init__(
        self, rows: int, weight: Any, position_weight: Any = None, *, scale: float = 1.0,
        used: int | None = None, measured: bool = True,
    ) -> None:  # fmt: skip
        self.rows, width = rows, weight.shape[1]
        self.states = arrays.empty(weight, (rows, width))
        self.statistics = arrays.empty(weight, (rows, 1, 2), np.float32) if measured else None
        tables = [table for table in (weight, position_weight) if table is not None]
        assert all(
            x.strides[1] == x.itemsize and (x.strides[0] | x.data.ptr) % 16 == 0 for x in tables
        )
        steps = [table.strides[0] // table.itemsize for table in tables]
        flags = [
            arrays.index_flag(weight, f"embedding: {name}") for name in ("tokens", "positions")
        ]
        self._held = weight, position_weight, flags
        record = np.zeros((), EMBEDDING)
        for name, x in (
            ("weight", weight), ("position_weight", position_weight), ("y", self.states),
            ("statistics", self.statistics), ("token_flag", flags[0]), ("position_flag", flags[1]),
        ):  # fmt: skip
            record[name] = 0 if x is None else x.data.ptr
        record["stride"], record["position_stride"] = steps[0], steps[-1]
        record["width"], record["scale"] = width, scale
        record["vocabulary"] = len(weight) if used is None else used
        record["places"] = 0 if position_weight is None else len(position_weight)
        self.record = record.view(f"V{EMBEDDING.itemsize}")
        self.scalar, packs = ctype(weight.dtype), -(-width // COLUMNS)
        self.constants = {"PACKS": packs, "POSITIONS": position_weight is not None}

    def __call__(self, tokens: Any, positions: Any) -> None:
        """Make the states of all texts; ``tokens``, ``positions``: int32 (rows,)."""
        kernel(FILE, "row_embedding", scalar=self.scalar, **self.constants)(
            (-(-self.rows // WARPS),), (32 * WARPS,), tokens, positions, self.record, self.rows
        )


def states_of(embedding: RowEmbedding | None, settled: bool) -> tuple[dict[str, Any], Any, int]:
    """Return the constants and the struct of an update's launch, and the threads of a text."""
    if embedding is None:
        return {"SETTLED": int(settled), **NO_STATES}, NOTHING, 1
    assert settled, "the launch before an update that makes states writes none of what it reads"
    return {"SETTLED": 1, "STATES": embedding.scalar, **embedding.constants}, embedding.record, 32
