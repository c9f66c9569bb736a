"""BERT: types, lengths, packed texts, pooling, and the gradient of every parameter."""

import numpy as np
import pytest

from gpuattn.data.batching import IGNORED, token_order
from gpuattn.errors import ConfigError
from gpuattn.models import Bert, BertConfig, bert

TINY = BertConfig(vocab=20, d_model=12, heads=3, layers=2, ffn=20, max_length=8, dropout=0.0,
                  masked=True)  # fmt: skip


@pytest.fixture
def model(rng):
    """A model whose weights are large enough to see every part of it."""
    model = Bert(TINY, seed=1).eval()
    for p in model.parameters():
        p.data = p.data + rng.standard_normal(p.shape, dtype="f4") * np.float32(0.2)
    return model


def tokens(rng, *shape):
    return rng.integers(0, 20, shape).astype(np.int32)


def test_a_text_does_not_depend_on_what_lies_after_it(model, rng):
    x, types, lengths = tokens(rng, 3, 8), tokens(rng, 3, 8) % 2, np.array([8, 3, 5], np.int32)
    states = model.states(x, types, lengths).data
    for row, kinds, n, want in zip(x, types, lengths, states, strict=True):
        alone = model.states(row[None, :n], kinds[None, :n]).data[0]
        np.testing.assert_allclose(want[:n], alone, atol=1e-5)
    assert np.abs(model.states(x).data - states).max() > 0.1  # types and lengths matter


