"""Updates of flat buffers, all rules: float64 formulas, and the properties that all share."""

import numpy as np
import pytest
from checks import dtype_of

from gpuattn import OptimizerState, adamw, explain, gradient_statistics, lion, sgd, use_impl
from gpuattn.arrays import BFLOAT16, to_cpu
from gpuattn.impls import OPS
from gpuattn.ops.update.flat_update import DECAY_BLOCK, ROUNDING, round_at_random
from gpuattn.rng import Key, philox

SIZES = (0, 40 * 128, 1100 * 128)  # the last one exceeds a block of the NumPy loop
MOMENTUM = {"momentum": 0.75}


@pytest.fixture(params=["reference", "raw-simt"])
def impl(request, xp):
    if request.param == "raw-simt" and xp is np:
        pytest.skip("kernels need a GPU")
    return request.param


# ---- the rules as their papers have them; d: the weight decay of each element -------------------


def exact_adam(p, g, moments, t, lr, d, betas, eps, decoupled):
    m, v = moments
    if not decoupled:
        g = g + d * p
    m = betas[0] * m + (1 - betas[0]) * g
    v = betas[1] * v + (1 - betas[1]) * g**2
    mhat, vhat = m / (1 - betas[0] ** t), v / (1 - betas[1] ** t)
    shrink = d * p if decoupled else 0
    return p - lr * (mhat / (np.sqrt(vhat) + eps) + shrink), [m, v]


def exact_lion(p, g, moments, t, lr, d, betas):
    (m,) = moments
    update = np.sign(betas[0] * m + (1 - betas[0]) * g)
    return p - lr * (update + d * p), [betas[1] * m + (1 - betas[1]) * g]


def exact_sgd(p, g, moments, t, lr, d, momentum=0.0, nesterov=False):
    g = g + d * p
    if not momentum:
        return p - lr * g, moments
    velocity = momentum * moments[0] + g
    return p - lr * (g + momentum * velocity if nesterov else velocity), [velocity]


ADAM = {"betas": (0.9, 0.98), "eps": 1e-2}
LION = {
    "betas": (0.5, 0.75)
}  # exact for gradients that are multiples of 1/16, and so are the signs
RULES = {  # name: (op, formula, moments, constants)
    "adamw": (adamw, exact_adam, 2, {**ADAM, "decoupled": True}),
    "adam": (adamw, exact_adam, 2, {**ADAM, "decoupled": False}),
    "lion": (lion, exact_lion, 1, LION),
    "sgd": (sgd, exact_sgd, 0, {}),
    "momentum": (sgd, exact_sgd, 1, MOMENTUM),
    "nesterov": (sgd, exact_sgd, 1, {**MOMENTUM, "nesterov": True}),
}


