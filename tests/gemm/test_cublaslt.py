"""Plans for cuBLASLt, tested with a fake library that follows the descriptors; tuning."""

import importlib.util
import sys

import fake_cublaslt
import numpy as np
import pytest
from checks import DTYPES, dtype_of
from fake_cublaslt import gpu
from fake_gpu import GPUS
from in_threads import in_threads

from gpuattn.arrays import wide
from gpuattn.autodiff.numpy import products
from gpuattn.errors import SlowPathWarning
from gpuattn.gemm import cublaslt, matmul, tuning
from gpuattn.gemm.bindings import bindings
from gpuattn.modes import with_mode

M, K, N = 6, 33, 7
REFUSED = "cuBLASLt planned this product but refuses to launch it"
start = cublaslt.handle


@pytest.fixture
def fake(monkeypatch):
    """The fake library; arrays made by ``gpu`` are treated as arrays on a GPU."""
    return fake_cublaslt.install(monkeypatch)


def whole(rng, *shape):
    """Return small integers, whose sums are exact in every dtype."""
    return rng.integers(-2, 3, shape).astype(np.float64)


@pytest.mark.parametrize("out_kind", ["new", "slice", "columns", "wide"])
@pytest.mark.parametrize("kind", ["plain", "columns of a wider one", "every other"])
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("dtype", [*DTYPES, "float64"])
def test_layouts(fake, rng, dtype, transpose_a, transpose_b, kind, out_kind):
    dtype = dtype_of(dtype)
    operands = []
    for rows, cols, turned in ((M, K, transpose_a), (K, N, transpose_b)):
        shape = (cols, rows) if turned else (rows, cols)
        double = gpu(whole(rng, shape[0], 2 * shape[1]).astype(dtype))
        operands.append(
            {
                "plain": gpu(double[:, : shape[1]].copy()),
                "columns of a wider one": double[:, shape[1] :],
                "every other": double[:, ::2],
            }[kind]
        )
    a, b = operands
    wide_a, wide_b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    want = (wide_a.T if transpose_a else wide_a) @ (wide_b.T if transpose_b else wide_b)
    how = {"transpose_a": transpose_a, "transpose_b": transpose_b}
    if out_kind == "new":
        got = cublaslt.multiply(a, b, **how)
        assert got.dtype == dtype
        return np.testing.assert_array_equal(np.asarray(got, np.float64), want)
    flat = gpu(np.full(M * N + 2, 0.5).astype(wide(dtype) if out_kind == "wide" else dtype))
    out = flat[1:-1].reshape(N, M).T if out_kind == "columns" else flat[1:-1].reshape(M, N)
    for accumulate, expected in ((True, want + 0.5), (False, want)):
        assert cublaslt.multiply(a, b, out, accumulate=accumulate, **how) is out
        np.testing.assert_array_equal(np.asarray(out, np.float64), expected)
    assert flat[[0, -1]].tolist() == [0.5, 0.5]


def test_one_row_or_column(fake, rng):
    for m, k, n in ((1, 5, 3), (4, 1, 3), (4, 5, 1), (1, 1, 1)):
        a, b = whole(rng, m, k), whole(rng, k, n)
        np.testing.assert_array_equal(cublaslt.multiply(gpu(a), gpu(b)), a @ b)
        turned = cublaslt.multiply(gpu(a.T.copy()), gpu(b.T.copy()), None, transpose_a=True,
                                   transpose_b=True)  # fmt: skip
        np.testing.assert_array_equal(turned, a @ b)


@pytest.mark.parametrize(
    "left, right",
    [((3, M, K), (3, K, N)), ((2, 3, M, K), (3, K, N)), ((3, M, K), (K, N)), ((M, K), (3, K, N))],
)
def test_stacks(fake, rng, left, right):
    a, b = whole(rng, *left), whole(rng, *right)
    for dtype in ("float32", "bfloat16"):
        got = products._product(gpu(a.astype(dtype_of(dtype))), gpu(b.astype(dtype_of(dtype))))
        assert got.dtype == dtype_of(dtype)
        np.testing.assert_array_equal(np.asarray(got, np.float64), a @ b)
    turned = products._product(gpu(a), gpu(np.swapaxes(b, -1, -2).copy()).swapaxes(-1, -2))
    np.testing.assert_array_equal(turned, a @ b)
    assert fake.ran


