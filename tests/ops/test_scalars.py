"""Products of single numbers are rounded as NumPy rounds them."""

import pytest

from gpuattn.arrays import to_cpu
from gpuattn.ops.scalars import add_product, product, take_mean


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_bits_are_those_of_separate_operations(xp, rng, dtype):
    for numbers in rng.standard_normal((20, 3)).astype(dtype):
        a, b, total = numbers
        given = [xp.asarray(x) for x in numbers[:2]]
        found = product(*given)
        assert found.shape == () and to_cpu(found) == a * b
        there = xp.asarray([total])[:1].reshape(())
        assert add_product(there, *given) is None
        assert to_cpu(there) == total + a * b
        mean = take_mean(there, 3)
        assert to_cpu(mean) == (total + a * b) / numbers.dtype.type(3) and to_cpu(there) == 0
