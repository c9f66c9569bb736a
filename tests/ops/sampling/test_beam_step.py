import itertools

import numpy as np
import pytest
from checks import DTYPES, check_no_float64, dtype_of, implementations, module_named

import gpuattn.ops.sampling.beam_step as module
from gpuattn import Tensor, explain
from gpuattn.arrays import to_cpu
from gpuattn.ops.sampling.beam_step import IMPLS, MAX_BEAM, beam_step

HERE = implementations(IMPLS)


def plain_step(logits, scores, banned, vocab, penalties=None, count=None):
    """Compute one sentence in Python and float64: [(score, parent, token)], best first."""
    every = []
    for beam, score in enumerate(scores):
        row = [float(x) for x in logits[beam][:vocab]]
        peak = max(row)
        total = np.log(sum(np.exp(x - peak) for x in row))
        listed = (
            [] if penalties is None else zip(*(p[beam].tolist() for p in penalties), strict=True)
        )
        costs = {}
        for token, amount in listed:
            costs[token] = costs.get(token, 0) + amount
        for token, x in enumerate(row):
            hidden = score == -np.inf or token in banned
            x = -np.inf if hidden else x - costs.get(token, 0)
            every.append((score + x - peak - total if x > -np.inf else x, beam, -x, token))
    best = sorted(every, key=lambda c: (-c[0], *c[1:]))[: count or 2 * len(scores)]
    return [(score, beam, token) for score, beam, _, token in best]


def mask(xp, vocab, *tokens):
    banned = np.zeros(vocab, bool)
    banned[list(tokens)] = True
    return xp.asarray(banned)


