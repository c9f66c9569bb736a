"""Beam search against known answers, plain Python and exhaustive search."""

import numpy as np
import pytest
from decode.fakes import (
    BOS,
    EOS,
    Fake,
    every_text,
    log_softmax,
    plain_beam,
    plain_search,
    random_model,
)

from gpuattn.decode import stepper as stepper_module
from gpuattn.decode.beam import beam_search
from gpuattn.decode.greedy import greedy
from gpuattn.decode.options import BeamOptions
from gpuattn.decode.stepper import Stepper

NEVER = -np.inf
ENDS = {"bos": BOS, "eos": EOS}


def check(found, want):
    """Assert that hypotheses have the texts of plain tuples, in their order, and their scores."""
    assert [h.tokens for h in found] == [text for _, _, text, _ in want]
    assert [h.ended for h in found] == [ended for *_, ended in want]
    for h, (normalised, score, _, _) in zip(found, want, strict=True):
        assert h.score == pytest.approx(score, abs=1e-4)
        assert h.normalised == pytest.approx(normalised, abs=1e-4)


def script(table, vocab):
    """Return the logits of {text: {token: probability}}; other tokens have probability 0."""

    def logits_of(sentence, text):
        row = np.full(vocab, NEVER)
        for token, probability in table.get(text, {EOS: 1.0}).items():
            row[token] = np.log(probability)
        return row

    return logits_of


# Greedy takes token 2 (0.6) and then reaches 0.6 * 0.4 at best; token 3 leads to 0.4 * 0.9
GREEDY_FAILS = {
    (): {2: 0.6, 3: 0.4},
    (2,): {EOS: 0.3, 2: 0.4, 3: 0.3},
    (3,): {EOS: 0.9, 3: 0.1},
    (2, 2): {EOS: 1.0},
}


def test_known_answers(xp):
    model = Fake(xp, 1, script(GREEDY_FAILS, 4))
    (best,) = beam_search(model, beam=2, nbest=2, length_penalty=0, max_length=5, **ENDS)
    check(best, [
        (np.log(0.36), np.log(0.36), [3], True),
        (np.log(0.24), np.log(0.24), [2, 2], True),
    ])  # fmt: skip
    (best,) = beam_search(model, beam=2, nbest=2, length_penalty=1, max_length=5, **ENDS)
    check(best, [
        (np.log(0.24) / 3, np.log(0.24), [2, 2], True),
        (np.log(0.36) / 2, np.log(0.36), [3], True),
    ])  # fmt: skip
    settings = {"length_penalty": 1, "length_rule": "gnmt"}
    (best,) = beam_search(model, beam=2, nbest=2, max_length=5, **settings, **ENDS)
    check(best, [
        (np.log(0.36) * 6 / 7, np.log(0.36), [3], True),
        (np.log(0.24) * 6 / 8, np.log(0.24), [2, 2], True),
    ])  # fmt: skip
    (text,) = greedy(model, max_length=5, **ENDS)
    check([text], [(np.log(0.24) / 3, np.log(0.24), [2, 2], True)])


def test_eos_ends_a_text_only_among_the_best_k():
    """With K = 1, EOS in second place is dropped, as in fairseq."""
    table = {(): {2: 0.6, EOS: 0.4}, (2,): {2: 0.6, EOS: 0.4}, (2, 2): {EOS: 1.0}}
    model = Fake(np, 1, script(table, 3))
    (best,) = beam_search(model, beam=1, length_penalty=0, max_length=5, **ENDS)
    check(best, [(np.log(0.36), np.log(0.36), [2, 2], True)])


@pytest.mark.parametrize("rule", ["power", "gnmt"])
@pytest.mark.parametrize("penalty", [0.0, 0.6, 1.0, 2.0, -0.5])
def test_tokens_equal_those_of_a_plain_python_beam(xp, rule, penalty):
    settings = np.random.default_rng(int(10 * penalty) + 100)
    for seed in range(8):
        vocab, beam, max_length = settings.integers([3, 1, 1], [12, 7, 9]).tolist()
        nbest, sentences = int(settings.integers(1, beam + 1)), int(settings.integers(1, 4))
        min_length = int(settings.integers(0, max_length + 1)) if seed % 3 == 0 else 0
        banned = (BOS,) if seed % 2 else ()
        logits_of = random_model(seed, vocab)
        found = beam_search(
            Fake(xp, sentences, logits_of), beam=beam, nbest=nbest, max_length=max_length,
            length_penalty=penalty, length_rule=rule, min_length=min_length, banned=banned, **ENDS,
        )  # fmt: skip
        assert len(found) == sentences
        for b in range(sentences):
            plain = plain_beam(
                logits_of, b, beam, max_length, penalty, rule, min_length, banned
            )  # fmt: skip
            check(found[b], plain[:nbest])


