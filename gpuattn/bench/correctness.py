"""Random inputs, and the comparison of results: a wrong result is not timed."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from gpuattn.arrays import get_xp
from gpuattn.bench.samples import DTYPES

TOLERANCE = {"bfloat16": 3e-2, "float16": 1e-2, "float32": 1e-3, "float64": 1e-5}
BLOCK = 4096  # elements compared at a time, so that one wrong tile of a long sequence counts


def normal(xp: ModuleType, seed: int, dtype: str) -> Callable[..., Any]:
    """Return ``floats(*shape)``, which draws normal numbers on the device of ``xp``."""
    random = xp.random.default_rng(seed)
    return lambda *shape: random.standard_normal(shape, dtype=np.float32).astype(DTYPES[dtype])


def compare(got: Any, want: Any, tolerance: float, what: str) -> None:
    """Raise AssertionError unless |got - want| <= tolerance * |want| in every block of BLOCK.

    The values of a block near zero, such as the dq of queries that see one key, are rounding
    errors: its norm counts as at least a tenth of the blocks' root mean square.
    """
    got, want = _blocks(got), _blocks(want)
    scale = (want**2).sum(-1)
    error = ((got - want) ** 2).sum(-1) / scale.clip(scale.mean() / 100)
    worst = float(error.max()) ** 0.5
    if not worst <= tolerance:
        raise AssertionError(f"{what}: error {worst:.2g}; a wrong result is not timed")


def _blocks(x):
    """Return the elements in rows of BLOCK, the last one padded with zeros."""
    width, flat = min(BLOCK, x.size), x.reshape(-1)
    if x.size % width:
        xp = get_xp(x)
        flat = xp.concatenate([flat, xp.zeros(-x.size % width, x.dtype)])
    return flat.reshape(-1, width)
