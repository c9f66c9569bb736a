"""Multi-head attention: packed and batched tokens, grouped heads, encoder memories, KV caches."""

import numpy as np
import pytest
from checks import dtype_of

from gpuattn import Tensor, flash_attention, nn, no_grad, rotary, to_cpu
from gpuattn.autodiff import backward_pass, gradient_layout
from gpuattn.cuda import kernels
from gpuattn.nn import attention
from gpuattn.nn.attention import HostMemory, split_heads

LENGTHS = (3, 1, 5)
CU = np.array([0, 3, 4, 9], np.int32)


def by_hand(layer, x, memory=None, causal=False):
    """Compute attention of one sequence (T, width) in float64, head by head."""
    H, G, D = layer.heads, layer.kv_heads, layer.head_dim

    def project(linear, x):
        y = x.astype(np.float64) @ linear.weight.data.T.astype(np.float64) + linear.bias.data
        return y.reshape(len(x), -1, D)

    if memory is None:
        q, k, v = np.split(project(layer.qkv, x), [H, H + G], axis=1)
    else:
        q = project(layer.q, x)
        k, v = np.split(project(layer.kv, memory), 2, axis=1)
    out = np.zeros((len(x), H, D))
    for h in range(H):
        g = h // (H // G)
        logits = q[:, h] @ k[:, g].T / D**0.5
        if causal:
            logits[np.triu(np.ones_like(logits), 1 + len(k) - len(q)) > 0] = -np.inf
        p = np.exp(logits - logits.max(-1, keepdims=True))
        out[:, h] = p / p.sum(-1, keepdims=True) @ v[:, g]
    return out.reshape(len(x), -1) @ layer.out.weight.data.T + layer.out.bias.data


def make(rng, **options):
    layer = nn.MultiHeadAttention(24, 6, rng=rng, **options)
    for p in layer.parameters():
        if p.ndim == 1:
            p.data[:] = rng.standard_normal(p.shape)
    return layer


def sequences(rng, lengths=LENGTHS):
    return [rng.standard_normal((n, 24)).astype(np.float32) for n in lengths]


@pytest.mark.parametrize("kv_heads", [6, 2, 1])
@pytest.mark.parametrize("causal", [False, True])
def test_packed_and_single_and_by_hand_agree(rng, kv_heads, causal):
    layer, parts = make(rng, kv_heads=kv_heads, causal=causal), sequences(rng)
    packed = layer(np.concatenate(parts), cu_seqlens=CU, max_seqlen=5).data
    for part, got in zip(parts, np.split(packed, CU[1:-1]), strict=True):
        want = by_hand(layer, part, causal=causal)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(layer(part[None]).data[0], want, rtol=1e-4, atol=1e-5)


def test_padded_batch_with_key_lengths_equals_packed(rng):
    layer, parts = make(rng), sequences(rng)
    padded = np.full((3, 5, 24), 1e3, np.float32)
    for row, part in zip(padded, parts, strict=True):
        row[: len(part)] = part
    out = layer(padded, key_lengths=np.array(LENGTHS, np.int32)).data
    for row, part in zip(out, parts, strict=True):
        np.testing.assert_allclose(row[: len(part)], by_hand(layer, part), rtol=1e-4, atol=1e-5)


def test_cross_attention_packed_by_hand(rng):
    layer = make(rng, cross=True, kv_heads=3)
    parts, memories = sequences(rng), sequences(rng, (2, 4, 1))
    cu_memory = np.array([0, 2, 6, 7], np.int32)
    out = layer(
        np.concatenate(parts), np.concatenate(memories), cu_seqlens=CU, max_seqlen=5,
        cu_memory=cu_memory, max_memory=4,
    ).data  # fmt: skip
    for got, x, memory in zip(np.split(out, CU[1:-1]), parts, memories, strict=True):
        np.testing.assert_allclose(got, by_hand(layer, x, memory), rtol=1e-4, atol=1e-5)


