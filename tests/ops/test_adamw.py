"""AdamW and the statistics of its gradients, against a plain loop in float64."""

import re

import numpy as np
import pytest
from checks import dtype_of

from gpuattn import kernels
from gpuattn.arrays import to_cpu
from gpuattn.impls import explain, use_impl
from gpuattn.ops import adamw as op
from gpuattn.ops.adamw import AdamWState, adamw, gradient_statistics

SIZES = (0, 128, 40 * 128, 1100 * 128)  # the last one is more than a block of the NumPy loop
BETAS, EPS = (0.9, 0.98), 1e-2


@pytest.fixture(params=["reference", "raw-simt"])
def impl(request, xp):
    if request.param == "raw-simt" and xp is np:
        pytest.skip("kernels need a GPU")
    return request.param


def exact_update(p, g, m, v, t, lr, betas, eps, decay):
    """One AdamW step of float64 arrays, written from the paper."""
    m = betas[0] * m + (1 - betas[0]) * g
    v = betas[1] * v + (1 - betas[1]) * g**2
    mhat, vhat = m / (1 - betas[0] ** t), v / (1 - betas[1] ** t)
    return p - lr * (mhat / (np.sqrt(vhat) + eps) + decay * p), m, v


def buffers(xp, rng, size, grad_dtype="float32"):
    p = xp.asarray(rng.standard_normal(size).astype(np.float32))
    g = xp.asarray(rng.standard_normal(size).astype(dtype_of(grad_dtype)))
    return p, g, xp.zeros(size, np.float32), xp.zeros(size, np.float32)


def close(got, want, tol=2e-6):
    np.testing.assert_allclose(to_cpu(got).astype(np.float64), want, rtol=tol, atol=tol)


