"""Results on the host."""

import numpy as np
import pytest

from gpuattn.decode.stepper import MANY_TOKENS, Hypothesis, hypotheses_of, token_lists


@pytest.mark.parametrize("rows", [2, MANY_TOKENS // 8])
def test_token_lists(rows):
    """What is behind the end of a text may be any number."""
    texts = np.random.default_rng(0).integers(0, 900, (rows, 9)).astype(np.int32)
    lists = texts.tolist()
    texts[:, 8] = np.resize([-(2**31), -1, 900, 2**31 - 1], rows)
    found = token_lists(texts, 900)
    assert [row[:8] for row in found] == [row[:8] for row in lists]
    assert {type(token) for row in found for token in row} == {int}
    if texts.size >= MANY_TOKENS:  # equal integers are one object
        assert len({id(token) for row in found for token in row}) <= 900


def test_hypotheses_with_and_without_a_vocabulary():
    rng = np.random.default_rng(1)
    texts = rng.integers(0, 50, (600, 2, 9)).astype(np.int32)
    lengths, limits = rng.integers(0, 10, (600, 2)), [9] * 600
    scores = rng.random((600, 2))
    scores[::7, 1] = -np.inf
    found = hypotheses_of(texts, lengths, scores, scores, limits, vocab=50)
    assert found == hypotheses_of(texts, lengths, scores, scores, limits)
    assert found[0] == [
        Hypothesis(texts[0, 0, : lengths[0, 0]].tolist(), *[scores[0, 0]] * 2, True)
    ]
    assert [len(texts) for texts in found[:8]] == [1, 2, 2, 2, 2, 2, 2, 1]
