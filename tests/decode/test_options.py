"""Settings are checked when they are made, and say when a search is done."""

import dataclasses

import numpy as np
import pytest
from decode.fakes import BOS, EOS, Fake, random_model

from gpuattn.decode import options as module
from gpuattn.decode.beam import beam_search
from gpuattn.decode.options import BeamOptions, GreedyOptions, SampleOptions

# After [2] (0.5) an end is certain. What begins with 3 ends with 0.1 a step, so it ends late.
CHANCES = {(): [0, 0, 0.5, 0.5], (2,): [0, 1, 0, 0]}


def logits_of(sentence, text):
    with np.errstate(divide="ignore"):
        return np.log(CHANCES.get(text, [0, 0.1, 0, 0.9]))


@pytest.mark.parametrize("stopping, penalty, steps", [
    ("fairseq", 1, 3), ("fairseq", 0, 2), ("hf-early", 1, 3), ("hf-early", 0, 3),
    # two texts have ended after 3 steps: [2] at 0.5 and [3] at 0.05; the beam is then at 0.405
    ("hf", 1, 12), ("hf-never", 1, 12), ("hf", 0, 12), ("ct2", 1, 3), ("ct2", 0, 2),
])  # fmt: skip
def test_when_a_search_is_done(stopping, penalty, steps):
    model = Fake(np, 1, logits_of)
    settings = {"beam": 2, "length_penalty": penalty, "stopping": stopping, "max_length": 12}
    beam_search(model, bos=BOS, eos=EOS, **settings)
    assert model.steps == steps


def test_hf_divides_for_the_present_length_and_never_for_the_longest():
    """At a penalty of 2 the best beam may win later, though not at its present length."""
    found = {}
    for stopping in ("hf", "hf-never"):
        model = Fake(np, 1, random_model(5, 12))
        settings = {"beam": 2, "length_penalty": 2.0, "stopping": stopping, "max_length": 30}
        (texts,) = beam_search(model, bos=BOS, eos=EOS, **settings)
        found[stopping] = model.steps, texts[0].normalised
    assert found["hf"][0] < found["hf-never"][0]
    assert found["hf"][1] <= found["hf-never"][1]


def test_ct2_without_a_penalty_waits_for_nbest_after_the_best_end():
    table = {(): [0, 0.5, 0.3, 0.2], (2,): [0, 0.4, 0.6, 0]}  # the best ends first, then the next

    def logits_of(sentence, text):
        with np.errstate(divide="ignore"):
            return np.log(table.get(text, [0, 0, 0.5, 0.5]))

    model, settings = Fake(np, 1, logits_of), {"beam": 2, "nbest": 2, "length_penalty": 0}
    (texts,) = beam_search(model, bos=BOS, eos=EOS, max_length=9, stopping="ct2", **settings)
    assert model.steps == 2 and [h.tokens for h in texts] == [[], [2]]


def test_the_bound_of_a_text_without_its_end_mark():
    """At a penalty of -1, [3] has log 0.6 once it ends, [] has log 0.4: its length is 1, not 2."""
    table = {(): [0, 0.4, 0, 0.6]}

    def logits_of(sentence, text):
        with np.errstate(divide="ignore"):
            return np.log(table.get(text, [0, 1, 0, 0]))

    settings = {"beam": 2, "length_penalty": -1, "end_counts": False, "max_length": 9}
    (texts,) = beam_search(Fake(np, 1, logits_of), bos=BOS, eos=EOS, **settings)
    assert texts[0].tokens == [3] and texts[0].normalised == pytest.approx(np.log(0.6))


@pytest.mark.parametrize("stopping", ["fairseq", "hf-early", "ct2"])
def test_patience_waits_for_more_texts(stopping):
    steps = []
    for patience in (0.5, 1, 2, 4):
        model = Fake(np, 1, lambda b, text: np.array([-9.0, 1, 0.5, 0.4]))
        settings = {"beam": 2, "patience": patience, "stopping": stopping, "length_penalty": 1.0}
        beam_search(model, bos=BOS, eos=EOS, max_length=9, **settings)
        steps.append(model.steps)
    assert steps == sorted(steps) and steps[0] < steps[-1]
    assert [BeamOptions(eos=1, patience=p).enough for p in (0.5, 1, 2.5)] == [2, 5, 12]


def test_the_length_with_and_without_the_end_mark():
    options = BeamOptions(eos=EOS, length_penalty=2)
    without = dataclasses.replace(options, end_counts=False)
    assert [options.divisor(3, ended) for ended in (False, True)] == [9, 16]
    assert [without.divisor(3, ended) for ended in (False, True)] == [9, 9]
    assert without.divisor(0, True) == 1
    (texts,) = beam_search(
        Fake(np, 1, logits_of), bos=BOS, eos=EOS, max_length=5, beam=2, end_counts=False
    )  # fmt: skip
    (h,) = [h for h in texts if h.ended][:1] or texts
    assert h.normalised == pytest.approx(h.score / len(h.tokens))


