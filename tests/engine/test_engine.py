"""The engine's translations equal gpuattn.decode's, on NumPy and as CUDA graphs."""

import numpy as np
import pytest

from gpuattn import nn
from gpuattn.arrays import get_xp, to_cpu
from gpuattn.data.batching import PackedLoader
from gpuattn.decode.beam import beam_search
from gpuattn.decode.options import BeamOptions
from gpuattn.engine import Engine, arguments, searches
from gpuattn.engine.beam import TranslationSearch
from gpuattn.engine.inputs import rounded
from gpuattn.models.translation import TranslationConfig, TranslationModel
from gpuattn.ops.sampling.beam_update import best_texts
from gpuattn.runtime.device import batch_to

BOS, EOS, VOCAB = 1, 2, 40
SIZE = {"d_model": 32, "heads": 2, "layers": (1, 2), "ffn": 64, "max_length": 48}


@pytest.fixture(params=[{}, {"kv_heads": 1, "norm": "post"}, {"positions": "rotary"}], ids=str)
def model(xp, request):
    model = TranslationModel(TranslationConfig(vocab=VOCAB, **SIZE, **request.param), seed=3)
    for parameter in model.parameters():
        parameter.data = xp.asarray(parameter.data) * np.float32(2)
    return model.eval()


def options_of(rng):
    beam, limit = int(rng.integers(1, 6)), int(rng.integers(1, 20))
    return limit, {
        "bos": BOS, "eos": EOS, "beam": beam, "nbest": int(rng.integers(1, beam + 1)),
        "length_penalty": float(rng.choice([0, 0.6, 1, 2])), "banned": (0, BOS, 3),
        "length_rule": str(rng.choice(["power", "gnmt"])),
        "min_length": int(rng.integers(0, min(limit, 4))),
    }  # fmt: skip


def wanted(model, sources, limit, options):
    return beam_search(model.stepper(model.pack(sources), limit), max_length=limit, **options)


