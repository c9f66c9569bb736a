import numpy as np
import pytest
from checks import DTYPES, check_implementation, dtype_of, implementations, module_named

from gpuattn import Tensor, explain
from gpuattn.arrays import to_cpu
from gpuattn.errors import UnsupportedError
from gpuattn.ops.sampling.topk_logprobs import GROUP, IMPLS, MAX_K, in_order, largest, topk_logprobs

# 257: one more than a block; 4099: odd, and large enough for groups in the reference
SHAPES = {"one": (1, 1), "short": (3, 31), "odd": (2, 3, 257), "long": (2, 4099), "vector": (64,)}
HERE = implementations(IMPLS)


def by_sorting(x, k):
    """Return the k best of a float64 row with Python's sort: largest first, then lowest index."""
    key = [(0 if v != v else 1, -v if v == v else 0, i) for i, v in enumerate(x.tolist())]
    return [i for _, _, i in sorted(key)[:k]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1, 5, 31])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name, where", HERE)
def test_implementations_agree(name, where, rng, shape, k, dtype):
    x = 3 * rng.standard_normal(shape)
    k = min(k, shape[-1])
    check_implementation(
        IMPLS, name, where, [x], dtype, needs=(False,), k=k, vocab_size=shape[-1]
    )  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("k", [1, 2, 10, 127, 128, 129, 512])
@pytest.mark.parametrize("name, where", HERE)
def test_order_equals_a_sort(name, where, rng, k, dtype):
    xp = module_named(where)
    x = rng.standard_normal((4, 1500)).astype(dtype_of(dtype))  # bfloat16: many ties
    x[1] = np.round(x[1].astype(np.float32))
    x[2] = x[2, 0]
    x[3, ::7] = x[3, 1::7][: len(x[3, ::7])]
    indices = to_cpu(topk_logprobs(xp.asarray(x), k, impl=name)[1])
    assert indices.tolist() == [by_sorting(row, k) for row in x.astype(np.float64)]


