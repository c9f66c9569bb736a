"""Bans and penalties against plain Python."""

import numpy as np
import pytest

from gpuattn.arrays import to_cpu
from gpuattn.decode import processors

VOCAB = 6


def problem(xp, length, seed=0):
    """Return (x (2, 3, V), texts (2, 3, length)), on a device and as lists."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((2, 3, VOCAB)).astype(np.float32)
    texts = rng.integers(0, VOCAB, (2, 3, length)).astype(np.int32)
    return xp.asarray(x), xp.asarray(texts), x, texts


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("length", [1, 2, 6, 30])
def test_repeated_ngrams(xp, size, length):
    given, tokens, x, texts = problem(xp, length, 10 * size + length)
    found = to_cpu(processors.ban_repeated_ngrams(given, tokens, size))
    for row in np.ndindex(2, 3):
        text = texts[row].tolist()
        grams = {tuple(text[i : i + size]) for i in range(length - size + 1)}
        for token in range(VOCAB):
            banned = (*text[length - size + 1 :], token)[-size:] in grams
            assert found[(*row, token)] == (-np.inf if banned else x[(*row, token)])


def test_repetitions(xp):
    given, tokens, x, texts = problem(xp, 4)
    found = to_cpu(processors.penalise_repetitions(given, tokens, 1.5))
    for row in np.ndindex(2, 3):
        for token, before in enumerate(x[row]):
            after = before / 1.5 if before > 0 else before * 1.5
            want = after if token in texts[row] else before
            assert found[(*row, token)] == pytest.approx(want, rel=1e-6)


def test_bans_and_forced_tokens(xp):
    given, _, x, _ = problem(xp, 1)
    logprobs = processors.log_softmax(given)
    want = x - np.log(np.exp(x.astype(np.float64)).sum(-1, keepdims=True))
    np.testing.assert_allclose(to_cpu(logprobs), want, rtol=1e-5)
    mask = np.arange(VOCAB) % 2 == 0
    found = to_cpu(processors.ban(given, xp.asarray(mask)))
    np.testing.assert_array_equal(found, np.where(mask, -np.inf, x))
    found = to_cpu(processors.force(given, logprobs, xp.asarray([-1, 4], np.int32)))
    np.testing.assert_array_equal(found[0], x[0])
    np.testing.assert_array_equal(found[1, :, 4], to_cpu(logprobs)[1, :, 4])
    assert (np.delete(found[1], 4, -1) == -np.inf).all()


def test_rows_without_a_token(xp):
    x = xp.full((1, 1, 4), -np.inf, np.float32)
    assert (to_cpu(processors.log_softmax(x)) == -np.inf).all()
    texts = xp.zeros((1, 1, 3), np.int32)
    assert (to_cpu(processors.penalise_repetitions(x, texts, 2.0)) == -np.inf).all()
