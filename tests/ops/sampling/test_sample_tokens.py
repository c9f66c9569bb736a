import numpy as np
import pytest
from checks import DTYPES, dtype_of, implementations, module_named

from gpuattn import Tensor, explain, rng
from gpuattn.arrays import to_cpu
from gpuattn.ops.sampling.sample_tokens import IMPLS, sample_tokens

HERE = implementations(IMPLS)
LOGITS = np.array([-1.0, 0.5, 2.0, 0.0, 1.0, -3.0, 0.5, -np.inf, 1.9], np.float32)


def kept(logits, temperature=1.0, top_k=None, top_p=1.0, min_p=0.0, banned=()):
    """Compute the distribution of the draws in Python and float64."""
    x = [-np.inf if i in banned else float(v) / temperature for i, v in enumerate(logits)]
    weights = [np.exp(v - max(x)) for v in x]
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))[:top_k]
    total, reached, nucleus = sum(weights[i] for i in order), 0.0, []
    for i in order:
        if reached >= top_p * total:
            break
        reached += weights[i]
        nucleus.append(i)
    nucleus = [i for i in nucleus if weights[i] >= min_p]
    total = sum(weights[i] for i in nucleus)
    return np.array([weights[i] / total if i in nucleus else 0 for i in range(len(x))])


SETTINGS = {
    "plain": {}, "cold": {"temperature": 0.5}, "hot": {"temperature": 3.0}, "top-k": {"top_k": 3},
    "top-k with a tie": {"top_k": 4}, "top-p": {"top_p": 0.6}, "min-p": {"min_p": 0.2},
    "top-p with a tie": {"top_p": 0.93, "temperature": 1.5}, "one": {"top_k": 1},
    "all": {"top_k": 6, "top_p": 0.9, "min_p": 0.1, "temperature": 1.3, "banned": (2, 5)},
}  # fmt: skip


def frequencies(xp, draws, name, seed, **settings):
    """Return how often each token is drawn when all rows are LOGITS."""
    banned = np.isin(np.arange(len(LOGITS)), settings.pop("banned", ()))
    logits = xp.broadcast_to(xp.asarray(LOGITS), (draws, len(LOGITS)))
    tokens, logprobs = sample_tokens(
        logits, seed=seed, banned=xp.asarray(banned), impl=name, **settings
    )  # fmt: skip
    tokens, logprobs = to_cpu(tokens), to_cpu(logprobs)
    allowed = np.where(banned, -np.inf, LOGITS.astype(np.float64))
    want = allowed - np.log(np.exp(allowed).sum())
    np.testing.assert_allclose(logprobs, want[tokens], rtol=1e-6, atol=1e-6)
    return np.bincount(tokens, minlength=len(LOGITS)) / draws


def close(found, probabilities, draws):
    """Counts are within five standard deviations; tokens of probability 0 are never drawn."""
    deviation = np.sqrt(probabilities * (1 - probabilities) / draws)
    return bool((np.abs(found - probabilities) <= 5 * deviation + 1e-9).all())


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("name, where", HERE)
def test_draws_follow_the_distribution(name, where, settings):
    draws, want = 40_000, kept(LOGITS, **settings)
    found = frequencies(module_named(where), draws, name, seed=5, **settings)
    assert close(found, want, draws)
    other = kept(LOGITS, **(settings | {"temperature": settings.get("temperature", 1) * 3}))
    assert len(np.flatnonzero(want)) == 1 or not close(found, other, draws)


@pytest.mark.parametrize("name, where", HERE)
def test_a_million_draws(name, where):
    xp, draws = module_named(where), 250_000
    found = [frequencies(xp, draws, name, rng.Key(9, 2, step)) for step in range(4)]
    assert close(np.mean(found, 0), kept(LOGITS), 4 * draws)


@pytest.mark.parametrize("name, where", HERE)
def test_the_random_number_depends_on_row_and_step(name, where):
    """The token drawn is the one whose interval of cumulative probability has u = word / 2**32."""
    xp, p = module_named(where), kept(LOGITS)
    key = rng.Key(12345, stream=6, step=2)
    logits = xp.broadcast_to(xp.asarray(LOGITS), (50, len(LOGITS)))
    words = rng.philox(12345, np.arange(50, dtype=np.uint64), *(np.uint64(c) for c in (0, 6, 2)))
    want = np.searchsorted(np.cumsum(p), words[0] / 2**32, side="right")
    assert to_cpu(sample_tokens(logits, seed=key, impl=name)[0]).tolist() == want.tolist()
    if where == "cupy":  # a step on the device, for graphs
        key = key._replace(step=xp.asarray([2], np.uint32))
        assert to_cpu(sample_tokens(logits, seed=key, impl=name)[0]).tolist() == want.tolist()


