"""GPT-2: causality, initial weights, gradients, and learning a simple sequence."""

import dataclasses

import numpy as np
import pytest

from gpuattn import to_cpu
from gpuattn.decode.sample import sample
from gpuattn.errors import ConfigError
from gpuattn.models.gpt2 import GPT2, GPT2Config
from gpuattn.runtime.workspace import Workspace

TINY = GPT2Config(vocab=20, d_model=16, heads=2, layers=2, block=8)


def tokens(rng, *shape):
    return rng.integers(0, 20, shape).astype(np.int32)


def test_logits_do_not_depend_on_later_tokens(rng):
    model, x = GPT2(TINY), tokens(rng, 2, 8)
    changed = x.copy()
    changed[:, 5:] = (x[:, 5:] + 1) % 20
    before, after = model.logits(x).data, model.logits(changed).data
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert (before[:, 5:] != after[:, 5:]).any(axis=-1).all()


@pytest.mark.parametrize("bias", [True, False])
def test_parameters_and_their_initial_spread(bias):
    config = GPT2Config(vocab=1000, d_model=128, heads=4, layers=8, block=64, bias=bias)
    model = GPT2(config, seed=1)
    parameters = dict(model.named_parameters())
    d, L, rows = 128, 8, 1024
    weights = rows * d + 64 * d + L * 12 * d * d + (2 * L + 1) * d
    biases = L * 9 * d + (2 * L + 1) * d
    assert sum(p.size for p in parameters.values()) == weights + bias * biases
    std = {name: p.data.std() for name, p in parameters.items() if p.ndim == 2}
    np.testing.assert_allclose(std["layers.0.attention.qkv.weight"], 0.02, rtol=0.05)
    np.testing.assert_allclose(std["layers.7.feed_forward.out.weight"], 0.005, rtol=0.05)
    np.testing.assert_allclose(std["layers.3.attention.out.weight"], 0.005, rtol=0.05)
    assert (parameters["embedding.weight"].data[1000:] == 0).all()


def test_initial_loss_is_that_of_guessing(rng):
    loss = GPT2(TINY).loss(tokens(rng, 4, 8), tokens(rng, 4, 8))
    np.testing.assert_allclose(loss.item(), np.log(20), rtol=0.02)


VARIANTS = {
    "plain": {},
    "rotary": {"positions": "rotary", "kv_heads": 1, "pad_vocab": False},
    "swiglu": {"activation": "swiglu", "bias": False},
    "gelu_exact": {"activation": "gelu_exact", "kv_heads": 2},
}


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_gradient_of_every_parameter_agrees_with_differences(rng, options):
    model = GPT2(dataclasses.replace(TINY, dropout=0.2, **options), seed=2)
    for p in model.parameters():
        p.data = p.data.astype(np.float64) * 5
    x, labels, eps = tokens(rng, 2, 8), tokens(rng, 2, 8), 1e-6
    model.loss(x, labels).backward()
    for name, p in model.named_parameters():
        step = rng.standard_normal(p.shape)
        home, sides = p.data, []
        for sign in (1, -1):
            p.data = home + sign * eps * step
            sides.append(model.loss(x, labels).item())
        p.data = home
        numeric, exact = (sides[0] - sides[1]) / (2 * eps), float((p.grad * step).sum())
        assert abs(numeric - exact) <= 2e-6 * max(1, abs(exact)), (name, numeric, exact)
        assert abs(p.grad).max() > 1e-8, f"{name} has no gradient"


@pytest.mark.parametrize("positions", ["learned", "rotary"])
@pytest.mark.parametrize("checkpoint", ["none", "full"])
def test_texts_end_to_end_are_those_texts_alone(rng, xp, positions, checkpoint):
    model = GPT2(dataclasses.replace(TINY, positions=positions, kv_heads=1), seed=3)
    model.checkpoint = checkpoint
    texts, labels = ([tokens(np.random.default_rng(seed), n) for n in (3, 8, 1, 5)]
                     for seed in (1, 2))  # fmt: skip
    for p in model.parameters():
        p.data = xp.asarray(p.data * 5)

    def run(some, wanted, weight=1.0, **packing):
        loss = model.loss(xp.asarray(some), xp.asarray(wanted), **packing)
        (loss * weight).backward()
        return float(to_cpu(loss.data)) * weight

    each = sum(run(t[None], w[None], len(t) / 17) for t, w in zip(texts, labels, strict=True))
    grads = [to_cpu(p.grad) for p in model.parameters()]
    model.zero_grad()
    ends = np.cumsum([0, *map(len, texts)], dtype=np.int32)
    joined = run(
        np.concatenate(texts), np.concatenate(labels), max_seqlen=8,
        positions=xp.asarray(np.concatenate([np.arange(len(t), dtype=np.int32) for t in texts])),
        cu_seqlens=xp.asarray(ends),
    )  # fmt: skip
    np.testing.assert_allclose(joined, each, rtol=1e-5)
    for p, grad in zip(model.parameters(), grads, strict=True):
        np.testing.assert_allclose(to_cpu(p.grad), grad, atol=1e-4 * abs(grad).max())


