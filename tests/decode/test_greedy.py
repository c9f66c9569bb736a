"""Greedy search against beam search and plain Python."""

from functools import partial

import numpy as np
import pytest
from decode.fakes import BOS, EOS, Fake, log_softmax, plain_beam, random_model

from gpuattn.decode import stepper
from gpuattn.decode.beam import beam_search
from gpuattn.decode.greedy import greedy
from gpuattn.decode.sample import sample

ENDS = {"bos": BOS, "eos": EOS}


def test_takes_the_most_probable_token(xp):
    for seed in range(20):
        logits_of = random_model(seed, 9)
        texts = greedy(Fake(xp, 3, logits_of), max_length=8, **ENDS)
        for b, h in enumerate(texts):
            (want,) = plain_beam(logits_of, b, 1, 8, 1.0, "power")
            assert (h.tokens, h.ended) == (want[2], want[3])
            assert (h.normalised, h.score) == pytest.approx(want[:2], abs=1e-4)


def test_equals_a_beam_of_one():
    for seed in range(30):
        model = Fake(np, 4, random_model(seed, 12))
        settings = {"max_length": 7, "min_length": seed % 3, "banned": (BOS,) * (seed % 2)}
        texts = greedy(model, **settings, **ENDS)
        beams = [h for (h,) in beam_search(model, beam=1, **settings, **ENDS)]
        assert [(h.tokens, h.ended) for h in texts] == [(h.tokens, h.ended) for h in beams]
        for field in ("score", "normalised"):
            mine, others = ([getattr(h, field) for h in hs] for hs in (texts, beams))
            assert mine == pytest.approx(others, abs=1e-5)


def test_minimum_and_maximum_length():
    model = Fake(np, 2, lambda b, text: np.where(np.arange(4) == EOS, 9.0, 0.0))
    assert [h.tokens for h in greedy(model, max_length=9, **ENDS)] == [[], []]
    (h, _) = greedy(model, max_length=9, min_length=3, banned=(0,), **ENDS)
    assert h.tokens == [2, 2, 2] and h.ended
    (h, _) = greedy(model, max_length=3, min_length=3, **ENDS)
    assert h.tokens == [0, 0, 0] and not h.ended
    (h, _) = greedy(model, max_length=4, bos=BOS, eos=None)
    assert h.tokens == [EOS] * 4 and not h.ended


def test_a_sentence_has_the_same_result_alone_and_in_a_batch():
    models = [random_model(seed, 30, spread=1 + seed) for seed in range(5)]
    together = Fake(np, 5, lambda b, text: models[b](0, text))
    found = greedy(together, max_length=10, **ENDS)
    for b, model in enumerate(models):
        assert greedy(Fake(np, 1, model), max_length=10, **ENDS) == [found[b]]


def test_stops_when_all_texts_have_ended():
    model = Fake(np, 2, lambda b, text: np.where(np.arange(4) == EOS, 9.0 * len(text), 1.0))
    found = greedy(model, max_length=50, **ENDS)
    assert [len(h.tokens) for h in found] == [1, 1] and model.steps == 2


def test_steps_after_the_end_change_nothing(monkeypatch):
    model = Fake(np, 4, random_model(3, 9))
    want = greedy(model, max_length=30, **ENDS)
    monkeypatch.setattr("gpuattn.decode.greedy.all_done", lambda done, step: False)
    assert greedy(model, max_length=30, **ENDS) == want and model.steps == 30


@pytest.mark.parametrize("extra", [{}, {"no_repeat_ngram": 2}, {"prefix": [[2]] * 5}])
def test_finished_texts_leave_without_a_trace(monkeypatch, extra):
    settings = {"max_length": [9, 2, 30, 12, 5], **ENDS, **extra}
    for search in (greedy, partial(sample, seed=3, numbers=[7, 1, 2, 9, 4])):
        found, rows = [], []
        for share in (2, 0.01):
            monkeypatch.setattr(stepper, "LEAVING_SHARE", share)
            model = Fake(np, 5, random_model(3, 9))
            found.append(search(model, **settings))
            rows.append(model.computed)
        assert found[0] == found[1] and rows[1] < rows[0]


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_dtypes(xp, dtype):
    logits_of = random_model(2, 9)
    (h,) = greedy(Fake(xp, 1, logits_of, dtype), max_length=6, **ENDS)
    path = [*h.tokens, EOS][:6]
    rows = [log_softmax(logits_of(0, tuple(path[:i]))) for i in range(len(path))]
    score = sum(row[token] for row, token in zip(rows, path, strict=True))
    assert h.score == pytest.approx(score, abs=1e-13 if dtype == np.float64 else 1e-2)
