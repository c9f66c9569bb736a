"""Sampling: frequencies follow the probabilities, and seeds repeat."""

import numpy as np
import pytest
from decode.fakes import BOS, EOS, Fake, log_softmax, random_model

from gpuattn import manual_seed, rng
from gpuattn.decode.greedy import greedy
from gpuattn.decode.sample import sample

ENDS = {"bos": BOS, "eos": EOS}
LOGITS = np.array([-1.0, 0.5, 2.0, 0.0, 1.0, -3.0])
MANY = 20000


def frequencies(**settings):
    """Return the share of each token in MANY draws from LOGITS."""
    model = Fake(np, MANY, lambda b, text: LOGITS)
    texts = sample(model, max_length=1, seed=11, bos=BOS, eos=None, **settings)
    return np.bincount([h.tokens[0] for h in texts], minlength=6) / MANY


def close(found, probabilities):
    """Return whether shares are within five standard deviations; a probability of 0 must give 0."""
    deviation = np.sqrt(probabilities * (1 - probabilities) / MANY)
    return bool((np.abs(found - probabilities) <= 5 * deviation).all())


def softmax(x):
    return np.exp(log_softmax(x))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_frequencies_follow_the_softmax(temperature):
    found = frequencies(temperature=temperature)
    assert close(found, softmax(LOGITS / temperature))
    assert not close(found, softmax(LOGITS / (temperature * 1.2)))


def test_top_k_draws_from_the_k_best():
    want = softmax(np.where(np.isin(np.arange(6), [2, 4, 1]), LOGITS, -np.inf))
    assert close(frequencies(top_k=3), want)
    assert frequencies(top_k=1)[2] == 1
    assert close(frequencies(top_k=50), softmax(LOGITS))


def test_top_p_draws_from_the_smallest_nucleus():
    p = softmax(LOGITS)
    best = p[2] + p[4]  # the two most probable
    kept = np.where(np.isin(np.arange(6), [2, 4]), LOGITS, -np.inf)
    assert close(frequencies(top_p=best - 1e-4), softmax(kept))
    kept[1] = LOGITS[1]
    assert close(frequencies(top_p=best + 1e-4), softmax(kept))
    assert frequencies(top_p=1e-9)[2] == 1
    both = frequencies(top_k=3, top_p=0.5, temperature=1.0)  # token 2 has 0.63 of the top three
    assert both[2] == 1


def test_banned_tokens_and_minimum_length_are_kept():
    found = frequencies(banned=(2, 3))
    assert close(found, softmax(np.where(np.isin(np.arange(6), [2, 3]), -np.inf, LOGITS)))
    model = Fake(np, 500, lambda b, text: np.zeros(4))
    texts = sample(model, max_length=6, min_length=3, seed=2, **ENDS)
    lengths = {len(h.tokens) for h in texts}
    assert lengths == {3, 4, 5, 6}
    assert all(EOS not in h.tokens and h.ended == (len(h.tokens) < 6) for h in texts)


def test_scores_are_log_probabilities_of_the_model():
    logits_of = random_model(3, 9)
    settings = {"temperature": 2.0, "top_k": 4, "top_p": 0.9, "seed": 1, "max_length": 8}
    for b, h in enumerate(sample(Fake(np, 5, logits_of), **settings, **ENDS)):
        path = [*h.tokens, EOS] if h.ended else h.tokens
        rows = [log_softmax(logits_of(b, tuple(path[:i]))) for i in range(len(path))]
        score = sum(row[token] for row, token in zip(rows, path, strict=True))
        assert h.score == pytest.approx(score, abs=1e-5)
        assert h.normalised == pytest.approx(score / len(path), abs=1e-5)


def test_a_seed_repeats_and_another_does_not():
    model = Fake(np, 8, random_model(1, 40))

    def draw(seed):
        return sample(model, max_length=10, seed=seed, **ENDS)

    assert draw(5) == draw(5) == draw(rng.Key(5))
    assert draw(5) != draw(6)
    assert draw(rng.Key(5, stream=1)) != draw(5)
    assert draw(None) != draw(None)
    manual_seed(3)
    first = draw(None)
    manual_seed(3)
    assert draw(None) == first


