"""Attention dropout: one bit by hand, statistics of the bits, and equal masks in all kernels."""

import numpy as np
import pytest
from checks import dtype_of

from gpuattn import Tensor, rng
from gpuattn.arrays import to_cpu
from gpuattn.ops.attention.dropout import attention_keep_mask, round_bounds, words
from gpuattn.ops.attention.flash_attention import IMPLS, flash_attention
from gpuattn.rng import Key

KEY = Key(seed=0x1234_5678_9ABC, stream=3, step=5)
SIGMAS = 5


def close(values, mean, variance):
    """Return whether the mean of independent ``values`` is within SIGMAS of the expected one."""
    return abs(values.mean() - mean) <= SIGMAS * (variance / values.size) ** 0.5


@pytest.fixture(scope="module")
def drawn():
    """Words (heads, query blocks, key blocks, 8, 8), split into 7-bit bytes on a last axis."""
    every = np.arange(64, dtype=np.uint64)
    z, _ = words(np, every[:8], every, every, KEY)
    z &= np.uint32(0x7F7F7F7F)
    return z.view(np.uint8).reshape(*z.shape, 4)


def test_a_logit_by_hand():
    B, H, T, S, p = 2, 3, 37, 50, 0.3
    keep = attention_keep_mask(np, (B, H, T, S), p, KEY)
    for b, h, q, k in np.ndindex(B, H, T, S):
        if (q * S + k) % 7:
            continue
        head = b * H + h

        def draw(side, block, number, head=head):
            counter = block << 5 | number, head | side << 31, KEY.stream, KEY.step
            return [int(word) for word in rng.philox(KEY.seed, *map(np.uint64, counter))]

        group = draw(0, q // 16, k % 8 * 4 + q % 8 // 2)
        factor, summand = group[q % 2] | 1, group[2 + q % 2]
        at = q % 8 * 8 + k % 8
        y = (factor * draw(1, k // 16, at // 4)[at % 4] + summand) % 2**32
        place = q % 16 // 8 * 2 + k % 16 // 8
        number = (y ^ y >> 16) >> 8 * place & 127
        spare = sum((draw(0, q // 16, n)[0] & 1) << n for n in range(16))
        point = (spare / 65536 + (0, 0.5, 0.25, 0.75)[place]) % 1
        whole, rest = divmod(rng.threshold(p) / 512, 1)
        assert keep[b, h, q, k] == (number + whole + (point + rest >= 1) >= 128)


@pytest.mark.parametrize("p", [1e-5, 0.1, 0.25, 0.5, 0.97, 0.999999])
def test_a_weight_is_kept_with_probability_1_minus_p(p):
    """The share is exact over all random numbers for a bound, for every byte of a word."""
    bounds = round_bounds(np, np.arange(65536, dtype=np.uint32), p).view(np.uint8).reshape(-1, 4)
    assert (bounds.sum(0, dtype=np.int64) == 128 * rng.threshold(p)).all()
    assert bounds.max() <= 128
    pairs = bounds.reshape(-1, 2, 2).sum(2, dtype=int)  # the two bounds of a query
    assert np.ptp(pairs) <= 1


def test_numbers_are_uniform(drawn):
    for byte in range(4):
        found = np.bincount(drawn[..., byte].ravel(), minlength=128)
        expected = drawn[..., byte].size / 128
        chi2 = ((found - expected) ** 2 / expected).sum()
        assert abs(chi2 - 127) <= SIGMAS * (2 * 127) ** 0.5


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_numbers_are_independent(drawn, p):
    """Correlations of dropped bits: neighbours, adjacent blocks, 3 and 4 corners of a rectangle.

    Without the mixing step, the lowest byte of the words fails for the four corners.
    """
    dropped, share = drawn < 128 * p, np.ceil(128 * p) / 128
    x = dropped - share
    corners = x[:, ::2, ::2], x[:, ::2, 1::2], x[:, 1::2, ::2], x[:, 1::2, 1::2]
    products = {
        "queries": x[:, :, :, 1:] * x[:, :, :, :-1],
        "keys": x[..., 1:, :] * x[..., :-1, :],
        "bytes": x[..., 1:] * x[..., :-1],
        "blocks of queries": corners[0] * corners[2],
        "blocks of keys": corners[0] * corners[1],
        "blocks across": corners[0] * corners[3],
        "heads": x[1:] * x[:-1],
        "three corners": corners[0] * corners[1] * corners[2],
        "four corners": corners[0] * corners[1] * corners[2] * corners[3],
    }
    one, count = share * (1 - share), {"three corners": 3, "four corners": 4}
    for name, found in products.items():
        for byte in range(found.shape[-1]):
            assert close(found[..., byte], 0, one ** count.get(name, 2)), (name, byte)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_rows_and_columns_drop_the_expected_number(p):
    keep = attention_keep_mask(np, (2, 2, 1024, 1024), p, KEY)
    q = rng.threshold(p) / 65536
    variance = q * (1 - q)
    assert close(keep, q, variance)
    for axis in (2, 3):
        counts = keep.sum(axis)
        spread = (counts - 1024 * q) ** 2 / (1024 * variance)
        up = 256 * q % 1  # share of queries with one of the two bounds rounded up
        rounding = 4**2 * up * (1 - up) / (1024 * variance) if axis == 3 else 0
        assert close(spread, 1 + rounding, 2)
        assert spread.max() < 25
    again = [
        attention_keep_mask(np, keep.shape, p, key) for key in (Key(1), Key(1, 1), Key(1, 0, 1))
    ]
    for one, other in zip(again, [*again[1:], keep], strict=True):
        assert close((one - q) * (other - q), 0, variance**2)


RAW = [i.name for i in IMPLS if i.name.startswith("raw-") and not i.specialized]
LENGTHS = [(64, 64), (272, 200), (130, 900), ((200, 1, 0, 77), (90, 40, 5, 200))]
FORMS = [  # tensor cores need 16 bits; raw-hopper-head: see test_hopper_head
    *[("raw-short", "bfloat16", LENGTHS[i]) for i in (0, 3)],
    *[(name, "bfloat16", lengths) for name in RAW for lengths in LENGTHS],
    *[("raw-hopper", "float16", lengths) for lengths in LENGTHS],
    *[("raw-simt", "float32", lengths) for lengths in LENGTHS],
]


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("impl, dtype, lengths", FORMS)
def test_every_form_applies_the_same_mask(gpu, impl, lengths, D, dtype):
    """All weights are equal, so unit vectors as values (and as gradients) reveal the mask."""
    xp, H, p, size = gpu, 3, 0.3, dtype_of(dtype)
    packed = isinstance(lengths[0], tuple)
    params = {"dropout_p": p, "seed": KEY, "impl": impl}
    sequences = list(zip(*lengths, strict=True)) if packed else [lengths] * 2
    cu_q, cu_k = (np.cumsum([0, *n]).astype(np.int32) for n in zip(*sequences, strict=True))
    if packed:
        longest = {"max_seqlen_q": max(lengths[0]), "max_seqlen_k": max(lengths[1])}
        cu = {"cu_seqlens_q": xp.asarray(cu_q), "cu_seqlens_k": xp.asarray(cu_k)}
        params |= longest | cu

    def units(starts, first):
        """Return rows: row first + n of every sequence is unit vector n; the others are zeros."""
        x = np.zeros((starts[-1], H, D), np.float32)
        for begin, end in zip(starts, starts[1:], strict=False):
            rows = np.arange(first, min(first + D, end - begin))
            x[begin + rows, :, rows - first] = 1
        x = x if packed else x.reshape(2, -1, H, D)
        return xp.asarray(x.astype(size))

    keep = [
        attention_keep_mask(np, (len(sequences), H, *n), p, KEY)[b] for b, n in enumerate(sequences)
    ]
    q, k = (xp.zeros_like(units(starts, 0)) for starts in (cu_q, cu_k))
    for first in range(0, max(max(n) for n in sequences), D):
        v = Tensor(units(cu_k, first), requires_grad=True)
        out = flash_attention(q, k, v, **params)
        out.backward(units(cu_q, first))
        weights, grads = (
            to_cpu(x).astype(np.float32).reshape(-1, H, D) for x in (out.data, v.grad)
        )
        for b, mask in enumerate(keep):
            found = weights[cu_q[b] : cu_q[b + 1]].transpose(1, 0, 2) > 0
            want = mask[:, :, first : first + D]
            np.testing.assert_array_equal(found[..., : want.shape[2]], want)
            found = grads[cu_k[b] : cu_k[b + 1]].transpose(1, 2, 0) > 0
            want = mask[:, first : first + D]
            np.testing.assert_array_equal(found[:, : want.shape[1]], want)