@pytest.mark.parametrize("name, where", HERE)
def test_numbers_move_with_their_rows(name, where):
    """A row draws the same token wherever it is in the batch; 0, 1, 2... are the default."""
    xp, numbers = module_named(where), np.random.default_rng(0)
    logits = xp.asarray(numbers.standard_normal((30, 70)), np.float32)
    want = to_cpu(sample_tokens(logits, seed=4, impl=name)[0])
    order = numbers.permutation(30).astype(np.int32)
    for part in (slice(None), slice(1), slice(None, None, 3)):  # the last with a stride
        here = xp.asarray(order)[part]
        found = sample_tokens(logits[here], seed=4, numbers=here, impl=name)[0]
        assert to_cpu(found).tolist() == want[order[part]].tolist()


@pytest.mark.parametrize("name, where", HERE)
def test_keys_of_each_row(name, where):
    """Rows with keys of their own draw what a call with each key does; no seed goes with them."""
    xp, numbers = module_named(where), np.random.default_rng(0)
    logits, own = xp.asarray(numbers.standard_normal((20, 70)), np.float32), np.arange(20, 40)
    keys = numbers.integers(0, 1 << 32, (20, 4)).astype(np.uint32)
    own = xp.asarray(own, np.int32)
    found = sample_tokens(logits, keys=xp.asarray(keys), numbers=own, impl=name)[0]
    for row, (low, high, stream, step) in enumerate(keys.tolist()):
        key, here = rng.Key(low | high << 32, stream, step), slice(row, row + 1)
        want = sample_tokens(logits[here], seed=key, numbers=own[here], impl=name)[0]
        assert int(found[row]) == int(want[0])
    with pytest.raises(ValueError, match="seed is given with keys; accepted: one of the two"):
        sample_tokens(logits, keys=xp.asarray(keys), seed=3)
    with pytest.raises(ValueError, match=r"contiguous, \(20, 4\)"):
        sample_tokens(logits, keys=xp.asarray(keys)[1:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", [1, 31, 4099, 50001])
def test_both_backends_draw_the_same(gpu, cols, dtype):
    numbers = np.random.default_rng(cols)
    logits = 2 * numbers.standard_normal((8, cols + 3), np.float32)
    logits[1] = np.round(logits[1])  # many ties
    logits[2] = 0
    logits = logits.astype(dtype_of(dtype))
    logits[:, cols:] = np.nan
    banned = numbers.random(cols) < 0.1
    banned[0] = False
    for settings in SETTINGS.values():
        settings = {name: x for name, x in settings.items() if name != "banned"}
        settings |= {"seed": rng.Key(3, 1, 4), "vocab_size": cols}
        want = sample_tokens(logits, banned=banned, **settings)
        got = sample_tokens(
            gpu.asarray(logits), banned=gpu.asarray(banned), impl="raw-simt", **settings
        )  # fmt: skip
        # exp may round differently, which may move the end of a token's interval
        differ = to_cpu(got[0]) != want[0]
        assert differ.sum() <= 1, settings
        np.testing.assert_allclose(to_cpu(got[1])[~differ], want[1][~differ], rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", [5, 300, 2048, 2049, 9001])
def test_any_k_of_hot_draws(gpu, cols, dtype):
    """Hot draws are as good as uniform over the k largest, so a wrong k-th one would show."""
    numbers = np.random.default_rng(cols)
    logits = numbers.standard_normal((40, cols), np.float32)
    logits[:8] = np.round(4 * logits[:8])
    logits[8:12, 3:] = -np.inf
    logits[12:16, :-1] = np.finfo(np.float32).min  # which the maxima of threads begin with
    with np.errstate(over="ignore"):
        logits = logits.astype(dtype_of(dtype))
    for k in (1, 2, 16, 17, 63, 64, 65, 100, 511, 512, 513, 2000):
        settings = {"seed": rng.Key(k), "top_k": k, "temperature": 1e3}
        want = sample_tokens(logits, **settings)[0]
        got = sample_tokens(gpu.asarray(logits), impl="raw-simt", **settings)[0]
        assert (to_cpu(got) != want).sum() <= 1, k


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_in_any_company(gpu, dtype):
    """Tokens and bits of log-probabilities, alone, in a batch and at another address."""
    numbers = np.random.default_rng(1)
    logits = numbers.standard_normal((70, 20011), np.float32).astype(dtype_of(dtype))
    moved = gpu.zeros((70, 20016), logits.dtype)
    moved[:, 3:20014] = gpu.asarray(logits)
    for settings in ({}, {"top_k": 50}, {"top_p": 0.9}, {"top_k": 300, "min_p": 0.1}):
        settings |= {"seed": 6, "impl": "raw-simt"}
        whole = [to_cpu(x) for x in sample_tokens(gpu.asarray(logits), **settings)]
        for row in (0, 41, 69):
            here, number = moved[row : row + 1, 3:20014], gpu.asarray([row], np.int32)
            alone = sample_tokens(here, numbers=number, **settings)
            assert [to_cpu(x)[0].tobytes() for x in alone] == [x[row].tobytes() for x in whole]


@pytest.mark.parametrize("name, where", HERE)
def test_nonfinite_logits(name, where):
    xp, inf, nan = module_named(where), np.inf, np.nan
    x = xp.asarray([[-inf] * 3, [1, nan, nan], [1, 0, inf], [nan, 0, -inf], [0, -inf, -inf]])
    with np.errstate(invalid="ignore"):
        tokens, logprobs = sample_tokens(x.astype(np.float32), seed=1, impl=name)
    assert to_cpu(tokens).tolist() == [0, 1, 2, 0, 0]
    np.testing.assert_array_equal(to_cpu(logprobs), [-inf, nan, nan, nan, 0])


@pytest.mark.parametrize("name, where", HERE)
def test_strides_and_no_rows(name, where):
    xp = module_named(where)
    base = xp.asarray(np.random.default_rng(0).standard_normal((12, 30)), np.float32)
    banned = xp.asarray(np.arange(60) % 7 == 0)[::2]
    for x in (base[::-1], base.T.copy().T, base.ravel()[1:349].reshape(12, 29), base[:, 1:]):
        settings = {"seed": 3, "top_p": 0.9, "banned": banned[: x.shape[1]], "impl": name}
        got, want = sample_tokens(x, **settings), sample_tokens(x.copy(), **settings)
        assert [g.tolist() for g in got] == [w.tolist() for w in want]
    assert [a.shape for a in sample_tokens(base[:0], impl=name)] == [(0,), (0,)]


def test_a_captured_draw_follows_the_step_on_the_device(gpu):
    from gpuattn.bench.timing import Graph

    logits = gpu.asarray(np.random.default_rng(0).standard_normal((30, 500)), np.float32)
    stream, step = gpu.cuda.Stream(non_blocking=True), gpu.zeros(1, np.uint32)
    gpu.cuda.Device().synchronize()
    with stream:
        graph = Graph([lambda: sample_tokens(logits, seed=rng.Key(1, 2, step), top_p=0.9)])
        drawn = []
        for n in range(3):
            step[...] = n
            graph()
            drawn.append(graph.results[0][0].tolist())
    want = [sample_tokens(logits, seed=rng.Key(1, 2, n), top_p=0.9)[0].tolist() for n in range(3)]
    assert drawn == want and drawn[0] != drawn[1]


def test_float64_tensors_and_explain():
    x = np.random.default_rng(0).standard_normal((3, 9))
    tokens, logprobs = sample_tokens(Tensor(x), seed=0)
    assert logprobs.dtype == np.float64 and tokens.dtype == np.int32
    assert explain(sample_tokens, x).chosen == "reference"


@pytest.mark.parametrize("settings, words", [
    ({"temperature": 0}, "greedy"), ({"temperature": float("nan")}, "temperature is nan"),
    ({"top_k": 0}, "top_k is 0"), ({"top_p": 0}, "top_p is 0"), ({"top_p": 1.1}, "top_p is 1.1"),
    ({"min_p": -0.1}, "min_p is -0.1"), ({"min_p": 1.5}, "min_p is 1.5"),
    ({"vocab_size": 6}, "vocab_size is 6"), ({"banned": np.zeros(4, bool)}, "banned.shape"),
])  # fmt: skip
def test_bad_settings(settings, words):
    with pytest.raises(ValueError, match=f"sample_tokens: .*{words}"):
        sample_tokens(np.zeros((2, 5), np.float32), **settings)


def test_bad_arrays(xp):
    with pytest.raises(ValueError, match=r"logits\.shape"):
        sample_tokens(xp.zeros(5, np.float32))
    with pytest.raises(ValueError, match="vocab"):
        sample_tokens(xp.zeros((2, 0), np.float32))
    with pytest.raises(TypeError, match=r"logits\.dtype is int32"):
        sample_tokens(xp.zeros((2, 5), np.int32))
    with pytest.raises(TypeError, match=r"numbers\.dtype is int64"):
        sample_tokens(xp.zeros((2, 5), np.float32), numbers=xp.zeros(2, np.int64))
    with pytest.raises(ValueError, match=r"numbers\.shape is \(3,\)"):
        sample_tokens(xp.zeros((2, 5), np.float32), numbers=xp.zeros(3, np.int32))
    with pytest.raises(TypeError, match="bool"):
        sample_tokens(xp.zeros((2, 5), np.float32), banned=xp.zeros(5, np.int8))
