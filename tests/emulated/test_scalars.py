"""Kernels in place of single operations of CuPy, emulated: bit by bit what NumPy computes."""

from types import SimpleNamespace
from unittest import mock

import emulator
import numpy as np
import pytest
from fake_cublaslt import gpu

from gpuattn.arrays import BFLOAT16
from gpuattn.ops import scalars
from gpuattn.ops.loss import linear_cross_entropy as sliced
from gpuattn.optim import ExponentialAverage, averaging

pytestmark = pytest.mark.usefixtures("host_compiler")


def emulated(module):
    machine = emulator.Machine(1, multiprocessors=3)
    stand_ins = {"kernel": machine.kernel, "on_gpu": lambda _: True}
    return mock.patch.multiple(module, **stand_ins)


def test_products(rng):
    for a, b, total in rng.standard_normal((9, 3)).astype(np.float32):
        given = [gpu(np.array(x)) for x in (a, b)]
        there = gpu(np.array(total))
        with emulated(scalars):
            assert scalars.product(*given) == a * b
            scalars.add_product(there, *given)
        assert there == total + a * b
        with emulated(scalars):
            mean = scalars.take_mean(there, 3)
        assert mean == (total + a * b) / np.float32(3) and there == 0


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16])
def test_moving_average(rng, dtype):
    space = SimpleNamespace(masters=rng.standard_normal(1000).astype(dtype))
    averages = [ExponentialAverage(space) for _ in "ab"]
    for _ in range(3):
        space.masters[:] = rng.standard_normal(1000).astype(dtype)
        share = np.array(rng.random(), np.float32)
        with emulated(averaging), mock.patch.object(averaging, "BLOCKS", 2):
            averages[0].update(share)
        averages[1].update(share)
        assert averages[0].average.tobytes() == averages[1].average.tobytes()


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize(
    "mean, scaled, right", [(True, True, 5), (False, True, None), (True, False, 2)]
)
def test_sums_over_slices(rng, dtype, mean, scaled, right):
    x = np.zeros(1, np.float32)
    for count in (0, 1, 3001):
        labels = rng.integers(-1, 4, count).astype(dtype)
        dloss = np.array(rng.random(), np.float32) if scaled else None
        with emulated(sliced):
            one = sliced._RawSums(x, labels, dloss, -1, mean)
            other = sliced._Sums(x, labels, dloss, -1, mean)
            for loss in rng.random(3, np.float32):
                for sums in (one, other):
                    sums.add(np.array(loss), None if right is None else np.array(right, np.int32))
        for name in ("share", "scale", "loss", "right"):
            a, b = getattr(one, name), getattr(other, name)
            assert (a.dtype, a.shape, a) == (b.dtype, b.shape, b), name
