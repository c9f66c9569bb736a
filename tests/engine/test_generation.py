"""Texts that the engine generates equal gpuattn.decode's, on NumPy and as CUDA graphs."""

import numpy as np
import pytest
from checks import sampled

from gpuattn import rng as random
from gpuattn.arrays import import_cupy, to_cpu
from gpuattn.decode.greedy import greedy
from gpuattn.decode.sample import sample
from gpuattn.engine import Engine
from gpuattn.engine.generation import Generation
from gpuattn.engine.inputs import joined
from gpuattn.models.gpt2 import GPT2, GPT2Config
from gpuattn.models.llama import Llama, LlamaConfig

VOCAB, BLOCK, EOS = 40, 48, 2
SIZE = {"vocab": VOCAB, "d_model": 32, "heads": 2, "layers": 2, "block": BLOCK}
pytestmark = pytest.mark.filterwarnings("ignore::gpuattn.errors.SlowPathWarning")


MODELS = {
    "gpt2": lambda: GPT2(GPT2Config(**SIZE), seed=3),
    "rotary": lambda: GPT2(
        GPT2Config(**SIZE, kv_heads=1, positions="rotary", pad_vocab=False), seed=3
    ),
    "llama": lambda: Llama(
        LlamaConfig(**SIZE, ffn=48, kv_heads=1, head_dim=32, qk_norm=True), seed=3
    ),
}


@pytest.fixture(params=MODELS)
def model(xp, request):
    model = MODELS[request.param]()
    for parameter in model.parameters():
        parameter.data = xp.asarray(parameter.data) * np.float32(8)
    return model.eval()


def settings_of(rng):
    return {
        "eos": [None, EOS][rng.integers(2)], "banned": [(), (0, 1, 3)][rng.integers(2)],
        "temperature": float(rng.choice([0.5, 1, 3])), "top_p": float(rng.choice([0.7, 1])),
        "top_k": [None, 1, 5, 100][rng.integers(4)], "min_p": float(rng.choice([0, 0.1])),
        "min_length": int(rng.integers(0, 5)),
    }  # fmt: skip


def alone(model, prompt, limit, key, number, settings):
    """The text of one prompt by ``gpuattn.decode``."""
    xp = np if isinstance(model.parameters()[0].data, np.ndarray) else import_cupy()
    stepper = model.stepper(xp.asarray([prompt], np.int32), limit)
    given = {"bos": stepper.first_tokens, "max_length": [limit], **settings}
    if settings["temperature"]:
        return sample(stepper, seed=key, numbers=[number], **given)[0]
    del given["temperature"]
    return greedy(stepper, **given)[0]


def check(found, want):
    assert [(h.tokens, h.ended) for h in found] == [(h.tokens, h.ended) for h in want]
    for name in ("score", "normalised"):
        scores = ([getattr(h, name) for h in texts] for texts in (found, want))
        np.testing.assert_allclose(*scores, rtol=1e-4, atol=1e-3)


def batch_of(rng, count=5):
    """Return prompts of several lengths, their limits (one of them 0) and sample numbers."""
    prompts = [rng.integers(3, VOCAB, n).tolist() for n in rng.choice([1, 2, 9, 20], count)]
    limits = [int(n) for n in rng.integers(0, 15, count)]
    return prompts, limits, rng.integers(0, 1000, count).tolist()


@pytest.mark.parametrize("seed", sampled(range(25), 6))
def test_equals_decode(model, seed):
    rng = np.random.default_rng(seed)
    engine = Engine(model, max_rows=4)
    key = random.Key(int(rng.integers(1 << 62)), int(rng.integers(9)), int(rng.integers(99)))
    for _ in range(2 if engine.on_gpu else 1):  # the second batch may replay graphs of the first
        prompts, limits, numbers = batch_of(rng)
        settings = settings_of(rng)
        found = engine.generate(prompts, limits=limits, seed=key, numbers=numbers, **settings)
        each = zip(prompts, limits, numbers, strict=True)
        check(found, [alone(model, p, most, key, n, settings) for p, most, n in each])


