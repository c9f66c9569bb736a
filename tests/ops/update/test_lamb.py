"""LAMB compared with the paper's formula in float64, and the order of its kernel's tiles."""

import numpy as np
import pytest
from checks import dtype_of

from gpuattn import OptimizerState, TensorTable, gradient_statistics, lamb
from gpuattn.arrays import to_cpu
from gpuattn.ops.update.lamb import BOTH, NORMS, TILE, WEIGHTS, plan

BETAS, EPS, DECAY = (0.9, 0.98), 1e-3, 0.1
# in decay blocks: one tile, one block more, many tiles, and tensors that are not adapted
LENGTHS = (1, TILE, TILE + 1, 3, 300 * TILE + 5, 2, 40)
ADAPTED = (True, True, True, False, True, True, False)


@pytest.fixture(params=["reference", "raw-simt"])
def impl(request, xp):
    if request.param == "raw-simt" and xp is np:
        pytest.skip("kernels need a GPU")
    return request.param


class Problem:
    def __init__(self, xp, grad="float32", weight="float32", model=None, lengths=LENGTHS):
        self.xp, self.rng, self.grad = xp, np.random.default_rng(0), dtype_of(grad)
        self.bounds = np.cumsum([0, *lengths]) * 128
        self.size = int(self.bounds[-1])
        draw = self.rng.standard_normal(self.size, dtype=np.float32)
        draw[self.bounds[-3] : self.bounds[-2]] = 0  # a tensor of norm 0
        self.params = xp.asarray(draw.astype(dtype_of(weight)))
        self.moments = [xp.zeros(self.size, np.float32) for _ in range(2)]
        self.model = None if model is None else xp.zeros(self.size, dtype_of(model))
        self.adapted = ADAPTED[-len(lengths) :]
        starts = self.bounds[:-1].tolist()
        self.tensors = TensorTable(self.params, starts, self.size, self.adapted)
        self.state = OptimizerState(self.params, learning_rate=0.01)

    def draw(self):
        drawn = self.rng.standard_normal(self.size, dtype=np.float32)
        return self.xp.asarray(drawn.astype(self.grad))

    def update(self, g, impl):
        gradient_statistics(g, self.state, impl=impl)
        lamb(
            self.params, g, *self.moments, self.state, self.tensors, model=self.model,
            betas=BETAS, eps=EPS, weight_decay=DECAY, impl=impl,
        )  # fmt: skip

    def bytes(self):
        return [to_cpu(a).tobytes() for a in (self.params, *self.moments)]


def exact_update(problem, p, g, m, v, t, lr):
    """Compute one step on float64 arrays, following the paper."""
    m = BETAS[0] * m + (1 - BETAS[0]) * g
    v = BETAS[1] * v + (1 - BETAS[1]) * g**2
    r = (m / (1 - BETAS[0] ** t)) / (np.sqrt(v / (1 - BETAS[1] ** t)) + EPS)
    p = p.copy()
    bounds = problem.bounds
    for begin, end, adapted in zip(bounds, bounds[1:], problem.adapted, strict=False):
        x, u = p[begin:end], r[begin:end]
        if adapted:
            u = u + DECAY * x
            lengths = np.linalg.norm(x), np.linalg.norm(u)
            u = u * (lengths[0] / lengths[1] if all(lengths) else 1)
        x -= lr * u
    return p, m, v


@pytest.mark.parametrize("grad", ["float32", "float16", "bfloat16"])
def test_follows_the_formula_in_float64(xp, impl, grad):
    problem = Problem(xp, grad)
    want = [to_cpu(a).astype(np.float64) for a in (problem.params, *problem.moments)]
    for t in range(1, 5):
        problem.state.learning_rate = 0.01 / t
        g = problem.draw()
        problem.update(g, impl)
        p, m, v = want
        want = exact_update(problem, p, to_cpu(g).astype(np.float64), m, v, t, 0.01 / t)
    for got, exact in zip((problem.params, *problem.moments), want, strict=True):
        np.testing.assert_allclose(to_cpu(got), exact, rtol=5e-6, atol=5e-6)


def test_the_norm_of_a_step_follows_the_learning_rate(xp, impl):
    """|change| = learning rate * |weights| for every adapted tensor with a nonzero norm."""
    problem = Problem(xp)
    before = to_cpu(problem.params).astype(np.float64)
    problem.update(problem.draw(), impl)
    change = to_cpu(problem.params) - before
    for tensor, (begin, end) in enumerate(zip(problem.bounds, problem.bounds[1:], strict=False)):
        length = np.linalg.norm(before[begin:end])
        if problem.adapted[tensor] and length:
            assert np.linalg.norm(change[begin:end]) == pytest.approx(0.01 * length, rel=1e-4)


