"""Steppers: results do not depend on the cache, and steps equal a pass over the whole text."""

import numpy as np
import pytest

from gpuattn.data.batching import PackedLoader
from gpuattn.data.tokenizer import BOS, EOS
from gpuattn.decode.beam import beam_search
from gpuattn.decode.greedy import greedy
from gpuattn.models.gpt2 import GPT2, GPT2Config
from gpuattn.models.translation import TranslationConfig, TranslationModel
from gpuattn.nn import attention

SOURCES = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14]]
PROMPT = np.array([[5, 6, 7], [8, 9, 10]], np.int32)


def translator(norm="pre", positions="sinusoidal", **options):
    config = TranslationConfig(
        vocab=20, d_model=16, heads=4, layers=(2, 2), ffn=24, dropout=0.2, norm=norm,
        positions=positions, max_length=12, **options,
    )  # fmt: skip
    return TranslationModel(config, seed=3)


OPTIONS = {"kv_heads": 2, "positions": "rotary", "activation": "swiglu", "pad_vocab": False}


def language_model(**options):
    sizes = {"vocab": 20, "d_model": 16, "heads": 4, "layers": 2, "block": 12, "dropout": 0.2}
    model = GPT2(GPT2Config(**sizes, **options), seed=3)
    for p in model.parameters():  # large weights, as after training, so that earlier tokens matter
        p.data = p.data * 10
    return model


def make(kind, beam, kv_cache):
    name, _, options = kind.partition("-")
    options = OPTIONS if options else {}
    if name == "gpt2":
        return language_model(**options).stepper(PROMPT, 6, beam, kv_cache)
    model = translator(name, **options)
    return model.stepper(model.pack(SOURCES), 6, beam, kv_cache)


@pytest.mark.parametrize("slots", [False, True])
@pytest.mark.parametrize("kind", ["pre", "post", "gpt2", "post-options", "gpt2-options"])
@pytest.mark.parametrize("beam", [1, 3])
def test_cache_equals_recomputation_also_when_beams_move(kind, beam, rng, slots, monkeypatch):
    if slots:  # as on a GPU
        monkeypatch.setattr(attention, "on_gpu", lambda x: True)
    cached, whole = make(kind, beam, True), make(kind, beam, False)
    sentences = cached.sentences
    tokens = np.full(sentences * beam, BOS, np.int32)
    for position in range(6):
        logits = cached.step(tokens, position)
        assert logits.shape == (sentences * beam, 20)
        np.testing.assert_allclose(logits, whole.step(tokens, position), atol=1e-4)
        if position in (2, 4) and not slots and sentences > 1:  # the others leave
            kept = np.arange(1, sentences)
            assert cached.keep(kept) and whole.keep(kept)
            sentences -= 1
        first = np.arange(sentences).repeat(beam) * beam
        parents = (first + rng.integers(0, beam, sentences * beam)).astype(np.int32)
        cached.reorder(parents)
        whole.reorder(parents)
        tokens = rng.integers(0, 20, sentences * beam).astype(np.int32)


@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "rotary"])
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_stepping_greedily_equals_teacher_forcing(norm, positions):
    model = translator(norm, positions)
    stepper = model.stepper(model.pack(SOURCES), 8)
    tokens, chosen = np.full(3, BOS, np.int32), []
    for position in range(8):
        tokens = stepper.step(tokens, position).argmax(-1).astype(np.int32)
        chosen.append(tokens)
    targets = np.stack(chosen, axis=1)
    pairs = [(s, t[:-1]) for s, t in zip(SOURCES, targets.tolist(), strict=True)]
    (batch,) = PackedLoader(pairs, 100, seed=0).epoch(0)
    with model.evaluating():
        x = model.target(batch.target_in, batch.target_positions)
        packing = {"cu_seqlens": batch.cu_target, "max_seqlen": batch.max_target}
        packing |= {"cu_memory": batch.cu_source, "max_memory": batch.max_source}
        logits = model.output(model.decode(x, memory=model.encode(batch), **packing)).data
    forced = logits[:, :20].argmax(-1).reshape(3, 8)
    np.testing.assert_array_equal(forced, targets[batch.sentences])


@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["plain", "options"])
def test_gpt2_stepping_equals_the_whole_text(options):
    model = language_model(**options)
    stepper = model.stepper(PROMPT, 6)
    text, tokens = PROMPT, stepper.first_tokens
    for position in range(6):
        logits = stepper.step(tokens, position)
        with model.evaluating():
            whole = model.logits(text).data[:, -1, :20]
        np.testing.assert_allclose(logits, whole, atol=1e-4)
        tokens = logits.argmax(-1).astype(np.int32)
        text = np.concatenate([text, tokens[:, None]], axis=1)