def test_a_sentence_does_not_depend_on_later_ones():
    models = [random_model(seed, 30) for seed in range(5)]
    texts = [
        sample(Fake(np, n, lambda b, text: models[b](0, text)), max_length=10, seed=7, **ENDS)
        for n in (1, 3, 5)
    ]
    assert texts[0] == texts[2][:1] and texts[1] == texts[2][:3]
    assert len({tuple(h.tokens) for h in texts[2]}) == 5


def test_a_text_does_not_depend_on_its_place():
    """Alone, or in another order: the sample's number and the position count, not the row."""
    models = [random_model(seed, 30) for seed in range(5)]
    settings = {"max_length": 10, "seed": 7, "temperature": 1.5, "bos": BOS, "eos": None}
    want = sample(Fake(np, 5, lambda b, text: models[b](0, text)), **settings)
    order = [3, 0, 4, 1, 2]
    for rows in (order, [2], [4, 2]):
        model = Fake(np, len(rows), lambda b, text, rows=rows: models[rows[b]](0, text))
        assert sample(model, numbers=rows, **settings) == [want[b] for b in rows]
    # and a text that is continued, from step 4 on, draws what it would have drawn
    begun = [text.tokens[:4] for text in want]
    model = Fake(np, 5, lambda b, text: models[b](0, (*begun[b], *text)))
    rest = sample(model, **(settings | {"seed": rng.Key(7, step=4), "max_length": 6}))
    assert [a + b.tokens for a, b in zip(begun, rest, strict=True)] == [h.tokens for h in want]


def test_same_samples_on_both_backends(gpu):
    settings = {"max_length": 12, "seed": 9, "temperature": 1.3, **ENDS}
    for extra in ({}, {"top_k": 10}, {"top_p": 0.8}, {"banned": (0,)}):
        texts = [
            sample(Fake(xp, 16, random_model(2, 300)), **settings, **extra) for xp in (np, gpu)
        ]
        assert [h.tokens for h in texts[0]] == [h.tokens for h in texts[1]]


def test_a_low_temperature_is_greedy(xp):
    model = Fake(xp, 4, random_model(6, 20))
    cold = sample(model, max_length=8, temperature=1e-4, seed=0, **ENDS)
    assert [h.tokens for h in cold] == [h.tokens for h in greedy(model, max_length=8, **ENDS)]


def test_each_step_advances_the_step_of_the_key():
    model = Fake(np, 3, random_model(3, 25))
    key = rng.Key(12345, stream=6, step=2)
    texts = sample(model, max_length=4, seed=key, bos=BOS, eos=None)
    for b, h in enumerate(texts):
        for t in range(4):
            p = softmax(random_model(3, 25)(b, tuple(h.tokens[:t])))
            word = rng.philox(12345, *(np.uint64(c) for c in (b, 0, 6, 2 + t)))[0]
            assert h.tokens[t] == np.searchsorted(np.cumsum(p), word / 2**32, side="right")


def test_min_p_keeps_tokens_near_the_best():
    p = softmax(LOGITS)
    want = softmax(np.where(p >= 0.3 * p.max(), LOGITS, -np.inf))
    assert close(frequencies(min_p=0.3), want)


def test_zero_length_no_sentences_and_nan(xp):
    model = Fake(xp, 2, random_model(0, 5))
    assert [h.tokens for h in sample(model, max_length=0, seed=0, **ENDS)] == [[], []]
    assert sample(Fake(xp, 0, None), max_length=3, seed=0, **ENDS) == []
    with np.errstate(invalid="ignore"):
        (h,) = sample(Fake(xp, 1, lambda b, t: np.full(5, np.nan)), max_length=2, seed=0, **ENDS)
    assert np.isnan(h.score)


@pytest.mark.parametrize("settings, words", [
    ({"temperature": 0}, "greedy"), ({"temperature": float("nan")}, "temperature is nan"),
    ({"temperature": -1}, "temperature is -1"), ({"top_k": 0}, "top_k is 0"),
    ({"top_p": 0}, "top_p is 0"), ({"top_p": 1.1}, "top_p is 1.1"), ({"min_p": 2}, "min_p is 2"),
    ({"max_length": -1}, "max_length is -1"),
])  # fmt: skip
def test_bad_settings(settings, words):
    model = Fake(np, 1, random_model(0, 5))
    with pytest.raises(ValueError, match=f"sample: .*{words}"):
        sample(model, **{"max_length": 3, **settings}, **ENDS)