class Problem:
    """Buffers for a rule, on ``xp``. ``update()`` draws gradients and makes one update."""

    def __init__(self, xp, rule, size, grad="float32", weight="float32", model=None, seed=0):
        self.op, self.exact, count, self.constants = RULES[rule]
        self.xp, self.size, self.grad = xp, size, dtype_of(grad)
        self.rng = np.random.default_rng(seed)
        self.params = xp.asarray(self.rng.standard_normal(size).astype(dtype_of(weight)))
        self.moments = [xp.zeros(size, np.float32) for _ in range(count)]
        self.model = None if model is None else xp.zeros(size, dtype_of(model))
        self.decay = xp.asarray((np.arange(size // 128) % 3 > 0).astype(np.uint8))
        self.state = OptimizerState(self.params)

    def draw(self):
        drawn = np.round(self.rng.standard_normal(self.size) * 16) / 16
        return self.xp.asarray(drawn.astype(self.grad))

    def update(self, g, impl, learning_rate=0.01, weight_decay=0.1, **more):
        self.state.learning_rate = learning_rate
        gradient_statistics(g, self.state, impl=impl)
        moments = self.moments or ([None] if self.op is sgd else [])
        self.op(
            self.params, g, *moments, self.state, model=self.model, decay=self.decay,
            weight_decay=weight_decay, impl=impl, **self.constants, **more,
        )  # fmt: skip

    def bytes(self):
        arrays = [self.params, *self.moments, *([] if self.model is None else [self.model])]
        return [to_cpu(a).tobytes() for a in arrays]


@pytest.mark.parametrize("grad", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rule", RULES)
def test_follows_the_formula_in_float64(xp, impl, rule, size, grad):
    problem = Problem(xp, rule, size, grad)
    d = np.repeat(to_cpu(problem.decay), 128) * 0.1
    p, moments = to_cpu(problem.params).astype(np.float64), [np.zeros(size)] * len(problem.moments)
    for t in range(1, 7):
        g = problem.draw()
        problem.update(g, impl, 0.01 / t)
        wide = to_cpu(g).astype(np.float64)
        p, moments = problem.exact(p, wide, moments, t, 0.01 / t, d, **problem.constants)
    for got, want in zip([problem.params, *problem.moments], [p, *moments], strict=True):
        np.testing.assert_allclose(to_cpu(got).astype(np.float64), want, rtol=3e-6, atol=3e-6)
    assert problem.state.step == 6 and problem.state.skip == 0


@pytest.mark.parametrize("model", ["float16", "bfloat16"])
@pytest.mark.parametrize("rule", RULES)
def test_the_model_gets_a_rounded_copy(xp, impl, rule, model):
    problem = Problem(xp, rule, 5 * 128, model, model=model)
    problem.update(problem.draw(), impl)
    want = to_cpu(problem.params).astype(dtype_of(model))
    assert to_cpu(problem.model).tobytes() == want.tobytes()


@pytest.mark.parametrize("weight", ["float32", "bfloat16"])
@pytest.mark.parametrize("rule", RULES)
def test_gives_the_same_bits_twice_and_as_a_graph(gpu, rule, weight):
    def run(graphed):
        problem = Problem(gpu, rule, 33 * 128, "bfloat16", weight)
        g = problem.draw()
        if not graphed:
            for _ in range(3):
                problem.update(g, "raw")
            return problem.bytes()
        stream = gpu.cuda.Stream(non_blocking=True)
        gpu.cuda.Device().synchronize()
        with stream:
            problem.update(g, "raw")  # compiles
            stream.begin_capture()
            problem.update(g, "raw")
            graph = stream.end_capture()
            for _ in range(2):
                graph.launch(stream)
        stream.synchronize()
        assert problem.state.step == 3
        return problem.bytes()

    assert run(False) == run(False) == run(True)


@pytest.mark.parametrize("weight", ["float32", "bfloat16"])
@pytest.mark.parametrize("rule", RULES)
def test_a_skipped_update_changes_nothing(xp, impl, rule, weight):
    model = None if weight == "bfloat16" else "float16"
    grad = "float32" if model is None else "float16"
    problem = Problem(xp, rule, 300 * 128, grad, weight, model)
    good, bad = problem.draw(), problem.draw()
    bad[299 * 128] = np.nan
    for g in (bad, good, bad):
        before = problem.bytes()
        problem.update(g, impl)
        assert (problem.bytes() == before) == (g is bad)
    assert problem.state.step == 1 and problem.state.skipped == 2


@pytest.mark.parametrize("weight, model", [("float32", "float16"), ("bfloat16", None)])
@pytest.mark.parametrize("rule", RULES)
def test_nothing_beyond_the_end_is_written(xp, impl, rule, weight, model):
    """The size is 3/8 of a thread block's work, and the buffer continues with sevens."""
    size, grad = 3 * 128, "float32" if model is None else model
    problem = Problem(xp, rule, size, grad, weight, model)
    names = ["params", *(["model"] if model else [])]
    wide = [xp.full(size + 1024, 7.0, getattr(problem, name).dtype) for name in names]
    wide += [xp.full(size + 1024, 7.0, np.float32) for _ in problem.moments]
    before = problem.bytes()
    parts = [buffer[:size] for buffer in wide]
    for name, part in zip(names, parts, strict=False):
        part[...] = getattr(problem, name)
        setattr(problem, name, part)
    problem.moments = parts[len(names) :]
    for moment in problem.moments:
        moment[...] = 0
    problem.update(problem.draw(), impl)
    assert problem.bytes() != before
    assert all((to_cpu(buffer[size:]).astype(np.float32) == 7).all() for buffer in wide)


# ---- bfloat16 weights without masters -----------------------------------------------------------


def test_weights_are_rounded_by_the_random_numbers_of_their_index(xp, impl, rng):
    """From zero at learning rate 1, new weights are the negated gradients, then rounded."""
    seed, size = 2**40 + 5, 130 * 128
    g = rng.standard_normal(size).astype(np.float32)
    g[:2] = 0, 1
    problem = Problem(xp, "sgd", size, weight="bfloat16")
    problem.params[...] = 0
    problem.state.step = 6
    problem.update(xp.asarray(g), impl, 1.0, 0.0, seed=seed)
    counters = (np.arange(size // 8), 0, ROUNDING, 7)
    words = philox(seed, *(np.asarray(counter, np.uint64) for counter in counters))
    lanes = np.stack(words, axis=1).astype(np.uint32).view(np.uint16).ravel()
    want = ((0 - g).view(np.uint32) + lanes) >> 16
    np.testing.assert_array_equal(to_cpu(problem.params).view(np.uint16), want)


def test_rounding_at_random_has_the_right_mean():
    """A value 1/3 of the way between two neighbours is rounded up with probability 1/3."""
    x = np.full(1 << 17, 1 + 2**-7 / 3, np.float32)
    drawn = np.stack([round_at_random(np, x, Key(7, ROUNDING, n)) for n in range(4)])
    up = (drawn.astype(np.float32) > 1).mean()
    assert set(np.unique(drawn.astype(np.float32))) == {1, 1 + 2**-7}
    deviation = np.sqrt(1 / 3 * 2 / 3 / drawn.size)
    assert abs(up - 1 / 3) < 4 * deviation
    assert (drawn[0] != drawn[1]).any()


def test_rounding_at_random_keeps_exact_values():
    bits = np.arange(1 << 16, dtype=np.uint32) << 16
    x = bits.view(np.float32)  # every bfloat16
    got = round_at_random(np, x, Key(1))
    finite = np.isfinite(x)
    assert got[finite].tobytes() == x[finite].astype(BFLOAT16).tobytes()
    np.testing.assert_array_equal(got[~finite].astype(np.float32), x[~finite])
    wild = np.array([0x7FFFFFFF, 0xFFFFFFFF], np.uint32).view(np.float32)
    assert np.isnan(round_at_random(np, wild, Key(1)).astype(np.float32)).all()


def test_steps_too_small_for_a_weight_add_up(xp, impl):
    """Steps of 1/10 of the distance to the next bfloat16 move weights by 1/10 on average."""
    problem = Problem(xp, "sgd", 64 * 128, weight="bfloat16")
    problem.params[...] = 1.5
    g = xp.ones(problem.size, np.float32)
    for _ in range(50):
        problem.update(g, impl, 2**-7 / 10, 0.0)
    moved = 1.5 - to_cpu(problem.params).astype(np.float64)
    deviation = np.sqrt(50 * 0.1 * 0.9 / problem.size) * 2**-7
    assert abs(moved.mean() - 5 * 2**-7) < 4 * deviation


def test_rounding_depends_on_the_seed(xp, impl):
    results = []
    for seed in (1, 1, 2):
        problem = Problem(xp, "adamw", 8 * 128, weight="bfloat16")
        problem.update(problem.draw(), impl, seed=seed)
        results.append(problem.bytes()[0])
    assert results[0] == results[1] != results[2]


# ---- what is refused ----------------------------------------------------------------------------


def given(xp, **change):
    flat = {k: np.zeros(128, np.float32) for k in ("params", "grads", "exp_avg", "exp_avg_sq")}
    flat.update(change)
    arrays = {k: xp.asarray(a) if isinstance(a, np.ndarray) else a for k, a in flat.items()}
    return arrays | {"state": OptimizerState(arrays["params"])}


BAD = {
    "params.dtype": (TypeError, {"params": np.zeros(128)}),
    "grads is float64": (TypeError, {"grads": np.zeros(128)}),
    "grads is float16, but the weights": (TypeError, {
        "grads": np.zeros(128, np.float16), "model": np.zeros(128, BFLOAT16),
    }),
    "exp_avg is": (ValueError, {"exp_avg": np.zeros(256, np.float32)}),
    "exp_avg_sq.dtype": (TypeError, {"exp_avg_sq": np.zeros(128, np.float16)}),
    "model.dtype": (TypeError, {"model": np.zeros(128, np.float32)}),
    "model is a bfloat16 copy": (ValueError, {
        "params": np.zeros(128, BFLOAT16), "model": np.zeros(128, BFLOAT16),
    }),
    "decay is": (ValueError, {"decay": np.zeros(2, np.uint8)}),
    "betas": (ValueError, {"betas": (0.9, 1.0)}),
    "eps": (ValueError, {"eps": 0.0}),
    "weight_decay is nan": (ValueError, {"weight_decay": np.nan}),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_refuses_by_name(xp, name):
    error, change = BAD[name]
    with pytest.raises(error, match=f"adamw: .*{name}"):
        adamw(**given(xp, **change))


def test_refuses_strides_and_sizes_between_blocks(xp):
    strided = given(xp)
    strided["exp_avg_sq"] = xp.zeros(256, np.float32)[::2]
    with pytest.raises(ValueError, match=r"adamw: exp_avg_sq is \(128,\) with strides \(8,\)"):
        adamw(**strided)
    short = [xp.zeros(100, np.float32) for _ in range(4)]
    with pytest.raises(ValueError, match=f"multiple of {DECAY_BLOCK}"):
        adamw(*short, OptimizerState(short[0]))


@pytest.mark.parametrize("constants, sentence", [
    ({"momentum": 1.0}, "momentum is 1.0; accepted: 0 <= momentum < 1"),
    ({"nesterov": True}, "momentum is 0.0; accepted: above 0 with nesterov"),
    ({"momentum": 0.5}, "velocity is None for momentum 0.5"),
    ({"weight_decay": -1.0}, "weight_decay is -1.0; accepted: 0 or more"),
])  # fmt: skip
def test_sgd_refuses(constants, sentence):
    flat = np.zeros(128, np.float32)
    with pytest.raises(ValueError, match=f"sgd: .*{sentence}"):
        sgd(flat, flat, None, OptimizerState(flat), **constants)


def test_mixing_host_and_gpu_arrays_is_refused(gpu):
    host = [np.zeros(128, np.float32) for _ in range(4)]
    with pytest.raises(TypeError, match="state on the GPU"):
        adamw(*host, OptimizerState(gpu.zeros(1)))


def test_a_misaligned_view_uses_the_reference(gpu):
    flat = gpu.ones(257 + 128, np.float32)
    p, g, m = flat[1:129], flat[129:257], gpu.zeros(128, np.float32)
    state = OptimizerState(p, learning_rate=1.0, coefficient=1.0)
    reasons = dict(explain(lion, p, g, m, state).reasons)
    assert reasons["raw-simt"] == "params does not start at a multiple of 16 bytes; try a copy"
    lion(p, g, m, state, impl="reference")
    assert (to_cpu(flat) == [1, *[0] * 128, *[1] * 256]).all()


@pytest.mark.parametrize("op", ["adamw", "gradient_statistics", "lamb", "lion", "sgd"])
def test_explain_and_use_impl(xp, op):
    assert [one.name for one in OPS[op]] == ["raw-simt", "reference"]
    state, flat = OptimizerState(xp.zeros(1)), xp.zeros(128, np.float32)
    if op == "gradient_statistics":
        assert explain(gradient_statistics, flat, state).chosen == (
            "reference" if xp is np else "raw-simt"
        )
        with use_impl(gradient_statistics="reference"):
            assert explain(gradient_statistics, flat, state).chosen == "reference"
