"""Lengths, prefixes, several end marks, dead ends and sick logits, in all decoders."""

from functools import partial

import numpy as np
import pytest
from decode.fakes import BOS, EOS, Fake, log_softmax, random_model

from gpuattn.decode.beam import beam_search
from gpuattn.decode.greedy import greedy
from gpuattn.decode.sample import sample


def best_of_beam(model, **settings):
    return [texts[0] for texts in beam_search(model, beam=3, **settings)]


DECODERS = {"beam": best_of_beam, "greedy": greedy, "sample": partial(sample, seed=3)}
each_decoder = pytest.mark.parametrize("decode", DECODERS.values(), ids=DECODERS)


@each_decoder
def test_a_limit_of_its_own_for_each_sentence(xp, decode):
    limits, models = [4, 0, 9, 2], [random_model(b, 12) for b in range(4)]
    together = Fake(xp, 4, lambda b, text: models[b](0, text))
    found = decode(together, bos=BOS, eos=EOS, max_length=xp.asarray(limits))
    assert found[1].tokens == [] and not found[1].ended
    for b, limit in enumerate(limits):
        assert len(found[b].tokens) + found[b].ended <= limit
        if decode is not DECODERS["sample"]:
            assert decode(Fake(xp, 1, models[b]), bos=BOS, eos=EOS, max_length=limit) == [found[b]]
    assert decode(together, bos=BOS, eos=EOS, max_length=limits) == found


@each_decoder
def test_a_prefix_of_its_own_continues_a_text(decode):
    """Forced to begin as it does, a text stays as it is, with the same bits of its score."""
    model = Fake(np, 8, random_model(2, 15))
    settings = {"bos": BOS, "eos": EOS, "max_length": 9}
    want = decode(model, **settings)
    prefix = [h.tokens[: b % 4] for b, h in enumerate(want)]
    assert len({len(begun) for begun in prefix}) == 4
    found = decode(model, prefix=prefix, **settings)
    if decode is not DECODERS["beam"]:  # a beam that spreads later may find a better text
        assert found == want
    for h, begun in zip(found, prefix, strict=True):
        assert h.tokens[: len(begun)] == begun
    assert decode(model, prefix=[[]] * 8, **settings) == want


def test_the_best_text_is_the_best_that_begins_as_it_does():
    """With a beam as wide as all texts the search is exhaustive, with a prefix too."""
    logits_of, wide = random_model(4, 4), {"beam": 4**4, "nbest": 4**4}
    model, settings = Fake(np, 1, logits_of, np.float64), {"bos": BOS, "eos": EOS, "max_length": 4}
    (everything,) = beam_search(model, **wide, **settings)
    for begun in ([], [3], [2, 0], everything[0].tokens):
        (found,) = beam_search(model, prefix=[begun], **wide, **settings)
        want = [h for h in everything if h.tokens[: len(begun)] == begun]
        assert found == want and len(want) > 0


@each_decoder
def test_a_prefix_is_scored_by_the_model_and_not_banned(decode):
    logits_of, prefix = random_model(1, 10), [[5, 5, 6, 5, 5, 6]]
    rules = {"banned": (5,), "min_length": 6, "no_repeat_ngram": 2, "repetition_penalty": 2.0}
    (h,) = decode(
        Fake(np, 1, logits_of), bos=BOS, eos=EOS, max_length=6, prefix=prefix, **rules
    )  # fmt: skip
    score = sum(
        log_softmax(logits_of(0, (5, 5, 6, 5, 5, 6)[:i]))[t] for i, t in enumerate(prefix[0])
    )
    assert h.tokens == prefix[0] and not h.ended
    assert h.score == pytest.approx(score, abs=1e-5)


@each_decoder
def test_any_of_several_end_marks_ends_a_text(xp, decode):
    def logits_of(sentence, text):
        row = np.where(np.isin(np.arange(8), (EOS, 4, 6)), -30.0, 0.0)
        row[(EOS, 4, 6)[sentence]] += 60 * (len(text) == 2)
        return row

    model = Fake(xp, 3, logits_of)
    found = decode(model, bos=BOS, eos=(EOS, 4, 6), max_length=9, banned=(BOS,), min_length=1)
    assert [len(h.tokens) for h in found] == [2] * 3 and all(h.ended for h in found)
    (h, *_) = decode(model, bos=BOS, eos=(EOS, 4), max_length=5, banned=(BOS,), min_length=5)
    assert len(h.tokens) == 5 and not {EOS, 4} & set(h.tokens)


def test_k_texts_go_on_when_all_best_continuations_end():
    """With two end marks, two beams have four best continuations that end: six are needed."""

    def logits_of(sentence, text):
        if not text:
            return np.array([-9.0, -9, -9, 5, 5.5, -9])
        return np.array([-9.0, 9, 8, 1, 0, -9])

    settings = {"beam": 2, "nbest": 2, "stopping": "ct2", "patience": 3, "length_penalty": 0.1}
    (found,) = beam_search(
        Fake(np, 1, logits_of), bos=BOS, eos=(1, 2), max_length=3, renormalise=True, **settings
    )  # fmt: skip
    assert [h.tokens for h in found] == [[4], [3]]
    model = Fake(np, 1, logits_of)
    beam_search(model, bos=BOS, eos=(1, 2), max_length=3, **settings)
    assert sorted(set(model.texts)) == [(BOS, 3, 3), (BOS, 4, 3)]


