"""Transformer layers: both norm kinds, both layouts, causality, and fusion across layers."""

import numpy as np
import pytest

from gpuattn import nn
from gpuattn.autodiff.tape import no_grad
from gpuattn.autodiff.tensor import Tensor
from gpuattn.nn.transformer import fill_caches, first_token, run_layers

CU = np.array([0, 3, 4, 9], np.int32)
PACKED = {"cu_seqlens": CU, "max_seqlen": 5}


def encoder(rng, **options):
    return nn.TransformerEncoderLayer(16, 4, 32, rng=rng, **options)


def decoder(rng, **options):
    return nn.TransformerDecoderLayer(16, 4, 32, rng=rng, **options)


def tokens(rng, *shape):
    return rng.standard_normal((*shape, 16)).astype(np.float32)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_encoder_layer_is_its_formula(rng, norm):
    layer, x = encoder(rng, norm=norm), tokens(rng, 2, 6)
    first, second = layer.norms
    if norm == "pre":
        h = x + layer.attention(first(x))
        want = h + layer.feed_forward(second(h))
    else:
        h = first(x + layer.attention(x))
        want = second(h + layer.feed_forward(h))
    np.testing.assert_allclose(layer(x).data, want.data, atol=1e-5)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_decoder_layer_is_its_formula(rng, norm):
    layer, x, memory = decoder(rng, norm=norm), tokens(rng, 2, 6), tokens(rng, 2, 3)
    first, second, third = layer.norms
    if norm == "pre":
        h = x + layer.attention(first(x))
        h = h + layer.cross_attention(second(h), memory)
        want = h + layer.feed_forward(third(h))
    else:
        h = first(x + layer.attention(x))
        h = second(h + layer.cross_attention(h, memory))
        want = third(h + layer.feed_forward(h))
    np.testing.assert_allclose(layer(x, memory).data, want.data, atol=1e-5)


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_a_stack_equals_its_layers_one_by_one(rng, norm, p):
    streams = nn.Streams(nn.RandomState(7))
    layers = [encoder(rng, norm=norm, dropout=p, streams=streams) for _ in range(3)]
    final = nn.LayerNorm(16) if norm == "pre" else None
    x = tokens(rng, 9)
    want = x
    for layer in layers:
        want = layer(want, **PACKED)
    want = final(want) if final else want
    got = run_layers(layers, final, x, **PACKED)
    np.testing.assert_allclose(got.data, want.data, atol=2e-5)


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("left_out", [{}, {"layer_drop": 0.5}, {"stochastic_depth": 0.5}], ids=str)
def test_the_last_layer_computes_what_is_picked(rng, norm, recompute, left_out):
    """Rows that are read, and all gradients, equal those of a stack that computes all rows."""
    streams = nn.Streams(nn.RandomState(7))
    layers = [encoder(rng, norm=norm, streams=streams, **left_out) for _ in range(2)]
    final = nn.LayerNorm(16) if norm == "pre" else None
    x = tokens(rng, 3, 5)
    parts = [*layers, *([final] if final else [])]
    for step in range(4):  # which branches are left out differs
        streams.state.step = step
        found = []
        for early in (True, False):
            start = Tensor(x.copy(), requires_grad=True)
            options = {"recompute": recompute, "pick": first_token if early else None}
            y = run_layers(layers, final, start, **options)
            y = y if early else first_token(y)
            assert y.shape == (3, 1, 16)
            (y * np.arange(16, dtype="f")).sum().backward()
            own = [p for part in parts for p in part.parameters()]
            found.append([y.data, start.grad, *(p.grad for p in own)])
            for p in own:
                p.grad = None
        for picked, whole in zip(*found, strict=True):
            assert (picked is None) == (whole is None)
            if whole is not None:
                np.testing.assert_allclose(picked, whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("count", [1, 3])
def test_caches_are_filled_without_the_rest_of_the_last_layer(rng, norm, count):
    layers = [encoder(rng, norm=norm, causal=True, kv_heads=2).eval() for _ in range(count)]
    x = tokens(rng, 2, 6)
    stored, want = ([layer.attention.new_cache(2, 6) for layer in layers] for _ in range(2))
    with no_grad():
        run_layers(layers, None, x, caches=want)
        fill_caches(layers, x, stored)
    for one, other in zip(stored, want, strict=True):
        np.testing.assert_allclose(one.k, other.k, atol=1e-6)
        np.testing.assert_allclose(one.v, other.v, atol=1e-6)
        assert one.length == 6


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_packed_equals_single_sentences_and_padded(rng, norm):
    layer, x = encoder(rng, norm=norm), tokens(rng, 9)
    packed = layer(x, **PACKED).data
    padded = np.zeros((3, 5, 16), np.float32)
    parts = np.split(x, CU[1:-1])
    for row, part in zip(padded, parts, strict=True):
        row[: len(part)] = part
    batch = layer(padded, key_lengths=np.diff(CU)).data
    for got, part, row in zip(np.split(packed, CU[1:-1]), parts, batch, strict=True):
        np.testing.assert_allclose(got, layer(part[None]).data[0], atol=1e-5)
        np.testing.assert_allclose(got, row[: len(part)], atol=1e-5)


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_causal_layers_do_not_see_the_future(rng, kind):
    x, memory = tokens(rng, 1, 8), tokens(rng, 1, 3)
    layer = encoder(rng, causal=True) if kind == "encoder" else decoder(rng)
    context = {} if kind == "encoder" else {"memory": memory}
    before = layer(x, **context).data
    changed = x.copy()
    changed[:, 5:] = 9
    after = layer(changed, **context).data
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert (before[:, 5:] != after[:, 5:]).any()


def test_a_layer_that_is_not_causal_sees_everything(rng):
    x, layer = tokens(rng, 1, 8), encoder(rng)
    changed = x.copy()
    changed[:, 7] = 9
    assert (layer(x).data[:, 0] != layer(changed).data[:, 0]).any()


def test_packed_sentences_do_not_see_each_other(rng):
    x, layer = tokens(rng, 9), encoder(rng)
    changed = x.copy()
    changed[:3] = 9
    same = layer(x, **PACKED).data[3:] == layer(changed, **PACKED).data[3:]
    assert same.all()


def test_layers_of_one_model_draw_different_bits():
    streams = nn.Streams(nn.RandomState(0))
    layers = [nn.TransformerDecoderLayer(8, 2, 8, dropout=0.1, streams=streams) for _ in range(2)]
    drops = [m.stream for layer in layers for _, m in layer.modules() if isinstance(m, nn.Dropout)]
    assert len(drops) == len(set(drops)) == 2 * (2 + 3)


def test_kind_of_norm_is_checked():
    with pytest.raises(ValueError, match="'pre' or 'post'"):
        nn.TransformerEncoderLayer(8, 2, 8, norm="sandwich")
