"""Random inputs, and whether a result is right: a wrong one gets no figure."""

import numpy as np

from gpuattn.arrays import get_xp
from gpuattn.bench.samples import DTYPES

TOLERANCE = {"bfloat16": 3e-2, "float16": 1e-2, "float32": 1e-3, "float64": 1e-5}
BLOCK = 4096  # elements compared at a time: a wrong tile must not drown in a long sequence


def normal(xp, seed, dtype):
    """Return ``floats(*shape)``, which draws normal numbers where they are used."""
    random = xp.random.default_rng(seed)
    return lambda *shape: random.standard_normal(shape, dtype=np.float32).astype(DTYPES[dtype])


def compare(got, want, tolerance, what):
    """Raise AssertionError unless |got - want| <= tolerance * |want| in every block.

    A block of almost nothing, such as the dq of queries that see one key, is rounding: what counts
    for it is a tenth of the blocks' root mean square.
    """
    got, want = _blocks(got), _blocks(want)
    scale = (want**2).sum(-1)
    error = ((got - want) ** 2).sum(-1) / scale.clip(scale.mean() / 100)
    worst = float(error.max()) ** 0.5
    if not worst <= tolerance:
        raise AssertionError(f"{what}: error {worst:.2g}; a wrong result gets no figure")


def _blocks(x):
    """Return the elements in rows of BLOCK, the last filled up with zeros."""
    width, flat = min(BLOCK, x.size), x.reshape(-1)
    if x.size % width:
        xp = get_xp(x)
        flat = xp.concatenate([flat, xp.zeros(-x.size % width, x.dtype)])
    return flat.reshape(-1, width)
