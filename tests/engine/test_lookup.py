"""Speculation changes how many tokens a pass takes, and nothing else."""

import numpy as np
import pytest
from fake_runs import Array, training_on

import gpuattn
from gpuattn.arrays import BFLOAT16
from gpuattn.engine import Engine, Speculation, lookup
from gpuattn.errors import ConfigError
from gpuattn.gemm import tuning
from gpuattn.models.gpt2 import GPT2, GPT2Config
from gpuattn.models.llama import Llama, LlamaConfig

EOS, VOCAB, BLOCK = 2, 40, 96
pytestmark = pytest.mark.filterwarnings("ignore::gpuattn.errors.SlowPathWarning")


def on(xp, model, scale=6):
    for parameter in model.parameters():
        parameter.data = xp.asarray(parameter.data) * np.float32(scale)
    return model.eval()


def learned(xp, **more):
    size = {"d_model": 32, "heads": 2, "layers": 2, "block": BLOCK} | more
    model = on(xp, GPT2(GPT2Config(vocab=VOCAB, **size), seed=3))
    model.embedding.position_weight.data *= np.float32(0.05)  # then its texts repeat themselves
    return model


def rotary(xp):
    size = {"d_model": 32, "heads": 4, "kv_heads": 2, "layers": 2, "ffn": 48, "block": BLOCK}
    return on(xp, Llama(LlamaConfig(vocab=VOCAB, **size), seed=3))


def prompts_of(rng, count):
    """Prompts, of which some repeat themselves and some have one token."""
    found = [rng.integers(3, VOCAB, rng.integers(1, 20)).tolist() for _ in range(count)]
    return [prompt * (1 + i % 3) for i, prompt in enumerate(found)]


