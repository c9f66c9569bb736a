"""AdamW's own tests: bias correction, clipping, loss scale. Shared ones: test_flat_update."""

import numpy as np
import pytest

from gpuattn.arrays import to_cpu
from gpuattn.ops.update.adamw import adamw
from gpuattn.ops.update.gradient_statistics import OptimizerState, gradient_statistics

BETAS = (0.9, 0.98)


@pytest.fixture(params=["reference", "raw-simt"])
def impl(request, xp):
    if request.param == "raw-simt" and xp is np:
        pytest.skip("kernels need a GPU")
    return request.param


def buffers(xp, rng, size):
    p, g = (xp.asarray(rng.standard_normal(size).astype(np.float32)) for _ in range(2))
    return p, g, xp.zeros(size, np.float32), xp.zeros(size, np.float32)


def close(got, want, tol=2e-6):
    np.testing.assert_allclose(to_cpu(got).astype(np.float64), want, rtol=tol, atol=tol)


@pytest.mark.parametrize("beta", [0.0, 0.9, 0.999, 0.9999])
def test_bias_correction_is_accurate_from_the_first_step_on(xp, impl, beta):
    """With a constant gradient the moments cancel, so every step equals the learning rate."""
    p, m, v = (xp.zeros(128, np.float32) for _ in range(3))
    g = xp.full(128, 0.25, np.float32)
    state = OptimizerState(p, learning_rate=1.0)
    for t in range(1, 30):
        gradient_statistics(g, state, impl=impl)
        adamw(p, g, m, v, state, betas=(beta, beta), eps=1e-12, impl=impl)
        np.testing.assert_allclose(to_cpu(p), -t, rtol=3e-6)


def test_clipping_scales_the_gradient_alone(xp, impl, rng):
    p, g, m, v = buffers(xp, rng, 256)
    state = OptimizerState(p, learning_rate=0.1)
    gradient_statistics(g, state, max_norm=0.01, impl=impl)
    adamw(p, g, m, v, state, betas=BETAS, impl=impl)
    exact = to_cpu(g).astype(np.float64)
    close(m, 0.1 * exact * 0.01 / (np.linalg.norm(exact) + 1e-6), 1e-7)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan, 3e38])
@pytest.mark.parametrize("first", [True, False])
def test_gradients_that_are_not_finite_change_nothing(xp, impl, rng, bad, first):
    p, g, m, v = buffers(xp, rng, 300 * 128)
    model = xp.zeros(p.size, np.float16)
    state = OptimizerState(p, learning_rate=0.1)
    if not first:
        gradient_statistics(g, state, impl=impl)
        adamw(p, g, m, v, state, model=model, weight_decay=0.1, impl=impl)
    before = [to_cpu(a).tobytes() for a in (p, m, v, model)]
    g[299 * 128] = bad
    for times in (1, 2):
        gradient_statistics(g, state, max_norm=1.0, impl=impl)
        adamw(p, g, m, v, state, model=model, weight_decay=0.1, impl=impl)
        assert (state.skip, state.skipped, state.skipped_in_a_row) == (1, times, times)
    assert [to_cpu(a).tobytes() for a in (p, m, v, model)] == before
    assert state.step == (0 if first else 1)
    assert state.loss_scale == 1.0
    g[299 * 128] = 0
    gradient_statistics(g, state, impl=impl)
    assert (state.skip, state.skipped, state.skipped_in_a_row) == (0, 2, 0)


def test_gradients_are_divided_by_the_scale_before_it_changes(xp, impl, rng):
    p, g, m, v = buffers(xp, rng, 128)
    state = OptimizerState(p, loss_scale=1024.0, learning_rate=0.0)
    gradient_statistics(g * 1024, state, growth_interval=1, impl=impl)
    assert state.loss_scale == 2048
    adamw(p, g * 1024, m, v, state, betas=BETAS, impl=impl)
    close(m, 0.1 * to_cpu(g).astype(np.float64), 1e-6)


def test_an_update_can_be_captured(gpu, rng):
    p, g, m, v = buffers(gpu, rng, 128)
    state = OptimizerState(p)
    stream = gpu.cuda.Stream(non_blocking=True)
    gpu.cuda.Device().synchronize()
    with stream:
        gradient_statistics(g, state, max_norm=1.0, growth_interval=2)
        adamw(p, g, m, v, state, weight_decay=0.1)  # compiles: capture only launches
        stream.begin_capture()
        gradient_statistics(g, state, max_norm=1.0, growth_interval=2)
        adamw(p, g, m, v, state, weight_decay=0.1)
        graph = stream.end_capture()
        graph.launch(stream)
    stream.synchronize()
    assert state.step == 2