def random_options(rng, vocab):
    """Return (settings of beam_search, greatest length)."""
    beam, length = int(rng.integers(1, 6)), int(rng.integers(0, 8))
    ends = rng.permutation(np.arange(1, vocab - 1))[: rng.integers(1, 4)].tolist()
    stopping = str(rng.choice(["fairseq", "fairseq", "ct2", "hf", "hf-early", "hf-never"]))
    nbest = int(rng.integers(1, beam + 1))
    counting = stopping in ("fairseq", "hf-early", "ct2")
    patience = float(rng.choice([1, 1, 2, nbest / beam])) if counting else 1.0
    return {
        "beam": beam, "nbest": nbest, "stopping": stopping, "patience": patience,
        "eos": ends[0] if len(ends) == 1 else ends, "end_counts": bool(rng.integers(2)),
        "renormalise": bool(rng.integers(2)), "length_rule": str(rng.choice(["power", "gnmt"])),
        "length_penalty": float(rng.choice([0, 0.6, 1, 2, -0.5])),
        "no_repeat_ngram": int(rng.choice([0, 0, 1, 2, 3])),
        "repetition_penalty": float(rng.choice([1, 1, 0.8, 1.5])),
        "banned": rng.integers(0, vocab, rng.integers(0, 3)).tolist(),
        "min_length": int(rng.integers(0, length + 1)) * int(rng.integers(2)),
    }, length  # fmt: skip


def compare(xp, seed, sentences=3):
    """Compare a search with random options, limits and prefixes with plain Python's."""
    rng = np.random.default_rng(seed)
    vocab = int(rng.integers(5, 10))
    settings, longest = random_options(rng, vocab)
    limits = np.array([longest, *rng.integers(0, longest + 1, sentences - 1)])
    free = [t for t in range(vocab) if t not in np.atleast_1d(settings["eos"])]
    prefix = [rng.choice(free, rng.integers(0, limit + 1)).tolist() for limit in limits]
    prefix = prefix if rng.integers(2) else None
    model = random_model(seed, vocab)
    found = beam_search(
        Fake(xp, sentences, model, np.float64), bos=BOS, max_length=limits, prefix=prefix,
        **settings,
    )  # fmt: skip
    options = BeamOptions(**settings)
    for b, limit in enumerate(limits.tolist()):
        begun = prefix[b] if prefix else ()
        check(found[b], plain_search(model, b, options, limit, begun)[: options.nbest])


@pytest.mark.parametrize("seed", range(5))
def test_any_options_equal_a_plain_python_search(xp, seed):
    for each in range(10):
        compare(xp, 10 * seed + each)


@pytest.mark.exhaustive
def test_a_thousand_options_equal_a_plain_python_search():
    for seed in range(1000):
        compare(np, seed)


@pytest.mark.parametrize("penalty, rule", [(0.0, "power"), (1.0, "power"), (1.0, "gnmt")])
@pytest.mark.parametrize("seed", range(5))
def test_a_beam_as_wide_as_all_texts_is_exhaustive(seed, penalty, rule):
    vocab, max_length = 3, 4
    width = vocab**max_length
    logits_of = random_model(seed, vocab)
    settings = {"beam": width, "nbest": width, "max_length": max_length}
    settings |= {"length_penalty": penalty, "length_rule": rule}
    found = beam_search(Fake(np, 2, logits_of, np.float64), **settings, **ENDS)
    for b in range(2):
        want = every_text(logits_of, b, vocab, max_length, penalty, rule)
        assert len(want) == 31  # 1 + 2 + 4 + 8 that end, 16 that reach max_length
        check(found[b], want)


def test_a_sentence_has_the_same_result_alone_and_in_a_batch(rng):
    """The same bits, whatever the other sentences are and however long they are."""
    models = [random_model(seed, 50, spread=1 + seed) for seed in range(6)]
    settings = {"beam": 4, "nbest": 3, "max_length": 12}
    together = Fake(np, 6, lambda b, text: models[b](0, text))
    found = beam_search(together, **settings, **ENDS)
    for b, model in enumerate(models):
        alone = Fake(np, 1, model)
        assert beam_search(alone, **settings, **ENDS) == [found[b]]
        assert alone.steps <= together.steps
    assert len({len(texts[0].tokens) for texts in found}) > 1


def test_nbest_is_a_prefix_and_sorted():
    model = Fake(np, 3, random_model(5, 20))
    whole = beam_search(model, beam=6, nbest=6, max_length=8, **ENDS)
    for texts in whole:
        assert len(texts) == 6
        assert [t.normalised for t in texts] == sorted((t.normalised for t in texts), reverse=True)
        assert len({tuple(t.tokens) for t in texts}) == 6
    for nbest in (1, 3):  # stops earlier, with the same result
        short = beam_search(model, beam=6, nbest=nbest, max_length=8, **ENDS)
        assert short == [texts[:nbest] for texts in whole]


