"""All settings of a search, on the device's path, compared with gpuattn.decode.

The logits come from a hash of sentence and tokens, so that hundreds of settings take seconds.
"""

from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest
from decode import test_parity as parity
from decode.fakes import BOS, Fake, random_model
from decode.hashed import bigram_logits, extended, logits_of

from gpuattn.arrays import to_cpu
from gpuattn.decode.beam import beam_search
from gpuattn.decode.options import STOPPING, BeamOptions, SampleOptions
from gpuattn.decode.sample import sample
from gpuattn.decode.stepper import hypotheses_of
from gpuattn.engine.beam import TranslationSearch
from gpuattn.engine.generation import DRAWS, RULES, Generation
from gpuattn.ops.sampling.beam_update import best_texts
from gpuattn.rng import Key

NAN, INF = np.nan, np.inf


def without_weights(xp, vocab):
    """Return what a search needs of a model, but for its logits."""
    config = SimpleNamespace(vocab=vocab, heads=1, kv_heads=None, d_model=4, block=64)
    weight = SimpleNamespace(data=xp.zeros(1, np.float32))
    return SimpleNamespace(config=config, parameters=lambda: [weight], decoder=[None], layers=[])


def texts_of(state, lengths):
    """Return the tokens of each beam, as lists of tuples without the first token."""
    history, slots, lengths = (to_cpu(x) for x in (state.history, state.slots, lengths))
    sentences, beam, _ = slots.shape
    tokens = history[..., 0] if history.ndim == 4 else history[:, :, None]
    return [
        tuple(int(tokens[b, j - 1, slots[b, i, j]]) for j in range(1, int(lengths[b, i]) + 1))
        for b in range(sentences) for i in range(beam)
    ]  # fmt: skip


