"""Linear layers and the feed-forward network."""

import math

import numpy as np
import pytest

from gpuattn import nn


@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
@pytest.mark.parametrize("bias", [True, False])
def test_linear_is_its_formula(rng, activation, bias):
    layer = nn.Linear(6, 5, bias=bias, activation=activation, rng=rng)
    if bias:
        layer.bias.data[:] = rng.standard_normal(5)
    x = rng.standard_normal((2, 3, 6)).astype(np.float32)
    want = x @ layer.weight.data.T + (layer.bias.data if bias else 0)
    if activation == "relu":
        want = np.maximum(want, 0)
    if activation == "gelu":
        want = 0.5 * want * (1 + np.tanh((2 / np.pi) ** 0.5 * (want + 0.044715 * want**3)))
    np.testing.assert_allclose(layer(x).data, want, rtol=1e-5, atol=1e-6)
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"][: 1 + bias]


def test_initial_weights_keep_variances(rng):
    weight = nn.Linear(300, 500, rng=rng).weight.data
    assert weight.dtype == np.float32
    assert abs(weight).max() <= (6 / 800) ** 0.5
    np.testing.assert_allclose(weight.var(), 2 / 800, rtol=0.02)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ["gelu_exact", "swiglu"])
def test_feed_forward_with_an_activation_after_its_product(rng, activation, bias):
    layer = nn.FeedForward(4, 16, activation=activation, bias=bias, rng=rng)
    x = rng.standard_normal((7, 4)).astype(np.float32)
    z = x @ layer.inner.weight.data.T
    if bias:
        layer.inner.bias.data[:] = rng.standard_normal(z.shape[1])
        z += layer.inner.bias.data
    if activation == "swiglu":
        gate, up = np.split(z, 2, axis=1)
        hidden = gate / (1 + np.exp(-gate)) * up
    else:
        hidden = z * np.vectorize(lambda t: (1 + math.erf(t / 2**0.5)) / 2)(z)
    np.testing.assert_allclose(layer(x).data, hidden @ layer.out.weight.data.T, atol=1e-5)


def test_feed_forward_sizes(rng):
    layer = nn.FeedForward(4, 16, rng=rng)
    x = rng.standard_normal((7, 4)).astype(np.float32)
    hidden = np.maximum(x @ layer.inner.weight.data.T, 0)
    np.testing.assert_allclose(layer(x).data, hidden @ layer.out.weight.data.T, atol=1e-5)
