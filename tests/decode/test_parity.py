"""With their settings, searches find what Hugging Face and CTranslate2 find.

The files are those of tests/support/hf_golden.py and tests/support/ct2_golden.py.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from decode.hashed import bigram_logits, extended, logits_of

from gpuattn.decode.beam import beam_search
from gpuattn.decode.greedy import greedy
from gpuattn.decode.stepper import Stepper

HERE = Path(__file__).parent
HF = json.loads((HERE / "hf_golden.json").read_text())
CT2 = json.loads((HERE / "ct2_golden.json").read_text())
NEAR = 1e-5  # scores that float32 may order either way


class Hashed(Stepper):
    """Logits are a hash of all tokens so far."""

    def __init__(self, ends):
        self.xp, self.sentences, self.ends = np, len(HF["bos"]), ends

    def start(self, beam):
        self.states = np.zeros(self.sentences * beam, np.uint64)

    def step(self, tokens, position):
        self.states = extended(self.states, tokens)
        return logits_of(self.states, HF["vocab"], self.ends, position)

    def reorder(self, parents):
        self.states = self.states[parents]


class Bigrams(Stepper):
    """Logits are a hash of the last token, and the end mark gets likelier."""

    def __init__(self):
        self.xp, self.sentences, self.table = np, len(CT2["bos"]), bigram_logits(CT2["vocab"])

    def start(self, beam):
        pass

    def step(self, tokens, position):
        logits = self.table[tokens]
        logits[:, CT2["eos"]] += np.float32(CT2["ramp"]) * np.float32(position)
        return logits

    def reorder(self, parents):
        pass


def found_as_hf(settings):
    """Return the Hypotheses of each sentence."""
    settings = {"eos": [HF["eos"]], **settings}
    model = Hashed(tuple(settings["eos"]))
    begin = {"bos": np.array(HF["bos"]), "max_length": HF["max_length"]}
    if settings["beam"] > 1:
        found = beam_search(model, **begin, **settings)
        return without(settings["prefix"], found, model, begin) if "prefix" in settings else found
    del settings["beam"]
    return [[text] for text in greedy(model, **begin, renormalise=True, **settings)]


def without(prefix, found, model, begin):
    """Return the Hypotheses without the tokens and the scores of their prefixes."""
    length = len(prefix[0])
    before = greedy(model, **(begin | {"max_length": length}), eos=None, prefix=prefix)
    return [
        [h._replace(tokens=h.tokens[length:], normalised=h.normalised - begun.score) for h in texts]
        for texts, begun in zip(found, before, strict=True)
    ]


def found_as_ct2(settings):
    """Return the Hypotheses of each sentence."""
    begin = {"bos": np.array(CT2["bos"]), "eos": CT2["eos"], "max_length": CT2["max_length"]}
    rules = {"stopping": "ct2", "renormalise": True}
    return beam_search(Bigrams(), **begin, **rules, **settings)


def near_ties(texts, want, field="normalised"):
    """Check scores and texts; return how many texts differ, which must be near-ties."""
    scores = np.array([getattr(h, field) for h in texts])
    wanted = np.array([score for _, score, *_ in want])
    np.testing.assert_allclose(scores, wanted, rtol=1e-5, atol=1e-4)
    differ = [
        h.tokens != tokens or ended not in ([], [h.ended])
        for h, (tokens, _, *ended) in zip(texts, want, strict=True)
    ]
    assert (np.abs(scores - wanted)[differ] < NEAR).all(), (texts, want)
    return sum(differ)


@pytest.mark.parametrize("beam", [1, 2, 4, 5, 8])
def test_equals_hugging_face(beam):
    cases = [case for case in HF["cases"] if case["settings"]["beam"] == beam]
    field = "normalised" if beam > 1 else "score"
    near = compared = 0
    for case in cases:
        for texts, want in zip(found_as_hf(case["settings"]), case["texts"], strict=True):
            near, compared = near + near_ties(texts, want, field), compared + len(want)
    print(f"beam {beam}: {compared} hypotheses, {near} near-ties")
    assert compared >= 24 and near <= 1


@pytest.mark.parametrize("beam", [2, 4, 5, 8])
def test_equals_ctranslate2(beam):
    cases = [case for case in CT2["cases"] if case["settings"]["beam"] == beam]
    near = compared = 0
    for case in cases:
        for texts, want in zip(found_as_ct2(case["settings"]), case["texts"], strict=True):
            near, compared = near + near_ties(texts, want), compared + len(want)
    print(f"beam {beam}: {compared} hypotheses, {near} near-ties")
    assert compared >= 60 and near <= 1


def test_the_files_have_every_setting():
    kept = [case["settings"] for case in HF["cases"]]
    assert {s["stopping"] for s in kept if "stopping" in s} == {"hf", "hf-early", "hf-never"}
    rules = {"min_length", "no_repeat_ngram", "repetition_penalty", "banned", "nbest"}
    assert set().union(*kept) >= rules | {"eos", "prefix"}
    others = [case["settings"] for case in CT2["cases"]]
    assert set().union(*others) >= rules | {"patience"}
    for settings in ([s for s in kept if s["beam"] > 1], others):
        assert {s["length_penalty"] for s in settings} == {0, 0.6, 1, 2, -1}
    assert HF["transformers"] == "5.23.0" and CT2["ctranslate2"] == "4.8.5"
