"""Sums, differences, products and squares of GPU arrays by a kernel: the bits of CuPy's own."""

import emulator
import numpy as np
import pytest
from fake_cublaslt import gpu as fake

from gpuattn.arrays import BFLOAT16, to_cpu
from gpuattn.autodiff import arithmetic
from gpuattn.autodiff.arithmetic import OPERATIONS, by_kernel

SIZES = 1, 7, 8, 2048, 2049, 100_003
DTYPES = np.float32, np.float16, BFLOAT16


def drawn(rng, function, size, dtype):
    """Return an array for each input of a ufunc."""
    values = rng.standard_normal((2, size)) * 100.0 ** rng.integers(-3, 3, (2, size))
    values[:, : size // 5] = np.inf
    return values[: function.nin].astype(dtype)


def computed(function, *inputs):
    """Return what is wanted: 16-bit numbers computed in float32 and rounded once."""
    with np.errstate(all="ignore"):
        return function(*[x.astype(np.float32) for x in inputs]).astype(inputs[0].dtype)


def check(found, wanted):
    assert found.dtype == wanted.dtype
    np.testing.assert_array_equal(found.astype(np.float32), wanted.astype(np.float32))


@pytest.mark.usefixtures("host_compiler")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", OPERATIONS)
def test_emulated(rng, function, dtype, monkeypatch):
    machine = emulator.Machine(1, multiprocessors=3)
    monkeypatch.setattr(arithmetic, "kernel", machine.kernel)
    monkeypatch.setattr(arithmetic, "on_gpu", lambda _: True)
    ran = 0
    for size in SIZES[:-1]:
        inputs = drawn(rng, function, size, dtype)
        given = [fake(np.ascontiguousarray(x)) for x in inputs]
        found = by_kernel(function, *given)
        if found is not None:  # NumPy's arrays lie at multiples of 8 bytes or more
            check(found, computed(function, *inputs))
            ran += 1
    assert ran


REPEATED = ((3, 5, 8), (5, 8)), ((7, 24), (24,)), ((2, 3, 1024), (3, 1024)), ((257, 16), (16,))


@pytest.mark.usefixtures("host_compiler")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", [f for f in OPERATIONS if f.nin == 2])
def test_a_repeated_operand_emulated(rng, function, dtype, monkeypatch):
    machine = emulator.Machine(1, multiprocessors=3)
    monkeypatch.setattr(arithmetic, "kernel", machine.kernel)
    monkeypatch.setattr(arithmetic, "on_gpu", lambda _: True)
    ran = 0
    for shapes in REPEATED:
        inputs = [rng.standard_normal(shape).astype(dtype) for shape in shapes]
        found = by_kernel(function, *map(fake, inputs))
        if found is not None:  # NumPy's arrays lie at multiples of 8 bytes or more
            check(found, computed(function, *inputs))
            ran += 1
    assert ran


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", [f for f in OPERATIONS if f.nin == 2])
def test_a_repeated_operand_has_the_bits_of_cupy(gpu, rng, function, dtype):
    for shapes in REPEATED:
        inputs = [gpu.asarray(rng.standard_normal(shape).astype(dtype)) for shape in shapes]
        found = by_kernel(function, *inputs)
        assert found is not None
        check(to_cpu(found), to_cpu(function(*inputs)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", OPERATIONS)
def test_the_bits_of_cupy(gpu, rng, function, dtype):
    for size in SIZES:
        inputs = [gpu.asarray(x) for x in drawn(rng, function, size, dtype)]
        found = by_kernel(function, *inputs)
        assert found is not None
        check(to_cpu(found), to_cpu(function(*inputs)))


def test_what_the_kernel_does_not_take(gpu):
    a = gpu.ones((6, 8), np.float32)
    others = [
        (np.divide, a, a), (np.add, a, 2.0), (np.add, a[0], a), (np.add, a, a.astype(np.float64)),
        (np.add, a[:, ::2], a[:, ::2]), (np.add, a.T, a.T), (np.add, a[:0], a[:0]),
        (np.add, a, a[:, :1].copy()), (np.add, a[:, :3].copy(), a[0, :3]), (np.add, a, a[:3]),
        (np.add, a.ravel()[1:9], a.ravel()[1:9]), (np.add, to_cpu(a), to_cpu(a)),
    ]  # fmt: skip
    for function, *given in others:
        assert by_kernel(function, *given) is None
