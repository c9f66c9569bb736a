"""Tests of the op: values, gradient and dtype. Run them with pytest."""

import numpy as np
import pytest
from relu_squared import relu_squared

from gpuattn import Tensor, gradcheck


@pytest.mark.parametrize("shape", [(3,), (2, 5), (0, 4)], ids=str)
def test_values(shape):
    x = np.random.default_rng(0).standard_normal(shape)
    np.testing.assert_array_equal(relu_squared(x), np.where(x > 0, x * x, 0))


def test_gradient():
    assert gradcheck(relu_squared, np.random.default_rng(0).standard_normal((4, 3))) < 1e-6


def test_half_precision_stays_half():
    x = Tensor(np.ones(3, np.float16), requires_grad=True)
    y = relu_squared(x)
    y.sum().backward()
    assert y.dtype == x.grad.dtype == np.float16
