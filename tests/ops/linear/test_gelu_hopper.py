"""A linear layer with GELU on Hopper: slopes of GELU stored as bytes, gradients from them."""

import itertools

import emulator
import numpy as np
import pytest
from checks import check_hopper_compiles, find, sampled
from fake_gpu import GPUS
from fake_launches import as_array, launches_on

from gpuattn import explain, use_impl
from gpuattn.arrays import BFLOAT16, to_cpu
from gpuattn.autodiff.pending_matmul import PendingMatmul
from gpuattn.autodiff.tensor import Tensor
from gpuattn.cuda import kernels
from gpuattn.cuda.gpu import gpu as gpu_of
from gpuattn.ops.linear import gelu_hopper, gradients
from gpuattn.ops.linear.activations import activate
from gpuattn.ops.linear.linear import IMPLS as LINEAR
from gpuattn.ops.linear.linear import linear

DTYPES = {"f16": np.float16, "bf16": BFLOAT16}
UNIT = {"f16": 2.0**-10, "bf16": 2.0**-7}  # unit in the last place of 1
SLOPE_ERROR = {"f16": 1 / 400, "bf16": 1 / 256}
# rows, in, out, the next layer's out; where out is 256 or less the weight stays in shared memory
PROBLEMS = [
    ((300, 136, 232, 72), "f16", "gelu", False),
    ((300, 136, 232, 72), "bf16", "gelu_exact", True),
    ((400, 72, 328, 136), "f16", "gelu_exact", False),
    ((130, 392, 264, 8), "bf16", "gelu", True),
    ((130, 392, 264, 8), "f16", "gelu_exact", True),
    ((1, 8, 8, 392), "bf16", "gelu", False),
]


def problem(xp, shape, dtype, seed=0):
    """Return x, the weight, a bias and a PendingMatmul that is y's gradient, and all of them as
    float64."""
    rows, depth, columns, width = shape
    rng = np.random.default_rng(seed)
    shapes = (rows, depth), (columns, depth), (columns,), (rows, width), (width, columns)
    exact = [rng.standard_normal(s, np.float32) for s in shapes]
    exact[1] *= 2 / np.sqrt(depth)
    exact = [x.astype(DTYPES[dtype]) for x in exact]
    x, weight, bias, dz, after = (xp(a) for a in exact)
    return (
        x,
        weight,
        bias,
        PendingMatmul(dz, after, (rows, columns)),
        [a.astype(np.float64) for a in exact],
    )


def close(found, want, unit, slack):
    found = to_cpu(found).astype(np.float64)
    assert not np.isnan(found).any()
    assert (np.abs(found - want) <= unit / 2 * 1.01 * np.abs(want) + slack).all()


def slopes_of(codes, dtype, shape, like):
    """Return the slopes that the codes stand for, computed for dy = 1: exact in 16 bits."""
    ones = like(np.ones(shape, DTYPES[dtype]))
    return to_cpu(gelu_hopper.backward(ones, codes)).astype(np.float64)