def searched(xp, logits_of, vocab, limits, options, prefix=None, bos=BOS):
    """Return the Hypotheses that the search of the device finds, step by step.

    ``bos``: a token, or one for each sentence.
    """
    sentences, beam = len(limits) + 1, options.beam  # one sentence has no source
    room = max(map(len, prefix)) if prefix else 0
    model = without_weights(xp, vocab)
    search = TranslationSearch(
        model, sentences, beam, max(limits) + 2, 4, options=options, bos=BOS, prefix_room=room
    )
    table = np.full((len(limits), room), -1, np.int32)
    for row, tokens in zip(table, prefix or (), strict=False):
        row[: len(tokens)] = tokens
    search.rules.prefix[: len(limits)] = xp.asarray(table)
    beams = search.beams
    first = np.full(sentences, BOS, np.int32)
    first[: len(limits)] = bos
    search.rules.first[...] = xp.asarray(first)
    beams.start(first, xp.asarray([*limits, 0], np.int32))
    for step in range(max(limits)):
        texts = texts_of(beams, beams.positions)
        logits = np.array([logits_of(r // beam, text) for r, text in enumerate(texts)], np.float32)
        search.take(xp.asarray(logits))
        if step % 3 == 2 and int(beams.live[0]) == 0:
            break
    assert int(beams.live[0]) == 0 and bool(beams.done.all())
    texts = map(to_cpu, best_texts(beams, options.nbest))
    return hypotheses_of(*texts, limits)


def some_options(rng, vocab):
    """Return (BeamOptions, limits, prefixes or None)."""
    beam = int(rng.integers(1, 6))
    stopping = str(rng.choice(STOPPING))
    ends = rng.choice(np.arange(1, vocab), rng.choice([0, 1, 1, 2, 3]), replace=False).tolist()
    free = [token for token in range(1, vocab) if token not in ends]
    limits = rng.integers(0, 9, 3).tolist()
    limits[0] = max(limits[0], 1)
    options = BeamOptions(
        beam=beam, stopping=stopping, eos=ends, nbest=int(rng.integers(1, beam + 1)),
        patience=1.0 if stopping in ("hf", "hf-never") else float(rng.choice([1, 1.5, 2])),
        length_penalty=float(rng.choice([0, 0.6, 1, 2, -1])), end_counts=bool(rng.integers(2)),
        length_rule=str(rng.choice(["power", "gnmt"])), renormalise=bool(rng.integers(2)),
        no_repeat_ngram=int(rng.choice([0, 0, 1, 2, 3])), min_length=int(rng.choice([0, 0, 2])),
        repetition_penalty=float(rng.choice([1, 1, 1.3, 0.7])),
        banned=rng.choice(free, rng.integers(0, len(free)), replace=False).tolist(),
    )  # fmt: skip
    prefix = None
    if rng.integers(2):
        lengths = [int(rng.integers(0, min(limit, 3) + 1)) for limit in limits]
        prefix = [rng.choice(free, length).tolist() for length in lengths]
    return options, limits, prefix


def wanted(xp, logits_of, limits, options, prefix=None):
    settings = asdict(options)
    stepper = Fake(xp, len(limits), logits_of)
    return beam_search(stepper, bos=BOS, max_length=limits, prefix=prefix, **settings)


def check(found, want, limits):
    for one, other, limit in zip(found, want, limits, strict=True):
        if limit == 0:
            continue
        assert [h.tokens for h in one] == [h.tokens for h in other]
        assert [h.ended for h in one] == [h.ended for h in other]
        for name in ("score", "normalised"):
            scores = [[getattr(h, name) for h in texts] for texts in (one, other)]
            np.testing.assert_allclose(*scores, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(10))
def test_any_options_equal_decode(xp, seed):
    for number in range(20):
        rng = np.random.default_rng([seed, number])
        vocab = int(rng.integers(5, 12))
        options, limits, prefix = some_options(rng, vocab)
        model = random_model(seed, vocab)
        found = searched(xp, model, vocab, limits, options, prefix)
        check(found, wanted(xp, model, limits, options, prefix), limits)


def hashed(begin, vocab, ends):
    """Return the logits of ``decode.hashed`` by (sentence, text), for texts begun by ``begin``."""

    def model(sentence, text):
        state = np.zeros(1, np.uint64)
        for token in (begin[min(sentence, len(begin) - 1)], *text):
            state = extended(state, np.array([token]))
        return logits_of(state, vocab, ends, len(text))[0]

    return model


@pytest.mark.parametrize("beam", [2, 4, 5, 8])
def test_equals_hugging_face(xp, beam):
    """The texts of transformers' beam searches, by the search of the device."""
    near = compared = 0
    for case in parity.HF["cases"]:
        settings = {"eos": [parity.HF["eos"]], **case["settings"]}
        if settings["beam"] != beam:
            continue
        prefix, bos, ends = settings.pop("prefix", None), parity.HF["bos"], tuple(settings["eos"])
        vocab, limits = parity.HF["vocab"], [parity.HF["max_length"]] * len(bos)
        model, options = hashed(bos, vocab, ends), BeamOptions(**settings)
        found = searched(xp, model, vocab, limits, options, prefix, bos)
        if prefix:
            begin = {"bos": np.array(bos), "max_length": limits[0]}
            found = parity.without(prefix, found, parity.Hashed(ends), begin)
        for texts, want in zip(found, case["texts"], strict=True):
            near, compared = near + parity.near_ties(texts, want), compared + len(want)
    assert compared >= 24 and near <= 1


@pytest.mark.parametrize("beam", [2, 4, 5, 8])
def test_equals_ctranslate2(xp, beam):
    """The texts of CTranslate2's beam searches, by the search of the device."""
    golden, near, compared = parity.CT2, 0, 0
    table = bigram_logits(golden["vocab"])
    for case in golden["cases"]:
        if case["settings"]["beam"] != beam:
            continue
        rules = {"stopping": "ct2", "renormalise": True, "eos": golden["eos"]}
        options, limits = BeamOptions(**rules, **case["settings"]), [golden["max_length"]] * 6

        def model(sentence, text):
            first = golden["bos"][min(sentence, 5)]
            row = table[[first, *text][-1]].copy()
            row[golden["eos"]] += np.float32(golden["ramp"]) * np.float32(len(text))
            return row

        found = searched(xp, model, golden["vocab"], limits, options, bos=golden["bos"])
        for texts, want in zip(found, case["texts"], strict=True):
            near, compared = near + parity.near_ties(texts, want), compared + len(want)
    assert compared >= 60 and near <= 1


def generated(xp, logits_of, vocab, limits, options, key):
    model, sentences = without_weights(xp, vocab), len(limits)
    draws, rules = ({n: getattr(options, n) for n in names} for names in (DRAWS, RULES))
    generation = Generation(model, sentences, 16, draws=draws, rules=rules, banned=options.banned)
    generation.load([[BOS]] * sentences, limits, range(sentences), [key] * sentences)
    generation.begin()
    for _ in range(max(limits)):
        texts = texts_of(generation.texts, generation.texts.lengths[:, None])
        logits = np.array([logits_of(b, text) for b, text in enumerate(texts)], np.float32)
        generation.take(xp.asarray(logits))
    assert int(generation.texts.live[0]) == 0
    read = [to_cpu(x) for x in generation.results()]
    return [text for (text,) in generation.hypotheses(read, range(sentences))]


@pytest.mark.parametrize("seed", range(5))
def test_any_samples_equal_decode(xp, seed):
    for number in range(20):
        rng, key = np.random.default_rng([seed, number]), Key(seed, 1, number)
        vocab = int(rng.integers(5, 12))
        drawn, limits, _ = some_options(rng, vocab)
        settings = {name: getattr(drawn, name) for name in (*RULES, "banned")}
        settings["top_k"] = [None, 1, 4][rng.integers(3)]
        settings["temperature"] = float(rng.choice([0.5, 2]))
        model = random_model(seed, vocab)
        found = generated(xp, model, vocab, limits, SampleOptions(**settings), key)
        stepper = Fake(xp, len(limits), model)
        want = sample(stepper, bos=BOS, max_length=limits, seed=key, **settings)
        check([[h] for h in found], [[h] for h in want], [1] * len(limits))
        assert [h.tokens for h in found] == [h.tokens for h in want]


# ---- faults -------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("wrong", [NAN, INF, -INF])
@pytest.mark.parametrize("more", [
    {}, {"renormalise": True, "no_repeat_ngram": 2, "repetition_penalty": 1.2},
    {"no_repeat_ngram": 2, "repetition_penalty": 1.2, "stopping": "hf"}, {"prefix": [[3], [4], []]},
], ids=str)  # fmt: skip
def test_numbers_that_are_none_harm_their_sentence_alone(xp, more, wrong):
    """A sentence with NaN, inf or nothing but -inf ends; the others keep all their bits."""
    model, limits = random_model(0, 9), [6, 6, 6]
    settings = {"beam": 3, "nbest": 2, "eos": 1} | more
    prefix = settings.pop("prefix", None)
    options = BeamOptions(**settings)

    def broken(sentence, text):
        row = model(sentence, text)
        return np.full(9, wrong) if sentence == 1 and len(text) >= 2 else row

    found, whole = (searched(xp, m, 9, limits, options, prefix) for m in (broken, model))
    assert [found[0], found[2]] == [whole[0], whole[2]]
    if wrong == -INF:
        assert all(h.ended and len(h.tokens) < 2 for h in found[1])
    else:
        assert np.isnan(found[1][0].score)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("wrong", [NAN, INF, -INF])
@pytest.mark.parametrize("more", [{}, {"no_repeat_ngram": 2, "repetition_penalty": 1.2}], ids=str)
def test_numbers_that_are_none_harm_their_text_alone(xp, more, wrong):
    model, limits, key = random_model(0, 9), [6, 6, 6], Key(4)
    options = SampleOptions(eos=None, **more)

    def broken(sentence, text):
        return np.full(9, wrong) if sentence == 1 and len(text) == 2 else model(sentence, text)

    found, whole = (generated(xp, m, 9, limits, options, key) for m in (broken, model))
    assert [found[0], found[2]] == [whole[0], whole[2]]
    assert found[1].tokens[:2] == whole[1].tokens[:2]
    if wrong == -INF:
        assert found[1].score == -INF and len(found[1].tokens) == 2 and not found[1].ended
    else:
        assert np.isnan(found[1].score)


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("stopping", STOPPING)
def test_all_tokens_banned(xp, stopping, renormalise):
    options = BeamOptions(
        beam=3, nbest=3, eos=1, banned=range(7), stopping=stopping, renormalise=renormalise
    )
    model = random_model(0, 7)
    assert searched(xp, model, 7, [4, 4], options) == [[], []]
    sampled = generated(xp, model, 7, [4, 4], SampleOptions(eos=1, banned=range(7)), Key(0))
    assert sampled == [([], -INF, -INF, False)] * 2


@pytest.mark.parametrize("stopping", STOPPING)
def test_no_token_is_left(xp, stopping):
    """After all tokens but one have come once, texts end or there is none."""
    options = BeamOptions(beam=2, nbest=2, eos=None, no_repeat_ngram=1, stopping=stopping)
    model = random_model(1, 4)
    found = searched(xp, model, 4, [3, 6], options)
    check(found, wanted(xp, model, [3, 6], options), [3, 6])
    assert len(found[0]) == 2 and found[1] == []


@pytest.mark.parametrize("ends", [1, [1], [1, 2], None])
def test_more_beams_than_tokens(xp, ends):
    options, model = BeamOptions(beam=7, nbest=7, eos=ends), random_model(2, 3)
    check(searched(xp, model, 3, [4], options), wanted(xp, model, [4], options), [4])


def test_more_texts_than_beams():
    with pytest.raises(ValueError, match="nbest is 4; accepted: 1 to beam, 3"):
        BeamOptions(beam=3, nbest=4, eos=1)