def test_ties_go_to_the_lowest_token():
    model = Fake(np, 2, lambda b, text: np.zeros(5))
    for texts in beam_search(model, beam=2, nbest=2, max_length=3, banned=(BOS,), **ENDS):
        third = np.log(0.2)
        check(texts, [(third, third, [], True), (third, 2 * third, [2], True)])


def test_scores_are_log_probabilities_of_the_model():
    logits_of = random_model(3, 30)
    (texts,) = beam_search(Fake(np, 1, logits_of), beam=5, nbest=5, max_length=10, **ENDS)
    for h in texts:
        path = [*h.tokens, EOS] if h.ended else h.tokens
        rows = [log_softmax(logits_of(0, tuple(path[:i]))) for i in range(len(path))]
        score = sum(row[token] for row, token in zip(rows, path, strict=True))
        assert h.score == pytest.approx(score, abs=1e-5)
        assert h.normalised == pytest.approx(score / len(path), abs=1e-5)


def test_stops_when_all_are_done():
    ends_at = [1, 3]

    def logits_of(b, text):
        row = np.zeros(6)
        row[EOS] = 50 if len(text) >= ends_at[b] else -50
        return row

    model = Fake(np, 2, logits_of)
    found = beam_search(model, beam=2, max_length=40, length_penalty=0, **ENDS)
    assert [len(texts[0].tokens) for texts in found] == ends_at
    assert model.steps == 4


@pytest.mark.parametrize("penalty, longest, go_on, steps", [
    (0, 40, 0.9, 2),   # a score can only fall
    (1, 40, 0.9, 40),  # log(0.45) / 40 would beat log(0.5) / 2
    (1, 2, 0.9, 2),    # but not at length 2
    (-1, 40, 0.9, 2),  # the next length has the best bound
    (0, 40, 1.0, 2),   # a tie with the best does not win
])  # fmt: skip
def test_stops_when_no_beam_can_win(penalty, longest, go_on, steps):
    """The text [2] has probability 0.5; those that begin with 3 never end."""

    def logits_of(sentence, text):
        chances = [0, 0, 0.5, 0.5]
        if text:
            chances = [0, 1, 0, 0] if text[0] == 2 else [0, 0, 1 - go_on, go_on]
        with np.errstate(divide="ignore"):
            return np.log(chances)

    model = Fake(np, 1, logits_of)
    settings = {"beam": 3, "length_penalty": penalty, "max_length": longest}
    (best,) = beam_search(model, **settings, **ENDS)
    assert model.steps == steps
    assert best[0].tokens == ([3] * 40 if steps == 40 else [2])


def test_waits_for_a_short_text_with_a_negative_penalty():
    table = {(): {2: 0.3, 3: 0.7}, (2,): {EOS: 1.0}, (3,): {3: 1.0}}
    model = Fake(np, 1, script(table, 4))
    (best,) = beam_search(model, beam=3, length_penalty=-1, max_length=40, **ENDS)
    check(best, [(3 * np.log(0.7), np.log(0.7), [3, 3], True)])


def test_steps_after_the_end_change_nothing(monkeypatch):
    """A GPU runs steps after the last text has ended, until the next check."""
    settings = {"beam": 3, "nbest": 2, "max_length": 30}
    model = Fake(np, 4, random_model(8, 15))
    want = beam_search(model, **settings, **ENDS)
    soon = model.steps
    monkeypatch.setattr("gpuattn.decode.beam.all_done", lambda done, step: False)
    assert beam_search(model, **settings, **ENDS) == want
    assert model.steps == 30 > soon


@pytest.mark.parametrize("extra", [
    {}, {"no_repeat_ngram": 2, "nbest": 2}, {"stopping": "hf", "eos": (1, 2)},
    {"prefix": [[2]] * 3 + [[3, 4]] * 6}, {"length_penalty": -1.0, "renormalise": True},
])  # fmt: skip
def test_finished_sentences_leave_without_a_trace(monkeypatch, extra):
    """Also where each has its own greatest length; each leaves as soon as it is done."""
    settings = {"bos": BOS, "eos": EOS, "beam": 3, "max_length": [9, 2, 0, 12, 5, 8, 1, 12, 3]}
    settings["max_length"] = np.maximum(settings["max_length"], 2 * ("prefix" in extra))
    monkeypatch.setattr(stepper_module, "LEAVING_SHARE", 2)
    model = Fake(np, 9, random_model(7, 15))
    want = beam_search(model, **settings | extra)
    all_rows = model.computed
    for share in (0.01, 1 / 8):
        monkeypatch.setattr(stepper_module, "LEAVING_SHARE", share)
        model = Fake(np, 9, random_model(7, 15))
        assert beam_search(model, **settings | extra) == want
        assert model.computed < 0.7 * all_rows


