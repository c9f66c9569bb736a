from dataclasses import replace

import numpy as np
import pytest
from checks import (
    DTYPES,
    check_gradient,
    check_implementation,
    dtype_of,
    find,
    implementations,
    module_named,
)

from gpuattn import Tensor, explain
from gpuattn.arrays import same_memory, to_cpu
from gpuattn.cuda import compiler, kernels, sources
from gpuattn.cuda.gpu import gpu as gpu_of
from gpuattn.ops.dropout import dropout
from gpuattn.ops.norm import launch
from gpuattn.ops.norm.dropout_add_norm import (
    IMPLS,
    NORM_AND_RESIDUAL,
    dropout_add_norm,
    norm_and_residual,
)
from gpuattn.ops.norm.layer_norm import layer_norm
from gpuattn.ops.norm.rms_norm import rms_norm
from gpuattn.rng import Key, keep_mask

SHAPES = {
    "one": (1, 1), "odd": (3, 257), "batched": (2, 5, 31), "tail": (2, 1025), "row": (64,),
    "whole": (5, 256),
}  # fmt: skip
# as in test_layer_norm.py
WIDE = [(70, 384), (70, 512), (19, 768), (11, 1024), (9, 1000), (7, 2048), (5, 4096), (3, 8192),
        (2, 16392), (2, 16387)]  # fmt: skip
HERE = implementations(IMPLS)
KEY = Key(0x123456789ABCDEF0, 3, 7)
DROP = {"p": 0.3, "key": KEY, "rms": False, "eps": 1e-5}


