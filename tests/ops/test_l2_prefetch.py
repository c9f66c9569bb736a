"""L2 prefetch of rows: which launches request it, and results compared with the reference."""

from types import SimpleNamespace

import numpy as np
import pytest
from checks import dtype_of
from fake_gpu import GPUS

import gpuattn
from gpuattn.arrays import to_cpu
from gpuattn.ops import l2_prefetch as module
from gpuattn.ops.l2_prefetch import prefetch_rows


@pytest.mark.parametrize(
    "shape, itemsize, capability, want",
    [
        ((16384, 8192), 2, "9.0", 128), ((4, 8192, 4096), 2, "9.0", 256),
        ((8192, 8192), 4, "9.0", 64), ((4096, 4096), 2, "9.0", 0), ((65536, 2048), 2, "9.0", 0),
        ((16384, 8192), 2, "8.0", 0), ((64, 2**20), 4, "9.0", 1), ((0, 8192), 2, "9.0", 0),
    ],
)  # fmt: skip
def test_prefetch_distance(monkeypatch, shape, itemsize, capability, want):
    monkeypatch.setattr(module, "gpu", lambda device: GPUS[capability])
    nbytes = int(np.prod(shape)) * itemsize
    device = SimpleNamespace(id=0)
    x = SimpleNamespace(shape=shape, itemsize=itemsize, nbytes=nbytes, device=device)
    assert prefetch_rows(x) == want


OPS = {
    "softmax": lambda x, w, impl: gpuattn.softmax(x, impl=impl),
    "masked": lambda x, w, impl: gpuattn.softmax(x, mask=x[0], scale=0.5, impl=impl),
    "layer_norm": lambda x, w, impl: gpuattn.layer_norm(x, w, w, impl=impl),
    "rms_norm": lambda x, w, impl: gpuattn.rms_norm(x, w, impl=impl),
}


@pytest.mark.parametrize("place", ["whole", "strided", "view"])
@pytest.mark.parametrize("cols, dtype", [(4096, "bfloat16"), (8192, "float16"), (2048, "float32")])
@pytest.mark.parametrize("op", OPS)
def test_results(gpu, rng, monkeypatch, op, cols, dtype, place):
    """More rows than the prefetch distance; the last rows prefetch none, and memory ends there.

    ``place``: contiguous rows, every other row of a matrix, or its first columns.
    """
    monkeypatch.setattr(module, "MIN_ARRAY", 0)
    rows = (module.DISTANCE >> 13) + 5
    shape = {"whole": (rows, cols), "strided": (2 * rows, cols), "view": (rows, cols + 8)}[place]
    x, w = (
        gpu.asarray(rng.standard_normal(s, "f4")).astype(dtype_of(dtype)) for s in (shape, cols)
    )
    x = x[::2] if place == "strided" else x[:, :cols]
    assert prefetch_rows(x) in (0, module.DISTANCE // (cols * x.itemsize))
    got, want = (to_cpu(OPS[op](x, w, impl)).astype("f4") for impl in ("raw-simt", "reference"))
    unit = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}[dtype]
    np.testing.assert_allclose(got, want, rtol=4 * unit, atol=unit * abs(want).max() / 4)
