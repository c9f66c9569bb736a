"""The coverage penalty: how much of its source a translation has seen."""

import numpy as np
import pytest
from decode.fakes import BOS, EOS, Attending, Fake, plain_search, random_model

from gpuattn.decode.beam import beam_search
from gpuattn.decode.options import STOPPING, BeamOptions
from gpuattn.models.translation import TranslationConfig, TranslationModel


def attention_of(sentence, text):
    """Return probabilities of 4 source tokens, of which the last ones are past the end."""
    rng = np.random.default_rng([sentence, len(text), *text])
    probabilities = rng.random(4) ** 4
    probabilities[[4, 3, 2][sentence] :] = 0
    return probabilities / probabilities.sum()


@pytest.mark.parametrize("stopping", STOPPING)
@pytest.mark.parametrize("seed", range(4))
def test_equals_plain_python(xp, seed, stopping):
    rng, model = np.random.default_rng(seed), random_model(seed, 7)
    for penalty in (0, 1):
        limits = rng.integers(0, 9, 3).tolist()
        settings = {
            "beam": 3, "nbest": 3, "eos": EOS, "stopping": stopping, "length_penalty": penalty,
            "coverage": float(rng.choice([0.2, 1.5])),
        }  # fmt: skip
        stepper = Attending(xp, 3, model, attention_of)
        found = beam_search(stepper, bos=BOS, max_length=limits, **settings)
        for b, hypotheses in enumerate(found):
            options = BeamOptions(**settings)
            want = plain_search(model, b, options, limits[b], attention_of=attention_of)
            got = [(h.normalised, h.score, h.tokens, h.ended) for h in hypotheses]
            assert [x[2:] for x in got] == [x[2:] for x in want]
            np.testing.assert_allclose(
                [x[:2] for x in got], [x[:2] for x in want], rtol=1e-4, atol=1e-5
            )


@pytest.mark.parametrize("kv_heads", [None, 1])
def test_the_attention_is_that_of_the_last_layer(xp, kv_heads):
    """It equals the maps of ``attention_maps``, and asking for it does not change the scores."""
    config = TranslationConfig(
        vocab=30, d_model=32, heads=4, kv_heads=kv_heads, layers=(1, 2), ffn=32, max_length=16
    )
    model = TranslationModel(config, seed=1)
    for parameter in model.parameters():
        parameter.data = xp.asarray(parameter.data) * np.float32(2)
    sources, weight = [[5, 6, 7, 8, 9, 10], [11, 12], [13]], 0.3
    settings = {"bos": BOS + 1, "eos": 2, "beam": 3, "nbest": 3, "max_length": 8}
    plain, found = (
        beam_search(model.stepper(model.pack(sources), 8), coverage=w, **settings)
        for w in (0, weight)
    )
    for source, texts, others in zip(sources, found, plain, strict=True):
        scores = {tuple(h.tokens): h.score for h in others}
        for h in texts:
            cross = model.attention_maps(source, h.tokens)["cross"][-1][0]
            seen = cross[: len(h.tokens) + h.ended].sum(0)
            length = len(h.tokens) + h.ended
            want = h.score / length + weight * np.log(np.minimum(seen, 1)).sum()
            assert h.normalised == pytest.approx(want, rel=1e-4)
            assert scores.get(tuple(h.tokens), h.score) == pytest.approx(h.score, rel=1e-4)
    assert found != plain


def test_what_has_no_attention():
    settings = {"bos": BOS, "eos": EOS, "max_length": 3, "coverage": 0.5}
    with pytest.raises(ValueError, match="coverage is a Fake, without cross-attention"):
        beam_search(Fake(np, 1, random_model(0, 5)), **settings)
    model = TranslationModel(TranslationConfig(vocab=9, d_model=8, heads=1, layers=(1, 1), ffn=8))
    stepper = model.stepper(model.pack([[4]]), 3, kv_cache=False)
    with pytest.raises(ValueError, match="coverage is asked for; accepted: a stepper with a key"):
        beam_search(stepper, **settings)
    for wrong in (-1, 11, np.nan):
        with pytest.raises(ValueError, match="coverage is .*; accepted: 0 to 10"):
            BeamOptions(eos=EOS, coverage=wrong)
