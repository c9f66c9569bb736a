"""Matrix products: layouts, accumulation, gradient slots of another dtype."""

import numpy as np
import pytest
from checks import DTYPES, dtype_of

from gpuattn.arrays import to_cpu
from gpuattn.gemm import matmul

M, K, N = 5, 33, 7  # odd on purpose
ROUNDING = {"float64": 1e-15, "float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}


def operands(xp, rng, dtype, transpose_a=False, transpose_b=False):
    a = rng.standard_normal((K, M) if transpose_a else (M, K)).astype(dtype_of(dtype))
    b = rng.standard_normal((N, K) if transpose_b else (K, N)).astype(dtype_of(dtype))
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    want = (wide_a.T if transpose_a else wide_a) @ (wide_b.T if transpose_b else wide_b)
    return xp.asarray(a), xp.asarray(b), want


def assert_close(got, want, dtype):
    error = np.abs(to_cpu(got).astype(np.float64) - want).max()
    assert error <= ROUNDING[dtype] * np.abs(want).max()


@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("dtype", [*DTYPES, "float64"])
def test_products(xp, rng, dtype, transpose_a, transpose_b):
    a, b, want = operands(xp, rng, dtype, transpose_a, transpose_b)
    got = matmul(a, b, transpose_a=transpose_a, transpose_b=transpose_b)
    assert got.dtype == a.dtype
    assert_close(got, want, dtype)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_out_is_a_slice_of_any_dtype(xp, rng, dtype, out_dtype, accumulate):
    a, b, want = operands(xp, rng, dtype)
    flat = xp.full(M * N + 2, 0.5, np.float32).astype(dtype_of(out_dtype))
    out = flat[1:-1].reshape(M, N)
    assert matmul(a, b, out=out, accumulate=accumulate) is out
    coarsest = max(dtype, out_dtype, key=ROUNDING.get)
    assert_close(out, want + 0.5 * accumulate, coarsest)
    assert to_cpu(flat)[[0, -1]].tolist() == [0.5, 0.5]


def test_16_bit_sums_are_kept_in_float32(xp):
    ones = xp.ones((1, 4096), np.float16)
    ones[0, 0] = 2048  # from here on float16 cannot count by one
    assert to_cpu(matmul(ones, xp.ones((4096, 3), np.float16))).tolist() == [[6144] * 3]
    assert to_cpu(matmul(ones, xp.ones((4096, 1), np.float16))).tolist() == [[6144]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("view", ["sliced", "reversed", "broadcast", "misaligned"])
def test_any_strides(xp, rng, view, dtype):
    whole, b = (
        rng.standard_normal(shape).astype(dtype_of(dtype)) for shape in ((M, 2 * K), (K, N))
    )
    whole, b = xp.asarray(whole), xp.asarray(b)
    a = {
        "sliced": whole[:, ::2],
        "reversed": whole[::-1, K - 1 :: -1],
        "broadcast": xp.broadcast_to(whole[:1, :K], (M, K)),
        "misaligned": whole.ravel()[1 : M * K + 1].reshape(M, K),
    }[view]
    want = to_cpu(a).astype(np.float64) @ to_cpu(b).astype(np.float64)
    assert_close(matmul(a, b), want, dtype)


@pytest.mark.parametrize("shapes", [((0, 3), (3, 2)), ((2, 0), (0, 3)), ((2, 3), (3, 0))])
def test_empty_operands_give_empty_or_zero(xp, shapes):
    a, b = (xp.ones(shape, np.float32) for shape in shapes)
    want = np.zeros((shapes[0][0], shapes[1][1]))
    np.testing.assert_array_equal(to_cpu(matmul(a, b)), want)
    out = xp.ones(want.shape, np.float32)
    np.testing.assert_array_equal(to_cpu(matmul(a, b, out=out)), want)


def test_errors(xp):
    a = xp.ones((2, 3), np.float32)
    with pytest.raises(ValueError, match=r"matmul: \(2, 3\) @ \(2, 3\)"):
        matmul(a, a)
    with pytest.raises(ValueError, match="out has shape"):
        matmul(a, a, transpose_b=True, out=xp.ones((2, 3), np.float32))
    with pytest.raises(TypeError, match="share one dtype"):
        matmul(a, a.astype(np.float16), transpose_b=True)
    with pytest.raises(TypeError, match="int64"):
        matmul(a, xp.ones((3, 2), np.int64))
