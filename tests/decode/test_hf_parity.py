"""The "hf" settings find what Hugging Face generate finds: see tests/support/hf_golden.py."""

import json
from pathlib import Path

import numpy as np
import pytest
from decode.hashed import extended, logits_of

from gpuattn.decode.beam import beam_search
from gpuattn.decode.greedy import greedy
from gpuattn.decode.stepper import Stepper

GOLDEN = json.loads((Path(__file__).parent / "hf_golden.json").read_text())
NEAR = 1e-5  # scores that float32 may order either way


class Hashed(Stepper):
    def __init__(self, ends):
        self.xp, self.sentences, self.ends = np, len(GOLDEN["bos"]), ends

    def start(self, beam):
        self.states = np.zeros(self.sentences * beam, np.uint64)

    def step(self, tokens, position):
        self.states = extended(self.states, tokens)
        return logits_of(self.states, GOLDEN["vocab"], self.ends, position)

    def reorder(self, parents):
        self.states = self.states[parents]


def found(settings):
    """Return the Hypotheses of each sentence."""
    settings = {"eos": [GOLDEN["eos"]], **settings}
    model = Hashed(tuple(settings["eos"]))
    begin = {"bos": np.array(GOLDEN["bos"]), "max_length": GOLDEN["max_length"]}
    if settings["beam"] > 1:
        return beam_search(model, **begin, **settings)
    del settings["beam"]
    return [[text] for text in greedy(model, **begin, renormalise=True, **settings)]


def same(texts, want, beam):
    """Return whether the texts are equal; others must be near-ties."""
    scores = np.array([h.normalised if beam > 1 else h.score for h in texts])
    wanted = np.array([score for _, score, _ in want])
    np.testing.assert_allclose(scores, wanted, rtol=1e-5, atol=1e-4)
    differ = [
        [h.tokens, h.ended] != [tokens, ended]
        for h, (tokens, _, ended) in zip(texts, want, strict=True)
    ]
    assert (np.abs(scores - wanted)[differ] < NEAR).all(), (texts, want)
    return not any(differ)


@pytest.mark.parametrize("beam", [1, 2, 4, 5, 8])
def test_equals_hugging_face(beam):
    cases = [case for case in GOLDEN["cases"] if case["settings"]["beam"] == beam]
    near = compared = 0
    for case in cases:
        for texts, want in zip(found(case["settings"]), case["texts"], strict=True):
            near += not same(texts, want, beam)
            compared += 1
    print(f"beam {beam}: {compared} sentences, {near} near-ties")
    assert compared >= 24 and near <= 1


def test_the_file_has_every_setting():
    kept = [case["settings"] for case in GOLDEN["cases"]]
    assert {s["stopping"] for s in kept if "stopping" in s} == {"hf", "hf-early", "hf-never"}
    assert {s["length_penalty"] for s in kept if "stopping" in s} == {0, 0.6, 1, 2, -1}
    used = set().union(*kept)
    assert used >= {"min_length", "no_repeat_ngram", "repetition_penalty", "banned", "eos", "nbest"}
    assert GOLDEN["transformers"] == "5.23.0"
