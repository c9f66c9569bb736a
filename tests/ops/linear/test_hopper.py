"""The gradient of an activation between two linear layers, in one kernel on Hopper."""

import emulator
import numpy as np
import pytest
from checks import check_hopper_compiles, sampled

from gpuattn.arrays import BFLOAT16, to_cpu
from gpuattn.autodiff.pending_matmul import PendingMatmul
from gpuattn.autodiff.tensor import Tensor
from gpuattn.cuda import kernels, sources
from gpuattn.cuda.gpu import gpu as gpu_of
from gpuattn.ops.linear import hopper as linear_hopper
from gpuattn.ops.linear.activations import activate
from gpuattn.ops.linear.linear import linear

DTYPES = {"f16": np.float16, "bf16": BFLOAT16}
UNIT = {"f16": 2.0**-10, "bf16": 2.0**-7}  # unit in the last place of 1
# rows, depth, columns; the dtype, the activation
PROBLEMS = [
    ((300, 136, 328), "f16", "gelu"),  # several tiles of each block, edges of all kinds
    ((130, 392, 72), "bf16", "gelu"),
    ((64, 1096, 264), "bf16", "relu"),
    ((1, 72, 8), "f16", "relu"),
]


def problem(xp, shape, dtype, seed=0):
    """Return (PendingMatmul, input of the activation), and both as float64."""
    rows, depth, columns = shape
    rng = np.random.default_rng(seed)
    shapes = (rows, depth), (depth, columns), (rows, columns)
    exact = [rng.standard_normal(s, np.float32).astype(DTYPES[dtype]) for s in shapes]
    exact[2] *= exact[2].dtype.type(3)
    dz, weight, before = (xp.asarray(x) for x in exact)
    return PendingMatmul(dz, weight, before.shape), before, [x.astype(np.float64) for x in exact]


def check(found, exact, dtype, activation):
    """Both the product and the result are rounded, each by at most half a unit."""
    dz, weight, before = exact
    _, slope = activate(before, activation, True)
    want = dz @ weight * slope
    close = UNIT[dtype] * 1.01 * np.abs(want) + 1e-5 * np.abs(dz) @ np.abs(weight)
    found = to_cpu(found).astype(np.float64)
    assert not np.isnan(found).any() and (np.abs(found - want) <= close).all()


@pytest.mark.parametrize("shape, dtype, activation", sampled(PROBLEMS, 1))
def test_on_an_emulated_gpu(shape, dtype, activation, host_compiler):
    product, before, exact = problem(np, shape, dtype)
    product = product._replace(
        dz=emulator.as_array(product.dz), weight=emulator.as_array(product.weight)
    )
    with emulator.Machine(seed=sum(shape)).in_place():
        assert linear_hopper.fits(product, emulator.as_array(before), activation)
        found = linear_hopper.backward(product, emulator.as_array(before), activation)
    check(found, exact, dtype, activation)


def test_far_from_zero_and_not_a_number(host_compiler):
    """The slope of GELU far from zero is exact; NaN stays in its element."""
    largest = float(np.finfo(np.float16).max)
    before = np.array([[-np.inf, -largest, -7.5, -7, 7, 7.5, largest, np.inf, np.nan] + 7 * [0]])
    ones = emulator.as_array(np.ones((1, 72), np.float16))
    weight = emulator.as_array(np.ones((72, 16), np.float16) / np.float16(72))
    with emulator.Machine(seed=1).in_place():
        product = PendingMatmul(ones, weight, before.shape)
        before = emulator.as_array(before.astype(np.float16))
        (found,) = linear_hopper.backward(product, before, "gelu")
    np.testing.assert_allclose(found[:8], [0] * 4 + [1] * 4, atol=2e-3)
    assert np.isnan(found[8]) and not np.isnan(found[9:]).any()


