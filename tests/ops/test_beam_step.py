import numpy as np
import pytest
from checks import DTYPES, check_no_float64, dtype_of, implementations, module_named

from gpuattn import Tensor, explain
from gpuattn.arrays import to_cpu
from gpuattn.ops.beam_step import IMPLS, MAX_BEAM, beam_step

HERE = implementations(IMPLS)


def plain_step(logits, scores, banned, vocab):
    """One sentence in plain Python and float64: [(score, parent, token)], best first."""
    every = []
    for beam, score in enumerate(scores):
        row = [float(x) for x in logits[beam][:vocab]]
        total = np.log(sum(np.exp(x - max(row)) for x in row))
        for token, x in enumerate(row):
            hidden = score == -np.inf or token in banned
            every.append((-np.inf if hidden else score + x - max(row) - total, beam, token))
    return sorted(every, key=lambda c: (-c[0], c[1], c[2]))[: 2 * len(scores)]


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
    assert [g.dtype for g in got] == [np.float32, np.int32, np.int32]
    found, parents, tokens = (to_cpu(g) for g in got)
    for b in range(sentences):
        rows = logits[b * beam : (b + 1) * beam].astype(np.float64)
        want = plain_step(rows, scores[b].astype(np.float64), banned, vocab)
        np.testing.assert_allclose(found[b], [c[0] for c in want], rtol=2e-6, atol=2e-6)
        assert list(zip(parents[b], tokens[b], strict=True)) == [c[1:] for c in want]
    again = beam_step(*arrays, **settings)
    assert [to_cpu(g).tobytes() for g in got] == [to_cpu(a).tobytes() for a in again]


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
def test_what_is_not_finite(name, where):
    xp, inf, nan = module_named(where), np.inf, np.nan
    logits = xp.asarray([[0, 0, -inf], [-inf] * 3, [1, nan, 2], [0, inf, 0]], np.float32)
    scores = xp.asarray([[0, 0], [0, 0]], np.float32)
    with np.errstate(invalid="ignore"):
        found, parents, tokens = beam_step(logits, scores, banned=mask(xp, 3, 2), impl=name)
    half = np.float32(np.log(0.5))
    np.testing.assert_allclose(to_cpu(found), [[half, half, -inf, -inf], [nan] * 4], rtol=1e-6)
    assert to_cpu(parents).tolist() == [[0, 0, 0, 1], [0, 0, 1, 1]]
    assert to_cpu(tokens).tolist() == [[0, 1, 2, 0], [0, 1, 0, 1]]


@pytest.mark.parametrize("name, where", HERE)
def test_winners_that_crowd_in_one_group(name, where):
    """Every 32nd (128th) number is large: one thread of the search sees them all."""
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
    with pytest.raises(TypeError, match="bool"):
        beam_step(logits, scores, banned=xp.zeros(5, np.int32))


def test_numba_kernels_compile_without_float64(nvvm):
    import numba

    from gpuattn.numbakernels.beam_step import score_continuations, search_best

    matrix, vector = numba.float32[:, ::1], numba.float32[::1]
    check_no_float64(score_continuations, matrix, vector, numba.boolean[::1], matrix)
    check_no_float64(search_best, matrix, numba.int32[:, ::1])
