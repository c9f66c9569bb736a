"""``fuse``: the values and gradients of the same code op by op; a sentence where it cannot fuse."""

import re
import warnings

import fake_graphs
import numpy as np
import pytest

import gpuattn
from gpuattn import Tensor
from gpuattn.arrays import BFLOAT16, to_cpu
from gpuattn.autodiff import tape
from gpuattn.autodiff.fusion import launch
from gpuattn.cuda import kernels
from gpuattn.errors import KernelCompileError, SlowPathWarning, UnsupportedError

FACTOR = 2.0  # a global that a test replaces


def formula(x, y, p=0.5):
    z = np.tanh(x * p + y) ** 2
    return np.where(z > 0.25, z, np.maximum(x, y)) + np.exp(-abs(x)) / (1 - p**3)


def two(x, y):
    both = x * y
    return np.sqrt(both * both + 1), np.clip(x, -0.5, y) - both


def given(xp, rng, *shapes, dtype="f4"):
    return [xp.asarray(rng.standard_normal(shape).astype(dtype)) for shape in shapes]


def results(out):
    return out if isinstance(out, tuple) else (out,)


def as_float(x):
    return to_cpu(tape.raw(x)).astype(np.float64)


def gradients(function, arrays, weights, **params):
    """Return (results, gradient of each array) in float64."""
    tensors = [Tensor(x, requires_grad=True) for x in arrays]
    out = function(*tensors, **params)
    sum(np.sum(o * w) for o, w in zip(results(out), weights, strict=True)).backward()
    return [as_float(o) for o in results(out)], [as_float(t.grad) for t in tensors]


@pytest.mark.parametrize("function", [formula, two], ids=["formula", "two"])
@pytest.mark.parametrize("shapes", [[(3, 8)] * 2, [(3, 8), (8,)], [(2, 1, 5), (3, 1)], [(), (4,)],
                                    [(0, 3), (3,)]], ids=str)  # fmt: skip
def test_values_and_gradients(xp, rng, function, shapes):
    arrays = given(xp, rng, *shapes)
    if function is two and np.broadcast_shapes(*shapes) != shapes[0]:
        arrays = [xp.broadcast_to(x, np.broadcast_shapes(*shapes)).copy() for x in arrays]
    fused = gpuattn.fuse(function)
    for mine, other in zip(*[results(f(*arrays)) for f in (fused, function)], strict=True):
        np.testing.assert_allclose(as_float(mine), as_float(other), rtol=1e-5, atol=1e-6)
    shape = np.broadcast_shapes(*[x.shape for x in arrays])
    weights = given(xp, rng, *[shape] * (2 if function is two else 1))
    assert fused.reason is None
    (values, slopes), (others, others_slopes) = (
        gradients(f, arrays, weights) for f in (fused, function)
    )
    for mine, other in zip([*values, *slopes], [*others, *others_slopes], strict=True):
        assert mine.shape == other.shape
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype, unit", [("f8", 1e-13), ("f2", 2**-10), (BFLOAT16, 2**-7)])
def test_dtypes(xp, rng, dtype, unit):
    """16-bit results are those of float32, rounded once."""
    arrays = given(xp, rng, (4, 16), (16,), dtype=dtype)
    weights = given(xp, rng, (4, 16), dtype=dtype)
    fused = gpuattn.fuse(formula)
    (out,), slopes = gradients(fused, arrays, weights, p=0.25)
    wide = [to_cpu(x).astype("f8") for x in arrays]
    (want,), want_slopes = gradients(formula, wide, [to_cpu(weights[0]).astype("f8")], p=0.25)
    np.testing.assert_allclose(out, want, rtol=unit, atol=unit / 8)
    np.testing.assert_allclose(slopes[0], want_slopes[0], rtol=unit, atol=unit)
    np.testing.assert_allclose(slopes[1], want_slopes[1], rtol=4 * unit, atol=4 * unit)
    made = fused(*[Tensor(x, requires_grad=True) for x in arrays])
    assert made.dtype == dtype and made.node.op == "formula" and fused.reason is None
    mixed = fused(Tensor(arrays[0]), Tensor(arrays[1].astype("f4")))
    assert mixed.dtype == ("f8" if dtype == "f8" else "f4")


def test_any_order(rng):
    x, y = given(np, rng, (3, 4), (4,), dtype="f8")
    assert gpuattn.gradcheck(gpuattn.fuse(formula), x, y, order=2) < 1e-6


