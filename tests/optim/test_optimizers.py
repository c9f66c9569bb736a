"""The optimizers: arguments of their ops, learning and resuming."""

from types import SimpleNamespace

import numpy as np
import pytest

from gpuattn.arrays import BFLOAT16, to_cpu
from gpuattn.optim import OPTIMIZERS, SGD, AdamW, Lamb


def workspace(xp, size=256, model=None):
    rng = np.random.default_rng(0)
    grads = xp.zeros(size, np.float32)
    return SimpleNamespace(
        masters=xp.asarray(rng.standard_normal(size).astype(np.float32)),
        grads=grads,
        my_grads=grads,
        exp_avg=xp.zeros(size, np.float32),
        exp_avg_sq=xp.zeros(size, np.float32),
        decay=xp.asarray(np.arange(size // 128, dtype=np.uint8) % 2),
        model=model,
        part=None,
        slots={"first": (0, 100), "second": (128, 256)},
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_minimises_a_square(xp, name):
    w = workspace(xp)
    optimizer = OPTIMIZERS[name](w, max_norm=10.0)
    for update in range(400):
        w.grads[...] = w.masters
        optimizer.update(0.05 * (1 - update / 400))
    assert float(abs(w.masters).max()) < 1e-3
    assert optimizer.state.step == 400


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_without_masters_converge_too(xp, name):
    """Steps near the end are far below the distance of two bfloat16 values, 0.008 here."""
    w = workspace(xp, size=128 * 32)
    w.slots = {"all": (0, w.masters.size)}
    w.masters = w.masters.astype(BFLOAT16)
    optimizer = OPTIMIZERS[name](w, seed=11)
    for update in range(300):
        w.grads[...] = w.masters.astype(np.float32) - np.float32(1.2345)
        optimizer.update(0.03 * (1 - update / 300))
    found = to_cpu(w.masters).astype(np.float64)
    assert found.mean() == pytest.approx(1.2345, abs=0.03) and found.std() < 0.2


def test_every_setting_is_passed_on(xp):
    """Compare one step with the formula, with unusual constants."""
    w = workspace(xp)
    p = to_cpu(w.masters).astype(np.float64)
    w.grads[...] = 6.0
    optimizer = AdamW(w, betas=(0.5, 0.25), eps=0.5, weight_decay=0.2, max_norm=8.0, loss_scale=2.0)
    optimizer.update(0.125, divisor=3.0)
    g = 8.0 / 16  # the norm of 256 ones is 16
    decays = np.repeat([0, 1], 128)
    want = p - 0.125 * (g / (g + 0.5) + 0.2 * decays * p)
    np.testing.assert_allclose(to_cpu(w.masters), want, rtol=1e-6, atol=1e-6)
    assert optimizer.state.norm == pytest.approx(16)
    np.testing.assert_allclose(to_cpu(w.exp_avg), g * 0.5, rtol=1e-6)
    np.testing.assert_allclose(to_cpu(w.exp_avg_sq), g * g * 0.75, rtol=1e-6)


def test_sgd_takes_the_velocity_or_none(xp):
    w = workspace(xp)
    p = to_cpu(w.masters).astype(np.float64)
    w.grads[...] = 1.0
    SGD(w, momentum=0.0).update(0.5)
    assert not w.exp_avg.any()
    np.testing.assert_allclose(to_cpu(w.masters), p - 0.5, rtol=1e-6, atol=1e-6)
    SGD(w, momentum=0.5, nesterov=True).update(0.5)
    assert (to_cpu(w.exp_avg) == 1).all()
    np.testing.assert_allclose(to_cpu(w.masters), p - 1.25, rtol=1e-6, atol=1e-6)


def test_lamb_adapts_tensors_with_decay(xp):
    """The decay table of this workspace is zero for the first tensor, one for the second."""
    optimizer = Lamb(workspace(xp))
    assert optimizer.tensors.starts == (0, 128) and optimizer.tensors.adapted == (False, True)


def test_the_divisor_may_be_left_on_the_device(xp):
    w = workspace(xp)
    w.grads[...] = 6.0
    optimizer = AdamW(w)
    optimizer.state.field("divisor")[...] += xp.asarray(2, np.float32)
    optimizer.update(0.1)
    assert optimizer.state.norm == pytest.approx(2 * 16)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_resumes_bit_for_bit_from_its_state(xp, name):
    new = OPTIMIZERS[name]

    def updates(w, optimizer, which):
        for n in which:
            w.grads[...] = xp.asarray(np.random.default_rng(n).standard_normal(256), np.float32)
            optimizer.update(0.01 * n)

    whole, first = workspace(xp), workspace(xp)
    updates(whole, new(whole), range(10))
    optimizer = new(first)
    updates(first, optimizer, range(5))
    second = workspace(xp)
    for name in ("masters", "exp_avg", "exp_avg_sq"):
        getattr(second, name)[...] = getattr(first, name)
    resumed = new(second)
    resumed.state.array[...] = optimizer.state.array
    updates(second, resumed, range(5, 10))
    assert to_cpu(second.masters).tobytes() == to_cpu(whole.masters).tobytes()


def test_a_bad_constant_is_refused_at_the_first_update():
    with pytest.raises(ValueError, match="adamw: betas is"):
        AdamW(workspace(np), betas=(0.9, 1.5)).update(0.1)


def test_repr_shows_settings_and_state(xp):
    optimizer = AdamW(workspace(xp), betas=(0.5, 0.25), max_norm=8.0)
    optimizer.update(0.125)
    first, size, state = repr(optimizer).splitlines()
    assert first.startswith("AdamW(max_norm=8.0, growth_interval=0, betas=(0.5, 0.25), ")
    assert size == "  256 elements of float32"
    assert state.startswith("  OptimizerState(learning_rate=0.125, step=1, divisor=1, ")
    assert state.endswith(" clamped=0)")