def test_a_step_on_any_device(model):
    """Call the steps that graphs capture directly, also on NumPy."""
    rng, key = np.random.default_rng(0), random.Key(1 << 40 | 5, 3, 7)
    draws = {"temperature": 1.5, "top_k": 9, "top_p": 0.9, "min_p": 0.01}
    rules = {"eos": [EOS, 5], "min_length": 3, "no_repeat_ngram": 2, "repetition_penalty": 1.3}
    generation = Generation(model, 6, BLOCK, draws=draws, rules=rules, banned=(0, 1))
    for _ in range(2):  # the same state takes two batches
        prompts, limits, numbers = batch_of(rng)
        generation.load(prompts, limits, numbers, [key] * len(prompts))
        generation.begin()
        for _ in range(max(limits)):
            generation.step()
        assert int(generation.texts.live[0]) == 0
        settings = {"banned": (0, 1), **rules, **draws}
        each = zip(prompts, limits, numbers, strict=True)
        want = [alone(model, p, most, key, n, settings) for p, most, n in each]
        read = [to_cpu(x) for x in generation.results()]
        check([text for (text,) in generation.hypotheses(read, range(len(prompts)))], want)


def test_temperature_0_is_greedy_and_tokens_are_told(model):
    rng, told = np.random.default_rng(1), {}
    prompts, limits, _ = batch_of(rng)
    found = Engine(model).generate(
        prompts, limits=limits, eos=EOS, temperature=0,
        tell=lambda i, tokens: told.setdefault(i, []).extend(tokens),
    )  # fmt: skip
    settings = {"temperature": 0, "eos": EOS}
    each = zip(prompts, limits, strict=True)
    check(found, [alone(model, p, most, None, 0, settings) for p, most in each])
    assert [told.get(i, []) for i in range(len(prompts))] == [text.tokens for text in found]


def test_rules_that_read_the_texts(model):
    settings = {"temperature": 1.0, "eos": [EOS, 5], "no_repeat_ngram": 2}
    found = Engine(model).generate([[5, 6]], limits=[9], seed=3, **settings)
    check(found, [alone(model, [5, 6], 9, 3, 0, settings)])


@pytest.mark.parametrize("wrong, said", [
    ({"prompts": [[]]}, "a prompt is 0 tokens"), ({"limits": [BLOCK + 1]}, "with a limit of 49"),
    ({"limits": [-1]}, "with a limit of -1"),
    ({"banned": [VOCAB]}, "generate: banned or eos is holding 40; accepted: 0"),
    ({"eos": range(VOCAB)}, "generate: eos is 40 tokens; accepted: fewer end marks"),
    ({"top_p": 0}, "top_p"), ({"temperature": -1}, "temperature"),
])  # fmt: skip
def test_settings_out_of_range(model, wrong, said):
    with pytest.raises(ValueError, match=said):
        Engine(model).generate(**{"prompts": [[5]], "limits": [BLOCK], "eos": EOS} | wrong)


@pytest.mark.parametrize("token", [-1, VOCAB, 1 << 31, 1 << 70], ids=str)
@pytest.mark.parametrize("kind", [list, tuple, np.array])
def test_tokens_that_the_model_lacks(model, token, kind):
    with pytest.raises(IndexError, match=f"a prompt is holding {token}; accepted: 0 <= token"):
        Engine(model).generate([kind([5, 3]), kind([2, token])], limits=[2, 2])


@pytest.mark.parametrize("token, error", [
    (1 << 31, OverflowError), ("a", TypeError), (None, TypeError), (2.5, TypeError),
])  # fmt: skip
def test_what_is_no_token(token, error):
    with pytest.raises(error):
        joined([[1], [2, token]])


def test_tokens_of_lists_are_joined():
    texts = [[5, -(1 << 31)], [], [True, np.int64(7), (1 << 31) - 1]]
    found = joined(texts)
    assert found.dtype == np.int32 and found.tolist() == [5, -(1 << 31), 1, 7, (1 << 31) - 1]
    assert joined([]).tolist() == []
    assert joined([[1 << 40]], np.int64).tolist() == [1 << 40]