def test_compiles_without_spills_and_matches_the_host_memory_size(nvrtc):
    size = linear_hopper.SHARED_BYTES
    check_hopper_compiles(linear_hopper.FILE, size, ACTIVATION=2, SPREAD=6)


@pytest.mark.parametrize("activation", linear_hopper.ACTIVATIONS)
@pytest.mark.parametrize("depth", [72, 136, 264, 392, 520, 776, 1032, 4104])
def test_launched_kernels_are_compiled_in_advance(depth, activation):
    constants = linear_hopper.constants_of(depth, np.dtype(np.float16), activation)
    assert constants in sources.variants(linear_hopper.FILE)
    assert linear_hopper.DEPTH * (constants["SPREAD"] - 1) < depth


def views():
    """Matmuls and activation inputs that the kernel refuses."""
    dz, weight, before = (np.zeros(s, np.float16) for s in ((256, 136), (136, 264), (256, 264)))
    yield "wide", dz.astype(np.float32), weight.astype(np.float32), before.astype(np.float32)
    yield "mixed", dz, weight, before.astype(BFLOAT16)
    yield "odd columns", dz, weight[:, :-1], before[:, :-1]
    yield "odd depth", dz[:, :-1], weight[:-1], before
    yield "by columns", dz, np.asfortranarray(weight), before
    yield "shallow", dz[:, :64], weight[:64], before
    yield "no rows", dz[:0], weight, before[:0]


@pytest.mark.parametrize("name, dz, weight, before", list(views()))
def test_refusals(name, dz, weight, before):
    dz, weight, before = (emulator.as_array(x) for x in (dz, weight, before))
    assert not linear_hopper.fits(PendingMatmul(dz, weight, before.shape), before, "gelu")


def test_accepted_inputs():
    dz, weight, before = (np.zeros(s, np.float16) for s in ((256, 136), (136, 264), (256, 264)))
    whole = np.zeros((136, 272), np.float16)
    for w in (weight, whole[:, :264]):
        product = PendingMatmul(emulator.as_array(dz), emulator.as_array(w), before.shape)
        assert linear_hopper.fits(product, emulator.as_array(before), "relu")
        assert not linear_hopper.fits(product, emulator.as_array(before), None)


# ---- on a GPU --------------------------------------------------------------------------------


@pytest.fixture
def hopper(gpu):
    if not gpu_of(0).has_wgmma:
        pytest.skip("not a Hopper GPU")
    return gpu


@pytest.mark.parametrize("activation", linear_hopper.ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2049, 384, 1544), (1000, 776, 648), (333, 72, 2056)], ids=str)
def test_on_a_gpu(hopper, shape, dtype, activation):
    product, before, exact = problem(hopper, shape, dtype)
    check(linear_hopper.backward(product, before, activation), exact, dtype, activation)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("activation", linear_hopper.ACTIVATIONS)
def test_two_layers(hopper, monkeypatch, activation, with_bias):
    """All parameter gradients equal those without the kernel, which runs once."""
    rng = np.random.default_rng(0)
    shapes = [(1, 3072, 256), (1024, 256), (1024,), (256, 1024), (256,)]
    arrays = [hopper.asarray(rng.standard_normal(s, np.float32).astype(BFLOAT16)) for s in shapes]

    def gradients():
        x, w1, b1, w2, b2 = (Tensor(a, requires_grad=True) for a in arrays)
        hidden = linear(x, w1 * 0.06, b1 if with_bias else None, activation=activation)
        linear(hidden, w2 * 0.03, b2 if with_bias else None).backward(arrays[0])
        wanted = [x, w1, w2, *((b1, b2) if with_bias else ())]
        return [to_cpu(t.grad).astype(np.float64) for t in wanted]

    launches = kernels.launches[linear_hopper.NAME]
    found = gradients()
    assert kernels.launches[linear_hopper.NAME] == launches + 1
    monkeypatch.setattr(linear_hopper, "takes", lambda *_: False)
    for got, want in zip(found, gradients(), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-2 * np.abs(want).max())
