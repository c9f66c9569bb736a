"""Dropout modules: one random stream per module, the same bits for the same step."""

import numpy as np
import pytest

from gpuattn import Tensor, nn, rng
from gpuattn.arrays import to_cpu


def test_streams_are_numbered_by_construction():
    streams = nn.Streams(nn.RandomState(seed=5, step=3))
    drops = [nn.Dropout(0.5, streams) for _ in range(3)]
    assert [d.now()[1] for d in drops] == [rng.Key(5, i, 3) for i in range(3)]


def test_drops_by_step_and_stream(xp):
    state = nn.RandomState(seed=1)
    streams = nn.Streams(state)
    one, two = nn.Dropout(0.5, streams), nn.Dropout(0.5, streams)
    x = xp.ones((4, 64), np.float32)
    first = one(x)
    assert set(np.unique(first).tolist()) == {0.0, 2.0}
    assert (first == one(x)).all()
    assert (first != two(x)).any()
    state.step = 1
    assert (first != one(x)).any()


def test_no_dropout_in_evaluation_or_at_zero():
    x = np.ones((2, 8), np.float32)
    assert nn.Dropout(0.5).eval()(x) is x
    assert nn.Dropout(0.0)(x) is x
    assert nn.Dropout(0.0).now() == (0.0, None)


@pytest.mark.parametrize("p", [-0.1, 1.1, float("nan")])
def test_probability_is_checked(p):
    with pytest.raises(ValueError, match="0 <= p <= 1"):
        nn.Dropout(p)


def test_stochastic_depth_leaves_out_whole_samples(xp):
    state = nn.RandomState(3)
    layer = nn.StochasticDepth(0.25, nn.Streams(state))
    x = Tensor(xp.ones((4000, 2, 3), "float32"), requires_grad=True)
    y = layer(x)
    kept = to_cpu(y.data)[:, 0, 0] > 0
    want = np.where(kept, np.float32(4 / 3), 0)[:, None, None]
    np.testing.assert_allclose(to_cpu(y.data), np.broadcast_to(want, x.shape), rtol=1e-6)
    assert 0.72 < kept.mean() < 0.78
    y.backward(xp.ones_like(y.data))
    np.testing.assert_array_equal(to_cpu(x.grad), to_cpu(y.data))
    state.step = 1
    assert (kept != (to_cpu(layer(x).data)[:, 0, 0] > 0)).any()
    assert layer.eval()(x) is x


def test_layer_drop_leaves_out_whole_batches(xp):
    state = nn.RandomState(3)
    layer = nn.LayerDrop(0.25, nn.Streams(state))
    before, after = (Tensor(xp.full((3, 2), n, "float32"), requires_grad=True) for n in (1, 2))
    kept = []
    for state.step in range(400):
        y = to_cpu(layer(before, after).data)
        assert (y == y[0, 0]).all()
        kept.append(y[0, 0] == 2)
    assert 0.68 < np.mean(kept) < 0.82
    state.step = kept.index(False)
    layer(before, after).sum().backward()
    assert (to_cpu(before.grad) == 1).all() and not to_cpu(after.grad).any()
    layer.eval()
    assert layer(before, after) is after