CASES = {
    "one": (1, 1, 2), "greedy": (3, 1, 17), "small": (2, 4, 9), "more beams than tokens": (2, 7, 3),
    "odd": (2, 3, 257), "wide": (1, 16, 33),
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sentences, beam, vocab", CASES.values(), ids=CASES)
@pytest.mark.parametrize("name, where", HERE)
def test_implementations_agree_with_plain_python(name, where, rng, sentences, beam, vocab, dtype):
    xp = module_named(where)
    logits = (3 * rng.standard_normal((sentences * beam, vocab + 3))).astype(dtype_of(dtype))
    logits[:, vocab:] = np.nan  # padding, never read
    scores = -3 * rng.random((sentences, beam)).astype(np.float32)
    scores[0, 1:] = -np.inf  # as in the first step
    banned = [1] if vocab > 2 else []
    arrays = xp.asarray(logits), xp.asarray(scores)
    settings = {"banned": mask(xp, vocab, *banned), "vocab_size": vocab, "impl": name}
    got = beam_step(*arrays, **settings)
    if name != "numba":
        by_list = beam_step(*arrays, **settings | {"banned": xp.asarray(banned, np.int32)})
        assert [to_cpu(g).tobytes() for g in got] == [to_cpu(x).tobytes() for x in by_list]
    assert [g.dtype for g in got] == [np.float32, np.int32, np.int32]
    found, parents, tokens = (to_cpu(g) for g in got)
    for b in range(sentences):
        rows = logits[b * beam : (b + 1) * beam].astype(np.float64)
        want = plain_step(rows, scores[b].astype(np.float64), banned, vocab)
        np.testing.assert_allclose(found[b], [c[0] for c in want], rtol=2e-6, atol=2e-6)
        assert list(zip(parents[b], tokens[b], strict=True)) == [c[1:] for c in want]
    again = beam_step(*arrays, **settings)
    assert [to_cpu(g).tobytes() for g in got] == [to_cpu(a).tobytes() for a in again]


PENALISES = [case for case in HERE if case.values[0] != "numba"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("beam, vocab, count", [(2, 9, 3), (3, 3001, 40), (1, 257, 1)])
@pytest.mark.parametrize("name, where", PENALISES)
def test_penalties(name, where, rng, beam, vocab, count, dtype):
    """They raise, lower and ban; a token listed twice is penalised twice; -1 is no token."""
    xp, rows = module_named(where), 2 * beam
    logits = (2 * rng.standard_normal((rows, vocab))).astype(dtype_of(dtype))
    scores = -rng.random((2, beam)).astype(np.float32)
    tokens = rng.integers(-1, vocab, (rows, count)).astype(np.int32)
    half = min(count // 2, vocab)
    if half:
        tokens[:, :half] = np.argsort(-logits.astype(np.float32), -1)[:, :half]
    tokens[:, -1] = tokens[:, 0]
    amounts = (3 * rng.standard_normal((rows, count))).astype(np.float32)
    amounts[:, ::3] = np.inf
    penalties = xp.asarray(tokens), xp.asarray(amounts)
    inputs = xp.asarray(logits), xp.asarray(scores)
    for banned in ([], [0, vocab // 2]):
        got = beam_step(*inputs, banned=mask(xp, vocab, *banned), penalties=penalties, impl=name)
        found, parents, chosen = (to_cpu(g) for g in got)
        for b in range(2):
            mine = slice(b * beam, (b + 1) * beam)
            costs = tokens[mine], amounts[mine]
            want = plain_step(logits[mine].astype(np.float64), scores[b], banned, vocab, costs)
            np.testing.assert_allclose(found[b], [c[0] for c in want], rtol=4e-6, atol=4e-6)
            assert list(zip(parents[b], chosen[b], strict=True)) == [c[1:] for c in want]


@pytest.mark.parametrize("beam, vocab, count", [
    (4, 3001, 1), (4, 3001, 12), (42, 700, 126), (3, 4, 12), (5, 4, 15), (1, 9, 4),
])  # fmt: skip
@pytest.mark.parametrize("name, where", PENALISES)
def test_another_number_of_continuations(name, where, rng, beam, vocab, count):
    xp = module_named(where)
    logits = (2 * rng.standard_normal((3 * beam, vocab))).astype(np.float32)
    scores = -rng.random((3, beam)).astype(np.float32)
    inputs = xp.asarray(logits), xp.asarray(scores)
    found, parents, tokens = map(to_cpu, beam_step(*inputs, count=count, impl=name))
    for b in range(3):
        rows = logits[b * beam : (b + 1) * beam].astype(np.float64)
        want = plain_step(rows, scores[b].astype(np.float64), [], vocab, count=count)
        np.testing.assert_allclose(found[b], [c[0] for c in want], rtol=4e-6, atol=4e-6)
        assert list(zip(parents[b], tokens[b], strict=True)) == [c[1:] for c in want]
    with pytest.raises(ValueError, match=f"count is 0; accepted: 1 to K \\* V, {beam * vocab}"):
        beam_step(*inputs, count=0)


@pytest.mark.parametrize("name, where", PENALISES)
def test_penalised_and_banned_tokens_out_of_range(name, where):
    xp = module_named(where)
    logits, scores = xp.zeros((2, 5), np.float32), xp.zeros((1, 2), np.float32)
    for token in (5, -2, 2**31 - 1):
        listed = xp.asarray([[0], [token]], np.int32), xp.zeros((2, 1), np.float32)
        for given in ({"penalties": listed}, {"banned": xp.asarray([0, token], np.int32)}):
            with pytest.raises(IndexError, match=rf"penalties.*holding {token}; .*0 <= index < 5"):
                to_cpu(beam_step(logits, scores, **given, impl=name)[0])
    to_cpu(beam_step(logits, scores, impl=name)[0])  # reported once


@pytest.mark.parametrize("name, where", HERE)
def test_scores_with_equal_roundings_keep_the_order_of_their_logits(name, where):
    xp = module_named(where)
    logits = xp.asarray([np.arange(40) % 7, np.arange(40) % 5], np.float32)
    scores = xp.full((1, 2), -1e9, np.float32)
    found, parents, tokens = beam_step(logits, scores, impl=name)
    assert len(set(to_cpu(found).ravel().tolist())) == 1
    assert to_cpu(parents).tolist() == [[0] * 4]
    assert to_cpu(tokens).tolist() == [[6, 13, 20, 27]]


def test_token_exact_on_a_gpu(gpu, rng):
    """The kernel finds the reference's tokens, with rows in one slice and in many."""
    settings = np.random.default_rng(1)
    for n in range(120):
        beam = int(settings.integers(1, 9)) if n % 10 else int(settings.integers(17, MAX_BEAM + 1))
        vocab = int(settings.choice([2, 57, 8191, 8192, 8193, 16385, 40001]))
        sentences, padding = int(settings.integers(1, 4)), int(settings.integers(0, 9))
        dtype = dtype_of(DTYPES[n % 3])
        logits = 3 * rng.standard_normal((sentences * beam, vocab + padding), np.float32)
        logits = logits.astype(dtype)
        scores = (-10 * rng.random((sentences, beam))).astype(np.float32)
        banned = rng.random(vocab) < 0.1 if n % 2 else None
        penalties = None
        if n % 4 >= 2:
            listed = rng.integers(-1, vocab, (len(logits), 7)).astype(np.int32)
            penalties = listed, rng.standard_normal(listed.shape).astype(np.float32)
        want = beam_step(logits, scores, banned=banned, penalties=penalties, vocab_size=vocab)
        got = beam_step(
            gpu.asarray(logits), gpu.asarray(scores), vocab_size=vocab, impl="raw-simt",
            banned=None if banned is None else gpu.asarray(banned),
            penalties=None if penalties is None else [gpu.asarray(p) for p in penalties],
        )  # fmt: skip
        found, parents, tokens = (to_cpu(g) for g in got)
        np.testing.assert_allclose(found, want[0], rtol=4e-6, atol=4e-6)
        differ = (parents != want[1]) | (tokens != want[2])
        with np.errstate(invalid="ignore"):
            gaps = np.abs(np.diff(want[0], axis=-1, append=-np.inf))
        near = (gaps < 1e-5) | (np.roll(gaps, 1, -1) < 1e-5)  # the order of sums may decide these
        assert not (differ & ~near).any(), (sentences, beam, vocab, dtype)
        assert differ.sum() <= 4


def test_bits_do_not_depend_on_alignment_or_batch(gpu, rng, monkeypatch):
    for dtype in DTYPES:
        rows = rng.standard_normal((6, 20011), np.float32).astype(dtype_of(dtype))
        scores = gpu.asarray(-rng.random((3, 2)), np.float32)
        monkeypatch.setattr(module, "BLOCKS", 1)  # long slices, as with many rows
        whole = [to_cpu(x) for x in beam_step(gpu.asarray(rows), scores, impl="raw-simt")]
        monkeypatch.undo()
        padded = gpu.zeros((6, 20016), rows.dtype)
        padded[:, 5:] = gpu.asarray(rows)
        for b in range(3):
            mine = padded[2 * b : 2 * b + 2, 5:]
            alone = beam_step(mine, scores[b : b + 1], impl="raw-simt")
            for w, a in zip(whole, alone, strict=True):
                assert w[b].tobytes() == to_cpu(a)[0].tobytes()


def test_slices():
    """They cover a row, and what the last block of a sentence holds is bounded."""
    most = 0
    for rows, beam, vocab, itemsize in itertools.product(
        (1, 4, 130, 5000), (1, 3, 16, 32, 33, MAX_BEAM), (2, 5000, 50257, module.RAW_COLS), (2, 4)
    ):
        block = 128 if beam <= 32 else 256
        slices, stages, fold, parts = module._slices(rows * beam, beam, vocab, itemsize, block)
        vectors, size = -(-vocab * itemsize // 16), stages * module.STAGE * block
        assert (slices - 1) * size < vectors <= slices * size and stages & (stages - 1) == 0
        assert parts * 32 * module.STAGE >= vectors and fold <= 5
        keys = beam * slices * block >> fold
        assert keys <= module.GROUPS * max(1, beam // 16)
        most = max(
            most, module.LOADED * block, 4 * keys, 2 * stages * module.STAGE * block // itemsize + 4
        )
    assert most <= 68 << 10  # and 27 KB that the kernel declares, of 99 KB


def test_graph_replays_between_eager_calls(gpu, rng):
    """A replay uses its own counters and restores them."""
    from gpuattn.bench.timing import Graph

    logits = gpu.asarray(rng.standard_normal((8, 50000), np.float32))
    scores = gpu.asarray(-rng.random((4, 2)), np.float32)
    want = [to_cpu(x).tobytes() for x in beam_step(logits, scores, impl="raw-simt")]
    streams = [gpu.cuda.Stream(non_blocking=True) for _ in range(2)]
    graphs = []
    for stream in streams:
        with stream:
            graphs.append(Graph([lambda: beam_step(logits, scores, impl="raw-simt")] * 3))
    for _ in range(20):
        for graph in graphs:
            graph()
    for stream, graph in zip(streams, graphs, strict=True):
        stream.synchronize()
        assert all([to_cpu(x).tobytes() for x in result] == want for result in graph.results)


@pytest.mark.parametrize("fill", [0, -np.inf])
def test_rows_of_equal_logits_in_slices(gpu, fill):
    logits = gpu.full((4, 70000), fill, np.float16)
    logits[:, 69990] = 1
    scores = gpu.asarray([[0, -1], [-1, 0]], np.float32)
    want = beam_step(to_cpu(logits), to_cpu(scores))
    got = beam_step(logits, scores, impl="raw-simt")
    for g, w in zip(got[1:], want[1:], strict=True):
        np.testing.assert_array_equal(to_cpu(g), w)


@pytest.mark.gpu
@pytest.mark.parametrize("beam", [MAX_BEAM, 17])
def test_widest_beams_on_a_gpu(gpu, rng, beam):
    logits = rng.standard_normal((2 * beam, 5001)).astype(np.float32)
    scores = -rng.random((2, beam)).astype(np.float32)
    got = beam_step(gpu.asarray(logits), gpu.asarray(scores), impl="raw-simt")
    want = beam_step(logits, scores)
    for g, w in zip(got[1:], want[1:], strict=True):
        np.testing.assert_array_equal(to_cpu(g), w)
    wider = gpu.zeros((1, MAX_BEAM + 1), np.float32), gpu.zeros((MAX_BEAM + 1, 5), np.float32)
    reasons = dict(explain(beam_step, wider[1], wider[0]).reasons)
    assert str(MAX_BEAM) in reasons["raw-simt"] and reasons["reference"] is None


@pytest.mark.parametrize("name, where", HERE)
def test_ties_go_to_the_lowest_beam_then_token(name, where):
    xp = module_named(where)
    logits, scores = xp.zeros((6, 40), np.float32), xp.zeros((2, 3), np.float32)
    scores[1, 0] = -1
    _, parents, tokens = beam_step(logits, scores, impl=name)
    assert to_cpu(parents).tolist() == [[0] * 6, [1] * 6]
    assert to_cpu(tokens).tolist() == [[0, 1, 2, 3, 4, 5]] * 2
    _, parents, tokens = beam_step(logits[:, :2], scores, impl=name)
    assert to_cpu(parents).tolist() == [[0, 0, 1, 1, 2, 2], [1, 1, 2, 2, 0, 0]]
    assert to_cpu(tokens).tolist() == [[0, 1] * 3] * 2


@pytest.mark.parametrize("name, where", HERE)
def test_dead_beams_are_not_read(name, where):
    xp, inf = module_named(where), np.inf
    logits = xp.full((4, 5), np.nan, np.float32)
    logits[0] = 0
    scores = xp.asarray([[-1, -inf], [-inf, -inf]], np.float32)
    found, parents, tokens = beam_step(logits, scores, banned=mask(xp, 5, 0, 2, 4), impl=name)
    best = -1 - np.log(5)
    np.testing.assert_allclose(to_cpu(found), [[best, best, -inf, -inf], [-inf] * 4], rtol=1e-6)
    assert to_cpu(tokens).tolist() == [[1, 3, 0, 2], [0, 1, 2, 3]]
    assert to_cpu(parents).tolist() == [[0] * 4] * 2


@pytest.mark.parametrize("name, where", HERE)
def test_nonfinite_logits(name, where):
    xp, inf, nan = module_named(where), np.inf, np.nan
    logits = xp.asarray([[0, 0, -inf], [-inf] * 3, [1, nan, 2], [0, inf, 0]], np.float32)
    scores = xp.asarray([[0, 0], [0, 0]], np.float32)
    with np.errstate(invalid="ignore"):
        found, parents, tokens = beam_step(logits, scores, banned=mask(xp, 3, 2), impl=name)
    half = np.float32(np.log(0.5))
    np.testing.assert_allclose(to_cpu(found), [[half, half, -inf, -inf], [nan] * 4], rtol=1e-6)
    assert to_cpu(parents).tolist() == [[0, 0, 0, 1], [0, 0, 1, 1]]
    assert to_cpu(tokens).tolist() == [[0, 1, 2, 0], [1, 0, 1, 0]]


@pytest.mark.parametrize("name, where", HERE)
def test_winners_in_one_group(name, where):
    """Every 32nd (128th) number is large, so one thread of the search reads all of them."""
    xp = module_named(where)
    logits = np.zeros((1, 6000), np.float32)
    logits[0, ::32] = np.arange(188) % 7
    logits[0, ::128] += 9
    scores = xp.zeros((1, 1), np.float32)
    _, _, tokens = beam_step(xp.asarray(logits), scores, impl=name)
    assert to_cpu(tokens).tolist() == [np.argsort(-logits[0], kind="stable")[:2].tolist()]
    wide = np.repeat(logits[:, ::8], 8, axis=0)
    got = beam_step(xp.asarray(wide), xp.zeros((1, 8), np.float32), impl=name)
    order = np.argsort(-wide.ravel(), kind="stable")[:16]
    assert to_cpu(got[1]).tolist() == [(order // 750).tolist()]
    assert to_cpu(got[2]).tolist() == [(order % 750).tolist()]


def test_the_search_on_the_host_is_that_of_the_reference_bit_for_bit(monkeypatch):
    rng = np.random.default_rng(2)
    for n in range(150):
        sentences, beam = rng.integers(1, 6), rng.integers(1, 9)
        vocab = int(rng.choice([2, 3, 4, 5, 17, 64, 100, 1000]))
        logits = 3 * rng.standard_normal((sentences * beam, vocab))
        scores = -rng.random((sentences, beam)) * (1e9 if n % 5 == 0 else 4)
        logits = np.round(logits) if n % 3 == 0 else logits
        for every, value in ((4, -np.inf), (7, np.nan), (9, np.inf)):
            logits[rng.random(logits.shape) < (0.03 if n % every == 0 else 0)] = value
        scores[rng.random(scores.shape) < (0.4 if n % 2 else 0)] = -np.inf
        arrays = logits.astype(np.float32), scores.astype(np.float32)
        banned = rng.random(vocab) < 0.2
        with np.errstate(all="ignore"):
            got = beam_step(*arrays, banned=banned)
            monkeypatch.setattr(module, "_best_on_host", module._best_of_rows)
            want = beam_step(*arrays, banned=banned)
            monkeypatch.undo()
        for g, w in zip(got, want, strict=True):
            np.testing.assert_array_equal(g, w)


@pytest.mark.parametrize("name, where", HERE)
def test_strides(name, where, rng):
    xp = module_named(where)
    base = xp.asarray(rng.standard_normal((12, 30)), np.float32)
    scores = xp.asarray(-rng.random((3, 4)), np.float32).T[:, ::-1]  # (4, 3)
    banned = mask(xp, 60, 4, 8, 12)[::2]
    for logits in (base, base[::-1], base.T.copy().T, base.ravel()[1:349].reshape(12, 29)):
        cols = logits.shape[1]
        got = beam_step(logits, scores, banned=banned[:cols], impl=name)
        copies = logits.copy(), scores.copy()
        want = beam_step(*copies, banned=banned[:cols].copy(), impl=name)
        for g, w in zip(got, want, strict=True):
            assert g.tolist() == w.tolist()


@pytest.mark.parametrize("name, where", HERE)
def test_no_sentences(name, where):
    xp = module_named(where)
    got = beam_step(xp.zeros((0, 9), np.float16), xp.zeros((0, 3), np.float32), impl=name)
    assert [g.shape for g in got] == [(0, 6)] * 3


def test_a_sentence_does_not_depend_on_the_others(rng):
    logits = rng.standard_normal((20, 700)).astype(np.float32)
    scores = -rng.random((5, 4)).astype(np.float32)
    together = beam_step(logits, scores)
    for b in range(5):
        alone = beam_step(logits[4 * b : 4 * b + 4], scores[b : b + 1])
        for t, a in zip(together, alone, strict=True):
            assert t[b].tobytes() == a[0].tobytes()


def test_float64_and_tensors(rng):
    logits, scores = rng.standard_normal((4, 9)), -rng.random((2, 2))
    found, parents, tokens = beam_step(Tensor(logits, requires_grad=True), Tensor(scores))
    assert found.dtype == np.float64
    for b in range(2):
        want = plain_step(logits[2 * b : 2 * b + 2], scores[b], [], 9)
        np.testing.assert_allclose(found[b], [c[0] for c in want], rtol=1e-13)
        assert list(zip(parents[b], tokens[b], strict=True)) == [c[1:] for c in want]


def test_bad_arguments(xp):
    logits, scores = xp.zeros((6, 5), np.float32), xp.zeros((2, 3), np.float32)
    for wrong in (scores[:, :2], scores.ravel(), xp.zeros((6, 0), np.float32)):
        with pytest.raises(ValueError, match=r"beam_step: scores\.shape"):
            beam_step(logits, wrong)
    with pytest.raises(TypeError, match="float32"):
        beam_step(logits, scores.astype(np.float16))
    with pytest.raises(TypeError, match=r"logits\.dtype is int32"):
        beam_step(logits.astype(np.int32), scores)
    with pytest.raises(TypeError, match="banned is a list"):
        beam_step(logits, scores, banned=[False] * 5)
    with pytest.raises(ValueError, match="2 or more"):
        beam_step(logits[:, :1], scores)
    with pytest.raises(ValueError, match="vocab_size"):
        beam_step(logits, scores, vocab_size=6)
    with pytest.raises(ValueError, match=r"banned\.shape"):
        beam_step(logits, scores, banned=mask(xp, 5), vocab_size=4)
    for wrong in (xp.zeros(5, np.int64), xp.zeros((1, 5), np.int32)):
        with pytest.raises(TypeError, match="bool"):
            beam_step(logits, scores, banned=wrong)
    listed, amounts = xp.zeros((6, 2), np.int32), xp.zeros((6, 2), np.float32)
    with pytest.raises(TypeError, match="penalties' tokens is int64; accepted: int32"):
        beam_step(logits, scores, penalties=(listed.astype(np.int64), amounts))
    with pytest.raises(TypeError, match="penalties' amounts is float16; accepted: float32"):
        beam_step(logits, scores, penalties=(listed, amounts.astype(np.float16)))
    for wrong in ((listed[:5], amounts[:5]), (listed, amounts[:, :1]), (listed[0], amounts[0])):
        with pytest.raises(ValueError, match=r"penalties .*accepted: \(6, L\) twice"):
            beam_step(logits, scores, penalties=wrong)


def test_numba_kernels_compile_without_float64(nvvm):
    import numba

    from gpuattn.numbakernels.beam_step import merge_slices, search_slices

    floats = {n: numba.types.Array(numba.float32, n, "C") for n in (1, 2, 3, 4)}
    lists = numba.types.Array(numba.int32, 4, "C")
    flat, i = numba.int32[:, ::1], numba.int64
    inputs = numba.uint64[:, ::1], floats[1], numba.boolean[::1], i
    for per_word in (2, 4):
        outputs = floats[3], floats[3], numba.types.Array(numba.int32, 3, "C")
        check_no_float64(search_slices(per_word), *inputs, *outputs)
    rows = floats[3], numba.types.Array(numba.int32, 3, "C")
    check_no_float64(
        merge_slices, floats[4], floats[4], lists, i, floats[2], *rows, floats[2], flat
    )
