"""Averages over updates and over checkpoints."""

from types import SimpleNamespace

import numpy as np
import pytest

from gpuattn.arrays import BFLOAT16, to_cpu
from gpuattn.errors import CheckpointError
from gpuattn.optim import ExponentialAverage, average_tensors


def workspace(xp):
    masters = xp.zeros(256, np.float32)
    model = xp.zeros(256, np.float16)

    def sync_model():
        model[...] = masters

    return SimpleNamespace(masters=masters, model=model, sync_model=sync_model, on_sync=None)


def test_follows_the_formula(xp):
    w = workspace(xp)
    average, want = ExponentialAverage(w, 0.3), 0.0
    for n in range(1, 20):
        w.masters[...] = n
        average.update(average.next_share())
        keep = min(0.3, (1 + n) / (10 + n))
        want = keep * want + (1 - keep) * n
        np.testing.assert_allclose(to_cpu(average.average), want, rtol=1e-6)
    assert (w.masters == 19).all()


def test_averages_are_applied_inside_the_block_only(xp):
    w = workspace(xp)
    average = ExponentialAverage(w, 0.5)
    w.masters[...] = 4
    average.update(average.next_share())
    mean = float(average.average[0])
    assert 0 < mean < 4
    with pytest.raises(KeyError), average.applied():
        assert (w.masters == mean).all() and (w.model == np.float16(mean)).all()
        raise KeyError("an error inside")
    assert (w.masters == 4).all() and (w.model == 4).all()
    assert (average.average == mean).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16])
def test_a_gpu_has_the_bits_of_numpy(gpu, rng, dtype):
    first, size = rng.standard_normal(256 * 5000).astype(dtype), 256 * 5000
    spaces = [SimpleNamespace(masters=xp.asarray(first.copy())) for xp in (gpu, np)]
    averages = list(map(ExponentialAverage, spaces))
    for _ in range(3):
        masters, share = rng.standard_normal(size).astype(dtype), np.float32(rng.random())
        for average, space, xp in zip(averages, spaces, (gpu, np), strict=True):
            space.masters = xp.asarray(masters)
            average.update(xp.asarray(share))
    there, here = (to_cpu(average.average) for average in averages)
    assert there.tobytes() == here.tobytes()


@pytest.mark.parametrize("decay", [-0.1, 1.0, np.nan])
def test_refuses_a_decay_out_of_range(decay):
    with pytest.raises(ValueError, match="ExponentialAverage: decay is"):
        ExponentialAverage(workspace(np), decay)


def test_mean_of_checkpoints_is_exact_and_rounded_once():
    a = {"w": np.array([1, 2], np.float32), "h": np.ones(2, BFLOAT16), "step": np.uint32([5])}
    b = {"w": np.array([2, 1e-8], np.float32), "h": np.full(2, 2, BFLOAT16), "step": np.uint32([9])}
    c = {"w": np.array([4, -2], np.float32), "h": np.full(2, 4, BFLOAT16), "step": np.uint32([7])}
    mean = average_tensors(iter([a, b, c]))
    assert mean["w"].dtype == np.float32 and mean["h"].dtype == BFLOAT16
    np.testing.assert_array_equal(mean["w"], np.float32([7 / 3, np.float64(np.float32(1e-8)) / 3]))
    np.testing.assert_array_equal(mean["h"], np.full(2, 7 / 3).astype(BFLOAT16))
    assert mean["step"] == 7
    assert (a["w"] == [1, 2]).all()


def test_checkpoints_of_different_models_are_not_averaged():
    a = {"w": np.ones(2), "v": np.ones(3)}
    with pytest.raises(CheckpointError, match="average: v is not in all"):
        average_tensors([a, {"w": np.ones(2)}])
    with pytest.raises(CheckpointError, match="average: w is not in all"):
        average_tensors([a, a | {"w": np.ones(5)}])
    with pytest.raises(ValueError, match="no checkpoints"):
        average_tensors([])