def test_only_what_backward_reads_is_kept(xp, rng):
    x, y = (Tensor(a, requires_grad=True) for a in given(xp, rng, (3,), (3,)))
    assert [s is None for s in gpuattn.fuse(lambda x, y: x * 2 + y)(x, y).node.saved[1:]] == [
        True
    ] * 2
    saved = gpuattn.fuse(lambda x, y: np.exp(x) + y)(x, y).node.saved
    assert saved[1] is x.data and saved[2] is None


def test_an_input_without_influence_has_zero_gradient(xp, rng):
    x, y = given(xp, rng, (3,), (3,))
    _, (dx, dy) = gradients(gpuattn.fuse(lambda x, y: x * (y > 0) + np.sign(y)), [x, y], [x])
    np.testing.assert_allclose(dx, as_float(x) * (as_float(y) > 0))
    assert not dy.any()


def test_one_of_two_results_is_used(xp, rng):
    arrays = given(xp, rng, (3, 4), (3, 4))
    for place in range(2):
        pair = [
            gradients(lambda x, y, f=f, i=place: f(x, y)[i], arrays, [arrays[0]])[1]
            for f in (gpuattn.fuse(two), two)
        ]
        for mine, other in zip(*pair, strict=True):
            np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6)


def test_tensors_from_elsewhere_are_inputs(xp, rng):
    x, scale = given(xp, rng, (3, 4), (4,))
    weight = Tensor(scale, requires_grad=True)
    fused = gpuattn.fuse(lambda x: np.tanh(x * weight) + weight)
    for step in range(2):
        out = fused(Tensor(x))
        assert out.node.op == "<lambda>" and fused.reason is None
        np.sum(out).backward()
        inner = np.tanh(to_cpu(x) * to_cpu(scale))
        np.testing.assert_allclose(as_float(out), inner + to_cpu(scale), rtol=1e-5, atol=1e-6)
        slope = ((1 - inner**2) * to_cpu(x) + 1).sum(0)
        np.testing.assert_allclose(as_float(weight.grad), (step + 1) * slope, rtol=1e-4, atol=1e-5)
    assert len(fused._known) == 1


def test_what_changes_is_traced_again(xp, rng, monkeypatch):
    (x,) = given(xp, rng, (3,))
    fused = gpuattn.fuse(lambda x, power, shift: x**power * FACTOR + shift)
    for power, shift in ((2, 1.0), (3, 1.0), (2, 2.5), (2, -0.5)):
        out = fused(Tensor(x), power, shift=shift)
        np.testing.assert_allclose(
            as_float(out), as_float(x) ** power * 2 + shift, rtol=1e-5, atol=1e-6
        )
    assert len(fused._known) == 2  # a float is no reason
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    np.testing.assert_allclose(as_float(fused(Tensor(x), 2, shift=1.0)), as_float(x) ** 2 * 3 + 1,
                               rtol=1e-5, atol=1e-6)  # fmt: skip


def test_arithmetic_of_numbers_is_that_of_python(xp):
    """It is in double precision, though arrays are float32."""
    x = xp.ones(3, "f4")
    out = gpuattn.fuse(lambda x, beta: x / (1 - beta))(Tensor(x), 0.999)
    np.testing.assert_array_equal(as_float(out), np.float32(1) / np.float32(1 - 0.999))


def branches(x):
    return x if x > 0 else -x


def edits(x):
    x *= 2
    return x