def test_without_types_all_are_0(model, rng):
    x = tokens(rng, 3, 8)
    found, want = {}, {}
    for grads, types in ((found, None), (want, np.zeros_like(x))):
        states = model.states(x, types)
        (states * states.data[::-1].copy()).sum().backward()
        grads |= {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        grads["states"] = states.data
        for p in model.parameters():
            p.grad = None
    assert found.keys() == want.keys()
    for name, expected in want.items():
        scale = np.abs(expected).max()
        np.testing.assert_allclose(found[name], expected, rtol=0, atol=1e-5 * scale, err_msg=name)


def test_texts_end_to_end(model, rng):
    lengths = [5, 1, 8]
    texts = [tokens(rng, n) for n in lengths]
    cu = np.cumsum([0, *lengths]).astype(np.int32)
    packed = model.states(
        np.concatenate(texts), positions=np.concatenate([np.arange(n) for n in lengths]),
        cu_seqlens=cu, max_seqlen=8,
    ).data  # fmt: skip
    for text, begin, end in zip(texts, cu, cu[1:], strict=False):
        np.testing.assert_allclose(packed[begin:end], model.states(text[None]).data[0], atol=1e-5)


def test_texts_end_to_end_of_one_length_are_a_batch(model, rng, monkeypatch):
    """Texts of several lengths stay end to end."""
    x, types, seen = tokens(rng, 3, 8), rng.integers(0, 2, (3, 8)), []
    run_layers = bert.run_layers

    def noted(layers, cache, x, **context):
        seen.append((x.ndim, context["cu_seqlens"] is None))
        return run_layers(layers, cache, x, **context)

    monkeypatch.setattr(bert, "run_layers", noted)
    places = np.tile(np.arange(8), 3)
    packing = {
        "positions": places,
        "cu_seqlens": np.arange(0, 25, 8, dtype=np.int32),
        "max_seqlen": 8,
    }
    for kinds in (None, types):
        packed = model.states(x.ravel(), kinds if kinds is None else kinds.ravel(), **packing).data
        np.testing.assert_array_equal(packed, model.states(x, kinds).data.reshape(24, -1))
    assert seen == [(3, True)] * 4
    packing["cu_seqlens"] = np.array([0, 8, 9, 16, 24], np.int32)
    model.states(x.ravel(), **packing)
    assert seen[4:] == [(2, False)]


def test_vectors_of_texts(model, rng):
    x, lengths = tokens(rng, 3, 8), np.array([8, 3, 5], np.int32)
    states = model.states(x, lengths=lengths).data
    mean = np.stack([s[:n].mean(0) for s, n in zip(states, lengths, strict=True)])
    found = model.embed(x, lengths=lengths, normalised=False)
    np.testing.assert_allclose(found, mean, atol=1e-6)
    unit = mean / np.linalg.norm(mean, axis=1, keepdims=True)
    np.testing.assert_allclose(model.embed(x, lengths=lengths), unit, atol=1e-6)
    np.testing.assert_allclose(
        model.embed(x, lengths=lengths, pool="first", normalised=False), states[:, 0], atol=1e-6
    )
    np.testing.assert_allclose(
        model.embed(x, normalised=False), model.states(x).data.mean(1), atol=1e-6
    )
    with pytest.raises(ConfigError, match="pool is 'max'; accepted: 'mean' or 'first'"):
        model.embed(x, pool="max")


def test_a_text_that_is_too_long(model):
    with pytest.raises(ValueError, match="tokens is 9 tokens; accepted: up to max_length, 8"):
        model.states(np.zeros((1, 9), np.int32))


@pytest.mark.parametrize("tied", [True, False])
def test_gradient_of_every_parameter_agrees_with_differences(rng, tied):
    model = Bert(BertConfig(
        vocab=9, d_model=6, heads=2, layers=1, ffn=8, max_length=4, dropout=0.0, masked=True,
        tied=tied, pad_vocab=False,
    ))  # fmt: skip
    for p in model.parameters():
        p.data = rng.standard_normal(p.shape) * 0.5
    x, types = tokens(rng, 2, 4) % 9, tokens(rng, 2, 4) % 2
    weights = rng.standard_normal((2, 4, 9))
    pooled = rng.standard_normal((2, 6))

    def loss():
        states = model.states(x, types)
        return np.sum(model.head(states) * weights) + np.sum(model.pooled(states) * pooled)

    loss().backward()
    for name, p in model.named_parameters():
        step = rng.standard_normal(p.shape)
        before, values = p.data, []
        for sign in (1, -1):
            p.data = before + sign * 1e-6 * step
            values.append(loss().item())
        p.data = before
        want = (values[0] - values[1]) / 2e-6
        assert (p.grad * step).sum() == pytest.approx(want, rel=1e-5, abs=1e-6), name


CLASSES = BertConfig(vocab=20, d_model=12, heads=3, layers=2, ffn=20, max_length=8, dropout=0.0,
                     classes=5)  # fmt: skip


def packed_of(texts):
    """Return tokens and packing of texts, and the rows of their first tokens."""
    lengths = [len(text) for text in texts]
    cu = np.cumsum([0, *lengths]).astype(np.int32)
    packing = {"positions": np.concatenate([np.arange(n) for n in lengths]), "cu_seqlens": cu,
               "max_seqlen": max(lengths)}  # fmt: skip
    return np.concatenate(texts), cu[:-1], packing


def test_classes_of_texts_end_to_end_are_those_of_each_alone(rng):
    model = Bert(CLASSES, seed=1).eval()
    for p in model.parameters():
        p.data = p.data + rng.standard_normal(p.shape, dtype="f4") * np.float32(0.2)
    texts = [tokens(rng, n) for n in (5, 1, 8)]
    whole, rows, packing = packed_of(texts)
    logits = model.class_logits(whole, rows, **packing).data
    alone = np.concatenate([model.logits(text[None]).data for text in texts])
    assert logits.shape == (3, 5) and np.ptp(logits) > 0.1
    np.testing.assert_allclose(logits, alone, atol=1e-5)
    pooled = np.concatenate([model.pooled(model.states(text[None])).data for text in texts])
    want = pooled @ model.classifier.weight.data.T + model.classifier.bias.data
    np.testing.assert_allclose(logits, want, atol=1e-5)


def test_gradient_of_the_loss_of_classes_agrees_with_differences(rng):
    model = Bert(BertConfig(
        vocab=9, d_model=6, heads=2, layers=1, ffn=8, max_length=4, dropout=0.0, classes=3,
        pad_vocab=False,
    ))  # fmt: skip
    for p in model.parameters():
        p.data = rng.standard_normal(p.shape) * 0.5
    whole, rows, packing = packed_of([tokens(rng, n) % 9 for n in (3, 1, 4, 2)])
    labels = np.array([0, 2, -100, 1], np.int32)  # -100 is ignored

    def loss():
        return model.class_loss(whole, rows, labels, label_smoothing=0.2, **packing)

    logits = model.class_logits(whole, rows, **packing).data[labels >= 0]
    log = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    wanted = 0.8 * log[np.arange(3), labels[labels >= 0]] + 0.2 * log.mean(1)
    assert loss().item() == pytest.approx(-wanted.mean(), rel=1e-6)
    loss().backward()
    for name, p in model.named_parameters():
        step = rng.standard_normal(p.shape)
        before, values = p.data, []
        for sign in (1, -1):
            p.data = before + sign * 1e-6 * step
            values.append(loss().item())
        p.data = before
        want = (values[0] - values[1]) / 2e-6
        assert (p.grad * step).sum() == pytest.approx(want, rel=1e-5, abs=1e-6), name


def test_a_new_classifier_keeps_the_encoder(model):
    new = model.with_classes(4, seed=3)
    old, found = model.state(), new.state()
    assert new.config.classes == 4 and not new.config.masked
    assert all(values.tobytes() == found[name].tobytes() for name, values in old.items()
               if name in found)  # fmt: skip
    assert {name.partition(".")[0] for name in old.keys() - found.keys()} == {
        "transform", "transform_norm", "output_bias"
    }  # fmt: skip
    assert found.keys() - old.keys() == {"classifier.weight", "classifier.bias"}
    again, other = model.with_classes(4, seed=3).state(), model.with_classes(4, seed=4).state()
    name = "classifier.weight"
    assert (again[name] == found[name]).all() and (other[name] != found[name]).any()
    without = Bert(BertConfig(20, 12, 3, 1, 20, 8, pooler=False)).with_classes(2)
    assert "pooler.weight" in without.state()
    with pytest.raises(ConfigError, match="pooler is False; accepted: True for a classifier"):
        BertConfig(pooler=False, classes=2)


def test_work_of_a_classifier():
    config, d = BertConfig(classes=3), 768
    encoder = BertConfig().flops([512, 256])
    assert config.flops([512, 256]) == encoder + 6 * 2 * (d * d + 3 * d)


def packed(rng, lengths, predicted):
    """Return the arguments of ``masked_loss`` for random texts of ``lengths``, with that many rows,
    the last of them one to ignore."""
    count = sum(lengths)
    cu = np.cumsum([0, *lengths]).astype(np.int32)
    rows = np.sort(rng.choice(count - 1, predicted - 1, replace=False))
    labels = np.append(rng.integers(0, 9, predicted - 1), IGNORED)
    packing = {"positions": np.concatenate([np.arange(n) for n in lengths]).astype(np.int32),
               "cu_seqlens": cu, "max_seqlen": max(lengths)}  # fmt: skip
    rows = np.append(rows, count - 1).astype(np.int32)
    return (tokens(rng, count) % 9, rows, labels.astype(np.int32)), packing


@pytest.mark.parametrize("tied", [True, False])
def test_masked_loss_agrees_with_that_of_all_logits(rng, tied):
    model = Bert(BertConfig(
        vocab=9, d_model=6, heads=2, layers=1, ffn=8, max_length=4, dropout=0.0, masked=True,
        tied=tied, pooler=False, eps=1e-3,
    ))  # fmt: skip
    for p in model.parameters():
        p.data = rng.standard_normal(p.shape) * 0.5  # rows of padding among them: they are ignored
    (x, rows, labels), packing = packed(rng, [4, 1, 3], 5)
    loss = model.masked_loss(x, rows, labels, **packing)
    loss.backward()
    grads = {name: p.grad.copy() for name, p in model.named_parameters()}
    model.zero_grad()
    logits = model.head(model.states(x, **packing))[:, :9]
    counted, of_label = logits[rows[:-1]], (np.arange(4), labels[:-1])
    shifted = counted - np.max(counted, axis=1, keepdims=True)
    log_sums = np.log(np.sum(np.exp(shifted), axis=1))
    whole = np.mean(log_sums - shifted[of_label])
    whole.backward()
    assert loss.item() == pytest.approx(whole.item(), rel=1e-12)
    for name, p in model.named_parameters():
        np.testing.assert_allclose(grads[name], p.grad, rtol=1e-9, atol=1e-12, err_msg=name)


def test_masked_loss_in_float32_agrees_with_float64(model, rng):
    (x, rows, labels), packing = packed(rng, [8, 2, 5], 6)
    grads, losses = [], []
    for dtype in (np.float32, np.float64):
        for p in model.parameters():
            p.data = p.data.astype(dtype)
        model.zero_grad()
        loss = model.masked_loss(x, rows, labels, **packing, order=token_order(x))
        loss.backward()
        losses.append(loss.item())
        grads.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    left = {name for name, _ in model.named_parameters()} - grads[1].keys()
    assert left == {"pooler.weight", "pooler.bias"}
    for name, want in grads[1].items():
        scale = np.abs(want).max() + 1e-3
        np.testing.assert_allclose(grads[0][name] / scale, want / scale, atol=1e-4, err_msg=name)
    assert not grads[1]["types"][1].any() and grads[1]["types"][0].any()


def test_sizes_and_work():
    base = Bert(BertConfig(layers=2, vocab=1000))
    d = 768
    layer = 4 * (d * d + d) + 2 * d * 3072 + 3072 + d + 4 * d
    rows = 1024 + 512 + 2
    assert sum(p.size for p in base.parameters()) == rows * d + 2 * d + 2 * layer + d * d + d
    config = BertConfig(masked=True)
    matrices = 12 * 12 * d * d + d * (d + 30522)
    pairs = 12 * d * 12 * (512**2 + 256**2)
    assert config.flops([512, 256]) == 6 * matrices * 768 + pairs
    few = BertConfig(masked=True, predicted=0.25)
    matrices = 12 * 12 * d * d + d * (d + 30522) // 4
    assert few.flops([512, 256]) == 6 * matrices * 768 + pairs
    logits = 1024 * few.table_rows * 2
    bytes_of = [each.activation_bytes(1024, 2, "none") for each in (config, few)]
    assert bytes_of[0] - bytes_of[1] == logits * 3 // 4
    with pytest.raises(ConfigError, match="activation is 'swiglu'; accepted"):
        BertConfig(activation="swiglu")
    with pytest.raises(ConfigError, match="types is 0; accepted: a whole number from 1 on"):
        BertConfig(types=0)
