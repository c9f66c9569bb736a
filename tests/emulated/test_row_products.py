"""Matmuls whose blocks compute whole rows, fused with a norm, emulated on any CPU."""

import emulator
import numpy as np
import pytest
from checks import sampled

from gpuattn.arrays import BFLOAT16
from gpuattn.ops.linear import linear_dropout_add_norm as op
from gpuattn.rng import Key, keep_mask

pytestmark = pytest.mark.usefixtures("host_compiler")


def assert_rounded(found, want):
    """Assert equality to one unit in the last place, for values from about 1 on."""
    unit = {np.dtype(np.float16): 2.0**-10}.get(found.dtype, 2.0**-7)
    np.testing.assert_allclose(found.astype(np.float64), want, rtol=unit, atol=unit / 8)


@pytest.mark.parametrize("dtype, rows, width, depth, p, rms, vectors", sampled([
    (BFLOAT16, 150, 384, 200, 0.2, False, (0, 1, 2)),
    (np.float16, 70, 384, 456, 0.0, True, (0,)),
    (np.float16, 140, 128, 72, 0.5, False, (2,)),
    (BFLOAT16, 70, 512, 264, 0.2, False, (0, 1)),
    (np.float16, 20, 256, 520, 0.2, True, ()),  # more steps than stages
    (BFLOAT16, 70, 384, 1032, 0.2, False, (0,)),  # deep
    (np.float16, 20, 128, 1024, 0.5, False, (1,)),
], 3))  # fmt: skip
def test_matmul_and_norm(dtype, rows, width, depth, p, rms, vectors):
    machine, random = emulator.Machine(seed=rows), np.random.default_rng(width)
    shapes = [(rows, depth), (width, depth), (rows, width), *[(width,)] * 3]
    given = [random.standard_normal(shape).astype(dtype) for shape in shapes]
    given = [*given[:3], *(x if n in vectors else None for n, x in enumerate(given[3:]))]
    params = {"p": p, "key": Key(5, 3, 2) if p else None, "rms": rms, "eps": 1e-5}
    needs = (True,) * 6
    with machine.in_place():
        arrays = map(emulator.as_array, given)
        (normed, h), saved = op.IMPLS[0].forward(*arrays, needs=needs, **params)
    x, projection, residual, weight, bias, x_bias = (
        None if a is None else a.astype(np.float64) for a in given
    )
    y = x @ projection.T + (0 if x_bias is None else x_bias)
    if p:
        y = y * keep_mask(np, y.shape, p, params["key"]) / (1 - p)
    want_h = y + residual
    assert_rounded(h, want_h)
    exact = h.astype(np.float64)
    first, mean = (0, 0) if rms else (exact[:, 0], exact.mean(-1))
    rstd = 1 / np.sqrt(((exact - np.reshape(mean, (-1, 1))) ** 2).mean(-1) + 1e-5)
    want = (exact - np.reshape(mean, (-1, 1))) * rstd[:, None]
    want = want * (1 if weight is None else weight) + (0 if bias is None else bias)
    assert_rounded(normed, want)
    np.testing.assert_allclose(saved[-2], np.broadcast_to(mean - first, rows), atol=2e-5)
    np.testing.assert_allclose(saved[-1], rstd, rtol=2e-6)


def test_strided_rows():
    """The factors are parts of wider matrices."""
    random, machine = np.random.default_rng(1), emulator.Machine(seed=3)
    whole = [
        random.standard_normal(shape).astype(BFLOAT16) for shape in ((70, 2, 72), (128, 2, 72))
    ]
    x, projection = (emulator.as_array(a)[:, 1] for a in whole)
    residual = emulator.as_array(random.standard_normal((70, 128)).astype(BFLOAT16))
    params = {"needs": (False,) * 6, "p": 0.0, "key": None, "rms": False, "eps": 1e-5}
    with machine.in_place():
        (_, h), _ = op.IMPLS[0].forward(x, projection, residual, None, None, None, **params)
    x, projection, residual = (a.astype(np.float64) for a in (x, projection, residual))
    assert_rounded(h, x @ projection.T + residual)