@pytest.mark.parametrize("period", [1, 256, 1024, GROUP])
@pytest.mark.parametrize("name, where", HERE)
def test_winners_in_one_group(name, where, rng, period):
    """One thread or group has all large numbers, more than the filter keeps."""
    xp = module_named(where)
    x = rng.standard_normal((2, 4096 * 8)).astype(np.float32)
    x[0, ::period] += 100
    x[1, : x.shape[1] // period] += 100
    indices = to_cpu(topk_logprobs(xp.asarray(x), 300, impl=name)[1])
    np.testing.assert_array_equal(indices, np.argsort(-x, -1, kind="stable")[:, :300])


@pytest.mark.parametrize("name, where", HERE)
def test_all_equal_and_signed_zeros(name, where):
    xp = module_named(where)
    logprobs, indices = topk_logprobs(xp.zeros((2, 5000), np.float32), 4, impl=name)
    assert to_cpu(indices).tolist() == [[0, 1, 2, 3]] * 2
    np.testing.assert_allclose(to_cpu(logprobs), -np.log(5000), rtol=1e-6)
    x = xp.asarray([-0.0, 0.0, -0.0, 0.0], np.float32)
    assert to_cpu(topk_logprobs(x, 4, impl=name)[1]).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("name, where", HERE)
def test_nonfinite_values(name, where):
    xp, inf, nan = module_named(where), np.inf, np.nan
    x = xp.asarray([
        [-inf, -inf, -inf],
        [-inf, 0, -inf],
        [1, nan, 2],
        [1, inf, -nan],
        [nan, nan, nan],
    ], np.float32)  # fmt: skip
    with np.errstate(invalid="ignore"):
        logprobs, indices = topk_logprobs(x, 3, impl=name)
    assert to_cpu(indices).tolist() == [[0, 1, 2], [1, 0, 2], [1, 2, 0], [2, 1, 0], [0, 1, 2]]
    want = [[-inf] * 3, [0, -inf, -inf], [nan] * 3, [nan] * 3, [nan] * 3]
    np.testing.assert_array_equal(to_cpu(logprobs), want)


@pytest.mark.parametrize("name, where", HERE)
def test_padding_is_never_read(name, where, rng):
    xp = module_named(where)
    for vocab in (7, 3000):
        x = rng.standard_normal((5, vocab + 40)).astype(np.float32)
        want = topk_logprobs(xp.asarray(x[:, :vocab].copy()), 5, impl=name)
        for poison in (np.nan, np.inf):
            x[:, vocab:] = poison
            got = topk_logprobs(xp.asarray(x), 5, vocab_size=vocab, impl=name)
            for g, w in zip(got, want, strict=True):
                assert g.tolist() == w.tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name, where", HERE)
def test_strides(name, where, rng, dtype):
    xp = module_named(where)
    base = xp.asarray(rng.standard_normal((6, 8, 10)).astype(dtype_of(dtype)))
    views = {
        "transposed": base.transpose(2, 0, 1), "sliced": base[::2, 1:, 3:9],
        "reversed": base[:, ::-1, ::-1], "broadcast": xp.broadcast_to(base[:1], base.shape),
        "offset by one": base.ravel()[1:61].reshape(4, 15), "padded rows": base[:, :, :7],
    }  # fmt: skip
    for view, x in views.items():
        got, want = topk_logprobs(x, 3, impl=name), topk_logprobs(x.copy(), 3, impl=name)
        assert [g.tolist() for g in got] == [w.tolist() for w in want], view


@pytest.mark.parametrize("shape, k", [((0, 4), 2), ((4, 0), 0), ((4, 3), 0), ((2, 0, 3), 3)])
@pytest.mark.parametrize("name, where", HERE)
def test_empty(name, where, shape, k):
    xp = module_named(where)
    logprobs, indices = topk_logprobs(xp.zeros(shape, "float16"), k, impl=name)
    assert logprobs.shape == indices.shape == (*shape[:-1], k)
    assert (logprobs.dtype, indices.dtype) == (np.float32, np.int32)


def test_bad_arguments(xp):
    x = xp.zeros((2, 5), np.float32)
    for k in (-1, 6):
        with pytest.raises(ValueError, match=f"topk_logprobs: k is {k}; accepted: 0 to 5"):
            topk_logprobs(x, k)
    with pytest.raises(ValueError, match="k is 4; accepted: 0 to 3"):
        topk_logprobs(x, 4, vocab_size=3)
    for vocab_size in (0, 6):
        with pytest.raises(ValueError, match="vocab_size"):
            topk_logprobs(x, 1, vocab_size=vocab_size)
    with pytest.raises(TypeError):
        topk_logprobs(x, 1.5)
    with pytest.raises(TypeError, match="dtype"):
        topk_logprobs(x.astype(np.int32), 1)
    with pytest.raises(TypeError, match="list"):
        topk_logprobs([1.0, 2.0], 1)
    with pytest.raises(ValueError, match="axis"):
        topk_logprobs(xp.zeros((), np.float32), 1)


def test_float64_stays_float64(rng):
    x = rng.standard_normal((2, 50))
    logprobs, indices = topk_logprobs(x, 50)
    assert logprobs.dtype == np.float64
    assert np.exp(logprobs).sum(-1) == pytest.approx(1, rel=1e-14)


def test_there_is_no_gradient(rng):
    x = Tensor(rng.standard_normal((2, 5)), requires_grad=True)
    with pytest.raises(UnsupportedError, match="no gradient"):
        topk_logprobs(x, 2)[0].sum().backward()


def test_explain():
    assert explain(topk_logprobs, np.zeros((2, 3), np.float32), 1).chosen == "reference"
    assert 2 * MAX_K <= 1024  # limit of `retrieve` for the largest block


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1, 8, 16, 17, 128, 129, 512])
def test_rows_in_many_slices(gpu, rng, k, dtype):
    """Whole rows, misaligned rows, and columns that end within a slice give equal bits."""
    for cols in (16384, 70001):
        x = rng.standard_normal((3, cols), np.float32).astype(dtype_of(dtype))
        want = topk_logprobs(x, k)
        results = []
        for offset in (0, 3):
            padded = gpu.full((3, cols + 8), np.nan, x.dtype)
            padded[:, offset : offset + cols] = gpu.asarray(x)
            mine = padded[:, offset:]
            got = topk_logprobs(mine, k, vocab_size=cols, impl="raw-simt")
            np.testing.assert_allclose(to_cpu(got[0]), want[0], rtol=2e-6)
            np.testing.assert_array_equal(to_cpu(got[1]), want[1])
            results.append(to_cpu(got[0]).tobytes())
        assert len(set(results)) == 1


def test_large_k_falls_back_with_a_warning(gpu):
    x = gpu.zeros((1, 1000), np.float32)
    refusals = dict(explain(topk_logprobs, x, 600).reasons)
    assert "600" in refusals["raw-simt"] and refusals["reference"] is None


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_groups_find_the_result_of_a_sort(rng, dtype):
    """Of few values, so that maxima of groups are equal."""
    for n in range(200):
        rows, cols, k = rng.integers(1, 4), rng.integers(1, 9000), rng.integers(1, 20)
        x = rng.integers(0, rng.integers(1, 5000), (rows, cols)).astype(dtype)
        k = min(k, cols)
        np.testing.assert_array_equal(largest(x, k), np.argsort(-x, -1, kind="stable")[:, :k])
        if n % 2:
            x[rng.random(x.shape) < rng.random() / 100] = rng.choice([np.nan, np.inf, -np.inf])
            np.testing.assert_array_equal(largest(x, k), in_order(x.astype("f8"), k))


@pytest.mark.parametrize("cols, k", [(1, 1), (40, 40), (300, 3), (300, 256), (300, 299)])
def test_keys_of_float32_order_as_a_stable_sort(rng, cols, k):
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 1e-45, -1e-45, 3.4e38, -3.4e38]
    x = np.round(rng.standard_normal((50, cols)), 1).astype("f4")
    x[25:] = rng.choice(np.float32(special), (25, cols))
    np.testing.assert_array_equal(in_order(x, k), in_order(x.astype("f8"), k))
