"""With ``batch_invariant`` a text is the same bits in any company, order and slot."""

import numpy as np
import pytest
from fake_runs import Array, training_on

from gpuattn.arrays import BFLOAT16
from gpuattn.engine import Engine, beam, generation, plans
from gpuattn.engine.engine import _no_text
from gpuattn.engine.inputs import portions
from gpuattn.gemm import cublaslt
from gpuattn.gemm.matmul import BLOCK_ROWS, matmul
from gpuattn.models.gpt2 import GPT2, GPT2Config
from gpuattn.models.llama import Llama, LlamaConfig
from gpuattn.models.translation import TranslationConfig, TranslationModel
from gpuattn.modes import with_mode

BOS, EOS, VOCAB, ROOM = 1, 2, 57, 96  # odd sizes: BLAS has other kernels for their edges
SETTINGS = {"bos": BOS, "eos": EOS, "banned": (0, BOS, 3)}
WAIT = 60  # seconds, where a fault would wait for ever
pytestmark = pytest.mark.filterwarnings("ignore::gpuattn.errors.SlowPathWarning")


def on(xp, model):
    for parameter in model.parameters():
        parameter.data = xp.asarray(parameter.data) * np.float32(4)
    return model.eval()


def translation_model(xp, **more):
    size = {"d_model": 36, "heads": 2, "layers": (1, 2), "ffn": 50, "max_length": ROOM} | more
    return on(xp, TranslationModel(TranslationConfig(vocab=VOCAB, pad_vocab=False, **size), seed=3))


def language_model(xp):
    size = {"d_model": 36, "heads": 2, "layers": 2, "block": ROOM, "pad_vocab": False}
    return on(xp, GPT2(GPT2Config(vocab=VOCAB, **size), seed=3))


def grouped_model(xp):
    size = {"d_model": 32, "heads": 4, "kv_heads": 2, "layers": 2, "ffn": 50, "block": ROOM}
    return on(xp, Llama(LlamaConfig(vocab=VOCAB, **size), seed=3))


def sources_of(rng, count):
    """Sources, limits and prefixes of which some are long, some empty."""
    sizes = [*rng.integers(0, 20, count - 2).tolist(), 0, 70]
    sources = [rng.integers(4, VOCAB, n).tolist() for n in sizes]
    limits = [*rng.integers(0, 15, count - 2).tolist(), 9, 20]
    prefixes = [rng.integers(4, VOCAB, min(limit, i % 4 % 3)).tolist() for i, limit in
                enumerate(limits)]  # fmt: skip
    return list(zip(sources, limits, prefixes, strict=True))


def translated(engine, chosen, **settings):
    sources, limits, prefixes = zip(*chosen, strict=True)
    return engine.translate(
        sources, limits=limits, prefix=prefixes, **SETTINGS | {"beam": 3, "nbest": 2} | settings
    )


def prompts_of(rng, count):
    """(prompt, limit, number): some prompts are equal, some have one token, one is long."""
    sizes = [*rng.integers(1, 20, count - 1).tolist(), 75]
    prompts = [rng.integers(0, VOCAB, n).tolist() for n in sizes]
    prompts[1] = prompts[0]
    limits = [*rng.integers(0, 15, count - 1).tolist(), 20]
    return list(zip(prompts, limits, rng.integers(0, 50, count).tolist(), strict=True))


def written(engine, chosen, **settings):
    prompts, limits, numbers = zip(*chosen, strict=True)
    return engine.generate(prompts, limits=limits, numbers=numbers, seed=5, eos=EOS, **settings)


def companies(rng, count):
    """Yield lists of indices: another order, some twice and others not, one alone."""
    yield rng.permutation(count)
    yield rng.integers(0, count, count + 3)
    yield from ([i] for i in rng.permutation(count)[:2])


RULES = {"no_repeat_ngram": 2, "repetition_penalty": 1.2, "length_penalty": 0.6}


@pytest.mark.parametrize("more, settings", [
    ({}, {}), ({"kv_heads": 1, "norm": "post"}, RULES), ({"positions": "rotary"}, {"beam": 1}),
], ids=["plain", "grouped", "rotary"])  # fmt: skip
def test_translations(xp, more, settings):
    rng, model = np.random.default_rng(0), translation_model(xp, **more)
    texts, settings = sources_of(rng, 7), {"nbest": 1} | settings
    with Engine(model, max_rows=18, batch_invariant=True) as engine:
        want = translated(engine, texts, **settings)
        for chosen in companies(rng, len(texts)):
            found = translated(engine, [texts[i] for i in chosen], **settings)
            assert found == [want[i] for i in chosen]
    plain = translated(Engine(model), texts, **settings)
    assert [[h.tokens for h in best] for best in plain] == [
        [h.tokens for h in best] for best in want
    ]