@pytest.mark.parametrize("grad_dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("size", SIZES)
def test_follows_a_float64_loop(xp, impl, rng, size, grad_dtype):
    p, _, m, v = buffers(xp, rng, size)
    state = AdamWState(p)
    decay = xp.asarray((np.arange(size // 128) % 3 > 0).astype(np.uint8))
    mask = np.repeat(to_cpu(decay), 128) * 0.1
    want = [to_cpu(a).astype(np.float64) for a in (p, m, v)]
    for t in range(1, 8):
        g = xp.asarray(rng.standard_normal(size).astype(dtype_of(grad_dtype)))
        state.learning_rate = 0.01 / t
        gradient_statistics(g, state, impl=impl)
        adamw(p, g, m, v, state, decay=decay, betas=BETAS, eps=EPS, weight_decay=0.1, impl=impl)
        exact_g = to_cpu(g).astype(np.float64)
        want = exact_update(want[0], exact_g, *want[1:], t, 0.01 / t, BETAS, EPS, mask)
    for got, exact in zip((p, m, v), want, strict=True):
        close(got, exact)
    assert state.step == 7 and state.skip == 0


@pytest.mark.parametrize("beta", [0.0, 0.9, 0.999, 0.9999])
def test_bias_correction_is_accurate_from_the_first_step_on(xp, impl, beta):
    """With a constant gradient both moments cancel: every step is the learning rate exactly."""
    p, m, v = (xp.zeros(128, np.float32) for _ in range(3))
    g = xp.full(128, 0.25, np.float32)
    state = AdamWState(p, learning_rate=1.0)
    for t in range(1, 30):
        gradient_statistics(g, state, impl=impl)
        adamw(p, g, m, v, state, betas=(beta, beta), eps=1e-12, impl=impl)
        np.testing.assert_allclose(to_cpu(p), -t, rtol=3e-6)


@pytest.mark.parametrize("model_dtype", ["float16", "bfloat16"])
def test_the_model_gets_a_rounded_copy(xp, impl, rng, model_dtype):
    p, g, m, v = buffers(xp, rng, 5 * 128, model_dtype)
    model = xp.zeros(5 * 128, dtype_of(model_dtype))
    state = AdamWState(p, learning_rate=0.1)
    gradient_statistics(g, state, impl=impl)
    adamw(p, g, m, v, state, model=model, impl=impl)
    want = to_cpu(p).astype(dtype_of(model_dtype))
    assert to_cpu(model).tobytes() == want.tobytes()


@pytest.mark.parametrize("size", [1, 1000, 8192, 8193, 3_000_001])
def test_the_norm(xp, impl, rng, size):
    g = rng.standard_normal(size).astype(np.float32)
    state = AdamWState(xp.asarray(g), divisor=5.0)
    gradient_statistics(xp.asarray(g), state, max_norm=0.5, impl=impl)
    norm = np.sqrt((g.astype(np.float64) ** 2).sum()) / 5
    assert state.norm == pytest.approx(norm, rel=2e-6)
    assert state.coefficient == pytest.approx(min(1, 0.5 / (norm + 1e-6)) / 5, rel=2e-6)
    first = to_cpu(state.array).tobytes()
    again = AdamWState(xp.asarray(g), divisor=5.0)
    gradient_statistics(xp.asarray(g), again, max_norm=0.5, impl=impl)
    assert to_cpu(again.array).tobytes() == first


def test_a_view_at_an_odd_place(xp, impl, rng):
    flat = xp.asarray(rng.standard_normal(257 + 4 * 128).astype(np.float32))
    moments = xp.zeros((2, 256), np.float32)
    g = flat[257 + 128 :][:256]
    p = flat[1:257]
    before = to_cpu(flat).copy()
    state = AdamWState(p, learning_rate=1.0)
    gradient_statistics(g, state, impl=impl)
    adamw(p, g, *moments, state, impl=impl)
    after = to_cpu(flat)
    assert (after[1:257] != before[1:257]).all()
    assert after[0] == before[0] and (after[257:] == before[257:]).all()


def test_clipping_scales_the_gradient_alone(xp, impl, rng):
    p, g, m, v = buffers(xp, rng, 256)
    state = AdamWState(p, learning_rate=0.1)
    gradient_statistics(g, state, max_norm=0.01, impl=impl)
    adamw(p, g, m, v, state, betas=BETAS, impl=impl)
    exact = to_cpu(g).astype(np.float64)
    close(m, 0.1 * exact * 0.01 / (np.linalg.norm(exact) + 1e-6), 1e-7)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan, 3e38])
@pytest.mark.parametrize("first", [True, False])
def test_gradients_that_are_not_finite_change_nothing(xp, impl, rng, bad, first):
    p, g, m, v = buffers(xp, rng, 300 * 128)
    model = xp.zeros(p.size, np.float16)
    state = AdamWState(p, learning_rate=0.1)
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


def test_the_loss_scale_moves(xp, impl):
    good, bad = xp.full(128, 8.0, np.float16), xp.full(128, np.inf, np.float16)
    state = AdamWState(good, loss_scale=4.0)
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


def test_the_scale_is_removed_before_it_moves(xp, impl, rng):
    p, g, m, v = buffers(xp, rng, 128)
    state = AdamWState(p, loss_scale=1024.0, learning_rate=0.0)
    gradient_statistics(g * 1024, state, growth_interval=1, impl=impl)
    assert state.loss_scale == 2048
    adamw(p, g * 1024, m, v, state, betas=BETAS, impl=impl)
    close(m, 0.1 * to_cpu(g).astype(np.float64), 1e-6)


def test_state_is_one_array_with_names(xp):
    state = AdamWState(xp.zeros(1), learning_rate=0.25)
    assert state.array.dtype == np.uint32 and state.array.shape == (len(op.FIELDS),)
    assert state.read() == {**dict.fromkeys(op.FIELDS, 0), **{
        "learning_rate": 0.25, "divisor": 1, "loss_scale": 1,
    }}  # fmt: skip
    state.step = 3
    assert state.step == 3 and state.field("step").shape == ()
    with pytest.raises(AttributeError, match="AdamWState: the name is 'lr'; accepted: learning_r"):
        state.lr = 1.0
    with pytest.raises(AttributeError):
        _ = state.lr


def test_the_kernel_has_the_same_fields():
    text = (kernels.ROOT / "adamw.cu").read_text()
    fields = re.search(r"enum Field \{(.*?)\}", text, re.DOTALL)[1]
    assert tuple(fields.replace(",", " ").lower().split()) == tuple(op.FIELDS)
    assert f"constexpr int DECAY_BLOCK = {op.DECAY_BLOCK};" in text
    assert f"MIN_LOSS_SCALE = {op.MIN_LOSS_SCALE:.0f}.f" in text
    assert f"MAX_LOSS_SCALE = {op.MAX_LOSS_SCALE:.0f}.f" in text
    assert f"constexpr int PER_THREAD = {op.PER_THREAD};" in text


BAD = {
    "params.dtype": (TypeError, {"params": np.zeros(128)}),
    "grads": (TypeError, {"grads": np.zeros(128)}),
    "exp_avg is": (ValueError, {"exp_avg": np.zeros(256, np.float32)}),
    "exp_avg_sq is": (ValueError, {"exp_avg_sq": np.zeros(256, np.float32)[::2]}),
    "model.dtype": (TypeError, {"model": np.zeros(128, np.float32)}),
    "decay is": (ValueError, {"decay": np.zeros(2, np.uint8)}),
    "betas": (ValueError, {"betas": (0.9, 1.0)}),
    "eps": (ValueError, {"eps": 0.0}),
    "weight_decay nan": (ValueError, {"weight_decay": np.nan}),
}


@pytest.mark.parametrize("name", BAD)
def test_refuses_by_name(xp, name):
    error, change = BAD[name]
    given = {k: np.zeros(128, np.float32) for k in ("params", "grads", "exp_avg", "exp_avg_sq")}
    given.update(change)
    given = {k: xp.asarray(a) if isinstance(a, np.ndarray) else a for k, a in given.items()}
    if "exp_avg_sq" in change:
        given["exp_avg_sq"] = xp.zeros(256, np.float32)[::2]
    with pytest.raises(error, match=f"adamw: .*{name}"):
        adamw(**given, state=AdamWState(given["params"]))


def test_refuses_a_size_that_does_not_fill_the_decay_blocks(xp):
    flat = [xp.zeros(100, np.float32) for _ in range(4)]
    with pytest.raises(ValueError, match="multiple of 128"):
        adamw(*flat, AdamWState(flat[0]))


@pytest.mark.parametrize("max_norm", [0.0, -1.0, np.nan])
def test_refuses_a_norm_that_clips_everything(xp, max_norm):
    g = xp.zeros(128, np.float32)
    with pytest.raises(ValueError, match="gradient_statistics: max_norm is"):
        gradient_statistics(g, AdamWState(g), max_norm=max_norm)
    with pytest.raises(ValueError, match="growth_interval"):
        gradient_statistics(g, AdamWState(g), growth_interval=-1)
    with pytest.raises(ValueError, match="one flat contiguous buffer"):
        gradient_statistics(g.reshape(2, 64), AdamWState(g))
    with pytest.raises(TypeError, match="float32, float16 or bfloat16"):
        gradient_statistics([1.0], AdamWState(g))


def test_arrays_on_two_sides_are_refused(gpu):
    host = [np.zeros(128, np.float32) for _ in range(4)]
    with pytest.raises(TypeError, match="state on the GPU"):
        adamw(*host, AdamWState(gpu.zeros(1)))


def test_explain_and_use_impl(xp):
    flat = [xp.zeros(128, np.float32) for _ in range(4)]
    state = AdamWState(flat[0])
    answer = explain(adamw, *flat, state)
    assert answer.chosen == ("reference" if xp is np else "raw-simt")
    assert dict(answer.reasons)["raw-simt"] == (
        "the buffers are NumPy arrays; move them with gpuattn.to_gpu(x)" if xp is np else None
    )
    with use_impl(adamw="reference"):
        assert explain(adamw, *flat, state).chosen == "reference"


def test_an_update_can_be_captured_because_it_reads_nothing_back(gpu, rng):
    p, g, m, v = buffers(gpu, rng, 128)
    state = AdamWState(p)
    stream = gpu.cuda.Stream(non_blocking=True)
    gpu.cuda.Device().synchronize()
    with stream:
        gradient_statistics(g, state, max_norm=1.0, growth_interval=2)
        adamw(
            p, g, m, v, state, weight_decay=0.1
        )  # the kernels are compiled: capture only launches
        stream.begin_capture()
        gradient_statistics(g, state, max_norm=1.0, growth_interval=2)
        adamw(p, g, m, v, state, weight_decay=0.1)
        graph = stream.end_capture()
        graph.launch(stream)
    stream.synchronize()
    assert state.step == 2
