"""``fill`` stores the keys and values that ``states`` does, without the rest of the last layer."""

import numpy as np
import pytest

from gpuattn.arrays import to_cpu
from gpuattn.gemm import matmul
from gpuattn.models import Llama, LlamaConfig
from gpuattn.models.gpt2 import GPT2, GPT2Config
from gpuattn.models.rotary_scaling import RotaryScaling

SIZE = {"vocab": 20, "d_model": 32, "heads": 4, "block": 24}
LLAMA = SIZE | {"ffn": 48, "kv_heads": 2}
YARN = RotaryScaling("yarn", factor=4.0, original=8, scale=1.2)
MODELS = {
    "learned": lambda n: GPT2(GPT2Config(**SIZE, layers=n)),
    "without biases": lambda n: GPT2(GPT2Config(**SIZE, layers=n, kv_heads=1, bias=False)),
    "rotary": lambda n: GPT2(GPT2Config(**SIZE, layers=n, positions="rotary")),
    "llama": lambda n: Llama(LlamaConfig(**LLAMA, layers=n, layer_drop=0.3)),
    "qwen2": lambda n: Llama(LlamaConfig(**LLAMA, layers=n, qkv_bias=True)),
    "qwen3": lambda n: Llama(LlamaConfig(**LLAMA, layers=n, head_dim=6, qk_norm=True)),
    "scaled": lambda n: Llama(LlamaConfig(**LLAMA, layers=n, scaling=YARN)),
}
pytestmark = pytest.mark.filterwarnings("ignore::gpuattn.errors.SlowPathWarning")


def model_of(kind, layers, xp=np):
    model, rng = MODELS[kind](layers), np.random.default_rng(layers)
    for p in model.parameters():
        p.data = xp.asarray(rng.normal(p.ndim == 1, 0.3, p.shape).astype(np.float32))
    return model


def caches_of(model, rows=3):
    return [layer.attention.new_cache(rows, 12) for layer in model.layers]


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("kind", MODELS)
def test_stores_what_states_does(xp, rng, kind, layers):
    """Of texts that come in two parts."""
    model = model_of(kind, layers, xp)
    tokens = xp.asarray(rng.integers(0, 20, (3, 12)), np.int32)
    places = xp.asarray(np.broadcast_to(np.arange(12, dtype=np.int32), (3, 12)))
    filled, computed = caches_of(model), caches_of(model)
    with model.evaluating():
        for part in (slice(0, 7), slice(7, 12)):
            given = xp.ascontiguousarray(tokens[:, part]), xp.ascontiguousarray(places[:, part])
            assert model.fill(*given, caches=filled) is None
            model.states(*given, caches=computed)
    for i, (found, want) in enumerate(zip(filled, computed, strict=True)):
        for x, y in ((found.k, want.k), (found.v, want.v)):
            x, y = to_cpu(x), to_cpu(y)
            close = (1e-6 if xp is np else 1e-5) * abs(y).max()
            np.testing.assert_allclose(x, y, rtol=0, atol=close if i == layers - 1 else 0)
            assert abs(y).min() > 0 and found.length == 12


@pytest.mark.parametrize("kind", ["learned", "qwen3"])
def test_the_last_layer_takes_one_product(rng, monkeypatch, kind):
    model, shapes, product = model_of(kind, 3), [], matmul._product
    monkeypatch.setattr(
        matmul, "_product", lambda a, b, *out: shapes.append(b.shape) or product(a, b, *out)
    )
    tokens = rng.integers(0, 20, (3, 5)).astype(np.int32)
    with model.evaluating():
        model.states(tokens, caches=caches_of(model))
        of_states = [*shapes]
        shapes.clear()
        model.fill(tokens, caches=caches_of(model))
    own = model.layers[-1].attention
    assert len(of_states) == 3 * 4 and shapes[:8] == of_states[:8]
    assert shapes[8:] == [(32, 2 * own.kv_heads * own.head_dim)]


def test_texts_longer_than_the_block_are_refused(rng):
    model = model_of("learned", 1)
    with pytest.raises(ValueError, match="25 tokens; accepted: up to block, 24"):
        model.fill(np.zeros((1, 25), np.int32), caches=caches_of(model, 1))