@pytest.mark.parametrize("kind", [language_model, grouped_model])
def test_samples(xp, kind):
    rng, model = np.random.default_rng(1), kind(xp)
    texts = prompts_of(rng, 8)
    rules = {"temperature": 0, "no_repeat_ngram": 2}
    for settings in ({"top_p": 0.9}, rules)[: 2 if kind is language_model else 1]:
        with Engine(model, max_rows=5, batch_invariant=True) as engine:
            want = written(engine, texts, **settings)
            for chosen in companies(rng, len(texts)):
                found = written(engine, [texts[i] for i in chosen], **settings)
                assert found == [want[i] for i in chosen]


def test_requests_that_join_and_leave(xp):
    """Submitted in another order, beside others, some of which are cancelled."""
    rng = np.random.default_rng(2)
    model, writer = translation_model(xp), language_model(xp)
    with Engine(model, max_rows=9, batch_invariant=True) as engine:
        texts = sources_of(rng, 8)
        want = translated(engine, texts)
        handles = {}
        for i in rng.permutation(len(texts)).tolist():
            source, limit, prefix = texts[i]
            given = {"prefix": prefix, "beam": 3, "nbest": 2} | SETTINGS
            handles[i] = engine.submit(source, limit=limit, priority=i % 3, **given)
            engine.submit(source[::-1], limit=limit, **given).cancel()
        assert [handles[i].result(WAIT) for i in range(len(texts))] == want
    with Engine(writer, max_rows=4, batch_invariant=True) as engine:
        texts = prompts_of(rng, 10)
        want = written(engine, texts)
        for order in (range(10), rng.permutation(10).tolist()):
            handles = {}
            for i in order:
                prompt, limit, number = texts[i]
                handles[i] = engine.submit(prompt, limit=limit, number=number, seed=5, eos=EOS)
            assert [handles[i].result(WAIT) for i in range(10)] == [[text] for text in want]


def test_launches_of_one_shape(monkeypatch):
    """As on a GPU: no launch depends on how many texts there are, or on their lengths together."""
    rng = np.random.default_rng(3)
    for module in (beam, generation, plans):
        monkeypatch.setattr(module, "on_gpu", lambda x: True)
        monkeypatch.setattr(module, "FIXED_TOKENS", 128, raising=False)
    for model, texts, found in (
        (translation_model(np), sources_of(rng, 4), translated),
        (language_model(np), prompts_of(rng, 4), written),
    ):
        engine = Engine(model, max_rows=6, batch_invariant=True)
        engine.on_gpu, shapes = True, set()

        def run(name, shape, step, shapes=shapes):
            slots = shape[0].results()[0].shape[:1]
            # a graph of four steps has the launches of four graphs of one
            shapes.add((name, *slots, *(() if name == "steps" else shape[1:])))
            step()

        monkeypatch.setattr(engine._searches, "run", run)
        want, alone = found(engine, texts), []
        for text, own in zip(texts, want, strict=True):
            shapes.clear()
            assert found(engine, [text]) == [own]
            assert len(shapes) == 2 * (text[1] > 0)  # begin and steps
            alone.append({*shapes})
        for chosen in companies(rng, len(texts)):
            shapes.clear()
            assert found(engine, [texts[i] for i in chosen]) == [want[i] for i in chosen]
            assert shapes == set().union(*[alone[i] for i in chosen])


def test_a_nan_harms_no_other():
    model = translation_model(np, tied=False)
    texts = [(source, limit, []) for source, limit, _ in sources_of(np.random.default_rng(4), 8)]
    settings = {"banned": (0, BOS, 3, 13)}
    with Engine(model, batch_invariant=True) as engine:
        texts = [([5 if t == 13 else t for t in source], *rest) for source, *rest in texts]
        want = translated(engine, texts, **settings)
        model.source.weight.data[13] = np.nan
        found = translated(engine, [*texts, ([13, 6], 9, []), ([6, 13], 9, [])], **settings)
    assert found[:-2] == want and np.isnan(found[-1][0].score)