@pytest.mark.parametrize("model", ["float16", "bfloat16"])
def test_the_model_gets_a_rounded_copy(xp, impl, model):
    problem = Problem(xp, model, model=model)
    problem.update(problem.draw(), impl)
    want = to_cpu(problem.params).astype(dtype_of(model))
    assert to_cpu(problem.model).tobytes() == want.tobytes()


@pytest.mark.parametrize("weight", ["float32", "bfloat16"])
def test_gives_the_same_bits_every_time_and_as_a_graph(gpu, weight):
    def run(graphed):
        problem = Problem(gpu, "bfloat16", weight)
        g = problem.draw()
        if not graphed:
            for _ in range(4):
                problem.update(g, "raw")
            return problem.bytes()
        stream = gpu.cuda.Stream(non_blocking=True)
        gpu.cuda.Device().synchronize()
        with stream:
            problem.update(g, "raw")  # compiles
            stream.begin_capture()
            problem.update(g, "raw")
            graph = stream.end_capture()
            for _ in range(3):
                graph.launch(stream)
        stream.synchronize()
        assert problem.state.step == 4
        control = to_cpu(problem.tensors.control)
        assert control[:3].tolist() == [0, 0, 4] and not control[3::2].any()
        return problem.bytes()

    assert run(False) == run(False) == run(True)


def test_a_skipped_update_changes_nothing(xp, impl):
    problem = Problem(xp)
    good, bad = problem.draw(), problem.draw()
    bad[-1] = np.inf
    for g in (bad, good, bad, good):
        before = problem.bytes()
        problem.update(g, impl)
        assert (problem.bytes() == before) == (g is bad)
    assert problem.state.step == 2


def test_bfloat16_weights_without_masters(xp, impl):
    """Differs from weights with masters by at most one bfloat16 step per update."""
    alone, masters = Problem(xp, weight="bfloat16"), Problem(xp)
    masters.params[...] = alone.params.astype(np.float32)
    for _ in range(3):
        g = alone.draw()
        alone.update(g, impl)
        masters.update(g, impl)
    got, want = (to_cpu(x.params).astype(np.float64) for x in (alone, masters))
    assert (abs(got - want) < 3 * 2.0**-7 * abs(want) + 1e-3).all()
    assert (got - want).mean() == pytest.approx(0, abs=5e-5)


@pytest.mark.parametrize("adapted", [ADAPTED, (True,) * 7, (False,) * 7])
def test_the_plan_has_every_tile_once_and_norms_first(adapted):
    bounds = np.cumsum([0, *LENGTHS]).tolist()
    items, tensors, tiles = plan(bounds, adapted)
    for kind in (NORMS, WEIGHTS, BOTH):
        done = [range(first, first + count) for first, count, _, what in items if what == kind]
        blocks = sorted(block for part in done for block in part)
        chosen = [(kind != BOTH) == one for one in adapted]
        ranges = zip(bounds, bounds[1:], chosen, strict=False)
        assert blocks == [block for a, b, mine in ranges if mine for block in range(a, b)]
    for tensor, (begin, first, count) in enumerate(tensors):
        mine = [(n, item) for n, item in enumerate(items) if item[2] == tensor]
        norms = [n for n, item in mine if item[3] == NORMS]
        weights = [n for n, item in mine if item[3] == WEIGHTS]
        assert not norms or max(norms) < min(weights)
        places = {first + (items[n][0] - begin) // TILE for n in norms}
        assert places == set(range(first, first + count)) if adapted[tensor] else not places
        assert first + count * adapted[tensor] <= tiles


BAD_TABLES = {
    "starts": ((0, 64), 256, (True, True)),
    "starts is": ((128,), 256, (True,)),
    "accepted: rising": ((0, 256, 128), 512, (True,) * 3),
    "adapted": ((0, 128), 256, (True,)),
}


@pytest.mark.parametrize("name", BAD_TABLES)
def test_a_table_refuses(name):
    with pytest.raises(ValueError, match=f"TensorTable: .*{name}"):
        TensorTable(np.zeros(1, np.float32), *BAD_TABLES[name])


def test_refuses_by_name():
    flat = np.zeros(256, np.float32)
    table = TensorTable(flat, (0,), 128, (True,))
    with pytest.raises(ValueError, match="lamb: tensors is a table of 128; accepted: one of buf"):
        lamb(flat, flat, flat, flat, OptimizerState(flat), table)
    with pytest.raises(ValueError, match="lamb: eps is 0"):
        lamb(flat, flat, flat, flat, OptimizerState(flat), table, eps=0.0)
