"""The order of tokens for the gradient of a table, emulated: NumPy's stable sort."""

from unittest import mock

import emulator
import numpy as np
import pytest

from gpuattn.ops import embedding as module

pytestmark = pytest.mark.usefixtures("host_compiler")

IDS = {  # tiles are of 1,024 tokens, blocks of 64
    "one": lambda rng: rng.integers(0, 9, 1),
    "a block": lambda rng: rng.integers(0, 9, 64),
    "a tile": lambda rng: rng.integers(0, 300, 1024),
    "tiles, the last not full": lambda rng: rng.integers(-5, 40, 2200),
    "one id alone": lambda rng: np.full(1100, 7),
    "none twice": lambda rng: rng.permutation(1025),
    "the largest and the least": lambda rng: rng.choice([2**31 - 1, -(2**31), 0], 1200),
}


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("name", IDS)
def test_the_order_is_that_of_a_stable_sort(rng, name, dtype):
    ids = np.ascontiguousarray(IDS[name](rng), dtype)
    machine = emulator.Machine(1, multiprocessors=3)
    with mock.patch.object(module, "kernel", machine.kernel):
        order = module._argsort(ids)
    assert order.dtype == np.int32
    np.testing.assert_array_equal(order, np.argsort(ids, kind="stable"))