def test_beam_search_finds_the_same_with_and_without_cache():
    model, found = translator(), []
    for kv_cache in (True, False):
        stepper = model.stepper(model.pack(SOURCES), 7, kv_cache=kv_cache)
        found.append(beam_search(stepper, bos=BOS, eos=EOS, max_length=7, beam=4, nbest=3))
    for one, other in zip(*found, strict=True):
        assert [h.tokens for h in one] == [h.tokens for h in other]
        np.testing.assert_allclose([h.score for h in one], [h.score for h in other], rtol=1e-5)


def test_no_sentences_give_no_translations():
    model = translator()
    assert greedy(model.stepper(model.pack([]), 7), bos=BOS, eos=EOS, max_length=7) == []


def test_gpt2_continues_each_prompt():
    stepper = language_model().stepper(PROMPT, 5)
    together = greedy(stepper, bos=stepper.first_tokens, eos=None, max_length=5)
    alone = language_model().stepper(PROMPT[1:], 5)
    (single,) = greedy(alone, bos=alone.first_tokens, eos=None, max_length=5)
    assert single.tokens == together[1].tokens and len(single.tokens) == 5


def test_a_sentence_alone_equals_itself_in_a_batch():
    model = translator()
    together = model.stepper(model.pack(SOURCES), 4)
    alone = model.stepper(model.pack(SOURCES[1:2]), 4)
    for position, token in enumerate((BOS, 7, 9)):
        a = together.step(np.full(3, token, np.int32), position)[1]
        np.testing.assert_allclose(
            a, alone.step(np.full(1, token, np.int32), position)[0], atol=1e-5
        )


@pytest.mark.parametrize("kind", ["pre", "gpt2"])
@pytest.mark.parametrize("kv_cache", [True, False])
def test_start_resets_the_cache(kind, kv_cache):
    stepper, fresh = make(kind, 1, kv_cache), make(kind, 2, kv_cache)
    tokens = np.full(stepper.sentences, BOS, np.int32)
    stepper.step(tokens, 0)
    stepper.step(tokens, 1)
    stepper.start(2)
    again, want = (one.step(tokens.repeat(2), 0) for one in (stepper, fresh))
    # matrix products of the same shapes: the difference is rounding of the largest logit at most
    np.testing.assert_allclose(again, want, rtol=0, atol=8 * np.spacing(abs(want).max()))


def test_stepping_keeps_training_mode_and_records_nothing():
    model = translator()
    stepper = model.stepper(model.pack(SOURCES), 4)
    logits = stepper.step(np.full(3, BOS, np.int32), 0)
    assert model.training and isinstance(logits, np.ndarray)


def test_steps_must_be_in_order():
    stepper = make("pre", 1, True)
    with pytest.raises(ValueError, match="the next one, 0"):
        stepper.step(np.full(3, BOS, np.int32), 1)


def test_lengths_beyond_the_model_are_refused():
    model = translator()
    with pytest.raises(ValueError, match="max_length, 12"):
        model.stepper(model.pack(SOURCES), 13)
    with pytest.raises(ValueError, match="block"):
        language_model().stepper(PROMPT, 11)
    language_model().stepper(PROMPT, 10)
    with pytest.raises(ValueError, match="P >= 1"):
        language_model().stepper(PROMPT[:, :0], 4)


@pytest.mark.parametrize("kind", ["pre", "gpt2", "pre-options", "gpt2-options"])
def test_runs_on_both_backends(xp, kind):
    want = make(kind, 2, True)
    tokens = np.full(want.sentences * 2, BOS, np.int32)
    model = want.model
    expected = [want.step(tokens, 0), want.step(tokens, 1)]
    for p in model.parameters():
        p.data = xp.asarray(p.data)
    sources = xp.asarray(PROMPT) if kind.startswith("gpt2") else model.pack(SOURCES)
    stepper = model.stepper(sources, 6, 2)
    for position, logits in enumerate(expected):
        got = stepper.step(xp.asarray(tokens), position)
        assert isinstance(got, xp.ndarray)
        np.testing.assert_allclose(getattr(got, "get", lambda g=got: g)(), logits, atol=1e-3)
        stepper.reorder(xp.arange(len(tokens), dtype=np.int32))