def inputs(rng, shape):
    rows, vectors = rng.standard_normal((2, *shape)), rng.standard_normal((3, shape[-1]))
    return [rows[0], rows[1], 1 + 0.1 * vectors[0], vectors[1], vectors[2]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name, where", HERE)
def test_implementations_agree(name, where, rng, shape, dtype):
    check_implementation(IMPLS, name, where, inputs(rng, shape), dtype, **DROP)


@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("name, where", HERE)
def test_variants_agree(name, where, rng, p, rms):
    x, residual, weight, bias, x_bias = inputs(rng, (7, 33))
    params = {"p": p, "key": KEY if p else None, "rms": rms, "eps": 1e-3}
    for vectors in ((weight, bias, x_bias), (weight, None, None), (None, None, x_bias)):
        given = [x, residual, *vectors]
        check_implementation(IMPLS, name, where, given, "float32", **params)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", WIDE)
def test_wide_rows(gpu, rng, shape, dtype):
    check_implementation(IMPLS, "raw-simt", "cupy", inputs(rng, shape), dtype, **DROP)
    x, residual, weight, bias, _ = inputs(rng, shape)
    given, params = [x, residual, weight, bias, None], {**DROP, "p": 0.0, "key": None}
    check_implementation(IMPLS, "raw-simt", "cupy", given, dtype, **params)


@pytest.mark.parametrize("cols", [33, 64])
@pytest.mark.parametrize("name, where", HERE)
def test_more_rows_than_blocks(name, where, rng, monkeypatch, cols):
    monkeypatch.setattr(launch, "gpu", lambda device: replace(gpu_of(device), multiprocessors=1))
    check_implementation(IMPLS, name, where, inputs(rng, (203, cols)), "float32", **DROP)


@pytest.mark.parametrize("shape, dtype, vectors, taken", [
    ((203, 384), "bfloat16", (0, 1), True), ((12, 384), "float16", (0,), True),
    ((5, 384), "bfloat16", (0, 1, 2), False), ((161, 256), "bfloat16", (0, 1, 2), True),
    ((64, 256), "float16", (), False), ((64, 256), "float32", (0,), False),
    ((0, 384), "bfloat16", (0,), True), ((203, 768), "bfloat16", (0, 1, 2), True),
    ((41, 1280), "float16", (0, 1, 2), True), ((1, 1536), "bfloat16", (0,), True),
    ((64, 1024), "bfloat16", (0, 1), False),
])  # fmt: skip
def test_rows_in_pairs(gpu, rng, monkeypatch, shape, dtype, vectors, taken):
    """Few blocks, for all combinations of results, with and without dropout."""
    monkeypatch.setattr(launch, "gpu", lambda device: replace(gpu_of(device), multiprocessors=2))
    x, residual, *given = inputs(rng, shape)
    given = [v if n in vectors else None for n, v in enumerate(given)]
    before = kernels.launches.copy()
    for more in ({}, {"p": 0.0, "key": None}, {"rms": True}):
        params = DROP | more
        check_implementation(IMPLS, "raw-simt", "cupy", [x, residual, *given], dtype, **params)
    ran = kernels.launches - before
    assert (ran["dropout_add_norm_backward_pairs"] > 0) == (taken and shape[0] > 0)


@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize("cols, sums", [
    (256, 7), (384, 3), (384, 5), (384, 6), (768, 7), (1280, 7), (1536, 7),
])  # fmt: skip
def test_column_sums_fit_into_registers(nvrtc, cols, sums, second):
    warps, teams, blocks, most = launch.PAIRS[cols]
    assert sums.bit_count() == most
    file, constants = "norm/dropout_add_norm_backward_pairs.cu", {"RMS": False, "WEIGHT": True}
    constants |= {"WARPS": warps, "TEAMS": teams, "BLOCKS": blocks, "SECOND": second}
    constants |= {"scalar": "bf16", "COLUMNS": cols // warps, "SUMS": sums, "DROPOUT": True}
    _, log = compiler.compile_text(sources.source_text(file, **constants), "sm_90", file)
    assert "0 bytes spill stores, 0 bytes spill loads" in log, log


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("name, where", HERE)
def test_it_equals_the_separate_ops(name, where, rng, norm):
    """Both results and all gradients equal those of dropout, then +, then the norm."""
    xp = module_named(where)
    given = [xp.asarray(a, "float32") for a in inputs(rng, (6, 40))]
    leaves = [[Tensor(a.copy(), requires_grad=True) for a in given] for _ in range(2)]
    x, residual, weight, bias, x_bias = leaves[0]
    got = dropout_add_norm(
        x, residual, weight, bias, x_bias=x_bias, p=0.4, norm=norm, seed=9, impl=name
    )
    x, residual, weight, bias, x_bias = leaves[1]
    h = residual + dropout(x + x_bias, 0.4, seed=9)
    normed = (
        layer_norm(h, weight, bias) if norm == "layer" else rms_norm(h, weight, eps=1e-5) + bias
    )
    for mine, want in zip(got, (normed, h), strict=True):
        np.testing.assert_allclose(to_cpu(mine.data), to_cpu(want.data), atol=1e-5)
    seeds = xp.asarray(rng.standard_normal((2, 6, 40)), "float32")
    for a, b in (got, (normed, h)):
        (a * seeds[0] + b * seeds[1]).sum().backward()
    for mine, want in zip(*leaves, strict=True):
        np.testing.assert_allclose(to_cpu(mine.grad), to_cpu(want.grad), atol=2e-5)


@pytest.mark.parametrize("name, where", HERE)
def test_one_result_alone(name, where, rng):
    """The gradient of h alone skips the norm; that of normed alone has no residual part."""
    xp = module_named(where)
    given = [xp.asarray(a, "float32") for a in inputs(rng, (6, 40))]
    for which in (0, 1):
        x, residual, weight, bias, x_bias = (Tensor(a.copy(), requires_grad=True) for a in given)
        both = dropout_add_norm(
            x, residual, weight, bias, x_bias=x_bias, p=0.5, seed=KEY, impl=name
        )
        both[which].backward(xp.ones((6, 40), "float32"))
        if which == 1:
            keep = keep_mask(np, (6, 40), 0.5, KEY)
            assert residual.grad.tolist() == np.ones((6, 40)).tolist()
            assert x.grad.tolist() == (2.0 * keep).tolist()
            assert x_bias.grad.tolist() == (2.0 * keep).sum(0).tolist()
            assert not weight.grad.any() and not bias.grad.any()
        else:
            assert bias.grad.tolist() == [6.0] * 40
            assert abs(to_cpu(residual.grad).sum(-1)).max() < 1e-4, (
                "LayerNorm does not depend on the mean"
            )


@pytest.mark.parametrize("name, where", HERE)
def test_vector_gradients_go_to_their_slots(name, where, rng):
    """Without slots they are bfloat16; into float32 slots they are written without rounding."""
    xp, bf16 = module_named(where), dtype_of("bfloat16")
    given = [xp.asarray(a, bf16) for a in inputs(rng, (7, 40))]
    flat = xp.full((3, 40), np.nan, "float32")
    leaves = [[Tensor(a, requires_grad=True) for a in given] for _ in range(2)]
    for leaf, slot in zip(leaves[0][2:], flat, strict=True):
        leaf.grad_slot = slot

    def run(x, residual, weight, bias, x_bias):
        both = dropout_add_norm(
            x, residual, weight, bias, x_bias=x_bias, p=0.5, seed=KEY, impl=name
        )
        both[0].backward(xp.asarray(np.arange(280).reshape(7, 40) % 3 - 1, bf16))

    run(*leaves[0])
    once = to_cpu(flat).copy()
    run(*leaves[1])
    want = [to_cpu(leaf.grad).astype("float32") for leaf in leaves[1][2:]]
    np.testing.assert_allclose(once, want, rtol=2**-8, atol=1e-6)
    assert (once.astype(bf16) == want).all() and (once != want).any()
    run(*leaves[0])
    np.testing.assert_allclose(to_cpu(flat), 2 * once, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name, where", HERE)
def test_strides(name, where, rng):
    xp = module_named(where)
    base = xp.asarray(rng.standard_normal((2, 6, 8, 10)), dtype_of("bfloat16"))
    vectors = xp.asarray(rng.standard_normal((3, 30)), base.dtype)
    cases = [(base[0].T, base[1].T), (base[0, ::2, :, 9:3:-1], base[1, 1::2, :, 3:9])]
    cases += [(base[0].ravel()[1:61].reshape(4, 15), base[1].ravel()[3:63].reshape(4, 15))]
    for x, residual in cases:
        w, b, xb = vectors[:, 1 : 2 * x.shape[-1] : 2]
        got = dropout_add_norm(x, residual, w, b, x_bias=xb, p=0.2, seed=1, impl=name)
        copies = [a.copy() for a in (x, residual, w, b)]
        want = dropout_add_norm(*copies, x_bias=xb.copy(), p=0.2, seed=1, impl=name)
        assert [g.tolist() for g in got] == [w.tolist() for w in want]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name, where", HERE)
def test_two_gradients_of_the_result(name, where, rng, dtype):
    """As those of their sum; the later op's gradient comes first, and a third is added to it."""
    xp, dtype = module_named(where), dtype_of(dtype)
    given = [xp.asarray(a, dtype) for a in inputs(rng, (9, 384))]
    numbers = [xp.asarray(rng.integers(-2, 3, (9, 384)), dtype) for _ in range(3)]

    def gradients(factors, of_h):
        leaves = [Tensor(a, requires_grad=True) for a in given]
        x, residual, weight, bias, x_bias = leaves
        normed, h = dropout_add_norm(
            x, residual, weight, bias, x_bias=x_bias, p=0.5, seed=KEY, impl=name
        )
        total = h * of_h if of_h else None
        for factor in factors:
            total = normed * factor if total is None else total + normed * factor
        total.backward(xp.ones((9, 384), dtype))
        return [to_cpu(leaf.grad).astype("float64") for leaf in leaves]

    for count, of_h in ((2, 0), (2, 2), (3, 0)):
        before = kernels.launches.copy()
        found = gradients(numbers[:count], of_h)
        ran = kernels.launches - before
        want = gradients([sum(numbers[1:count], numbers[0])], of_h)
        for got, expected in zip(found, want, strict=True):
            np.testing.assert_allclose(got, expected, rtol=2**-7, atol=2**-7)
        assert name != "raw-simt" or ran["dropout_add_norm_backward"] == 1


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0,)])
@pytest.mark.parametrize("name, where", HERE)
def test_empty(name, where, shape):
    xp, impl = module_named(where), find(IMPLS, name)
    x, vector = xp.zeros(shape, "float32"), xp.ones(shape[-1:], "float32")
    needs = (True,) * 5
    outs, saved = impl.forward(x, x, vector, vector, vector, needs=needs, **DROP)
    grads = impl.backward(saved, *outs, needs=needs, into=(None,) * 5, **DROP)
    assert [a.shape for a in (*outs, *grads[:2])] == [shape] * 4
    assert [g.tolist() for g in grads[2:]] == [[0] * shape[-1]] * 3


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_gradient(rng, norm):
    def fun(x, residual, weight, bias, x_bias):
        return dropout_add_norm(x, residual, weight, bias, x_bias=x_bias, p=0.3, norm=norm, seed=5)

    check_gradient(fun, *inputs(rng, (2, 3, 7)))