def test_a_stepper_that_cannot_leave_sentences_out_keeps_all(monkeypatch):
    monkeypatch.setattr(Fake, "keep", Stepper.keep)
    model = Fake(np, 6, random_model(7, 15))
    beam_search(model, beam=2, max_length=9, **ENDS)
    assert model.computed == model.steps * 12


def test_a_gpu_is_synchronized_every_few_steps(gpu):
    model = Fake(gpu, 2, lambda b, text: np.where(np.arange(5) == EOS, 50.0, 0.0))
    beam_search(model, beam=2, max_length=40, **ENDS)
    assert model.steps == stepper_module.CHECK_EVERY


def test_max_length_zero(xp):
    model = Fake(xp, 2, random_model(0, 5))
    empty = (0.0, 0.0, [], False)
    for rule in ("power", "gnmt"):
        for texts in beam_search(model, beam=3, nbest=3, max_length=0, length_rule=rule, **ENDS):
            check(texts, [empty])
    check(greedy(model, max_length=0, **ENDS), [empty] * 2)
    assert model.steps == 0


def test_no_sentences(xp):
    assert beam_search(Fake(xp, 0, None), beam=3, max_length=5, **ENDS) == []
    assert greedy(Fake(xp, 0, None), max_length=5, **ENDS) == []


def test_eos_at_the_first_step(xp):
    model = Fake(xp, 2, script({}, 4))  # only EOS has a probability above 0
    for texts in beam_search(model, beam=3, nbest=3, max_length=5, **ENDS):
        check(texts, [(0.0, 0.0, [], True)])
    check(greedy(model, max_length=5, **ENDS), [(0.0, 0.0, [], True)] * 2)


def test_more_beams_than_tokens(xp):
    logits_of = random_model(1, 3)
    found = beam_search(Fake(xp, 2, logits_of), beam=20, nbest=20, max_length=2, **ENDS)
    for b in range(2):
        check(found[b], every_text(logits_of, b, 3, 2, 1.0, "power"))


def test_no_token_is_allowed():
    model = Fake(np, 2, random_model(1, 3))
    settings = {"beam": 2, "max_length": 4, "min_length": 4, "banned": (0, 2)}
    assert beam_search(model, **settings, **ENDS) == [[], []]
    assert model.steps == 1


def test_nan_stays_in_its_sentence():
    healthy = random_model(4, 6)
    sick = Fake(np, 2, lambda b, text: np.full(6, np.nan) if b == 0 else healthy(1, text))
    first, second = beam_search(sick, beam=3, nbest=2, max_length=6, **ENDS)
    assert all(np.isnan(h.score) for h in first)
    check(second, plain_beam(healthy, 1, 3, 6, 1.0, "power")[:2])


@pytest.mark.parametrize("setting, value, words", [
    ("beam", 0, "beam is 0"), ("nbest", 6, "nbest is 6; accepted: 1 to beam, 5"),
    ("nbest", 0, "nbest is 0"), ("max_length", -1, "max_length is -1"),
    ("min_length", 9, "min_length is 9; accepted: 0 to max_length, 8"),
    ("length_penalty", float("nan"), "length_penalty is nan"),
    ("length_rule", "wu", "length_rule is 'wu'; accepted: power, gnmt"),
    ("banned", (99,), "holding 99"), ("banned", (-1,), "holding -1"), ("eos", 20, "holding 20"),
    ("bos", np.zeros(3, np.int32), "a token, or one for each of the 2 sentences"),
])  # fmt: skip
def test_bad_settings(setting, value, words):
    settings = {"bos": BOS, "eos": EOS, "max_length": 8, setting: value}
    with pytest.raises(ValueError, match="beam_search: ") as error:
        beam_search(Fake(np, 2, random_model(0, 20)), **settings)
    assert words in str(error.value)


def test_each_sentence_may_have_its_own_bos(xp):
    class Begin(Fake):
        def step(self, tokens, position):
            self.seen = tokens.tolist()
            return self.xp.zeros((len(tokens), 4), np.float32)

    model = Begin(xp, 2, None)
    bos = xp.asarray([3, 2], np.int64)
    beam_search(model, beam=2, max_length=1, bos=bos, eos=EOS)
    assert model.seen == [3, 3, 2, 2]
    greedy(model, max_length=1, bos=bos, eos=None)
    assert model.seen == [3, 2]
