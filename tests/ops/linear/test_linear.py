"""The linear layer: every implementation, gradient slots, odd shapes, errors."""

import numpy as np
import pytest
from checks import DTYPES, check_gradient, check_implementation, dtype_of, implementations

from gpuattn import Tensor
from gpuattn.arrays import to_cpu
from gpuattn.autodiff import backward_pass, tape
from gpuattn.cuda import kernels
from gpuattn.ops.linear.linear import IMPLS, linear

# of "raw-hopper": test_gelu_hopper.py
HERE = [case for case in implementations(IMPLS) if case.values[0] != "raw-hopper"]
# (..., in), out
SHAPES = {
    "one": ((1, 1), 1),
    "odd": ((33, 17), 129),
    "stacked": ((2, 3, 8), 5),
    "vector": ((6,), 4),
    "no rows": ((0, 8), 4),
    "no inputs": ((3, 0), 4),
}


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("activation", [None, "relu", "gelu", "gelu_exact"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape, out", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name, where", HERE)
def test_implementations(rng, name, where, shape, out, dtype, activation, with_bias):
    def draw(*shape):
        if dtype == "float32":
            return rng.standard_normal(shape)
        # The library rounds the matmul to 16 bits before it adds the bias. For integers that
        # rounding is exact, so ReLU sees the right sign.
        return rng.integers(-2, 3, shape).astype(float)

    inputs = [draw(*shape), draw(out, shape[-1]), draw(out) + 0.25 if with_bias else None]
    check_implementation(IMPLS, name, where, inputs, dtype, activation=activation)


@pytest.mark.parametrize("activation", [None, "relu", "gelu", "gelu_exact"])
def test_gradient(rng, activation):
    x, weight, bias = (rng.standard_normal(s) for s in ((2, 3, 4), (5, 4), (5,)))
    check_gradient(lambda *a: linear(*a, activation=activation), x, weight, bias)
    check_gradient(lambda *a: linear(*a, activation=activation), x, weight)


def test_written_out_definition(xp, rng):
    x, weight, bias = (rng.standard_normal(s) for s in ((2, 3), (4, 3), (4,)))
    got = linear(*(xp.asarray(a) for a in (x, weight, bias)), activation="relu")
    np.testing.assert_allclose(to_cpu(got), np.maximum(x @ weight.T + bias, 0), rtol=1e-12)


@pytest.mark.parametrize("slot_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_written_to_their_slots(xp, rng, dtype, slot_dtype):
    x = xp.asarray(rng.standard_normal((40, 6)).astype(dtype_of(dtype)))
    weight = xp.asarray(rng.standard_normal((3, 6)).astype(dtype_of(dtype)))
    bias = xp.asarray(rng.standard_normal(3).astype(dtype_of(dtype)))
    dy = xp.asarray(rng.standard_normal((40, 3)).astype(dtype_of(dtype)))
    flat = xp.full(23, np.nan, np.float32).astype(dtype_of(slot_dtype))
    parameters = [Tensor(weight, requires_grad=True), Tensor(bias, requires_grad=True)]
    parameters[0].grad_slot, parameters[1].grad_slot = flat[1:19].reshape(3, 6), flat[19:22]
    for times in (1, 2):  # first written, then added to
        backward_pass.backward(linear(Tensor(x), *parameters), dy)
        rows, grads = to_cpu(x).astype(np.float64), to_cpu(dy).astype(np.float64)
        got = to_cpu(flat).astype(np.float64)
        coarse = 1e-2 if "bfloat16" in (dtype, slot_dtype) else 2e-3
        rtol = 1e-6 if dtype == slot_dtype == "float32" else coarse
        want = times * np.concatenate([(grads.T @ rows).ravel(), grads.sum(0)])
        np.testing.assert_allclose(got[1:22], want, rtol=0, atol=rtol * np.abs(want).max())
        assert np.isnan(got[[0, 22]]).all()
        assert parameters[0].grad is parameters[0].grad_slot


def test_views_of_any_strides(xp, rng):
    whole = xp.asarray(rng.standard_normal((4, 6, 10)).astype(np.float32))
    weight = xp.asarray(rng.standard_normal((10, 14)).astype(np.float32))
    cases = [(whole[:, ::2], weight.T), (whole.transpose(1, 0, 2), weight[:, :10])]
    cases += [(xp.broadcast_to(whole[:1], whole.shape), weight[::-1, 4:])]
    for x, w in cases:
        want = to_cpu(x).astype(np.float64) @ to_cpu(w).astype(np.float64).T
        np.testing.assert_allclose(to_cpu(linear(x, w)), want, atol=1e-5)


def test_only_needed_gradients_are_computed(xp, rng):
    x = xp.asarray(rng.standard_normal((4, 3)))
    weight = Tensor(xp.asarray(rng.standard_normal((2, 3))), requires_grad=True)
    y = linear(x, weight)
    assert y.node.saved[2] is None  # only dx needs the weight
    with tape.no_grad():
        assert linear(x, weight).node is None


def test_errors(xp):
    x, weight = xp.ones((2, 3), np.float32), xp.ones((4, 3), np.float32)
    with pytest.raises(ValueError, match=r"linear: x.shape is \(3, 2\)"):
        linear(x.T, weight)
    with pytest.raises(ValueError, match=r"linear: weight.shape is \(4,\)"):
        linear(x, weight[:, 0])
    with pytest.raises(ValueError, match=r"linear: bias.shape is \(3,\)"):
        linear(x, weight, xp.ones(3, np.float32))
    with pytest.raises(ValueError, match="linear: activation is 'swish'"):
        linear(x, weight, activation="swish")
    with pytest.raises(TypeError, match="share one dtype"):
        linear(x, weight.astype(np.float16))
    with pytest.raises(TypeError, match="int32"):
        linear(x.astype(np.int32), weight)


def test_mixing_host_and_gpu_arrays_is_refused(gpu):
    with pytest.raises(TypeError, match="weight on the GPU but x in host memory"):
        linear(np.ones((2, 3), np.float32), gpu.ones((4, 3), np.float32))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", [None, "relu", "gelu", "gelu_exact"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_launch_on_a_gpu(gpu, dtype, activation, bias, recwarn):
    ones = gpu.ones((8, 8), np.float32).astype(dtype_of(dtype))
    before = kernels.launches.copy()
    linear(ones, ones, ones[0] if bias else None, activation=activation)
    ran = kernels.launches - before
    # the library has no exact GELU, and in float32 its GELU is not accurate enough
    if activation == "gelu_exact" or (dtype == "float32" and activation == "gelu"):
        assert ran == {"matmul": 1, "bias_activation_forward": 1}
    else:
        assert ran.total() == 1
        assert next(iter(ran)).startswith("matmul")
    assert not recwarn.list


@pytest.mark.parametrize("dtype", DTYPES)
def test_bias_gradient_of_many_rows(gpu, rng, dtype):
    x, weight, bias, dy = (
        gpu.asarray(rng.standard_normal(shape).astype(dtype_of(dtype)))
        for shape in ((5000, 24), (40, 24), (40,), (5000, 40))
    )
    slots = [gpu.zeros(shape, np.float32).astype(dtype_of(dtype)) for shape in ((40, 24), 40)]
    parameters = [Tensor(a, requires_grad=True) for a in (weight, bias)]
    for parameter, slot in zip(parameters, slots, strict=True):
        parameter.grad_slot = slot
    rows, grads = to_cpu(x).astype(np.float64), to_cpu(dy).astype(np.float64)
    for times in (1, 2):
        backward_pass.backward(linear(x, *parameters), dy)
        for slot, want in zip(slots, (grads.T @ rows, grads.sum(0)), strict=True):
            error = np.abs(to_cpu(slot).astype(np.float64) - times * want).max()
            rounding = {"float32": 2e-5, "float16": 1e-3, "bfloat16": 8e-3}[dtype]
            assert error <= rounding * np.abs(times * want).max()


def test_captured_layers_keep_their_biases(gpu, rng):
    """Two layers of the same shapes share a plan; each captured launch keeps its own pointers."""
    bfloat16 = dtype_of("bfloat16")
    x, weight = (gpu.asarray(rng.standard_normal((64, 64)).astype(bfloat16)) for _ in range(2))
    biases = gpu.asarray(rng.standard_normal((2, 64)).astype(bfloat16))
    eager = [linear(x, weight, bias, activation="gelu") for bias in biases]
    stream, pool = gpu.cuda.Stream(non_blocking=True), gpu.cuda.MemoryPool()
    gpu.cuda.get_current_stream().synchronize()
    with stream, gpu.cuda.using_allocator(pool.malloc):
        stream.begin_capture()
        captured = [linear(x, weight, bias, activation="gelu") for bias in biases]
        graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
    for got, want in zip(captured, eager, strict=True):
        assert to_cpu(got).tobytes() == to_cpu(want).tobytes()