@pytest.mark.parametrize("function, reason", [
    (branches, "use np.where"),
    (lambda x: x / np.sum(x * x), "np.sum"),
    (lambda x: x[0] * 2, "indexes"),
    (lambda x: x * x.shape[0], r"\.shape"),
    (lambda x: np.add.reduce(x), "np.add.reduce"),
    (lambda x: x // 2, "np.floor_divide"),
    (lambda x: 2.0, "returns a float"),
    (lambda x: x * {}, "a dict does not fuse"),
    (edits, "x = x \\+ y"),
    (lambda x: x.astype("complex64"), "complex64"),
], ids=["if", "sum", "index", "shape", "reduce", "integer division", "number", "dict", "in place",
        "complex"])  # fmt: skip
def test_what_does_not_fuse_runs_op_by_op(xp, function, reason):
    x, fused = xp.ones(1, "f4"), gpuattn.fuse(function)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            try:
                out = fused(Tensor(x))
            except (TypeError, UnsupportedError) as error:  # the tape's own
                assert "fuse" not in str(error)
            else:
                np.testing.assert_array_equal(
                    as_float(out), as_float(function(Tensor(xp.ones(1, "f4"))))
                )
    said = [str(w.message) for w in caught if w.category is SlowPathWarning]
    assert len(said) == 1 and "is not fused: " in said[0]
    assert re.search(reason, fused.reason), fused.reason


def test_errors_of_the_arrays_are_numpys(xp):
    fused = gpuattn.fuse(lambda x, y: x + y)
    with pytest.raises(ValueError, match="broadcast"):
        fused(Tensor(xp.ones(3, "f4")), Tensor(xp.ones(2, "f4")))


@pytest.mark.filterwarnings("ignore:<lambda> is not fused")
def test_without_a_kernel_the_program_is_computed_op_by_op(monkeypatch, rng):
    def broken(*_):
        raise KernelCompileError("no such instruction")

    monkeypatch.setattr(launch, "_kernel", broken)
    with fake_graphs.graphs_on("9.0") as cp:
        x, y = (rng.standard_normal((3, 4)).astype("f4") for _ in range(2))
        fused = gpuattn.fuse(formula)
        with pytest.warns(SlowPathWarning, match="formula is not fused: no such instruction"):
            _, slopes = gradients(fused, [cp.asarray(x), cp.asarray(y)], [cp.asarray(x)])
        _, others = gradients(formula, [x, y], [x])
        np.testing.assert_allclose(slopes[0], others[0], rtol=1e-5, atol=1e-6)
        mixed = gpuattn.fuse(lambda x, y: x + y)
        mixed(cp.asarray(x), cp.asarray(x))
        mixed(cp.asarray(x), y)
        assert mixed.reason == "its arrays are in part NumPy's, in part on a GPU"


def test_numpy_is_just_called():
    seen = []

    @gpuattn.fuse
    def f(x):
        """Double."""
        seen.append(x)
        return x * 2

    x = np.ones(3)
    assert f(x).tolist() == [2, 2, 2] and seen[0] is x and f.__doc__ == "Double."
    assert f(2) == 4
    with pytest.raises(TypeError, match="fuse: function is an int"):
        gpuattn.fuse(3)


def test_methods(xp):
    class Scaled:
        def __init__(self, by):
            self.by = by

        @gpuattn.fuse
        def __call__(self, x):
            return x * self.by

    x, scaled = Tensor(xp.ones(3, "f4")), Scaled(3.0)
    assert as_float(scaled(x)).tolist() == [3, 3, 3]
    scaled.by = 4.0
    assert as_float(scaled(x)).tolist() == [4, 4, 4] and Scaled.__call__.reason is None


def test_a_launch_reads_and_writes_once(gpu, rng):
    """One kernel forward, one backward, on views and on arrays of any layout."""
    fused = gpuattn.fuse(formula)
    x, y = given(gpu, rng, (64, 96), (96,))
    for view in (x, x.T[:, :64].T, x[::2], x[:, ::-1], x[:, 1:]):
        bias = y[: view.shape[1]]
        before = kernels.launches["fused"]
        out = fused(view, bias, p=0.75)
        assert kernels.launches["fused"] == before + 1 and fused.reason is None
        want = formula(to_cpu(view), to_cpu(bias), 0.75)
        np.testing.assert_allclose(to_cpu(out), want, rtol=1e-5, atol=1e-6)


def test_a_captured_function_of_fused_ones(gpu, rng):
    fused = gpuattn.fuse(formula)
    captured = gpuattn.capture(gpuattn.value_and_grad(lambda x, y: np.sum(fused(x, y)), (0, 1)))
    for _ in range(4):
        x, y = given(gpu, rng, (16, 32), (32,))
        value, slopes = captured(x, y)
        want, want_slopes = gpuattn.value_and_grad(lambda x, y: np.sum(formula(x, y)), (0, 1))(x, y)
        np.testing.assert_allclose(as_float(value), as_float(want), rtol=1e-4)
        for mine, other in zip(slopes, want_slopes, strict=True):
            np.testing.assert_allclose(as_float(mine), as_float(other), rtol=1e-3, atol=1e-4)
    assert captured.graphs == 1
