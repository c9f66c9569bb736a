"""linear_dropout_add_norm: a branch's last layer, dropout, residual sum and norm in one op."""

import itertools

import numpy as np
import pytest
from checks import (
    check_gradient,
    check_hopper_compiles,
    check_implementation,
    dtype_of,
    find,
    implementations,
    sampled,
)
from fake_gpu import GPUS

from gpuattn import Tensor, explain
from gpuattn.arrays import BFLOAT16, to_cpu
from gpuattn.cuda.gpu import gpu as gpu_of
from gpuattn.ops.linear import linear_dropout_add_norm as module
from gpuattn.ops.linear.linear import linear
from gpuattn.ops.linear.linear_dropout_add_norm import IMPLS, linear_dropout_add_norm
from gpuattn.ops.norm.dropout_add_norm import dropout_add_norm
from gpuattn.rng import Key, keep_mask

KEY = Key(0x123456789ABCDEF0, 3, 7)
DROP = {"p": 0.3, "key": KEY, "rms": False, "eps": 1e-5}
BY_TWO = [case for case in implementations(IMPLS) if case.values[0] != "raw-hopper"]


def inputs(rng, shape, width):
    """Return x, projection, residual, weight, bias, projection_bias, scaled as in a network."""
    rows = rng.standard_normal((*shape[:-1], width))
    projection = rng.standard_normal((width, shape[-1])) * shape[-1] ** -0.5
    vectors = rng.standard_normal((3, width))
    return [rng.standard_normal(shape), projection, rows, 1 + 0.1 * vectors[0], *vectors[1:]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape, width", [((33, 17), 40), ((2, 3, 8), 5), ((6,), 4)], ids=str)
@pytest.mark.parametrize("name, where", BY_TWO)
def test_implementations_agree(name, where, rng, shape, width, dtype):
    check_implementation(IMPLS, name, where, inputs(rng, shape, width), dtype, **DROP)


@pytest.mark.parametrize("needs", [(1, 0, 0, 0, 0, 0), (0, 1, 0, 0, 0, 1), (0, 0, 1, 1, 0, 0)])
def test_only_needed_gradients_are_computed(rng, needs):
    given = inputs(rng, (7, 5), 8)
    check_implementation(IMPLS, "reference", "numpy", given, "float32", needs=needs, **DROP)


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_it_equals_the_two_ops(xp, rng, norm):
    """Both results and all gradients equal those of the two separate ops."""
    given = [xp.asarray(a, "float32") for a in inputs(rng, (2, 6, 24), 40)]
    leaves = [[Tensor(a.copy(), requires_grad=True) for a in given] for _ in range(2)]
    x, projection, residual, weight, bias, projection_bias = leaves[0]
    rest = {"p": 0.4, "norm": norm, "seed": 9}
    got = linear_dropout_add_norm(
        x, projection, residual, weight, bias, projection_bias=projection_bias, **rest
    )
    x, projection, residual, weight, bias, x_bias = leaves[1]
    want = dropout_add_norm(linear(x, projection), residual, weight, bias, x_bias=x_bias, **rest)
    seeds = xp.asarray(rng.standard_normal((2, 2, 6, 40)), "float32")
    for a, b in (got, want):
        (a * seeds[0] + b * seeds[1]).sum().backward()
    for mine, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(to_cpu(mine.data), to_cpu(other.data))
    for mine, other in zip(*leaves, strict=True):
        np.testing.assert_allclose(to_cpu(mine.grad), to_cpu(other.grad), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_donated_residual(xp, rng, norm, dtype):
    """It may become h, but not beside a gradient or dropout; the results stay as accurate."""
    given = [xp.asarray(a).astype(dtype_of(dtype)) for a in inputs(rng, (3, 40, 24), 48)]
    exact = linear_dropout_add_norm(
        *[to_cpu(a).astype(np.float64) for a in given[:4]], norm=norm,
        projection_bias=to_cpu(given[5]).astype(np.float64),
    )  # fmt: skip
    told = explain(linear_dropout_add_norm, *given[:4], norm=norm)
    forms = itertools.product(({"projection_bias": given[5]}, {}), ({}, {"p": 0.4, "seed": 3}))
    for vectors, rest in [form for form in forms for _ in range(3)]:  # later calls have plans
        x, projection, residual, weight = (a.copy() for a in given[:4])
        out = linear_dropout_add_norm(
            x, projection, residual, weight, norm=norm, donate=True, **vectors, **rest
        )
        taken = told.chosen == "cublaslt" and dtype == "bfloat16" and not rest
        assert xp.shares_memory(out[1], residual) == taken
        if not taken:
            np.testing.assert_array_equal(to_cpu(residual), to_cpu(given[2]))
        if vectors and not rest:
            bound = 1e-5 if dtype == "float32" else 0.04
            for mine, other in zip(out, exact, strict=True):
                np.testing.assert_allclose(
                    to_cpu(mine).astype(np.float64), other, rtol=bound, atol=bound
                )
    residual = Tensor(given[2].copy(), requires_grad=True)
    _, h = linear_dropout_add_norm(*given[:2], residual, given[3], norm=norm, donate=True)
    h.sum().backward()
    np.testing.assert_array_equal(to_cpu(residual.data), to_cpu(given[2]))
    assert (to_cpu(residual.grad) == 1).all()


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_gradient(rng, norm):
    def fun(x, projection, residual, weight, bias, projection_bias):
        return linear_dropout_add_norm(
            x, projection, residual, weight, bias, projection_bias=projection_bias, p=0.3,
            norm=norm, seed=5,
        )  # fmt: skip

    check_gradient(fun, *inputs(rng, (2, 3, 4), 7))


@pytest.mark.parametrize("bad, error, says", [
    (lambda f, *a: f(a[0].astype(int), *a[1:]), TypeError, "x.dtype is int64"),
    (lambda f, *a: f(a[0], a[1].astype("e"), *a[2:]), TypeError, "projection is float16"),
    (lambda f, *a: f(a[0], a[1][0], *a[2:]), ValueError, r"projection.shape is \(3,\)"),
    (lambda f, *a: f(a[0][:, :2], *a[1:]), ValueError, r"x.shape is \(2, 2\)"),
    (lambda f, *a: f(a[0], a[1], a[0], a[3]), ValueError, r"residual.shape is \(2, 3\)"),
    (lambda f, *a: f(*a[:3], a[3][:2]), ValueError, r"weight.shape is \(2,\)"),
    (lambda f, *a: f(*a, projection_bias=a[0]), ValueError, "projection_bias.shape"),
    (lambda f, *a: f(*a, p=1.5), ValueError, "p is 1.5"),
    (lambda f, *a: f(*a, eps=0), ValueError, "eps is 0"),
    (lambda f, *a: f(*a, norm="batch"), ValueError, "norm is 'batch'"),
])  # fmt: skip
def test_bad_arguments(xp, bad, error, says):
    given = [xp.ones(shape, "f") for shape in ((2, 3), (4, 3), (2, 4), (4,))]
    with pytest.raises(error, match=f"linear_dropout_add_norm: .*{says}"):
        bad(linear_dropout_add_norm, *given)


# ---- Hopper -------------------------------------------------------------------------------------


TILES = [(width, rows) for width, tiles in module.TILES.items() for rows in tiles]


@pytest.mark.parametrize("width, rows", sampled(TILES, 2))
@pytest.mark.parametrize("dropout", [False, True])
def test_compiles_without_spills_and_matches_the_host_memory_size(nvrtc, width, rows, dropout):
    size, boxes = module.shared_bytes(width, rows), f"P::PART == {module.box(width, rows)}"
    constants = {"ROWS": rows, "COLUMNS": width, "RMS": False, "DROPOUT": dropout}
    check_hopper_compiles(module.FILE, size, boxes, **constants)


@pytest.mark.parametrize("width, count, rows, share", [
    (384, 16384, 128, 0.97), (384, 8192, 64, 0.97), (384, 17000, 64, 0.67), (256, 16384, 128, 0.97),
    (128, 8192, 64, 0.97), (384, 33000, 128, 0.98), (512, 100, 64, 0.01), (192, 0, 128, 0),
])  # fmt: skip
def test_number_of_blocks(monkeypatch, width, count, rows, share):
    monkeypatch.setattr(module, "gpu", lambda device: GPUS["9.0"])
    assert module.block_rows(width, count, 0) == rows
    assert module.share_of(count, rows, 0) == pytest.approx(share, abs=0.006)


@pytest.fixture
def hopper(gpu, monkeypatch):
    """Return CuPy; lets the kernel accept any number of rows. Skips on other GPUs."""
    monkeypatch.setattr(module, "MIN_BUSY", 0)
    if not gpu_of(0).has_wgmma:
        pytest.skip("not a Hopper GPU")
    return gpu


@pytest.mark.parametrize("shape, width, p, rms, vectors, dtype", [
    ((600, 384), 384, 0.2, False, (0, 1, 2), "bfloat16"),
    ((2, 100, 1536), 384, 0.2, False, (0, 1), "float16"),
    ((400, 72), 384, 0.0, True, (0, 2), "bfloat16"),
    ((1, 8), 384, 0.5, True, (), "float16"),
    ((700, 128), 128, 0.2, False, (0, 1, 2), "bfloat16"),
    ((300, 264), 192, 0.2, True, (0,), "float16"),
    ((500, 264), 512, 0.2, False, (0, 1, 2), "bfloat16"),
    ((200, 512), 512, 0.2, True, (0,), "float16"),
    ((300, 1024), 256, 0.0, False, (0, 1, 2), "float16"),
    ((0, 128), 256, 0.2, False, (0, 1, 2), "bfloat16"),
])  # fmt: skip
def test_hopper(hopper, rng, shape, width, p, rms, vectors, dtype):
    given = inputs(rng, shape, width)
    given[3:] = [x if n in vectors else None for n, x in enumerate(given[3:])]
    params = {"p": p, "key": KEY if p else None, "rms": rms, "eps": 1e-5}
    check_implementation(IMPLS, "raw-hopper", "cupy", given, dtype, **params)


@pytest.mark.parametrize("width", module.TILES)
def test_the_dropout_mask_equals_the_reference(hopper, rng, width):
    given = [hopper.asarray(a, BFLOAT16) for a in inputs(rng, (300, 64), width)]
    impl = find(IMPLS, "raw-hopper")
    (_, h), _ = impl.forward(*given, needs=(False,) * 6, p=0.2, key=KEY, rms=False, eps=1e-5)
    same = to_cpu(h).view(np.uint16) == to_cpu(given[2]).view(np.uint16)
    keep = keep_mask(np, h.shape, 0.2, KEY)
    assert same[~keep].all() and same[keep].mean() < 0.02


def test_strided_rows(hopper, rng):
    """Slices of larger arrays, and strides that need a copy."""
    impl, needs = find(IMPLS, "raw-hopper"), (True,) * 6
    given = [a.astype(BFLOAT16) for a in inputs(rng, (300, 64), 384)]
    want, _ = impl.forward(*map(hopper.asarray, given), needs=needs, **DROP)
    rows = [hopper.asarray(np.stack([a, a], 1))[:, 0] for a in given]
    columns = [hopper.asarray(np.repeat(a, 2, -1))[..., ::2] for a in given]
    for strided in (rows, columns):
        got, _ = impl.forward(*strided, needs=needs, **DROP)
        assert all((g.view("u2") == w.view("u2")).all() for g, w in zip(got, want, strict=True))


def test_which_implementation_is_chosen(gpu):
    if not gpu_of(0).has_wgmma:
        pytest.skip("not a Hopper GPU")

    fitting = 64 * gpu_of(0).multiprocessors

    def choice(width, count=fitting, depth=64, dtype=BFLOAT16):
        shapes = (count, depth), (width, depth), (count, width), (width,)
        return explain(linear_dropout_add_norm, *(gpu.ones(s, dtype) for s in shapes)).chosen

    assert [choice(width) for width in (128, 256, 384, 512)] == ["raw-hopper"] * 4
    others = choice(400), choice(384, 640), choice(384, depth=63), choice(384, dtype="f")
    assert others == ("cublaslt",) * 4
