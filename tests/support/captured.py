"""What the tests of captured functions share: arrays, comparisons, warnings."""

import warnings

import numpy as np

import gpuattn
from gpuattn.arrays import to_cpu
from gpuattn.errors import SlowPathWarning


def full(cp, value, shape=(2, 3), dtype="float32"):
    return cp.full(shape, value, dtype)


def check(array, value):
    np.testing.assert_array_equal(to_cpu(array), np.full(array.shape, value, array.dtype))


def refusals(captured, *args, calls=4, **kwargs):
    """Call; return (results, warnings)."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = [captured(*args, **kwargs) for _ in range(calls)]
    return results, [str(w.message) for w in caught if w.category is SlowPathWarning]


def scaled_class():
    class Scaled:
        def __init__(self, by):
            self.by, self.count = by, 0

        @gpuattn.capture
        def __call__(self, x):
            return x * self.by

        def counting(self, x):
            self.count += 1
            return x * self.count

    return Scaled
