"""Matrix products: layouts, accumulation, gradient slots of another dtype."""

import numpy as np
import pytest
from checks import DTYPES, dtype_of

from gpuattn.arrays import to_cpu
from gpuattn.autodiff.numpy import products
from gpuattn.cuda.kernels import launches
from gpuattn.gemm import cublaslt, tuning
from gpuattn.gemm.matmul import matmul

M, K, N = 5, 33, 7  # odd sizes
ROUNDING = {"float64": 1e-15, "float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}
LONG_SUM = 2e-5  # error of float32 sums of thousands of terms; with TF32 it would be 1e-3


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
    ones[0, 0] = 2048  # above this float16 cannot represent odd integers
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


# ---- on a GPU: cuBLASLt --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*DTYPES, "float64"])
def test_rows_with_a_step_are_not_copied(gpu, rng, dtype):
    wide = gpu.asarray(rng.standard_normal((40, 3 * 16)).astype(dtype_of(dtype)))
    b = gpu.asarray(rng.standard_normal((16, 24)).astype(dtype_of(dtype)))
    before, pool = launches["matmul"], gpu.cuda.MemoryPool()
    out = gpu.empty((40, 24), dtype_of(dtype))
    with gpu.cuda.using_allocator(pool.malloc):
        matmul(wide[:, 16:32], b, out=out)
    assert launches["matmul"] == before + 1
    assert pool.total_bytes() == 0
    want = to_cpu(wide)[:, 16:32].astype(np.float64) @ to_cpu(b).astype(np.float64)
    assert_close(out, want, dtype)


@pytest.mark.parametrize("dtype", [*DTYPES, "float64"])
@pytest.mark.parametrize("shapes", [((3, 5, 33), (3, 33, 7)), ((2, 3, 5, 33), (3, 33, 7))])
def test_stacks(gpu, rng, shapes, dtype):
    a, b = (rng.standard_normal(shape).astype(dtype_of(dtype)) for shape in shapes)
    before = launches["matmul"]
    got = products._product(gpu.asarray(a), gpu.asarray(b))
    assert launches["matmul"] == before + 1
    assert got.dtype == a.dtype
    assert_close(got, a.astype(np.float64) @ b.astype(np.float64), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_captured_products_are_the_eager_ones(gpu, rng, dtype, monkeypatch):
    """Also if a kind of product, or a stream, is first used during the capture."""
    monkeypatch.setattr(cublaslt, "_plans", {})
    a, b = (
        gpu.asarray(rng.standard_normal(shape).astype(dtype_of(dtype)))
        for shape in ((3000, 104), (3000, 72))
    )
    total, pool = gpu.zeros((104, 72), np.float32), gpu.cuda.MemoryPool()
    stream = gpu.cuda.Stream(non_blocking=True)
    gpu.cuda.get_current_stream().synchronize()
    with stream, gpu.cuda.using_allocator(pool.malloc):
        stream.begin_capture()
        product = matmul(a, b, transpose_a=True)
        matmul(a, b, transpose_a=True, out=total, accumulate=True)
        graph = stream.end_capture()
        graph.launch(stream)
        graph.launch(stream)
        stream.synchronize()
    want = to_cpu(a).astype(np.float64).T @ to_cpu(b).astype(np.float64)
    assert np.abs(to_cpu(total) - 2 * want).max() <= LONG_SUM * np.abs(2 * want).max()
    eager = matmul(a, b, transpose_a=True)
    assert to_cpu(product).tobytes() == to_cpu(eager).tobytes()
    assert to_cpu(matmul(a, b, transpose_a=True)).tobytes() == to_cpu(eager).tobytes()


def test_tuned_products_are_right_and_stay_tuned(gpu, rng, monkeypatch, tmp_path):
    monkeypatch.setenv("GPUATTN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cublaslt, "_plans", {})
    a, b = (
        gpu.asarray(rng.standard_normal((512, 512)).astype(dtype_of("bfloat16"))) for _ in range(2)
    )
    out = gpu.ones((512, 512), np.float32)
    tuning.tune(lambda: matmul(a, b, out=out, accumulate=True))
    want = to_cpu(a).astype(np.float64) @ to_cpu(b).astype(np.float64) + 1
    assert np.abs(to_cpu(out) - want).max() <= LONG_SUM * np.abs(want).max()
    (plan,) = cublaslt._plans.values()
    assert plan.tuned
    (file,) = tmp_path.iterdir()
    chosen = plan.candidate
    cublaslt._plans.clear()
    tuning.tune(lambda: matmul(a, b, out=out, accumulate=True))
    (plan,) = cublaslt._plans.values()
    assert plan.candidate == chosen