def check(found, want):
    assert [[h.tokens for h in best] for best in found] == [[h.tokens for h in b] for b in want]
    for best, other in zip(found, want, strict=True):
        assert [h.ended for h in best] == [h.ended for h in other]
        for name in ("score", "normalised"):
            scores = [[getattr(h, name) for h in hypotheses] for hypotheses in (best, other)]
            np.testing.assert_allclose(*scores, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.filterwarnings("ignore::gpuattn.errors.SlowPathWarning")
def test_equals_decode(model, seed):
    rng = np.random.default_rng(seed)
    engine = Engine(model, max_rows=20)
    for _ in range(3):
        limit, options = options_of(rng)
        sources = [rng.integers(4, VOCAB, rng.integers(1, 16)).tolist() for _ in range(7)]
        found = engine.translate(sources, limits=[limit] * 7, **options)
        check(found, wanted(model, sources, limit, options))
        assert all(sentences * beam <= 20 for sentences, beam, *_ in engine._searches.kept)


@pytest.mark.filterwarnings("ignore::gpuattn.errors.SlowPathWarning")
def test_a_step_of_the_search_on_any_device(model):
    """Call the step that a graph captures directly, also on NumPy."""
    rng, limit = np.random.default_rng(0), 12
    sources = [rng.integers(4, VOCAB, n).tolist() for n in (3, 9, 1)]
    options = {"eos": EOS, "beam": 3, "nbest": 2, "banned": (0, BOS, 3), "min_length": 2}
    options["length_penalty"] = 0.6
    search = TranslationSearch(model, 4, 3, limit, 16, options=BeamOptions(**options), bos=BOS)
    for _ in range(2):  # the same search runs two batches
        search.load(sources, [limit] * 3)
        search.encode()
        for _ in range(limit):
            search.step()
        assert int(search.beams.live[0]) == 0
        texts, lengths, scores, _ = map(to_cpu, best_texts(search.beams, 2))
        for b, want in enumerate(wanted(model, sources, limit, options | {"bos": BOS})):
            assert [h.tokens for h in want] == [
                texts[b, n, : lengths[b, n]].tolist() for n in (0, 1)
            ]
            np.testing.assert_allclose([h.score for h in want], scores[b], rtol=1e-4, atol=1e-4)


def test_limits_of_each_sentence(model):
    sources, limits = [[5, 6], [7], [8, 9, 10], [8]], [3, 9, 1, 0]
    options = {"bos": BOS, "eos": EOS, "beam": 2, "banned": (0, BOS, EOS)}
    found = Engine(model).translate(sources, limits=limits, **options)
    assert [len(best[0].tokens) for best in found] == limits
    assert not any(best[0].ended for best in found)


@pytest.mark.parametrize("option, reason", [
    ({}, None), ({"beam": 64}, None), ({"beam": 42, "eos": [2, 5]}, None),
    ({"stopping": "hf", "no_repeat_ngram": 2, "renormalise": True}, None),
    ({"coverage": 0.5}, "coverage is 0.5, the search on the device has none"),
    ({"beam": 65}, "the beam is 65, the search on the device takes at most 64"),
    ({"beam": 43, "eos": [2, 5]}, "2 end marks and a beam of 43 need 129 continuations, the"),
], ids=str)  # fmt: skip
def test_options_that_the_device_lacks(option, reason):
    """They run through gpuattn.decode, and the reason is a sentence."""
    found = arguments.refusal(BeamOptions(**{"eos": EOS, "beam": 3, **option}))
    assert found is None if reason is None else reason in found


@pytest.mark.filterwarnings("ignore::gpuattn.errors.SlowPathWarning")
def test_any_option_equals_decode(model):
    """Sentences with prefixes and limits of their own, an empty source and an empty text."""
    engine, sources, limits = Engine(model), [[], [5, 6, 7], [8, 9]], [4, 0, 7]
    settings = {"stopping": "ct2", "no_repeat_ngram": 2, "eos": [EOS, 5], "nbest": 2, "beam": 3}
    prefix = [[6], [], [7, 7]]
    found = engine.translate(sources, limits=limits, bos=BOS, prefix=prefix, **settings)
    for b, best in enumerate(found):
        stepper = model.stepper(model.pack(sources[b : b + 1]), max(limits))
        given = {"max_length": limits[b], "prefix": prefix[b : b + 1], "bos": BOS}
        check([best], beam_search(stepper, **given, **settings))
        assert best[0].tokens[: len(prefix[b])] == prefix[b]
    assert found[1] == [([], 0.0, 0.0, False)]


@pytest.mark.filterwarnings("ignore::gpuattn.errors.SlowPathWarning")
def test_searches_are_evicted_for_others(model, monkeypatch):
    """Each search needs the whole cache, so the next one replaces it and its graphs."""
    monkeypatch.setattr(searches, "MAX_TOKENS", 1)
    engine, options = Engine(model), {"bos": BOS, "eos": EOS, "banned": (0, BOS, 3)}
    sources = [[5, 6, 7], [8, 9]]
    for beam in (2, 3, 2, 2, 3):
        found = engine.translate(sources, limits=[9, 9], beam=beam, **options)
        check(found, wanted(model, sources, 9, options | {"beam": beam}))
        assert len(engine._searches.kept) <= 1


@pytest.mark.filterwarnings("ignore::gpuattn.errors.SlowPathWarning")
def test_replaced_weights(model):
    """Graphs hold addresses; those of replaced weights must not be read again."""
    engine, options = Engine(model), {"bos": BOS, "eos": EOS, "beam": 2}
    sources = [[5, 6, 7], [8, 9]]
    for _ in range(3):
        engine.translate(sources, limits=[9, 9], **options)
    old = [
        parameter.data for parameter in model.parameters()
    ]  # kept alive, so that new weights get other memory
    for parameter in model.parameters():
        parameter.data = parameter.data * np.float32(-1)
    for _ in range(3):
        found = engine.translate(sources, limits=[9, 9], **options)
        check(found, wanted(model, sources, 9, options))
    assert old


@pytest.mark.parametrize("wrong, said", [
    ({"beam": 0}, "beam is 0"), ({"nbest": 3}, "nbest is 3; accepted: 1 to beam, 2"),
    ({"length_penalty": 11}, "length_penalty"), ({"length_rule": "log"}, "power, gnmt"),
    ({"limits": [49]}, "a limit is 49; accepted: 0 to the model's max_length, 48"),
])  # fmt: skip
def test_settings_out_of_range(model, wrong, said):
    options = {"bos": BOS, "eos": EOS, "beam": 2, "limits": [9]} | wrong
    with pytest.raises(ValueError, match=said):
        Engine(model).translate([[5]], **options)


@pytest.mark.parametrize("given, said", [
    ({"sources": [3]}, "one of sources is 3; accepted: lists of tokens"),
    ({"sources": ["abc"]}, "one of sources is 'abc'"), ({"sources": 3}, "sources is 3"),
    ({"limits": 9}, "limits is 9; accepted: a list"),
    ({"limits": ["9"]}, "a limit is '9'"),
    ({"limits": [9, 9]}, "the number of limits is 2; accepted: 1, one for each of sources"),
    ({"bean": 4}, "a setting is 'bean'; accepted: eos, .* Did you mean 'beam'"),
])  # fmt: skip
def test_wrong_arguments(model, given, said):
    options = {"sources": [[5]], "limits": [9], "bos": BOS, "eos": EOS} | given
    with pytest.raises((TypeError, ValueError), match=said):
        Engine(model).translate(options.pop("sources"), **options)


def test_wrong_models(model):
    with pytest.raises(TypeError, match="model is a Linear; accepted: a translator or a language"):
        Engine(nn.Linear(3, 4))
    with pytest.raises(TypeError, match="generate: the model is .* Translators have translate"):
        Engine(model).generate([[5]], limits=[9])
    with pytest.raises(TypeError, match="eos is missing"):
        Engine(model).translate([[5]], limits=[9], bos=BOS)


def test_no_sources(model):
    assert Engine(model).translate([], limits=[], bos=BOS, eos=EOS) == []


@pytest.mark.parametrize(("count", "most", "least", "expected"), [
    (1, 256, 16, 16), (17, 256, 16, 32), (60, 48, 16, 60), (300, 512, 1, 320), (3, 409, 1, 4),
    (409, 409, 1, 409), (1, 0, 1, 1),
])  # fmt: skip
def test_sizes_are_rounded_up_to_the_limit(count, most, least, expected):
    """As for ``max_rows``: 409 sentences of five beams are 2,045 rows, not the 2,240 of 448."""
    assert rounded(count, most, least) == expected


@pytest.mark.filterwarnings("ignore::gpuattn.errors.SlowPathWarning")
def test_scores_are_those_of_the_search_and_of_training(model):
    rng, engine = np.random.default_rng(1), Engine(model)
    sources = [rng.integers(4, VOCAB, n).tolist() for n in (3, 12, 1, 7, 12)]
    options = {"bos": BOS, "eos": EOS, "beam": 4, "nbest": 3, "banned": (0, BOS, 3)}
    found = engine.translate(sources, limits=[20] * 5, **options)
    chosen = [(s, h) for s, best in zip(sources, found, strict=True) for h in best]
    pairs = [(source, hypothesis.tokens) for source, hypothesis in chosen]
    for batch_tokens in (1, 20, 4096):
        scores = engine.score(pairs, batch_tokens=batch_tokens)
        assert [len(score) for score in scores] == [len(target) + 1 for _, target in pairs]
        ends = [len(h.tokens) + h.ended for _, h in chosen]  # a text that was cut has no end mark
        sums = [score[:end].sum() for score, end in zip(scores, ends, strict=True)]
        np.testing.assert_allclose(sums, [h.score for _, h in chosen], rtol=1e-5, atol=1e-4)
    (batch,) = PackedLoader(pairs, 4096, seed=0).epoch(0)
    with model.evaluating():
        loss = model.loss(batch_to(batch, get_xp(model.parameters()[0].data)), label_smoothing=0.0)
    assert -np.concatenate(scores).sum() / batch.target_tokens == pytest.approx(
        loss.item(), rel=1e-5
    )
    assert engine.score([]) == []
    with pytest.raises(ValueError, match="the target is 49 tokens; accepted: up to max_length, 48"):
        engine.score([([4], [5] * 48)])


@pytest.mark.filterwarnings("ignore::gpuattn.errors.SlowPathWarning")
def test_slots_are_refilled_on_any_device(model):
    """What translate does on a GPU, also on NumPy: 30 sources in few slots, longest first."""
    rng, engine = np.random.default_rng(2), Engine(model, max_rows=10)
    engine.on_gpu = True
    sources = [rng.integers(4, VOCAB, rng.integers(0, 16)).tolist() for _ in range(30)]
    limits = rng.integers(0, 12, 30).tolist()
    options = {"bos": BOS, "eos": EOS, "beam": 2, "banned": (0, BOS, 3)}
    groups = list(engine.translations(sources, limits=limits, **options))
    assert sorted(i for chosen, _ in groups for i in chosen) == list(range(30))
    assert len(groups) > 3 and [key[:2] for key in engine._searches.kept] == [(5, 2)]
    found = engine.translate(sources, limits=limits, **options)
    for i in range(30):
        stepper = model.stepper(model.pack([sources[i]]), max(1, limits[i]))
        want = beam_search(stepper, max_length=[limits[i]], **options)
        check([found[i]], want)
    some = engine.translations(sources, limits=limits, **options)
    next(some), next(some)
    check(engine.translate(sources[:3], limits=[9] * 3, **options), engine.translate(
        sources[:3], limits=[9] * 3, **options))  # fmt: skip
    some.close()
    assert not engine._searches.used and len(engine._searches.kept) <= 2
    again = engine.translate(sources, limits=limits, **options)
    assert [[h.tokens for h in best] for best in again] == [
        [h.tokens for h in best] for best in found
    ]


@pytest.mark.filterwarnings("ignore::gpuattn.errors.SlowPathWarning")
def test_every_result_has_lists_of_its_own(model):
    sources, limits = [[5], [6, 7], [5], []], [0, 3, 0, 0]
    options, lists = {"bos": BOS, "eos": EOS, "beam": 2}, []
    with Engine(model) as engine:
        for on_gpu in (engine.on_gpu, True):
            engine.on_gpu = on_gpu
            found = engine.translate(sources, limits=limits, **options)
            handles = [engine.submit([5], limit=0, **options) for _ in range(2)]
            found += [handle.result() for handle in handles]
            lists += [*found, *(text.tokens for best in found for text in best)]
    assert len({id(one) for one in lists}) == len(lists)
