"""Gradient statistics: norm, clipping, skipped updates, the loss scale."""

import re

import numpy as np
import pytest
from checks import dtype_of

from gpuattn.arrays import to_cpu
from gpuattn.cuda import sources
from gpuattn.ops.update import flat_update
from gpuattn.ops.update import gradient_statistics as statistics
from gpuattn.ops.update.gradient_statistics import OptimizerState, gradient_statistics


@pytest.fixture(params=["reference", "raw-simt"])
def impl(request, xp):
    if request.param == "raw-simt" and xp is np:
        pytest.skip("kernels need a GPU")
    return request.param


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("size", [0, 1, 7, 1000, 8192, 8193, 3_000_001])
def test_the_norm(xp, impl, rng, size, dtype):
    """Equals the float64 norm whatever follows the last gradient; repeats give equal bits."""
    buffer = xp.full(size + 64, np.nan, dtype_of(dtype))
    g = buffer[:size]
    g[...] = xp.asarray(rng.standard_normal(size).astype(dtype_of(dtype)))
    states = [OptimizerState(g, divisor=5.0) for _ in range(3)]
    for state in states:
        gradient_statistics(g, state, max_norm=0.5, impl=impl)
    norm = np.sqrt((to_cpu(g).astype(np.float64) ** 2).sum()) / 5
    assert states[0].norm == pytest.approx(norm, rel=2e-6)
    coefficient = min(1, 0.5 / (norm + 1e-6)) / 5
    assert states[0].coefficient == pytest.approx(coefficient, rel=2e-6)
    assert len({to_cpu(state.array).tobytes() for state in states}) == 1


@pytest.mark.parametrize("where", [0, 12_345, -1])
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_one_bad_gradient_is_found_wherever_it_is(xp, impl, where, bad):
    g = xp.ones(1_000_003, np.float16)
    g[where] = bad
    state = OptimizerState(g)
    gradient_statistics(g, state, impl=impl)
    assert (state.skip, state.step, state.skipped) == (1, 0, 1)


def test_the_loss_scale_moves(xp, impl):
    good, bad = xp.full(128, 8.0, np.float16), xp.full(128, np.inf, np.float16)
    state = OptimizerState(good, loss_scale=4.0)
    seen = []
    for g in (good, good, good, bad, good, bad, bad, bad, good, good, good):
        gradient_statistics(g, state, growth_interval=3, impl=impl)
        seen.append((state.loss_scale, state.clean_steps))
    assert seen == [
        (4, 1), (4, 2), (8, 0), (4, 0), (4, 1), (2, 0), (1, 0), (1, 0), (1, 1), (1, 2), (2, 0),
    ]  # fmt: skip
    assert state.clamped == 1
    assert state.step == 7
    state.loss_scale = 2.0**32
    for _ in range(3):
        gradient_statistics(good, state, growth_interval=3, impl=impl)
    assert state.loss_scale == 2.0**32 and state.clamped == 2


def test_state_is_one_array_with_names(xp):
    state = OptimizerState(xp.zeros(1), learning_rate=0.25)
    assert state.array.dtype == np.uint32 and state.array.shape == (len(statistics.FIELDS),)
    assert state.read() == {**dict.fromkeys(statistics.FIELDS, 0), **{
        "learning_rate": 0.25, "divisor": 1, "loss_scale": 1,
    }}  # fmt: skip
    state.step = 3
    assert state.step == 3 and state.field("step").shape == ()
    with pytest.raises(
        AttributeError, match="OptimizerState: the name is 'lr'; accepted: learning_r"
    ):
        state.lr = 1.0
    with pytest.raises(AttributeError):
        _ = state.lr


def test_the_kernel_has_the_same_fields():
    header = (sources.ROOT / "update/optimizer_state.cuh").read_text()
    fields = re.search(r"enum Field \{(.*?)\}", header, re.DOTALL)[1]
    assert tuple(fields.replace(",", " ").lower().split()) == tuple(statistics.FIELDS)
    text = (sources.ROOT / "update/gradient_statistics.cu").read_text()
    assert f"MIN_LOSS_SCALE = {statistics.MIN_LOSS_SCALE:.0f}.f" in text
    assert f"MAX_LOSS_SCALE = {statistics.MAX_LOSS_SCALE:.0f}.f" in text
    update = (sources.ROOT / "update/optimizer.cuh").read_text()
    assert f"constexpr int DECAY_BLOCK = {flat_update.DECAY_BLOCK};" in update
    assert f"ROUNDING = 0x{flat_update.ROUNDING:X}u;" in update


@pytest.mark.parametrize("max_norm", [0.0, -1.0, np.nan])
def test_refuses_a_norm_that_clips_everything(xp, max_norm):
    g = xp.zeros(128, np.float32)
    with pytest.raises(ValueError, match="gradient_statistics: max_norm is"):
        gradient_statistics(g, OptimizerState(g), max_norm=max_norm)
    with pytest.raises(ValueError, match="growth_interval"):
        gradient_statistics(g, OptimizerState(g), growth_interval=-1)
    with pytest.raises(ValueError, match="one flat contiguous buffer"):
        gradient_statistics(g.reshape(2, 64), OptimizerState(g))
    with pytest.raises(TypeError, match="float32, float16 or bfloat16"):
        gradient_statistics([1.0], OptimizerState(g))