@pytest.mark.parametrize("bad, error, says", [
    (lambda x, w: dropout_add_norm(x.astype(int), x, w), TypeError, "x.dtype is int64"),
    (lambda x, w: dropout_add_norm(x, x.astype("e"), w), TypeError, "residual is float16"),
    (lambda x, w: dropout_add_norm(x, x[:1], w), ValueError, r"residual.shape is \(1, 3\)"),
    (lambda x, w: dropout_add_norm(x, x, w[:2]), ValueError, r"weight.shape is \(2,\)"),
    (lambda x, w: dropout_add_norm(x, x, w, x_bias=x), ValueError, "x_bias.shape"),
    (lambda x, w: dropout_add_norm(x, x, w, p=1.5), ValueError, "p is 1.5"),
    (lambda x, w: dropout_add_norm(x, x, w, p=np.nan), ValueError, "p is nan"),
    (lambda x, w: dropout_add_norm(x, x, w, eps=0), ValueError, "eps is 0"),
    (lambda x, w: dropout_add_norm(x, x, w, norm="batch"), ValueError, "norm is 'batch'"),
])  # fmt: skip
def test_bad_arguments(xp, bad, error, says):
    with pytest.raises(error, match=f"dropout_add_norm: .*{says}"):
        bad(xp.ones((2, 3), "f"), xp.ones(3, "f"))


