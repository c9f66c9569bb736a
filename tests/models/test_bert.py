"""BERT: types, lengths, packed texts, pooling, and the gradient of every parameter."""

import numpy as np
import pytest

from gpuattn.errors import ConfigError
from gpuattn.models import Bert, BertConfig

TINY = BertConfig(vocab=20, d_model=12, heads=3, layers=2, ffn=20, max_length=8, dropout=0.0,
                  masked=True)  # fmt: skip


@pytest.fixture
def model(rng):
    """A model whose weights are large enough to see every part of it."""
    model = Bert(TINY, seed=1).eval()
    for p in model.parameters():
        p.data = p.data + rng.standard_normal(p.shape, dtype="f4") * np.float32(0.2)
    return model


def tokens(rng, *shape):
    return rng.integers(0, 20, shape).astype(np.int32)


def test_a_text_does_not_depend_on_what_lies_after_it(model, rng):
    x, types, lengths = tokens(rng, 3, 8), tokens(rng, 3, 8) % 2, np.array([8, 3, 5], np.int32)
    states = model.states(x, types, lengths).data
    for row, kinds, n, want in zip(x, types, lengths, states, strict=True):
        alone = model.states(row[None, :n], kinds[None, :n]).data[0]
        np.testing.assert_allclose(want[:n], alone, atol=1e-5)
    assert np.abs(model.states(x).data - states).max() > 0.1  # types and lengths matter


def test_texts_end_to_end(model, rng):
    lengths = [5, 1, 8]
    texts = [tokens(rng, n) for n in lengths]
    cu = np.cumsum([0, *lengths]).astype(np.int32)
    packed = model.states(
        np.concatenate(texts), positions=np.concatenate([np.arange(n) for n in lengths]),
        cu_seqlens=cu, max_seqlen=8,
    ).data  # fmt: skip
    for text, begin, end in zip(texts, cu, cu[1:], strict=False):
        np.testing.assert_allclose(packed[begin:end], model.states(text[None]).data[0], atol=1e-5)


def test_vectors_of_texts(model, rng):
    x, lengths = tokens(rng, 3, 8), np.array([8, 3, 5], np.int32)
    states = model.states(x, lengths=lengths).data
    mean = np.stack([s[:n].mean(0) for s, n in zip(states, lengths, strict=True)])
    found = model.embed(x, lengths=lengths, normalised=False)
    np.testing.assert_allclose(found, mean, atol=1e-6)
    unit = mean / np.linalg.norm(mean, axis=1, keepdims=True)
    np.testing.assert_allclose(model.embed(x, lengths=lengths), unit, atol=1e-6)
    np.testing.assert_allclose(
        model.embed(x, lengths=lengths, pool="first", normalised=False), states[:, 0], atol=1e-6
    )
    np.testing.assert_allclose(
        model.embed(x, normalised=False), model.states(x).data.mean(1), atol=1e-6
    )
    with pytest.raises(ConfigError, match="pool is 'max'; accepted: 'mean' or 'first'"):
        model.embed(x, pool="max")


def test_a_text_that_is_too_long(model):
    with pytest.raises(ValueError, match="tokens is 9 tokens; accepted: up to max_length, 8"):
        model.states(np.zeros((1, 9), np.int32))


@pytest.mark.parametrize("tied", [True, False])
def test_gradient_of_every_parameter_agrees_with_differences(rng, tied):
    model = Bert(BertConfig(
        vocab=9, d_model=6, heads=2, layers=1, ffn=8, max_length=4, dropout=0.0, masked=True,
        tied=tied, pad_vocab=False,
    ))  # fmt: skip
    for p in model.parameters():
        p.data = rng.standard_normal(p.shape) * 0.5
    x, types = tokens(rng, 2, 4) % 9, tokens(rng, 2, 4) % 2
    weights = rng.standard_normal((2, 4, 9))
    pooled = rng.standard_normal((2, 6))

    def loss():
        states = model.states(x, types)
        return np.sum(model.head(states) * weights) + np.sum(model.pooled(states) * pooled)

    loss().backward()
    for name, p in model.named_parameters():
        step = rng.standard_normal(p.shape)
        before, values = p.data, []
        for sign in (1, -1):
            p.data = before + sign * 1e-6 * step
            values.append(loss().item())
        p.data = before
        want = (values[0] - values[1]) / 2e-6
        assert (p.grad * step).sum() == pytest.approx(want, rel=1e-5, abs=1e-6), name


def test_sizes_and_work():
    base = Bert(BertConfig(layers=2, vocab=1000))
    d = 768
    layer = 4 * (d * d + d) + 2 * d * 3072 + 3072 + d + 4 * d
    rows = 1024 + 512 + 2
    assert sum(p.size for p in base.parameters()) == rows * d + 2 * d + 2 * layer + d * d + d
    config = BertConfig(masked=True)
    matrices = 12 * 12 * d * d + d * (d + 30522)
    assert config.flops([512, 256]) == 6 * matrices * 768 + 12 * d * 12 * (512**2 + 256**2)
    with pytest.raises(ConfigError, match="activation is 'swiglu'; accepted"):
        BertConfig(activation="swiglu")
    with pytest.raises(ConfigError, match="types is 0; accepted: a whole number from 1 on"):
        BertConfig(types=0)