def check(found, want):
    assert [(h.tokens, h.ended) for h in found] == [(h.tokens, h.ended) for h in want]
    for name in ("score", "normalised"):
        scores = [[getattr(h, name) for h in texts] for texts in (found, want)]
        np.testing.assert_allclose(*scores, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("kind, tokens, least", [
    (learned, 1, 1), (learned, 15, 1), (learned, 7, 0), (rotary, 4, 0),
])  # fmt: skip
def test_texts_are_those_of_single_steps(xp, kind, tokens, least, monkeypatch):
    """``least`` 0: it is never given up."""
    monkeypatch.setattr(lookup, "LEAST_ACCEPTED", least)
    rng, engine = np.random.default_rng(tokens), Engine(kind(xp))
    prompts = prompts_of(rng, 10)
    limits = [0, 1, *rng.integers(2, 25, 7).tolist(), BLOCK + 1 - len(prompts[-1])]
    for settings in ({"eos": EOS}, {"eos": [EOS, 5, 9], "banned": [0, 1, 7]}):
        given = {"limits": limits, "temperature": 0} | settings
        told: dict[int, list[int]] = {}
        speculation = Speculation(tokens)
        found = engine.generate(
            prompts, speculate=speculation, **given,
            tell=lambda i, new, told=told: told.setdefault(i, []).extend(new),
        )  # fmt: skip
        check(found, engine.generate(prompts, **given))
        assert [told.get(i, []) for i in range(10)] == [text.tokens for text in found]
        assert 0 < speculation.accepted <= speculation.proposed
        assert speculation.acceptance == speculation.accepted / speculation.proposed


def test_a_text_that_repeats_itself_takes_few_passes(xp):
    engine, speculation = Engine(learned(xp)), Speculation(7)
    (begin,) = engine.generate([[5, 6]], limits=[30], temperature=0)
    given = {"limits": [60], "temperature": 0}
    found = engine.generate([[5, 6, *begin.tokens]], speculate=speculation, **given)
    check(found, engine.generate([[5, 6, *begin.tokens]], **given))
    assert speculation.passes < 20 and speculation.acceptance > 0.5 and not speculation.given_up


def test_it_is_given_up_where_nothing_repeats(monkeypatch):
    """Wrong proposals cost a few passes; the rest of the text comes from single steps."""
    monkeypatch.setattr(lookup.Lookup, "proposal", lambda self, most: [3] * most)
    engine, speculation = Engine(learned(np)), Speculation(4)
    prompts = [[5, 6, i] for i in range(20)]
    given = {"limits": [40] * 20, "temperature": 0, "banned": [3]}
    check(engine.generate(prompts, speculate=speculation, **given),
          engine.generate(prompts, **given))  # fmt: skip
    assert speculation.given_up == 1 and speculation.passes == lookup.WINDOW
    assert speculation.accepted == 0 and speculation.acceptance == 0


def test_proposals():
    """As found by a search through the whole text."""
    rng = np.random.default_rng(0)
    for length in range(40):
        text = rng.integers(0, 3, length).tolist()
        want: list[int] = []
        for n in lookup.NGRAMS:
            places = [i for i in range(n, length) if text[i - n : i] == text[length - n :]]
            if places:
                longer = [*text]
                for _ in range(6):
                    longer.append(longer[places[-1] + len(longer) - length])
                want = longer[length:]
                break
        assert lookup.Lookup(text).proposal(6) == want
        assert lookup.Lookup(text).proposal(0) == []


def test_a_nan_harms_no_other():
    model = learned(np, tied=False)
    prompts, given = [[5, 6, 7] * 3, [8, 9], [13, 5]], {"limits": [30] * 3, "temperature": 0}
    engine = Engine(model)
    want = engine.generate(prompts[:2], limits=[30] * 2, temperature=0, banned=[13])
    model.embedding.weight.data[13] = np.nan
    *found, bad = engine.generate(prompts, banned=[13], speculate=Speculation(4), **given)
    check(found, want)
    assert np.isnan(bad.score) and len(bad.tokens) == 30


def test_dead_ends_and_no_prompts(xp):
    engine, given = Engine(learned(xp)), {"temperature": 0, "speculate": Speculation()}
    assert engine.generate([], limits=[], **given) == []
    (text,) = engine.generate([[5]], limits=[4], banned=range(VOCAB), **given)
    assert text == ([], -np.inf, -np.inf, False)


@pytest.mark.parametrize("wrong, said", [
    ({"temperature": 0.5}, "temperature is 0.5; accepted: 0 with speculate"),
    ({"min_length": 2}, "min_length is 2; accepted: 0 with"),
    ({"no_repeat_ngram": 3}, "no_repeat_ngram is 3; accepted: 0 with"),
    ({"repetition_penalty": 1.5}, "repetition_penalty is 1.5; accepted: 1 with"),
    ({"limits": [BLOCK + 1]}, "a prompt is 2 tokens, with a limit of 97"),
])  # fmt: skip
def test_settings_out_of_range(wrong, said):
    given = {"limits": [5], "temperature": 0, "speculate": Speculation(4)} | wrong
    with pytest.raises(ValueError, match=said):
        Engine(learned(np)).generate([[5, 6]], **given)


def test_it_depends_on_the_batch():
    engine = Engine(learned(np), batch_invariant=True)
    with pytest.raises(ConfigError, match="batch_invariant is True; accepted: False with"):
        engine.generate([[5]], limits=[5], temperature=0, speculate=Speculation(4))


@pytest.mark.parametrize("tokens, error", [(0, ValueError), (16, ValueError), ("4", TypeError)])
def test_tokens_out_of_range(tokens, error):
    with pytest.raises(error, match="tokens is .*; accepted: 1 to 15"):
        gpuattn.Speculation(tokens)


def test_passes_on_a_gpu(monkeypatch):
    """On a fake Hopper, with token 0 chosen everywhere: graphs of two widths, and of prompts."""
    monkeypatch.setattr(lookup.LookupSearch, "found", lambda self: [
        np.zeros((self.texts, self.width), dtype) for dtype in (np.int32, np.float32)
    ])  # fmt: skip
    monkeypatch.setattr(tuning, "FLUSH_BYTES", 1)
    with training_on("9.0") as run:
        model = GPT2(GPT2Config(vocab=64, d_model=64, heads=2, layers=1, block=BLOCK)).eval()
        for parameter in model.parameters():
            parameter.data = parameter.data.astype(BFLOAT16).view(Array)
        engine = Engine(model)
        for prompts in ([[5, 6] * 8, [7]], [[5, 6, 7]]):
            engine.generate(
                prompts, limits=[20] * len(prompts), temperature=0, speculate=Speculation(3)
            )
        names = {launch.name for launch in run.launches}
        assert {"append_kv", "decode_attention"} <= names
        assert any(name.startswith("sample_tokens") for name in names)
        shapes = {(name, *shape[1:]) for name, shape in engine._searches.run.graphs}
        assert len(engine._searches.kept) >= 2 and ("step", 4) in shapes