@pytest.mark.parametrize("seed", range(6))
def test_greedy_equals_a_beam_of_one_with_every_option(seed):
    rng = np.random.default_rng(seed)
    model = Fake(np, 4, random_model(seed, 12))
    settings = {
        "bos": BOS, "eos": [EOS, 7][: 1 + seed % 2], "max_length": rng.integers(0, 9, 4),
        "min_length": int(rng.integers(0, 3)), "no_repeat_ngram": int(rng.integers(0, 3)),
        "repetition_penalty": 1 + 0.5 * (seed % 3), "renormalise": seed % 2 == 0, "banned": [4],
    }  # fmt: skip
    settings["prefix"] = [[5, 6, 8][: min(b, n)] for b, n in enumerate(settings["max_length"])]
    texts = greedy(model, **settings)
    beams = [h for (h,) in beam_search(model, beam=1, **settings)]
    assert [(h.tokens, h.ended) for h in texts] == [(h.tokens, h.ended) for h in beams]
    np.testing.assert_allclose([h.score for h in texts], [h.score for h in beams], atol=1e-5)


@each_decoder
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("extra", [{}, {"no_repeat_ngram": 2}], ids=str)
def test_sick_logits_stay_in_their_sentence(decode, bad, extra):
    """That sentence scores NaN; the others keep their bits."""
    healthy = random_model(4, 9)

    def sick(sentence, text):
        row = healthy(sentence, text).copy()
        row[3] = bad if sentence == 1 and len(text) == 2 else row[3]
        return row

    settings = {"bos": BOS, "eos": EOS, "max_length": 6, "min_length": 4, **extra}
    want = decode(Fake(np, 3, healthy), **settings)
    with np.errstate(invalid="ignore"):
        found = decode(Fake(np, 3, sick), **settings)
    assert found[::2] == want[::2] and np.isnan(found[1].score)


def test_nan_of_dead_beams_is_ignored():
    """While a prefix is forced, one beam lives; the others follow texts that nobody asked for."""
    healthy, begun = random_model(4, 9), [5, 6, 5]

    def logits_of(sentence, text):
        asked = list(text[:3]) == begun[: len(text)]
        return healthy(0, text) if asked else np.full(9, np.nan)

    settings = {"bos": BOS, "eos": EOS, "max_length": 8, "beam": 4, "nbest": 4, "prefix": [begun]}
    found = beam_search(Fake(np, 1, logits_of), **settings)
    assert found == beam_search(Fake(np, 1, healthy), **settings)


def test_dead_ends():
    """Tokens that are all banned leave fewer hypotheses, or none; alone, a score of -inf."""
    model = Fake(np, 2, lambda b, text: np.zeros(4))
    settings = {"bos": BOS, "eos": EOS, "banned": (BOS,), "no_repeat_ngram": 1}
    # 2 3, 3 2, with or without the end, are all the texts there are
    (texts, _) = beam_search(model, beam=9, nbest=9, max_length=9, **settings)
    assert sorted(h.tokens for h in texts) == [[], [2], [2, 3], [3], [3, 2]]
    settings |= {"min_length": 3, "max_length": 9}
    for stopping in ("fairseq", "hf", "hf-early", "hf-never", "ct2"):
        assert beam_search(model, beam=2, stopping=stopping, **settings) == [[], []]
        assert model.steps == 3
    for decode in (greedy, partial(sample, seed=1)):
        for h in decode(model, **settings):
            assert sorted(h.tokens) == [2, 3]
            assert (h.score, h.normalised, h.ended) == (-np.inf, -np.inf, False)
        assert model.steps == 3


@each_decoder
@pytest.mark.parametrize("setting, value, words", [
    ("max_length", [3], "int64 of shape (1,); accepted: an integer, or one for each of the 2"),
    ("max_length", [3, -1], "max_length is -1"), ("max_length", 2.5, "max_length is float64"),
    ("prefix", [[2]], "prefix is 1 lists; accepted: one list of tokens for each of the 2"),
    ("prefix", [[2], [2] * 9], "the prefix of sentence 1 is 9 tokens long; accepted: up to max"),
    ("prefix", [[2], [EOS]], "the prefix of sentence 1 is holding 1; accepted: tokens that are no"),
    ("prefix", [[2], [99]], "prefix is holding 99; accepted: tokens below 20"),
    ("prefix", [[2], [-1]], "sentence 1 is holding -1"),
    ("eos", tuple(range(20)), "eos is 20 tokens; accepted: fewer end marks than tokens, 20"),
    ("eos", (1, 20), "holding 20"),
])  # fmt: skip
def test_what_is_refused(decode, setting, value, words):
    settings = {"bos": BOS, "eos": EOS, "max_length": 8, setting: value}
    with pytest.raises(ValueError) as error:
        decode(Fake(np, 2, random_model(0, 20)), **settings)
    assert words in str(error.value)
    assert str(error.value).partition(":")[0] in ("beam_search", "greedy", "sample")
