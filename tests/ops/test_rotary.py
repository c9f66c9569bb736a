"""Rotary positions: formula, implementations, in-place results, relative-position property."""

import numpy as np
import pytest
from checks import (
    DTYPES,
    check_gradient,
    check_implementation,
    dtype_of,
    implementations,
    module_named,
)

from gpuattn import Tensor, explain, rotary
from gpuattn.arrays import to_cpu
from gpuattn.ops.rotary import IMPLS

SHAPES = {  # (tokens, H, Hk, D)
    "packed": ((13,), 4, 2, 16),
    "batched": ((2, 7), 3, 3, 64),
    "one head": ((1, 1), 1, 1, 2),
    "odd pairs": ((3, 5), 2, 1, 6),
    "wide": ((9,), 12, 1, 256),
    "many heads": ((2, 3), 40, 8, 128),
}
HERE = implementations(IMPLS)


def draw(rng, tokens, heads, kv_heads, size):
    return [rng.standard_normal((*tokens, n, size)) for n in (heads, kv_heads)]


def by_hand(x, positions, base=10_000.0):
    """Multiply each pair, as a complex number, by exp(i * position * frequency)."""
    size = x.shape[-1]
    pairs = x[..., 0::2] + 1j * x[..., 1::2]
    angles = np.multiply.outer(positions, base ** (-np.arange(0, size, 2) / size))
    pairs = pairs * np.exp(1j * angles)[..., None, :]
    return np.stack([pairs.real, pairs.imag], axis=-1).reshape(x.shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name, where", HERE)
def test_implementations_agree(name, where, rng, shape, dtype):
    q, k = draw(rng, *shape)
    positions = rng.integers(0, 1000, shape[0])
    for given in (positions, None):
        check_implementation(
            IMPLS, name, where, [q, k, given], dtype, needs=(True, True, False), rates=1e4,
            donate=False,
        )  # fmt: skip


@pytest.mark.parametrize("name, where", HERE)
def test_equals_the_formula_at_any_position(name, where, rng):
    xp = module_named(where)
    q, k = draw(rng, (2, 5), 4, 2, 32)
    positions = np.array([[0, 1, 2, 3, 4], [-7, 1000, 123_456, 2**24, 9]])
    got = rotary(
        *(xp.asarray(x.astype(np.float32)) for x in (q, k)), xp.asarray(positions), base=500.0,
        impl=name,
    )  # fmt: skip
    for x, y in zip((q, k), got, strict=True):
        np.testing.assert_allclose(to_cpu(y), by_hand(x, positions, 500.0), atol=3e-6)


@pytest.mark.parametrize("name, where", HERE)
def test_keys_alone(name, where, rng):
    """With queries of no heads, where they lie side by side."""
    xp = module_named(where)
    x = xp.asarray(rng.standard_normal((2, 5, 6, 32)).astype(np.float32))
    q, k = x[..., :0, :], x[..., :2, :]
    _, want = rotary(x, k, impl=name)
    none, got = rotary(q, k, donate=True, impl=name)
    assert none.shape == (2, 5, 0, 32) and got is k
    np.testing.assert_array_equal(to_cpu(got), to_cpu(want))


@pytest.mark.parametrize("name, where", HERE)
def test_frequencies_of_its_own(name, where, rng):
    xp = module_named(where)
    q, k = (x.astype(np.float32) for x in draw(rng, (9,), 4, 2, 12))
    plain, given = 37.0 ** (-np.arange(0, 12, 2) / 12), [0.7, 0.1, 3.0, 0.0, 1e-5, -0.2]
    sides = [xp.asarray(x) for x in (q, k)]
    same = rotary(*sides, frequencies=plain, impl=name)
    for y, by_base in zip(same, rotary(*sides, base=37.0, impl=name), strict=True):
        assert y.tolist() == by_base.tolist()
    other = rotary(*sides, frequencies=given, impl=name)
    for x, y in zip((q, k), other, strict=True):
        pairs = x[..., 0::2] + 1j * x[..., 1::2]
        pairs = pairs * np.exp(1j * np.multiply.outer(np.arange(9), given))[:, None]
        want = np.stack([pairs.real, pairs.imag], axis=-1).reshape(x.shape)
        np.testing.assert_allclose(to_cpu(y), want, atol=3e-6)


@pytest.mark.parametrize("name, where", HERE)
def test_donation_gives_the_same_bits(name, where, rng):
    xp = module_named(where)
    q, k = (xp.asarray(x.astype(np.float32)) for x in draw(rng, (2, 5), 4, 2, 16))
    want = rotary(q, k, impl=name)
    got = rotary(q, k, donate=True, impl=name)
    for x, y, w in zip((q, k), got, want, strict=True):
        assert y.tolist() == w.tolist() == x.tolist()


@pytest.mark.parametrize("size", [16, 6])
@pytest.mark.parametrize("name, where", HERE)
def test_parts_of_an_array_are_rotated_in_place(name, where, rng, size):
    xp = module_named(where)
    whole = xp.asarray(rng.standard_normal((7, 5, size)).astype(np.float16))
    q, k = whole[:, :3], whole[:, 3:4]
    want, values = rotary(q.copy(), k.copy(), impl=name), whole[:, 4].tolist()
    got = rotary(q, k, donate=True, impl=name)
    for y, w in zip(got, want, strict=True):
        assert y.tolist() == w.tolist()
    assert whole[:, :3].tolist() == want[0].tolist() and whole[:, 4].tolist() == values


@pytest.mark.parametrize("name, where", HERE)
def test_an_unused_side_has_no_gradient(name, where, rng):
    xp = module_named(where)
    for used in (0, 1):
        sides = [
            Tensor(xp.asarray(x.astype(np.float32)), requires_grad=True)
            for x in draw(rng, (5,), 4, 2, 16)
        ]
        out = rotary(*sides, impl=name)[used]
        out.backward(out.data)
        np.testing.assert_allclose(  # rotated forward and back
            to_cpu(sides[used].grad), to_cpu(sides[used].data), atol=1e-6
        )
        assert sides[1 - used].grad is None


def test_gradient(rng):
    q, k = draw(rng, (2, 5), 4, 2, 6)
    positions = rng.integers(0, 50, (2, 5))
    check_gradient(lambda q, k: rotary(q, k, positions), q, k)


def test_products_depend_on_relative_positions_only(rng):
    q, k = draw(rng, (6,), 1, 1, 32)
    dots = []
    for start in (0, 1000):
        q_, k_ = rotary(q, k, np.arange(start, start + 6))
        dots.append(q_[:, 0] @ k_[:, 0].T)
    np.testing.assert_allclose(dots[0], dots[1], atol=1e-9)
    assert np.abs(dots[0] - q[:, 0] @ k[:, 0].T).max() > 0.1


@pytest.mark.parametrize("shape", [(0, 2, 8), (3, 0, 4, 8)])
@pytest.mark.parametrize("name, where", HERE)
def test_empty(name, where, shape):
    xp = module_named(where)
    for x in rotary(xp.zeros(shape, "float16"), xp.zeros(shape, "float16"), impl=name):
        assert (x.shape, x.dtype) == (shape, np.float16)


FAULTS = {
    "odd": ((2, 3, 4, 7), (2, 3, 4, 7), None, ValueError, "even D"),
    "other tokens": ((3, 4, 8), (4, 4, 8), None, ValueError, "k.shape"),
    "positions": ((3, 4, 8), (3, 4, 8), np.zeros(4, int), ValueError, "a position for each token"),
    "floats": ((3, 4, 8), (3, 4, 8), np.zeros(3), TypeError, "integers"),
}


@pytest.mark.parametrize("q, k, positions, error, match", FAULTS.values(), ids=FAULTS)
def test_faults(q, k, positions, error, match):
    with pytest.raises(error, match=match):
        rotary(np.zeros(q), np.zeros(k), positions)
    with pytest.raises(ValueError, match="base is 0"):
        rotary(np.zeros((2, 2, 2)), np.zeros((2, 2, 2)), base=0)
    for wrong, match in (([1.0], "1 numbers; accepted: 2 numbers, one"), ([1.0, np.inf], "is inf")):
        with pytest.raises(ValueError, match=match):
            rotary(np.zeros((2, 2, 4)), np.zeros((2, 2, 4)), frequencies=wrong)


def test_raw_runs_on_a_gpu(gpu):
    for dtype in DTYPES:
        x = gpu.ones((2, 3, 4), dtype_of(dtype))
        assert explain(rotary, x, x).chosen == "raw-simt"