def test_raw_runs_on_a_gpu(gpu):
    for dtype in DTYPES:
        x, weight = gpu.ones((2, 3), dtype_of(dtype)), gpu.ones(3, dtype_of(dtype))
        assert explain(dropout_add_norm, x, x, weight, p=0.5).chosen == "raw-simt"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("shape", [(7, 33), (2, 3, 384), (0, 8)], ids=str)
@pytest.mark.parametrize("name, where", HERE)
def test_norm_and_residual(name, where, rng, shape, rms, dtype):
    x, _, weight, bias, _ = inputs(rng, shape)
    for vectors in ((weight, bias), (None, None)):
        given, params = [x, *vectors], {"rms": rms, "eps": 1e-3}
        check_implementation(NORM_AND_RESIDUAL, name, where, given, dtype, **params)


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_gradient_of_norm_and_residual(rng, norm):
    x, _, weight, bias, _ = inputs(rng, (2, 3, 7))
    check_gradient(lambda *given: norm_and_residual(*given, norm=norm), x, weight, bias)
    for bad in ({"norm": "batch"}, {"eps": 0}):
        with pytest.raises(ValueError, match="norm_and_residual"):
            norm_and_residual(x, weight, **bad)


def test_the_second_result_is_a_view_of_the_input(xp, rng):
    x = Tensor(xp.asarray(rng.standard_normal((4, 8)), "f"), requires_grad=True)
    _, h = norm_and_residual(x, xp.ones(8, "f"))
    assert h.data.shape == x.data.shape and same_memory(h.data, x.data)
    h.backward(xp.ones((4, 8), "f"))
    assert x.grad.tolist() == [[1.0] * 8] * 4