def test_a_new_array_is_not_accumulated_into(fake, rng):
    a, b = whole(rng, M, K), whole(rng, K, N)
    np.testing.assert_array_equal(matmul.matmul(gpu(a), gpu(b), accumulate=True), a @ b)


def test_column_sums_in_the_launch_of_a_product(fake, rng):
    dz, x = gpu(whole(rng, K, M)), gpu(whole(rng, K, N))
    places = gpu(np.zeros(M + 4))
    sums = places[-places.ctypes.data % 16 // 8 :][:M]
    out = gpu(np.ones((M, N)))
    assert matmul.matmul_and_sums(dz, x, sums, out, accumulate=True) is out
    np.testing.assert_array_equal(out, dz.T @ x + 1)
    np.testing.assert_array_equal(sums, dz.sum(0))
    for other in (sums.astype(np.float32), gpu(np.zeros(2 * M))[::2]):
        reason = matmul.matmul_and_sums(dz, x, other, out)
        assert reason.by_design and "multiple of 16 bytes" in reason


def test_a_share_of_the_multiprocessors(fake, rng, monkeypatch):
    monkeypatch.setattr(cublaslt, "gpu", lambda device: GPUS["9.0"])
    dz, x, sums = gpu(whole(rng, K, M)), gpu(whole(rng, K, N)), np.zeros(M + 4)
    sums = gpu(sums[-sums.ctypes.data % 16 // 8 :][:M])
    for share, asked in ((1, []), (2, [66]), (3, [44])):
        for product in (
            lambda share: matmul.matmul(dz, x, transpose_a=True, share=share),
            lambda share: matmul.matmul_and_sums(dz, x, sums, share=share),
        ):
            cublaslt._plans.clear()
            np.testing.assert_array_equal(product(share), dz.T @ x)
            targets = [values.get("SM_COUNT_TARGET") for values in fake.objects.values()]
            assert [target for target in targets if target] == asked
    assert {plan.kind[-2:] for plan in cublaslt._plans.values()} == {" 3"}, "tuned by itself"


def test_bias_and_activation(fake, rng):
    x, weight = gpu(whole(rng, M, K)), gpu(whole(rng, N, K))
    for bias in gpu(whole(rng, 2, N)):  # the pointer changes, the plan does not
        got = matmul.matmul_activated(x, weight, bias)
        np.testing.assert_array_equal(got, x @ weight.T + bias)
        got = matmul.matmul_activated(x, weight, bias, "relu")
        np.testing.assert_array_equal(got, np.maximum(x @ weight.T + bias, 0))
    np.testing.assert_array_equal(
        matmul.matmul_activated(x, weight, activation="relu"), np.maximum(x @ weight.T, 0)
    )
    assert fake.planned == len(cublaslt._plans) == 3


def test_a_plan_serves_all_products_of_its_kind(fake, rng):
    for _ in range(3):
        cublaslt.multiply(gpu(whole(rng, M, K)), gpu(whole(rng, K, N)))
    assert fake.planned <= 3  # one for each alignment of NumPy's allocations
    a, b = np.zeros(4 * 64 + 1), gpu(np.zeros((8, 8)))
    start = -a.ctypes.data % 512 // 8
    plans = len(cublaslt._plans)
    for offset in (0, 1):
        x = gpu(a[start : start + 64]) if not offset else gpu(a[start + 1 : start + 65])
        cublaslt.multiply(x.reshape(8, 8), b)
    assert len(cublaslt._plans) > plans
    asked = fake.preferences[-1]
    assert asked["MIN_ALIGNMENT_A_BYTES"] == 8
    assert asked["MAX_WORKSPACE_BYTES"] == cublaslt.WORKSPACE_BYTES


def test_descriptors_are_destroyed(fake, rng, monkeypatch):
    monkeypatch.setattr(cublaslt, "MOST_PLANS", 2)
    for k in range(1, 6):
        cublaslt.multiply(gpu(whole(rng, M, k)), gpu(whole(rng, k, N)))
    assert len(cublaslt._plans) <= 2
    assert len(fake.objects) == 4 * len(cublaslt._plans)


def test_refusals_have_a_reason(fake):
    a = gpu(np.zeros((2, 3), np.float32))
    whole = gpu(np.zeros((4, 4), np.float32))
    for reason, *operands in (
        ("shapes of a and b do not fit: (2, 3) @ (2, 3)", a, a),
        ("a is float32 and b is float64", a, a.T.astype(np.float64)),
        ("a is int32 and b is int32", a.astype(np.int32), a.T.astype(np.int32)),
        (
            "out is (2, 3) on GPU 0, the product is (2, 2)",
            a,
            a.T,
            gpu(np.zeros((2, 3), np.float32)),
        ),
        ("out is float16 and a is float32", a, a.T, gpu(np.zeros((2, 2), np.float16))),
        ("neither rows nor columns of out are contiguous", a, a.T, whole[::2, ::2]),
        ("nothing to multiply: (0, 3) @ (3, 2)", a[:0], a.T),
        ("a has 1 axes and b has 2", a[0], a.T),
    ):
        for launch in (True, False):
            found = cublaslt.multiply(*operands, launch=launch)
            assert type(found) is cublaslt.Reason and reason in found
    assert "beside RELU rows of out" in cublaslt.multiply(
        a, a.T, gpu(np.zeros((2, 2), np.float32)).T, epilogue="RELU"
    )
    fake.status = 15
    found = cublaslt.multiply(a, a.T, epilogue="RELU")
    assert "no algorithm for (2, 2) = (2, 3) @ (3, 2) in float32 and RELU" in found
    assert not fake.ran
    with pytest.raises(ValueError, match=r"matmul: \(2, 3\) @ \(2, 3\)"):
        matmul.matmul(a, a)


def test_a_fallback_warns_with_the_reason(fake, rng):
    a, b = gpu(whole(rng, M, K)), gpu(whole(rng, K, N))
    assert matmul.fallback_reason(a, b) is None and not fake.ran
    fake.status = 15
    cublaslt._plans.clear()
    reason = matmul.fallback_reason(a, b)
    assert "cuBLASLt has no algorithm for (6, 7) = (6, 33) @ (33, 7) in float64" in reason
    with pytest.warns(SlowPathWarning) as seen:
        np.testing.assert_array_equal(matmul.matmul(a, b), a @ b)
        np.testing.assert_array_equal(matmul.matmul_stacks(gpu(a[None]), gpu(b[None]))[0], a @ b)
        assert "BIAS" in matmul.matmul_activated(a, gpu(b.T.copy()), gpu(np.zeros(N)))
        assert "BGRADB" in matmul.matmul_and_sums(gpu(a.T.copy()), b, gpu(np.zeros(M + 4))[:M])
    said = [str(warning.message) for warning in seen]
    assert len(said) >= 4 and all(text.startswith("a matrix product takes") for text in said)
    assert said[0].endswith(reason)
    assert {warning.filename for warning in seen} == {__file__}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("right", [(3, K, N), (K, N)])
def test_stacks_without_cublaslt_are_multiplied_by_cupy(fake, rng, monkeypatch, dtype, right):
    """CuPy has no product of bfloat16 stacks."""
    a, b = (gpu(whole(rng, *shape).astype(dtype_of(dtype))) for shape in ((3, M, K), right))
    monkeypatch.setattr(cublaslt, "library", lambda: (None, "no nvmath"))
    with pytest.warns(SlowPathWarning, match="no nvmath"):
        got = matmul.matmul_stacks(a, b)
    assert got.dtype == a.dtype and not fake.ran
    np.testing.assert_array_equal(
        np.asarray(got, np.float64), a.astype(np.float64) @ b.astype(np.float64)
    )


def test_stacks_of_two_dtypes_warn(fake, rng):
    """CuPy multiplies them, which no CUDA graph captures."""
    a, b = gpu(whole(rng, 3, M, K).astype(np.float32)), gpu(whole(rng, 3, K, N).astype(np.float16))
    with pytest.warns(SlowPathWarning, match="a is float32 and b is float16"):
        got = matmul.matmul_stacks(a, b)
    assert got.dtype == a.dtype and not fake.ran
    np.testing.assert_array_equal(got, np.asarray(a) @ np.asarray(b, np.float32))


def test_reasons_by_design_do_not_warn(fake, recwarn):
    a = gpu(np.zeros((2, 3), np.float32))
    assert matmul.matmul(a[:0], a.T).shape == (0, 2)
    assert matmul.matmul_stacks(a[:0], a.T).shape == (0, 2)
    assert products._product(a.astype(int), a.T.astype(int)).dtype == int
    assert matmul.matmul_activated(a, a, activation="gelu").by_design
    out = gpu(np.zeros((2, 2), np.float16))  # cuBLASLt multiplies, then the product is copied
    assert matmul.matmul(a, a.T, out=out) is out and fake.ran
    assert "out is float16" in matmul.fallback_reason(a, a.T, out=out)
    assert "a is a NumPy array" in matmul.fallback_reason(np.zeros((2, 3)), a.T)
    assert not recwarn


def test_a_failure_names_status_and_shape(fake):
    a = gpu(np.zeros((2, 3), np.float32))
    cublaslt.multiply(a, a.T)
    fake.status = 13
    with pytest.raises(RuntimeError, match=r"CUBLAS_STATUS_13.*\(2, 2\).*CUDA_LAUNCH_BLOCKING"):
        cublaslt.multiply(a, a.T)


def test_a_refused_plan_is_not_tried_again(fake, rng):
    a = gpu(np.zeros((2, 3), np.float32))
    assert type(cublaslt.multiply(a, a.T)) is fake_cublaslt.Array
    fake.status = 7
    assert cublaslt.multiply(a, a.T) == REFUSED
    fake.status = 0
    assert cublaslt.multiply(a, a.T) == REFUSED


def test_a_library_that_cannot_be_initialised(fake, monkeypatch):
    a = gpu(np.zeros((2, 3), np.float32))

    def create():
        raise fake.cuBLASLtError(1)

    monkeypatch.setattr(cublaslt, "handle", start)
    monkeypatch.setattr(fake, "create", create)
    with pytest.raises(RuntimeError, match=r"STATUS_1\) to start on device 0: .*cuda12x"):
        cublaslt.multiply(a, a.T)


def test_threads_do_not_mix_their_biases(fake, rng):
    x, weight = gpu(whole(rng, M, K)), gpu(whole(rng, N, K))
    wrong = []

    def work(bias):
        want = x @ weight.T + bias
        for _ in range(100):
            if (matmul.matmul_activated(x, weight, bias) != want).any():
                wrong.append(bias)

    in_threads(work, [gpu(whole(rng, N)) for _ in range(4)])
    assert not wrong


def test_tuning_selects_the_fastest_and_stores_it(fake, rng, monkeypatch, tmp_path):
    monkeypatch.setenv("GPUATTN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuning, "FLUSH_BYTES", 1)
    fake.costs = 1.0, 0.99, 0.5, 0.6
    a, b, out = gpu(whole(rng, M, K)), gpu(whole(rng, K, N)), gpu(np.zeros((M, N)))
    tuning.tune(lambda: cublaslt.multiply(a, b, out, accumulate=True))
    np.testing.assert_array_equal(out, a @ b)  # accumulated once, in spite of several trials
    assert len(fake.ran) == 4 * tuning.SAMPLES + 1
    cublaslt.multiply(a, b, out, accumulate=True)
    assert fake.ran[-2:] == [2, 2]
    (file,) = tmp_path.iterdir()
    assert file.name == "products-Fake-GPU-130000.json"

    cublaslt._plans.clear()  # like in a new process
    cublaslt.multiply(a, b, out)
    assert fake.ran[-1] == 0
    cublaslt._plans.clear()
    fake.ran.clear()
    tuning.tune(lambda: cublaslt.multiply(a, b, out, accumulate=True))
    assert fake.ran == [2]


def test_tuning_keeps_the_first_unless_another_is_clearly_faster(fake, rng, monkeypatch, tmp_path):
    monkeypatch.setenv("GPUATTN_CACHE_DIR", str(tmp_path / "file" / "none"))
    (tmp_path / "file").write_text("no folder: nothing can be kept, which is no error")
    monkeypatch.setattr(tuning, "FLUSH_BYTES", 1)
    fake.costs = 1.0, 0.99, 0.98, 0.98
    a, b = gpu(whole(rng, M, K)), gpu(whole(rng, K, N))
    np.testing.assert_array_equal(tuning.tune(lambda: cublaslt.multiply(a, b)), a @ b)
    assert fake.ran[-1] == 0


@pytest.mark.parametrize("there", [True, False])
def test_proposals_without_workspace_are_timed_too(fake, rng, monkeypatch, tmp_path, there):
    """The library lists them only if it is allowed none; it may know none."""
    monkeypatch.setenv("GPUATTN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuning, "FLUSH_BYTES", 1)
    fake.costs, ask = (1.0, 0.9, 0.9, 0.5), fake.matmul_algo_get_heuristic

    def answer(*given):
        if fake.objects[given[6]]["MAX_WORKSPACE_BYTES"] == 0 and not there:
            raise fake_cublaslt.Error(15)
        ask(*given)

    fake.matmul_algo_get_heuristic = answer
    a, b = gpu(whole(rng, M, K)), gpu(whole(rng, K, N))
    np.testing.assert_array_equal(tuning.tune(lambda: cublaslt.multiply(a, b)), a @ b)
    assert fake.ran[-1] == (3 if there else 1)


def test_nothing_is_timed_while_a_stream_is_captured(fake, rng, monkeypatch, tmp_path):
    monkeypatch.setenv("GPUATTN_CACHE_DIR", str(tmp_path))
    monkeypatch.setitem(sys.modules, "cupy", fake_cublaslt.cupy(capturing=True))
    a, b = gpu(whole(rng, M, K)), gpu(whole(rng, K, N))
    tuning.tune(lambda: cublaslt.multiply(a, b))
    assert fake.ran == [0]


def test_batch_invariant_products_are_not_split_or_tuned(fake, rng, monkeypatch, tmp_path):
    """A sum over several blocks may depend on the tile of its row; a tuned plan on the day."""
    monkeypatch.setattr(tuning, "_path", lambda plan: tmp_path / "algorithms.json")
    a, b = gpu(whole(rng, M, K)), gpu(whole(rng, K, N))
    cublaslt.multiply(a, b)
    with with_mode("batch_invariant", True):
        found = tuning.tune(lambda: cublaslt.multiply(a, b))
    np.testing.assert_array_equal(found, a @ b)
    assert [p["REDUCTION_SCHEME_MASK"] for p in fake.preferences] == [2, 0]
    assert fake.ran == [0, 0] and len(cublaslt._plans) == 2


@pytest.mark.parametrize("needs_all", [False, True])
def test_bindings_without_the_rest_of_nvmath(tmp_path, monkeypatch, needs_all):
    """nvmath itself is imported only where its bindings need it, and whole for those who ask."""
    inside = tmp_path / "nvmath" / "bindings"
    inside.mkdir(parents=True)
    (tmp_path / "nvmath" / "__init__.py").write_text("whole = True\nfrom nvmath import bindings\n")
    (inside / "__init__.py").write_text("from nvmath.bindings import cublasLt\n")
    text = "import nvmath\nassert nvmath.whole\n" if needs_all else ""
    (inside / "cublasLt.py").write_text(text)
    for name in [name for name in sys.modules if name.split(".")[0] == "nvmath"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        found = bindings()
        assert found.__name__ == "nvmath.bindings.cublasLt"
        assert ("nvmath" in sys.modules) == needs_all
        nvmath = importlib.import_module("nvmath")
        assert nvmath.whole and nvmath.bindings.cublasLt is found
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "nvmath"]:
            del sys.modules[name]


def test_without_nvmath(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "nvmath.bindings", None)
    with pytest.raises(ImportError, match="nvmath"):
        bindings()