def test_all_tokens_banned_and_no_prompts(model):
    (found,) = Engine(model).generate([[5]], limits=[4], banned=range(VOCAB), seed=1)
    assert found == ([], -np.inf, -np.inf, False)
    assert Engine(model).generate([], limits=[]) == []


def test_a_thousand_replays_do_not_drift(gpu):
    """Texts of one key are the same bits in every batch, also from other places in it."""
    model = GPT2(GPT2Config(**SIZE), seed=3)
    for parameter in model.parameters():
        parameter.data = gpu.asarray(parameter.data) * np.float32(8)
    engine, prompts = Engine(model.eval()), [[5, 6, 7], [8], [9, 10]]
    first = engine.generate(prompts, limits=[40] * 3, seed=4)
    for turn in range(20):
        other, same = (engine.generate(prompts, limits=[40] * 3, seed=s) for s in (turn, 4))
        assert same == first
        assert (other == first) == (turn == 4)
    assert len(engine._searches.kept) == 1
    assert to_cpu(next(iter(engine._searches.kept.values())).texts.done).all()


def test_equal_prompts_are_computed_once(model):
    prompts = [[5, 6, 7, 8], [9, 3], [5, 6, 7, 30], [5, 6, 7, 8], [9, 3]]
    draws = {"temperature": 1.0, "top_k": None, "top_p": 1.0, "min_p": 0.0}
    rules = {"eos": (), "min_length": 0, "no_repeat_ngram": 0, "repetition_penalty": 1.0}
    generation, key = Generation(model, 8, 40, draws=draws, rules=rules), random.Key(4, 0, 0)
    generation.load(prompts, [9] * 5, [0, 1, 2, 3, 4], [key] * 5)
    assert generation.shape[:2] == (8, 2)  # [5, 6, 7] and [9]
    generation.begin()
    for _ in range(9):
        generation.step()
    found = generation.hypotheses([to_cpu(x) for x in generation.results()], range(5))
    settings = {"eos": None, **draws}
    want = [alone(model, prompt, 9, key, i, settings) for i, prompt in enumerate(prompts)]
    check([texts[0] for texts in found], want)


def test_every_text_and_what_is_told_have_lists_of_their_own(model):
    told, found, engine = [], [], Engine(model)
    prompts, limits = [[5], [6, 7], [5], [8]], [0, 3, 0, 2]
    for on_gpu in (engine.on_gpu, True):
        engine.on_gpu = on_gpu
        found += engine.generate(prompts, limits=limits, tell=lambda *each: told.append(each))
    lists = [*(tokens for _, tokens in told), *(text.tokens for text in found)]
    assert len({id(one) for one in lists}) == len(lists) > 8


@pytest.mark.parametrize("given, said", [
    ({"prompts": [3]}, "one of prompts is 3; accepted: lists of tokens"),
    ({"prompts": ["ab"]}, "one of prompts is 'ab'"), ({"prompts": [[3.5]]}, "integer"),
    ({"prompts": [np.array([3.5])]}, "the dtype of prompts is float64; accepted: integers"),
    ({"limits": 9}, "limits is 9; accepted: a list"), ({"limits": [1.5]}, "a limit is 1.5"),
    ({"limits": [9, 9]}, "the number of limits is 2"), ({"beam": 4}, "a setting is 'beam'"),
])  # fmt: skip
def test_wrong_arguments(given, said):
    options = {"prompts": [[3]], "limits": [9]} | given
    engine = Engine(MODELS["gpt2"]().eval())
    with pytest.raises((TypeError, ValueError), match=said):
        engine.generate(options.pop("prompts"), **options)


def test_language_models_translate_and_score_nothing():
    engine = Engine(MODELS["llama"]().eval())
    with pytest.raises(TypeError, match="translate: the model is a Llama.*have generate"):
        engine.translate([[3]], limits=[9], bos=1, eos=2)
    with pytest.raises(TypeError, match="score: the model is a Llama; accepted: a translator"):
        engine.score([([3], [4])])
