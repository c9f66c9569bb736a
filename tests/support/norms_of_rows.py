"""Norms of rows in float64, and the statistics from which kernels of a decoding step know them."""

import numpy as np


def wide(x):
    return x.astype(np.float64)


def parts_of(x, count):
    """Return (rows, count, 2): means and squared distances of equal parts of rows."""
    x = wide(x).reshape(len(x), count, -1)
    mean = x.mean(-1)
    return np.stack([mean, ((x - mean[..., None]) ** 2).sum(-1)], -1).astype(np.float32)


def norm(x, gain, shift):
    x = wide(x)
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + 1e-5) * gain + shift


def folded_norm(weight, bias, gain, shift):
    """Return the weights of a linear layer behind a norm, and its float32 (outputs, 2)."""
    product = (weight.astype(np.float32) * gain.astype(np.float32)).astype(weight.dtype)
    both = wide(bias) + wide(weight) @ wide(shift), wide(product).sum(-1)
    return product, np.stack(both, -1).astype(np.float32)
