"""Norms alone, and fused with the preceding dropout and residual sum."""

import numpy as np
import pytest

from gpuattn import nn

NORMS = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}


@pytest.mark.parametrize("kind", NORMS)
def test_rows_are_normalised(rng, kind):
    norm = NORMS[kind](32)
    x = (3 + 5 * rng.standard_normal((4, 32))).astype(np.float32)
    y = norm(x).data
    np.testing.assert_allclose((y * y).mean(-1), 1, atol=1e-4)
    if kind == "layer":
        np.testing.assert_allclose(y.mean(-1), 0, atol=1e-5)


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("p", [0.0, 0.4])
def test_add_equals_its_steps(rng, kind, p):
    norm, out, drop = NORMS[kind](32), nn.Linear(32, 32, rng=rng), nn.Dropout(p)
    norm.weight.data[:] = rng.standard_normal(32)
    out.bias.data[:] = rng.standard_normal(32)
    x, residual = rng.standard_normal((2, 5, 32)).astype(np.float32)
    normed, h = norm.add(x, out, residual, drop)
    np.testing.assert_allclose(h.data, residual + drop(out(x)).data, atol=1e-6)
    np.testing.assert_allclose(normed.data, norm(h).data, atol=1e-5)


def test_layer_norm_without_bias_has_one_parameter():
    assert [n for n, _ in nn.LayerNorm(3, bias=False).named_parameters()] == ["weight"]
