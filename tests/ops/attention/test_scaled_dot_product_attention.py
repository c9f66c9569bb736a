import numpy as np
import pytest
from checks import check_gradient

from gpuattn import Tensor, arrays, explain
from gpuattn.ops.attention.scaled_dot_product_attention import scaled_dot_product_attention


def draw(rng, H=4, kv_heads=4, T=9, S=13):
    shapes = (2, H, T, 8), (2, kv_heads, S, 8), (2, kv_heads, S, 5)
    return tuple(rng.standard_normal(shape).astype(np.float32) for shape in shapes)


def naive(q, k, v, mask=None, scale=None):
    """PyTorch's definition, in float64."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (k, v))
    s = q @ k.swapaxes(2, 3) * (8**-0.5 if scale is None else scale)
    if mask is not None:
        s = np.where(mask, s, -np.inf) if mask.dtype == bool else s + mask
    p = np.exp(s - s.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True) @ v


@pytest.mark.parametrize("kind", ["none", "bool", "float", "causal", "scale"])
def test_equals_pytorchs_definition(xp, rng, kind):
    q, k, v = draw(rng)
    mask = {"bool": np.eye(9, 13, dtype=bool) | (rng.random((2, 1, 9, 13)) < 0.5)}.get(kind)
    if kind == "float":
        mask = rng.standard_normal((4, 9, 13)).astype(np.float32)
    scale = 0.5 if kind == "scale" else None
    got = scaled_dot_product_attention(
        *(xp.asarray(x) for x in (q, k, v)),
        attn_mask=None if mask is None else xp.asarray(mask),
        is_causal=kind == "causal",
        scale=scale,
    )
    seen = np.tri(9, 13, dtype=bool) if kind == "causal" else mask  # top-left
    np.testing.assert_allclose(arrays.to_cpu(got), naive(q, k, v, seen, scale), atol=2e-6)


def test_grouped_heads_need_enable_gqa(xp, rng):
    q, k, v = (xp.asarray(x) for x in draw(rng, kv_heads=2))
    got = arrays.to_cpu(scaled_dot_product_attention(q, k, v, enable_gqa=True))
    want = naive(*(arrays.to_cpu(x) for x in (q, k, v)))
    np.testing.assert_allclose(got, want, atol=2e-6)
    with pytest.raises(ValueError, match="enable_gqa=True"):
        scaled_dot_product_attention(q, k, v)


def test_gradient_reaches_the_mask(rng):
    inputs = [x.astype(np.float64) for x in draw(rng)]
    check_gradient(scaled_dot_product_attention, *inputs, rng.standard_normal((2, 1, 9, 13)))


def test_dropout_draws_its_seed(xp, rng):
    q, k, v = (xp.asarray(x) for x in draw(rng))
    first, second = (scaled_dot_product_attention(q, k, v, dropout_p=0.5) for _ in range(2))
    assert (first != second).any()


def test_refusals(rng):
    q, k, v = draw(rng)
    with pytest.raises(ValueError, match="not both"):
        scaled_dot_product_attention(q, k, v, np.ones((9, 13), bool), is_causal=True)
    with pytest.raises(ValueError, match=r"query.shape is \(4, 9, 8\)"):
        scaled_dot_product_attention(q[0], k[0], v[0])
    with pytest.raises(TypeError, match="share one dtype"):
        scaled_dot_product_attention(Tensor(q.astype(np.float16)), k, v)


def test_explain():
    x = np.ones((1, 2, 3, 8), np.float32)
    assert explain(scaled_dot_product_attention, x, x, x).op == "flash_attention"