def test_one_memory_for_several_rows(rng):
    layer = make(rng, cross=True)
    x = rng.standard_normal((6, 2, 24)).astype(np.float32)
    memory = rng.standard_normal((3, 4, 24)).astype(np.float32)
    shared = layer(x, layer.project(memory)).data
    np.testing.assert_allclose(shared, layer(x, memory.repeat(2, axis=0)).data, atol=1e-5)


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_attention_on_the_host_equals_flash_attention(rng, kv_heads):
    q, lengths = rng.standard_normal((6, 1, 4, 8), np.float32), np.array([5, 2])
    k, v = rng.standard_normal((2, 2, 5, kv_heads, 8), np.float32)
    k[1, 2:] = v[1, 2:] = np.nan  # past the end
    memory = HostMemory.of(k, v, lengths)
    want = flash_attention(q.reshape(2, 3, 4, 8), k, v, key_lengths=lengths).reshape(q.shape)
    np.testing.assert_allclose(memory.attend(q), want, rtol=1e-5, atol=1e-6)
    one = memory.kept(np.array([1]))
    np.testing.assert_allclose(one.attend(q[3:]), want[3:], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("slots", [False, True])
def test_cache_continues_and_reorders(rng, monkeypatch, slots):
    """With ``slots``, as on a GPU, cache rows stay in place and a table maps texts to them."""
    if slots:
        monkeypatch.setattr(attention, "on_gpu", lambda x: True)
    layer = make(rng, causal=True, kv_heads=2)
    x = rng.standard_normal((3, 6, 24)).astype(np.float32)
    cache = layer.new_cache(3, 6)
    with no_grad():
        parts = [layer(x[:, :2], cache=cache), layer(x[:, 2:3], cache=cache)]
        np.testing.assert_allclose(
            np.concatenate([p.data for p in parts], axis=1), layer(x[:, :3]).data, atol=1e-5
        )
        parents = np.array([2, 0, 0], np.int32)
        cache.reorder(parents)
        moved = np.concatenate([x[parents, :3], x[:, 3:]], axis=1)
        got = layer(moved[:, 3:], cache=cache).data
        np.testing.assert_allclose(got, layer(moved).data[:, 3:], atol=1e-5)
        with pytest.raises(ValueError, match="max_length, 6"):
            layer(x[:, :1], cache=cache)
        assert (cache.slots is not None) == slots


def test_a_cache_with_slots_takes_long_texts_and_moves_twice(rng, monkeypatch):
    monkeypatch.setattr(attention, "on_gpu", lambda x: True)
    layer = make(rng, causal=True, kv_heads=2)
    x = rng.standard_normal((3, 45, 24)).astype(np.float32)
    cache, text = layer.new_cache(3, 45), x[:, :0]
    with no_grad():
        for start, stop in (
            (0, 20),
            (20, 21),
            (21, 40),
            (40, 45),
        ):  # more and fewer than 16 tokens per call
            text = np.concatenate([text, x[:, start:stop]], axis=1)
            got = layer(text[:, start:], cache=cache).data
            np.testing.assert_allclose(got, layer(text).data[:, start:], atol=1e-5)
            parents = rng.integers(0, 3, 3)
            cache.reorder(parents)
            text = text[parents]


def test_dropout_repeats_within_a_step_and_is_off_in_evaluation(rng):
    layer = make(rng, dropout=0.5)
    x = rng.standard_normal((2, 9, 24)).astype(np.float32)
    first = layer(x).data
    np.testing.assert_array_equal(first, layer(x).data)
    layer.dropout.random.step += 1
    assert (first != layer(x).data).any()
    layer.eval()
    np.testing.assert_allclose(layer(x).data[0], by_hand(layer, x[0]), rtol=1e-4, atol=1e-5)


def test_runs_on_both_backends(xp, rng):
    layer = make(rng, kv_heads=2, causal=True)
    parts = sequences(rng)
    for p in layer.parameters():
        p.data = xp.asarray(p.data)
    x = Tensor(xp.asarray(np.concatenate(parts)), requires_grad=True)
    out = layer(x, cu_seqlens=xp.asarray(CU), max_seqlen=5)
    out.sum().backward()
    assert isinstance(x.grad, xp.ndarray) and x.grad.shape == x.shape
    for p in layer.parameters():
        p.data = np.asarray(p.numpy())
    got = np.split(out.numpy(), CU[1:-1])
    np.testing.assert_allclose(got[2], by_hand(layer, parts[2], causal=True), rtol=1e-3, atol=1e-3)


def test_rotary_positions_are_given_or_count_the_tokens(rng):
    layer, parts = make(rng, causal=True, kv_heads=2, rotary=True), sequences(rng)
    places_ = np.concatenate([np.arange(n) for n in LENGTHS])
    packing = {"cu_seqlens": CU, "max_seqlen": 5}
    packed = layer(np.concatenate(parts), positions=places_, **packing).data
    for part, got in zip(parts, np.split(packed, CU[1:-1]), strict=True):
        np.testing.assert_allclose(got, layer(part[None]).data[0], atol=1e-5)
    assert abs(packed - by_layer_without(layer, parts, packing)).max() > 1e-3


def by_layer_without(layer, parts, packing):
    layer.rotary = False
    return layer(np.concatenate(parts), **packing).data


@pytest.mark.parametrize("options", [{"cross": True}, {"heads": 8}], ids=["cross", "odd"])
def test_rotary_needs_even_heads_of_its_own(options):
    with pytest.raises(ValueError, match="self-attention with an even head size"):
        nn.MultiHeadAttention(24, **{"heads": 6, "rotary": True, **options})


def test_invalid_head_counts_are_refused():
    for options in ({"heads": 5}, {"heads": 6, "kv_heads": 4}):
        with pytest.raises(ValueError, match="divide"):
            nn.MultiHeadAttention(24, **options)


@pytest.mark.parametrize("make, message", [
    (lambda: nn.Linear(3, "4"), "Linear: outputs is '4'; accepted: an integer from 1 on"),
    (lambda: nn.Linear(-3, 4), "Linear: inputs is -3"),
    (lambda: nn.FeedForward(8, 2.5), "FeedForward: hidden is 2.5"),
    (lambda: nn.Embedding(None, 4), "Embedding: rows is None"),
    (lambda: nn.LayerNorm("8"), "LayerNorm: width is '8'"), (lambda: nn.RMSNorm(0), "width is 0"),
    (lambda: nn.MultiHeadAttention("64", 8), "MultiHeadAttention: width is '64'"),
    (lambda: nn.MultiHeadAttention(64, 0), "MultiHeadAttention: heads is 0"),
])  # fmt: skip
def test_sizes_are_integers_from_1_on(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()


def test_split_heads_are_views_with_adjacent_gradients(rng):
    x = Tensor(rng.standard_normal((4, 10)), requires_grad=True)
    q, k, v = split_heads(x, (3, 1, 1), 2)
    assert [part.shape for part in (q, k, v)] == [(4, 3, 2), (4, 1, 2), (4, 1, 2)]
    assert all(np.shares_memory(part.data, x.data) for part in (q, k, v))
    (q.sum() + 5 * v.sum()).backward()  # k is not used
    np.testing.assert_array_equal(x.grad, [[1] * 6 + [0] * 2 + [5] * 2] * 4)


def packed_attention(x, cu, packed, counts=(4, 2, 2), head_dim=8, **options):
    """Return attention of x (tokens, width), which holds queries, keys and values."""
    if packed:
        longest = int((cu[1:] - cu[:-1]).max())
        options |= {"cu_seqlens_q": cu, "max_seqlen_q": longest, "max_seqlen_k": longest}
    else:
        x = x.reshape(len(cu) - 1, -1, x.shape[-1])
    q, k, v = split_heads(x, counts, head_dim)
    return q, k, v, flash_attention(q, k, v, causal=True, **options)


def gradient_and_copies(monkeypatch, x, dout, cu, packed, **options):
    """Return the gradient of ``packed_attention`` with places, without them, and the copies made.

    Without places, the gradients of queries, keys and values are separate arrays and are copied.
    """
    found, copied, same = [], [], attention.same_memory
    for placed in (True, False):
        leaf = Tensor(x, requires_grad=True)

        def note(a, b, placed=placed):
            return same(a, b) or copied.append(placed)

        with monkeypatch.context() as patch:
            patch.setattr(attention, "same_memory", note)
            if not placed:
                patch.setattr(gradient_layout.GradientLayout, "take", lambda self, box: None)
            packed_attention(leaf, cu, packed, **options)[-1].backward(dout)
        found.append(to_cpu(leaf.grad))
    return (*found, copied)


@pytest.mark.parametrize("packed", [False, True])
def test_gradients_of_parts_are_written_in_place(monkeypatch, rng, packed):
    x = rng.standard_normal((18, 64)).astype(np.float32)
    cu = np.array([0, 5 if packed else 9, 18], np.int32)
    dout = rng.standard_normal((18, 4, 8) if packed else (2, 9, 4, 8)).astype(np.float32)
    placed, copied, copies = gradient_and_copies(monkeypatch, x, dout, cu, packed)
    np.testing.assert_array_equal(placed, copied)
    # the reference returns packed gradients in new arrays
    assert copies == [True] * 3 * packed + [False] * 3


FORMS = {  # which kernels: (sizes of x, dtype, options)
    "hopper": ((2048, 64), "bfloat16", {"impl": "raw-hopper", "deterministic": True}),
    "ampere": ((2048, 64), "float16", {"impl": "raw-ampere", "deterministic": True}),
    "short": ((2048, 64), "bfloat16", {"impl": "raw-short"}),
    "simt": ((2048, 24), "float32", {"impl": "raw-simt"}),
    "unaligned": ((2048, 20), "bfloat16", {"impl": "raw-simt"}),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_kernels_write_gradients_in_place(monkeypatch, rng, gpu, form, packed):
    (tokens, head_dim), dtype, options = FORMS[form]
    length = 64 if form == "short" else 256
    cu = gpu.asarray(sorted([*range(0, tokens + 1, length), *[length - 3] * packed]), "int32")
    x, dout = (
        gpu.asarray(rng.standard_normal(n).astype(np.float32)).astype(dtype_of(dtype))
        for n in ((tokens, 8 * head_dim), (tokens, 4, head_dim))
    )
    dout = dout if packed else dout.reshape(-1, length, 4, head_dim)
    before = kernels.launches.copy()
    placed, copied, copies = gradient_and_copies(
        monkeypatch, x, dout, cu, packed, head_dim=head_dim, **options
    )
    ran = kernels.launches - before
    assert bool(ran["flash_attention_short_backward"]) == (form == "short")
    assert bool(ran["flash_attention_backward"]) == (form == "hopper")
    np.testing.assert_array_equal(placed, copied)
    assert copies == [False] * 3, "without places all three are copied, with places none"
    assert placed.astype(np.float32).any(axis=0).all()


def test_a_place_is_for_one_use(rng):
    """A tensor that is used twice gets the sum of both gradients."""
    x = rng.standard_normal((2, 5, 64))

    def uses(x):
        q, k, v, out = packed_attention(x.reshape(10, 64), (0, 5, 10), False)
        again = flash_attention(q, k, k)
        return (out * again).sum() + (2 * v).sum() + flash_attention(q[:, :2], k, v).sum()

    leaf = Tensor(x, requires_grad=True)
    uses(leaf).backward()
    step, eps = rng.standard_normal(x.shape), 1e-6
    up, down = (uses(Tensor(x + sign * eps * step)).item() for sign in (1, -1))
    np.testing.assert_allclose((leaf.grad * step).sum(), (up - down) / (2 * eps), rtol=1e-6)


def test_a_retained_gradient_is_not_overwritten(rng):
    """The inverse rotation works in place, but not in a gradient that the caller gets."""
    x = Tensor(rng.standard_normal((2, 5, 64)), requires_grad=True)
    q, k, v = split_heads(x, (4, 2, 2), 8)
    turned = rotary(q, k)
    out = flash_attention(*turned, v)
    dout = rng.standard_normal(out.shape)
    alone = backward_pass.gradients([out], [dout], [turned[0]], retain_graph=True)[0].copy()
    both = backward_pass.gradients([out], [dout], [turned[0], x])
    np.testing.assert_array_equal(both[0], alone)
    assert (both[1][..., :32].reshape(alone.shape) != alone).any()


def test_split_heads_of_a_leaf_add_to_its_gradient(rng):
    x = Tensor(rng.standard_normal((4, 6)), requires_grad=True)
    x.grad_slot = np.full((4, 6), np.nan)
    for times in (1, 2):
        (part,) = split_heads(x, (3,), 2)
        part.sum().backward()
        np.testing.assert_array_equal(x.grad_slot, np.full((4, 6), times))