def test_texts_end_to_end_are_up_to_block(rng):
    with pytest.raises(ValueError, match="9 tokens; accepted: up to block, 8"):
        GPT2(TINY).states(tokens(rng, 12), cu_seqlens=np.array([0, 3, 12], np.int32), max_seqlen=9)


def test_learns_to_count(rng):
    model = GPT2(dataclasses.replace(TINY, d_model=32))
    x = (rng.integers(0, 20, (16, 1)) + np.arange(9)).astype(np.int32) % 20
    for _ in range(150):
        model.zero_grad()
        loss = model.loss(np.ascontiguousarray(x[:, :-1]), np.ascontiguousarray(x[:, 1:]))
        loss.backward()
        for p in model.parameters():
            p.data -= np.float32(0.002) * np.sign(p.grad)
    assert loss.item() < 0.3
    stepper = model.stepper(np.array([[3, 4]], np.int32), 6)
    token, out = stepper.first_tokens, []
    for position in range(6):
        token = stepper.step(token, position).argmax(-1).astype(np.int32)
        out.append(int(token[0]))
    assert out == [5, 6, 7, 8, 9, 10]
    prompts = np.array([[3, 4], [8, 9]], np.int32)
    for kv_cache in (True, False):
        stepper = model.stepper(prompts, 6, kv_cache=kv_cache)
        ends = {"bos": stepper.first_tokens, "eos": None, "max_length": 6}
        texts = sample(stepper, **ends, temperature=0.1, top_k=5, top_p=0.9, seed=1)
        assert [text.tokens for text in texts] == [[5, 6, 7, 8, 9, 10], [10, 11, 12, 13, 14, 15]]


@pytest.mark.parametrize("tied", [True, False])
def test_scores_add_up_to_the_loss(rng, tied):
    model = GPT2(dataclasses.replace(TINY, dropout=0.0, tied=tied))
    x, labels = tokens(rng, 3, 6), tokens(rng, 3, 6)
    scores = model.log_probabilities(x, labels)
    np.testing.assert_allclose(-scores.mean(), model.loss(x, labels).item(), rtol=1e-5)


def test_parameters_follow_the_options():
    plain = {name: p.shape for name, p in GPT2(TINY).named_parameters()}
    shapes = {
        name: p.shape
        for name, p in GPT2(
            dataclasses.replace(
                TINY, kv_heads=1, positions="rotary", activation="swiglu", pad_vocab=False
            )
        ).named_parameters()
    }
    assert set(plain) - set(shapes) == {"embedding.position_weight"}
    assert shapes["embedding.weight"] == (20, 16) and plain["embedding.weight"] == (64, 16)
    assert shapes["layers.0.attention.qkv.weight"] == (16 + 2 * 8, 16)
    assert shapes["layers.0.feed_forward.inner.weight"] == (2 * 64, 16)


def test_texts_longer_than_the_block_are_refused(rng):
    with pytest.raises(ValueError, match="block, 8"):
        GPT2(TINY).logits(tokens(rng, 1, 9))


FAULTS = [{"block": 0}, {"heads": 3}, {"layers": 1.5}, {"kv_heads": 3}, {"positions": "sinusoidal"}]


@pytest.mark.parametrize("options", FAULTS)
def test_invalid_configurations_are_refused(options):
    with pytest.raises(ConfigError):
        dataclasses.replace(TINY, **options)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_options_in_16_bits_on_a_gpu_are_near_float32(rng, gpu, dtype):
    config = dataclasses.replace(
        TINY, d_model=64, block=96, positions="rotary", kv_heads=1, activation="swiglu",
        pad_vocab=False, vocab=33,
    )  # fmt: skip
    x, labels = (rng.integers(0, 33, (4, 96)).astype(np.int32) for _ in range(2))
    plain, model = GPT2(config, seed=1), GPT2(config, seed=1)
    want = plain.loss(x, labels)
    want.backward()
    workspace = Workspace(model, "cuda", dtype)
    workspace.begin()
    loss = model.loss(gpu.asarray(x), gpu.asarray(labels))
    workspace.backward(loss)
    np.testing.assert_allclose(loss.item(), want.item(), rtol=0.01)
    for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
        got, wanted = to_cpu(q.grad).astype(np.float64), p.grad
        error = np.linalg.norm(got - wanted) / np.linalg.norm(wanted)
        assert error < 0.05 or "qkv.bias" in name, f"{name}: {error:.3f}"
