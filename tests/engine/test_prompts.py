"""Keys and values of prompts in caches of each kind, and what is launched for them."""

import numpy as np
import pytest
from fake_runs import Array, training_on

from gpuattn import rng as random
from gpuattn.arrays import BFLOAT16, to_cpu
from gpuattn.engine.cache import DeviceCache, PromptCache
from gpuattn.engine.generation import Generation
from gpuattn.engine.lookup import LookupSearch
from gpuattn.engine.paged_generation import PagedGeneration
from gpuattn.engine.pages import PAGE
from gpuattn.models.gpt2 import GPT2, GPT2Config
from gpuattn.models.llama import Llama, LlamaConfig
from gpuattn.ops.sampling.text_update import Texts

VOCAB, BLOCK = 40, 200
SIZE = {"vocab": VOCAB, "d_model": 32, "heads": 2, "layers": 2, "block": BLOCK}
SETTINGS = {
    "draws": {"temperature": 1.0, "top_k": None, "top_p": 1.0, "min_p": 0.0},
    "rules": {"eos": (), "min_length": 0, "no_repeat_ngram": 0, "repetition_penalty": 1.0},
}
MODELS = {
    "gpt2": lambda: GPT2(GPT2Config(**SIZE), seed=3),
    "llama": lambda: Llama(
        LlamaConfig(**SIZE, ffn=48, kv_heads=1, head_dim=32, qk_norm=True), seed=3
    ),
}
pytestmark = pytest.mark.filterwarnings("ignore::gpuattn.errors.SlowPathWarning")


def model_of(kind, xp, dtype=np.float32):
    model, rng = MODELS[kind](), np.random.default_rng(5)
    for p in model.parameters():
        p.data = xp.asarray(rng.normal(p.ndim == 1, 0.2, p.shape).astype(dtype))
    return model.eval()


def searched(kind, model):
    """Return the search whose caches hold the keys of prompts, some of which begin alike."""
    rng = np.random.default_rng(0)
    begin = rng.integers(0, VOCAB, 2 * PAGE).tolist()
    prompts = [[*begin, 5, 6], [7, 8, 9], begin, [4]]
    if kind is LookupSearch:
        search = LookupSearch(model, 4, BLOCK, 3, ())
        search.load([prompt[:-1] for prompt in prompts], [0] * 4, BLOCK)
        search.read()
        return search
    search, key = kind(model, 4, BLOCK, **SETTINGS), random.Key(1, 2, 3)
    for some, slots in ((prompts[:2], [0, 1]), (prompts[2:], [2, 3])):  # known beginnings
        search.load(some, [9] * 2, [0, 1], [key] * 2, slots)
        search.begin()
    return search


def check(monkeypatch, kind, model, tolerance):
    """Compare with caches that ``states`` filled."""
    found = searched(kind, model).caches
    monkeypatch.setattr(type(model), "fill", type(model).states)
    for own, want in zip(found, searched(kind, model).caches, strict=True):
        for x, y in ((own.k, want.k), (own.v, want.v)):
            x, y = (to_cpu(one).astype(np.float64) for one in (x, y))
            if kind is PagedGeneration:  # page 0 holds what pads prompts, in any order
                x, y = x[1:], y[1:]
            assert abs(y).max() > 0.5
            np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * abs(y).max())


@pytest.mark.parametrize("kind", [Generation, PagedGeneration, LookupSearch])
@pytest.mark.parametrize("name", MODELS)
def test_caches_are_those_of_whole_layers(xp, monkeypatch, name, kind):
    check(monkeypatch, kind, model_of(name, xp), 1e-6 if xp is np else 1e-5)


@pytest.mark.parametrize("kind", [Generation, PagedGeneration, LookupSearch])
@pytest.mark.parametrize("name", MODELS)
def test_caches_in_16_bits(gpu, monkeypatch, name, kind):
    check(monkeypatch, kind, model_of(name, gpu, BFLOAT16), 2**-7)


@pytest.mark.parametrize("kind", MODELS)
def test_launches_on_a_gpu(kind):
    """On a fake Hopper: one product of the last layer, and no attention in it."""
    with training_on("9.0") as run:
        model = MODELS[kind]().eval()
        for p in model.parameters():
            p.data = np.asarray(p.data).astype(BFLOAT16).view(Array)
        like, (first, last) = model.parameters()[0].data, (x.attention for x in model.layers)
        texts = Texts(like, 4, BLOCK)
        starts, places = (np.arange(4, dtype=np.int32).view(Array) * n for n in (16, 1))
        caches = [
            PromptCache(DeviceCache(like, texts, x.kv_heads, x.head_dim), starts, places)
            for x in (first, last)
        ]
        tokens = np.zeros((4, 16), np.int32).view(Array)
        run.launches.clear()
        before = run.products.computed
        with model.evaluating():
            model.fill(tokens, caches=caches)
        names = [launch.name for launch in run.launches]
    assert run.products.computed - before == 4 + 1
    assert names.count("store_rows") == 2
    behind = names[names.index("store_rows") + 1 :]
    assert sum("attention" in name or "flash" in name for name in names) == 1
    own = ["layer_norm_forward", "rotary"] if kind == "llama" else []  # of keys
    assert behind[-1 - len(own) :] == [*own, "store_rows"], names