def check(x, weight, bias, product, exact, dtype, activation, like):
    rows, matrix, shift, dz, after = exact
    y, codes = gelu_hopper.forward(x, weight, bias, activation)
    value, slope = activate(rows @ matrix.T + (0 if bias is None else shift), activation, True)
    close(y, value, UNIT[dtype], 2e-6 * np.abs(rows) @ np.abs(matrix.T) + 1e-6)
    alone, none = gelu_hopper.forward(x, weight, bias, activation, slopes=False)
    assert none is None and to_cpu(alone).tobytes() == to_cpu(y).tobytes()
    slopes = slopes_of(codes, dtype, y.shape, like)
    rounding = UNIT["f16"] if dtype == "f16" else 0  # a byte's slope is exact in bfloat16
    assert np.abs(slopes - slope).max() <= SLOPE_ERROR[dtype] + rounding + 1e-4
    want, sums = dz @ after, np.abs(dz) @ np.abs(after)
    # the product is rounded, then the result
    found = gelu_hopper.backward(product, codes)
    close(found, want * slopes, 2 * UNIT[dtype], 1e-5 * sums)
    again, parts = gelu_hopper.backward_and_sums(product, codes)
    assert (to_cpu(again) == to_cpu(found)).all()
    rows, found = len(found), to_cpu(found).astype(np.float64)
    for part, n in zip(to_cpu(parts), range(0, -(-rows // 128) * 128, 32), strict=True):
        here = n // 128 * 128 + np.arange(16) + np.array([[0], [64]]) + n % 128 // 2
        here = here[here < rows]
        np.testing.assert_allclose(part, found[here].sum(0), rtol=1e-5, atol=1e-5 * sums.max())
    dy = like(want.astype(DTYPES[dtype]))
    found = gelu_hopper.backward(dy, codes)
    close(found, to_cpu(dy).astype(np.float64) * slopes, UNIT[dtype], 1e-6)


@pytest.mark.parametrize("shape, dtype, activation, biased", sampled(PROBLEMS, 2))
def test_on_an_emulated_gpu(shape, dtype, activation, biased, host_compiler):
    x, weight, bias, product, exact = problem(emulator.as_array, shape, dtype)
    bias = bias if biased else None
    with emulator.Machine(seed=sum(shape)).in_place():
        assert gelu_hopper.refusal(x, weight) is None and gelu_hopper.takes_matmul(product)
        check(x, weight, bias, product, exact, dtype, activation, emulator.as_array)


@pytest.mark.parametrize("activation", gelu_hopper.FORMS)
@pytest.mark.parametrize("dtype", sampled(DTYPES, 1))
def test_far_from_zero(dtype, activation, host_compiler):
    """Slopes of 0 and 1 are exact; y keeps NaN."""
    z = np.array([-6e4, -30, -7, 7, 30, 6e4, np.nan, 0])
    one = np.zeros((1, 8), DTYPES[dtype])
    one[0, 0] = 1
    weight = np.zeros((8, 8), DTYPES[dtype])
    weight[:, 0] = z
    with emulator.Machine(seed=1).in_place():
        given = emulator.as_array(one), emulator.as_array(weight)
        y, codes = gelu_hopper.forward(*given, None, activation)
        slopes = slopes_of(codes, dtype, y.shape, emulator.as_array)
    y = y.astype(np.float64)
    want = np.where(z < 0, 0, weight[:, 0].astype(float))
    np.testing.assert_allclose(y[0, :6], want[:6], atol=1e-9)
    np.testing.assert_array_equal(slopes[0, :6], [0, 0, 0, 1, 1, 1])
    assert np.isnan(y[0, 6]) and y[0, 7] == 0 and abs(slopes[0, 7] - 0.5) <= SLOPE_ERROR[dtype]


@pytest.mark.parametrize("slot", [None, False, True], ids=["new", "write", "add"])
@pytest.mark.parametrize("as_product", [True, False])
def test_the_gradient_of_a_layer_uses_its_codes(as_product, slot, host_compiler, monkeypatch):
    x, weight, bias, product, exact = problem(emulator.as_array, (70, 72, 136, 80), "f16")
    raw, needs = find(LINEAR, "raw-hopper"), (True, True, True)
    place = emulator.as_array(np.ones(136, np.float32))
    monkeypatch.setattr(gradients, "JOINT_SIZE", 0)  # that launch is of a library
    with emulator.Machine(seed=3).in_place():
        _, saved = raw.forward(x, weight, bias, needs=needs, activation="gelu")
        assert saved[0] == "codes" and saved[3].dtype == np.uint8
        assert raw.fusion.takes_matmul(saved, product, 0, needs=needs, activation="gelu")
        dy = product if as_product else emulator.as_array(product.dz @ product.weight)
        into = None, None, None if slot is None else (place, slot)
        found = raw.backward(saved, dy, needs=needs, into=into, activation="gelu")
    rows, matrix, shift, dz, after = exact
    _, slope = activate(rows @ matrix.T + shift, "gelu", True)
    dz = dz @ after * slope
    dx, dweight, dbias = found
    if slot is not None:
        assert dbias is None
        dbias = place - slot
    for found, want in (dx, dz @ matrix), (dweight, dz.T @ rows), (dbias, dz.sum(0)):
        np.testing.assert_allclose(found, want, rtol=0, atol=1e-2 * np.abs(want).max())


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("held", gelu_hopper.SHARED_BYTES)
def test_compiles_without_spills_and_matches_the_host_memory_size(nvrtc, held, gradient):
    size = gelu_hopper.SHARED_BYTES[held]
    both = (False, True)
    forms = (
        [(False, False, sums, True) for sums in both]
        if gradient
        else [(*form, False, slopes) for *form, slopes in itertools.product(both, repeat=3)]
    )
    for exact, biased, sums, slopes in forms:
        constants = {"GRADIENT": gradient, "EXACT": exact, "BIAS": biased, "SUMS": sums}
        constants |= {"HELD": held, "SLOPES": slopes}
        check_hopper_compiles(gelu_hopper.FILE, size, **constants)


@pytest.mark.parametrize(
    "rows, columns, depth, want",
    [
        (16384, 1536, 384, (gelu_hopper.HELD, 132)),
        (16384, 1536, 392, (0, 132)),
        (16384, 3072, 384, (0, 132)),  # 24 columns of tiles five times: 120
        (1024, 1536, 384, (gelu_hopper.HELD, 96)),
        (128, 50304, 384, (0, 132)),
    ],
)
def test_plan(rows, columns, depth, want):
    assert gelu_hopper.plan(rows, columns, depth, 132) == want


def views():
    """Inputs and weights that the kernel refuses, with the text of the refusal."""
    x, weight = np.zeros((256, 136), np.float16), np.zeros((264, 136), np.float16)
    yield "wide", x.astype(np.float32), weight.astype(np.float32), "x is float32"
    yield "mixed", x, weight.astype(BFLOAT16), "weight is bfloat16"
    yield "odd columns", x, weight[:-1], "263 outputs"
    yield "odd depth", x[:, :-1], weight[:, :-1], "135"
    yield "by columns", x, np.asfortranarray(weight), "weight is not contiguous"
    yield "no rows", x[:0], weight, "0 rows"
    yield "no depth", x[:, :0], weight[:, :0], "0 inputs"


@pytest.mark.parametrize("name, x, weight, says", list(views()))
def test_refusals(name, x, weight, says):
    assert says in gelu_hopper.refusal(emulator.as_array(x), emulator.as_array(weight))


def layer(rows, depth, columns, dtype=BFLOAT16):
    shapes = (2, rows // 2, depth), (columns, depth)
    return [as_array(np.zeros(shape, dtype)) for shape in shapes]


@pytest.mark.parametrize("x, weight, params, runs, says", [
    (*layer(16384, 384, 1536), {}, "raw-hopper", None),
    (*layer(8192, 384, 1536), {}, "cublaslt", "768 tiles"),
    (*layer(16384, 384, 1536, np.float32), {}, "cublaslt", "float32"),
    (*layer(16384, 1600, 1536), {}, "raw-hopper", None),
    (*layer(16384, 1608, 1536), {}, "cublaslt", "1608 inputs"),
    (*layer(16384, 384, 1536), {"activation": "relu"}, "cublaslt", "the kernel computes GELU"),
    (*layer(16384, 384, 1536), {"bias": True}, "raw-hopper", None),
    (*layer(16384, 384, 1536), {"bias": True, "activation": "gelu_exact"}, "raw-hopper", None),
    (*layer(8192, 384, 1536), {"activation": "gelu_exact"}, "cublaslt", "768 tiles"),
    (*layer(16384, 384, 1536), {"wanted": False}, "cublaslt", "no gradient is wanted"),
    (*layer(16384, 768, 1536), {"wanted": False}, "raw-hopper", None),
])  # fmt: skip
def test_which_layers_select_it(x, weight, params, runs, says, recwarn):
    weight = Tensor(weight, requires_grad=params.pop("wanted", True))
    bias = weight.data[:, 0].copy() if params.pop("bias", False) else None
    with launches_on(GPUS["9.0"]):
        found = explain(linear, x, weight, bias, **{"activation": "gelu"} | params)
    assert found.chosen == runs
    assert says is None or says in dict(found.reasons)["raw-hopper"]
    assert not recwarn.list, "no warning: no other argument makes this layer faster"


def test_it_needs_hopper():
    x, weight = layer(16384, 384, 1536)
    with launches_on(GPUS["10.0"]):
        found = explain(linear, x, Tensor(weight, requires_grad=True), activation="gelu")
    assert "the kernel needs 9.0" in dict(found.reasons)["raw-hopper"]


# ---- on a GPU --------------------------------------------------------------------------------


@pytest.fixture
def hopper(gpu):
    if not gpu_of(0).has_wgmma:
        pytest.skip("not a Hopper GPU")
    return gpu


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",
    [(3000, 384, 1536, 384), (2049, 776, 1544, 520), (333, 72, 2056, 128), (900, 1600, 520, 1288)],
    ids=str,
)
@pytest.mark.parametrize("activation", gelu_hopper.FORMS)
@pytest.mark.parametrize("biased", [False, True])
def test_on_a_gpu(hopper, shape, dtype, activation, biased):
    x, weight, bias, product, exact = problem(hopper.asarray, shape, dtype)
    bias = bias if biased else None
    check(x, weight, bias, product, exact, dtype, activation, hopper.asarray)


@pytest.mark.parametrize("activation", gelu_hopper.FORMS)
@pytest.mark.parametrize("watched", [False, True], ids=["product", "array"])
def test_two_layers(hopper, watched, activation):
    """All parameter gradients equal those without the kernel, which runs once or twice."""
    rng = np.random.default_rng(0)
    shapes = [(1, 8192, 384), (2048, 384), (384, 2048), (2048,)]
    arrays = [hopper.asarray(rng.standard_normal(s, np.float32).astype(BFLOAT16)) for s in shapes]

    def gradients():
        x, w1, w2, bias = (Tensor(a, requires_grad=True) for a in arrays)
        hidden = linear(x, w1 * 0.06, bias, activation=activation)
        if watched:
            hidden = hidden * 1.0
        linear(hidden, w2 * 0.03).backward(arrays[0])
        return [to_cpu(t.grad).astype(np.float64) for t in (x, w1, w2, bias)]

    names = gelu_hopper.NAME, gelu_hopper.ALONE
    before = kernels.launches.copy()
    found = gradients()
    ran = tuple((kernels.launches - before)[name] for name in names)
    assert ran == ((1, 1) if watched else (2, 0))
    with use_impl(linear="cublaslt"):
        wanted = gradients()
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-2 * np.abs(want).max())
