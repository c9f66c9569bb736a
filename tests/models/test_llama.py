"""Llama: causality, decoding with and without a cache, and the gradient of every parameter."""

import numpy as np
import pytest

from gpuattn.decode.sample import sample
from gpuattn.errors import ConfigError
from gpuattn.models import Llama, LlamaConfig

TINY = LlamaConfig(vocab=20, d_model=16, heads=4, layers=2, ffn=24, block=9, kv_heads=2, base=50.0)


def tokens(rng, *shape):
    return rng.integers(0, 20, shape).astype(np.int32)


def larger(model):
    for p in model.parameters():
        p.data = p.data * (20 if p.ndim == 2 else 1)
    return model


def test_logits_do_not_depend_on_later_tokens(rng):
    model, x = larger(Llama(TINY)), tokens(rng, 2, 9)
    changed = x.copy()
    changed[:, 5:] = (x[:, 5:] + 1) % 20
    before, after = model.logits(x).data, model.logits(changed).data
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert (before[:, 5:] != after[:, 5:]).any(axis=-1).all()


def test_decoding_takes_the_most_probable_token_with_and_without_a_cache(rng):
    wide = LlamaConfig(**vars(TINY) | {"head_dim": 6, "qk_norm": True})
    model, prompt = larger(Llama(wide)).eval(), tokens(rng, 3, 4)
    for kv_cache in (True, False):
        stepper = model.stepper(prompt, 6, kv_cache=kv_cache)
        found = sample(stepper, bos=stepper.first_tokens, eos=None, max_length=6, top_k=1, seed=0)
        text = np.hstack([prompt, [one.tokens for one in found]]).astype(np.int32)
        best = model.logits(text[:, :-1]).data[..., :20].argmax(-1)
        np.testing.assert_array_equal(best[:, 3:], text[:, 4:])


@pytest.mark.parametrize("options", [
    {"qkv_bias": True, "tied": True, "kv_heads": 1}, {"head_dim": 6, "qk_norm": True},
])  # fmt: skip
def test_gradient_of_every_parameter_agrees_with_differences(rng, options):
    model = Llama(LlamaConfig(**vars(TINY) | {"layers": 1, "pad_vocab": False} | options))
    for p in model.parameters():
        p.data = rng.standard_normal(p.shape) * 0.5
    x, labels = tokens(rng, 2, 5), tokens(rng, 2, 5)
    model.loss(x, labels).backward()
    for name, p in model.named_parameters():
        step = rng.standard_normal(p.shape)
        before, values = p.data, []
        for sign in (1, -1):
            p.data = before + sign * 1e-6 * step
            values.append(model.loss(x, labels).item())
        p.data = before
        want = (values[0] - values[1]) / 2e-6
        assert (p.grad * step).sum() == pytest.approx(want, rel=1e-4, abs=1e-7), name


def test_sizes_and_work():
    parameters = sum(p.size for p in Llama(TINY).parameters())
    layer = 16 * 16 * 2 + 2 * 16 * 8 + 3 * 16 * 24
    assert parameters == 2 * 64 * 16 + 2 * (layer + 32) + 16
    weights = 2 * layer + 16 * 20
    assert TINY.flops([9]) == 6 * weights * 9 + 12 * 16 * 2 * 9**2 / 2
    wide = LlamaConfig(**vars(TINY) | {"head_dim": 6, "qk_norm": True})
    matrices = [p for p in Llama(wide).layers[0].parameters() if p.ndim == 2]
    assert wide.layer_weights() == 2 * sum(p.size for p in matrices)
    assert wide.flops([9]) == 6 * (wide.layer_weights() + 320) * 9 + 12 * 24 * 2 * 9**2 / 2
    with pytest.raises(ConfigError, match="kv_heads is 3; accepted: numbers that divide heads"):
        LlamaConfig(**vars(TINY) | {"kv_heads": 3})