@pytest.mark.parametrize("renormalise", [False, True])
def test_bans_before_or_after_the_normaliser(renormalise):
    model = Fake(np, 1, lambda b, text: np.zeros(4))
    settings = {"bos": BOS, "eos": EOS, "max_length": 1, "banned": (0, 3)}
    (texts,) = beam_search(model, beam=1, renormalise=renormalise, **settings)
    assert texts[0].score == pytest.approx(np.log(0.5 if renormalise else 0.25))


def test_an_option_that_changes_nothing_keeps_the_bits():
    """The search with penalties equals the search by beam_step, bit for bit."""
    settings = {"bos": BOS, "eos": EOS, "max_length": 12, "beam": 4, "nbest": 4, "min_length": 2}
    for seed in range(5):
        model = Fake(np, 3, random_model(seed, 80))
        want = beam_search(model, banned=(BOS, 7), **settings)
        assert beam_search(model, banned=(BOS, 7), no_repeat_ngram=20, **settings) == want
        assert want[0][0].tokens


def test_settings_are_values():
    options = BeamOptions(eos=[1, 2, 1], banned=range(3))
    assert options.eos == (1, 2) and options.banned == (0, 1, 2)
    assert hash(options) == hash(BeamOptions(eos=(1, 2), banned=[0, 1, 2]))
    assert BeamOptions(**dataclasses.asdict(options)) == options
    assert GreedyOptions(eos=None).eos == () and not GreedyOptions(eos=3).by_text
    for name in ("eos", "min_length", "banned", "no_repeat_ngram", "repetition_penalty", "beam",
                 "length_penalty", "end_counts", "stopping", "patience", "max_length", "prefix",
                 "renormalise", *module.STOPPING):  # fmt: skip
        assert name in module.__doc__


@pytest.mark.parametrize("settings, words", [
    ({"stopping": "marian"}, "stopping is 'marian'; accepted: fairseq, hf, hf-early, hf-never, ct"),
    ({"patience": 0}, "patience is 0; accepted: a number above 0"),
    ({"patience": 2.0, "stopping": "hf"}, "patience is 2.0; accepted: 1 with stopping 'hf'"),
    ({"patience": 0.5, "nbest": 5}, "round(beam * patience) is nbest, 5, or more"),
    ({"no_repeat_ngram": -1}, "no_repeat_ngram is -1; accepted: 0 for none, or from 1 on"),
    ({"repetition_penalty": 0}, "repetition_penalty is 0; accepted: a number above 0"),
    ({"min_length": -1}, "min_length is -1"), ({"nbest": 6}, "nbest is 6; accepted: 1 to beam, 5"),
])  # fmt: skip
def test_values_out_of_range(settings, words):
    with pytest.raises(ValueError, match="beam_search: ") as error:
        BeamOptions(**{"eos": 1, **settings})
    assert words in str(error.value)


@pytest.mark.parametrize("kind, settings, words", [
    (BeamOptions, {"beam": 2.5}, "beam is 2.5"), (BeamOptions, {"eos": "end"}, "eos is 'e'"),
    (GreedyOptions, {"renormalise": 1}, "renormalise is 1; accepted: True or False"),
    (SampleOptions, {"renormalise": True}, "unexpected keyword"),
    (GreedyOptions, {"beam": 2}, "unexpected keyword"),
    (SampleOptions, {"top_k": 1.5}, "top_k is 1.5"),
])  # fmt: skip
def test_wrong_types_and_unknown_names(kind, settings, words):
    with pytest.raises(TypeError, match=words):
        kind(**{"eos": 1, **settings})


def test_equal_settings_are_checked_once():
    settings = {"eos": (2, 3), "banned": (1,), "beam": 4}
    known = BeamOptions.of(settings)
    assert BeamOptions.of(dict(settings)) is known and known.beam == 4 and known.eos == (2, 3)
    for name, other in (("beam", 4.0), ("banned", (1.0,)), ("eos", (2.0, 3))):
        for _ in range(2):
            with pytest.raises(TypeError, match=name):
                BeamOptions.of(settings | {name: other})
    assert GreedyOptions.of({"eos": 2}) != SampleOptions.of({"eos": 2})
    one, other = (BeamOptions.of(settings | {"eos": np.array([2, 3])}) for _ in range(2))
    assert one == other == known and one is not other  # arrays may change


@pytest.mark.parametrize("settings, said", [
    ({"eos": 2, "bean": 4}, "bean"), ({"beam": 4}, "eos is missing"),
    ({"eos": [2], "beam": []}, "beam"), ({"eos": {}, "beam": {}}, "beam"),
])  # fmt: skip
def test_settings_that_are_no_options(settings, said):
    for _ in range(2):
        with pytest.raises(TypeError, match=said):
            BeamOptions.of(settings)
