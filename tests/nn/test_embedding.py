"""Embeddings: scale, positions, shared and padded tables."""

import numpy as np
import pytest
from delays import HOLD

from gpuattn import Tensor, nn
from gpuattn.arrays import to_cpu
from gpuattn.nn.embedding import sinusoidal_positions


def test_sinusoidal_positions_are_the_papers():
    table = sinusoidal_positions(50, 6)
    for t in (0, 1, 49):
        for i in range(3):
            angle = t / 10000 ** (2 * i / 6)
            np.testing.assert_allclose(table[t, 2 * i], np.sin(angle), atol=1e-6)
            np.testing.assert_allclose(table[t, 2 * i + 1], np.cos(angle), atol=1e-6)
    with pytest.raises(ValueError, match="even"):
        sinusoidal_positions(4, 5)


@pytest.mark.parametrize("kind", [None, "learned", "sinusoidal"])
def test_embedding_is_its_formula(rng, kind):
    layer = nn.Embedding(10, 6, positions=kind, max_length=8, scale=3.0, rng=rng)
    tokens = rng.integers(0, 10, (2, 5)).astype(np.int32)
    want = 3 * layer.weight.data[tokens]
    if kind == "learned":
        want = want + layer.position_weight.data[:5]
    if kind == "sinusoidal":
        want = want + sinusoidal_positions(8, 6)[:5]
    np.testing.assert_allclose(layer(tokens).data, want, rtol=1e-6, atol=1e-6)
    if kind:
        places = np.array([[7, 0, 1, 2, 3]] * 2, np.int32)
        np.testing.assert_allclose(
            layer(tokens, places).data[:, 1:] - layer(tokens[:, 1:]).data, 0, atol=1e-6
        )


@pytest.mark.parametrize("kind", ["learned", "sinusoidal"])
def test_a_shift_is_added_to_each_token(xp, rng, kind):
    layer = nn.Embedding(10, 6, positions=kind, max_length=8, rng=rng)
    layer.weight.data = xp.asarray(layer.weight.data)
    if kind == "learned":
        layer.position_weight.data = xp.asarray(layer.position_weight.data)
    tokens = xp.asarray(rng.integers(0, 10, (2, 5)), np.int32)
    shift = Tensor(xp.asarray(rng.standard_normal(6), np.float32), requires_grad=True)
    dy = xp.asarray(rng.standard_normal((2, 5, 6)), np.float32)
    found = layer(tokens, shift=shift)
    want = to_cpu(layer(tokens).data) + to_cpu(shift.data)
    np.testing.assert_allclose(to_cpu(found.data), want, rtol=1e-6, atol=1e-6)
    found.backward(dy)
    np.testing.assert_allclose(to_cpu(shift.grad), to_cpu(dy).sum((0, 1)), rtol=1e-5, atol=1e-6)
    if kind == "learned":
        places = to_cpu(layer.position_weight.grad)
        np.testing.assert_allclose(places[:5], to_cpu(dy).sum(0), rtol=1e-5, atol=1e-6)
        assert not places[5:].any()


def test_table_of_positions_follows_the_weight(xp, rng):
    layer = nn.Embedding(10, 6, positions="sinusoidal", max_length=8, rng=rng)
    layer.weight.data = xp.asarray(layer.weight.data.astype(np.float16))
    out = layer(xp.zeros((1, 3), np.int32)).data
    assert isinstance(out, xp.ndarray) and out.dtype == np.float16


def test_a_table_of_positions_is_complete_for_every_stream(gpu, rng):
    """It is made at its first use, on a stream that is late, and read on another at once."""
    layer = nn.Embedding(10, 6, positions="sinusoidal", max_length=8, rng=rng)
    layer.weight.data = gpu.asarray(layer.weight.data)
    hold = gpu.RawKernel(HOLD, "hold")
    streams = [gpu.cuda.Stream(non_blocking=True) for _ in range(2)]
    tokens = gpu.asarray(rng.integers(0, 10, (2, 5)), np.int32)
    gpu.cuda.Device().synchronize()
    with streams[0]:
        hold((1,), (1,), (np.int64(50_000_000),))
        late = layer(tokens)
    with streams[1]:
        early = to_cpu(layer(tokens).data)
    streams[0].synchronize()
    np.testing.assert_array_equal(early, to_cpu(late.data))


def test_padding_rows_start_as_zeros_and_tables_are_shared(rng):
    layer = nn.Embedding(64, 8, used=50, rng=rng)
    assert (layer.weight.data[50:] == 0).all() and (layer.weight.data[:50] != 0).all()
    assert nn.Embedding(64, 8, weight=layer.weight).weight is layer.weight


def test_kind_of_positions_is_checked():
    with pytest.raises(ValueError, match="rotary"):
        nn.Embedding(10, 6, positions="rotary")
    with pytest.raises(ValueError, match="max_length is None"):
        nn.Embedding(10, 6, positions="learned")


def test_padding_ids_are_refused():
    layer = nn.Embedding(64, 8, used=50)
    with pytest.raises(IndexError, match="holding 50; accepted: 0 <= index < 50"):
        layer(np.array([49, 50]))


def test_dropout_applies_to_the_sum():
    layer = nn.Embedding(10, 64, positions="learned", max_length=8, dropout=0.5)
    out = layer(np.arange(8, dtype=np.int32)).data
    assert 0.3 < (out == 0).mean() < 0.7
    assert (layer.eval()(np.arange(8, dtype=np.int32)).data != 0).all()