@pytest.mark.parametrize("K, N", [(36, 108), (33, 57), (50, 1), (1, 9), (256, 1024), (700, 31)])
def test_rows_of_a_product(rng, K, N):
    """Equal rows are equal bits wherever they stand, among however many others."""
    weight = rng.standard_normal((N, K), np.float32)
    rows = rng.standard_normal((3, K), np.float32)
    with with_mode("batch_invariant", True):
        want = matmul(rows, weight, transpose_b=True)
        for count in (1, 2, 5, BLOCK_ROWS, BLOCK_ROWS + 1, 4 * BLOCK_ROWS - 1):
            chosen = rng.integers(0, 3, count)
            np.testing.assert_array_equal(matmul(rows[chosen], weight.T), want[chosen])
        assert matmul(rows[:0], weight.T).shape == (0, N)
    np.testing.assert_allclose(want, rows.astype(np.float64) @ weight.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("lengths, most, want", [
    ([], 3, []), ([4, 4, 4], 3, [[0, 1], [2]]), ([1, 1, 1, 1], 3, [[0, 1, 2], [3]]),
    ([20, 1, 9, 30], 3, [[0], [1, 2], [3]]), ([9], 1, [[0]]),
])  # fmt: skip
def test_portions(lengths, most, want):
    assert portions(lengths, most, 10) == want


@pytest.mark.parametrize("settings, said", [
    ({"coverage": 0.1}, "batch_invariant is True; accepted: False, as coverage is 0.1, the search"),
    ({"beam": 65}, "the beam is 65, the search on the device takes at most 64, and the host's"),
])  # fmt: skip
def test_what_the_device_lacks_is_refused(xp, settings, said):
    engine = Engine(translation_model(xp), batch_invariant=True)
    for call in (
        lambda: engine.translate([[5]], limits=[9], **SETTINGS | settings),
        lambda: engine.submit([5], limit=9, **SETTINGS | settings),
    ):
        with pytest.raises(ValueError, match=said):
            call()


def test_the_flag_is_a_flag():
    with pytest.raises(TypeError, match="batch_invariant is 'yes'"):
        Engine(language_model(np), batch_invariant="yes")


def test_launches_on_a_gpu(monkeypatch):
    """Kernels, their grids and products of a text on a fake Hopper: the same in any company."""
    monkeypatch.setattr(
        beam, "hypotheses_of", lambda *texts, **_: [[_no_text()] for _ in texts[-1]]
    )
    run_plan, products = cublaslt.MatmulPlan.run, []

    def noted(self, *arrays):
        products.append((self.shape, self.invariant))
        return run_plan(self, *arrays)

    monkeypatch.setattr(cublaslt.MatmulPlan, "run", noted)
    rng = np.random.default_rng(5)
    size = {"d_model": 64, "heads": 2, "vocab": 64}
    config = GPT2Config(**size, layers=1)
    translates = TranslationConfig(**size, layers=(1, 1), ffn=64, max_length=ROOM)
    for max_rows in (32, 256):  # the step is one launch, and many
        kinds = (
            (lambda: GPT2(config), written, prompts_of),
            (lambda: TranslationModel(translates), translated, sources_of),
        )  # fmt: skip
        for make, call, texts_of in kinds:
            text = ([5, 6, 7], 9, 3 if call is written else [])
            others = [(tokens[:12], 9, text[2]) for tokens, *_ in texts_of(rng, 12) if tokens[1:]]
            seen = []
            for company in ([], others, others * 9):
                with training_on("9.0") as run:
                    model = make().eval()
                    for parameter in model.parameters():
                        parameter.data = parameter.data.astype(BFLOAT16).view(Array)
                    engine = Engine(model, max_rows=max_rows, batch_invariant=True)
                    products.clear()
                    for _ in range(2):
                        call(engine, [*company, text, *company])
                    seen.append(({*run.launches}, {*products}))
            assert seen[0][0] and seen[0] == seen[1] == seen[2]
            assert all(invariant for _, invariant in seen[0][1])
            names = {launch.name for launch in seen[0][0]}
            if call is written:
                assert ("decoder_step" in names) == (max_rows == 32)
            else:
                assert "cluster_step" in names


@pytest.mark.parametrize("settings", [{"banned": range(VOCAB)}, {"beam": 60, "nbest": 60}], ids=str)
def test_dead_ends_and_more_beams_than_tokens(settings):
    """Beside a text of its own kind, as alone, and as without ``batch_invariant``."""
    model, texts = translation_model(np), [([5, 6], 3, []), ([], 2, []), ([7], 0, [])]
    engine = Engine(model, batch_invariant=True)
    found = translated(engine, texts, **settings)
    assert found == [best for text in texts for best in translated(engine, [text], **settings)]
    plain = translated(Engine(model), texts, **settings)
    tokens = [[[h.tokens for h in best] for best in each] for each in (found, plain)]
    assert tokens[0] == tokens[1] and found[2][0].tokens == []
    assert bool(found[0]) == ("beam" in settings)
