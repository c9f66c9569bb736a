"""The translation model: gradients, packing, tied weights, states, and learning."""

import dataclasses

import numpy as np
import pytest

from gpuattn import Tensor, checkpoint, to_cpu
from gpuattn.data.batching import PackedLoader
from gpuattn.data.tokenizer import BOS, EOS
from gpuattn.errors import CheckpointError, ConfigError
from gpuattn.models.translation import TranslationConfig, TranslationModel
from gpuattn.runtime.device import batch_to

TINY = TranslationConfig(vocab=20, d_model=8, heads=2, layers=(2, 2), ffn=12, max_length=12)
PAIRS = [([5, 6, 7], [8, 9]), ([10], [11, 12, 13, 14]), ([15, 16, 17, 18, 19], [5])]


def make(seed=0, **options):
    return TranslationModel(dataclasses.replace(TINY, **options), seed)


def one_batch(pairs=PAIRS):
    (batch,) = PackedLoader(pairs, 1000, seed=0).epoch(0)
    return batch


def in_float64(model):
    for p in model.parameters():
        p.data = p.data.astype(np.float64)
    return model


VARIANTS = [
    {"norm": "pre", "positions": "sinusoidal", "tied": True, "activation": "relu", "dropout": 0.0},
    {"norm": "post", "positions": "learned", "tied": False, "activation": "gelu", "dropout": 0.0},
    {"norm": "pre", "positions": "learned", "tied": True, "activation": "gelu", "dropout": 0.3},
    {"norm": "post", "positions": "sinusoidal", "tied": True, "dropout": 0.3},
    {"norm": "pre", "positions": "rotary", "kv_heads": 1, "activation": "swiglu", "dropout": 0.0},
    {"norm": "post", "positions": "rotary", "activation": "gelu_exact", "pad_vocab": False},
    {"norm": "post", "positions": "sinusoidal_halves", "activation": "silu", "output_bias": True},
]


@pytest.mark.parametrize("options", VARIANTS, ids=lambda o: f"{o['norm']}-{o['positions']}")
def test_gradient_of_every_parameter_agrees_with_differences(options, rng):
    model, batch, eps = in_float64(make(**options)), one_batch(), 1e-6
    model.loss(batch).backward()
    for name, p in model.named_parameters():
        step = rng.standard_normal(p.shape)
        home, sides = p.data, []
        for sign in (1, -1):
            p.data = home + sign * eps * step
            sides.append(model.loss(batch).item())
        p.data = home
        numeric, exact = (sides[0] - sides[1]) / (2 * eps), float((p.grad * step).sum())
        assert abs(numeric - exact) <= 2e-6 * max(1, abs(exact)), (name, numeric, exact)
        # Softmax does not change when all keys move together: key biases alone have no gradient.
        assert abs(p.grad).max() > 1e-8, f"{name} has no gradient"


@pytest.mark.parametrize("options", VARIANTS, ids=lambda o: f"{o['norm']}-{o['positions']}")
def test_a_packed_batch_equals_its_sentences_alone(options):
    model = make(**options).eval()
    together, alone = one_batch(), [one_batch([pair]) for pair in PAIRS]
    assert together.target_tokens == sum(batch.target_tokens for batch in alone) == 10
    total = sum(model.loss(batch).item() * batch.target_tokens for batch in alone)
    np.testing.assert_allclose(model.loss(together).item() * 10, total, rtol=1e-5)


@pytest.mark.parametrize("frozen", [
    ("encoder", "source"), ("*.norms.*", "*.bias"), ("*.weight",), ("decoder.*.attention", "memory")
])  # fmt: skip
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_frozen_parameters_leave_the_other_gradients(xp, norm, frozen):
    whole, part = (make(norm=norm, d_model=16, dropout=0.1, activation="gelu") for _ in range(2))
    device = "numpy" if xp is np else "cuda"
    learnt = dict(part.to(device=device).freeze(*frozen).named_parameters())
    for model in (whole.to(device=device), part):
        model.loss(batch_to(one_batch(), xp)).backward()
    for (name, p), (_, q) in zip(whole.named_tensors(), part.named_tensors(), strict=True):
        assert (q.grad is None) == (name not in learnt), name
        if q.grad is not None:
            np.testing.assert_allclose(to_cpu(q.grad), to_cpu(p.grad), rtol=1e-4, atol=1e-6)


def test_initial_loss_is_near_that_of_guessing():
    model = make(vocab=500, d_model=64).eval()
    loss = model.loss(one_batch(), label_smoothing=0.0)
    assert np.log(500) - 1 < loss.item() < np.log(500) + 1.5


def test_padding_of_the_vocabulary_has_no_effect():
    model, batch = make(), one_batch()
    assert model.source.weight.shape == (64, 8)
    model.loss(batch).backward()
    assert (model.source.weight.grad[20:] == 0).all()
    before = model.eval().loss(batch).item()
    model.source.weight.data[20:] = 1e4
    assert model.loss(batch).item() == before


def test_the_vocabulary_may_be_unpadded():
    model, batch = make(pad_vocab=False, tied=False), one_batch()
    assert model.source.weight.shape == model.head.weight.shape == (20, 8)
    padded = make(tied=False)
    grown = {
        name: np.concatenate([x, np.zeros((44, 8))]) if len(x) == 20 and x.ndim == 2 else x
        for name, x in model.state().items()
    }
    padded.load_state(grown)
    assert model.eval().loss(batch).item() == padded.eval().loss(batch).item()


def test_one_product_makes_all_keys_and_values_of_the_memory(monkeypatch):
    """One product computes the gradient too: each layer's attention writes its part of it."""
    from gpuattn.autodiff import gradient_layout
    from gpuattn.nn import attention

    found, copies = [], []
    same = attention.same_memory
    note = lambda a, b: same(a, b) or copies.append(1)  # noqa: E731
    monkeypatch.setattr(attention, "same_memory", note)
    source = np.array([[5, 6, 7, 1], [8, 9, 10, 1]], np.int32)
    for placed in (True, False):
        model = make(kv_heads=1, dropout=0.0)
        if not placed:
            monkeypatch.setattr(gradient_layout.GradientLayout, "take", lambda self, box: None)
        states = model.decode(model.target(source), model.source(source))
        (states * states).sum().backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
        assert len(copies) == (0 if placed else 2 * (3 + 3)), (
            "two layers with q, k, v of self-attention and of cross-attention"
        )
    assert found[0]["memory.kv.weight"].shape == (2 * 2 * 4, 8)
    for name, grad in found[0].items():
        if grad is not None:
            np.testing.assert_array_equal(grad, found[1][name], err_msg=name)


def test_a_layer_with_its_own_product_gives_the_same():
    """The joint projection has the weights that a separate layer would have."""
    from gpuattn import nn

    rng = np.random.default_rng(2)
    memory, x = (rng.standard_normal((2, n, 8)).astype(np.float32) for n in (5, 3))
    shared = nn.MemoryProjection(8, 2, 3, kv_heads=1)
    shared.kv.bias.data[:] = rng.standard_normal(24)
    for i, pair in enumerate(shared(memory)):
        own = nn.MultiHeadAttention(8, 2, cross=True, kv_heads=1)
        rows = slice(8 * i, 8 * (i + 1))
        own.kv.weight.data, own.kv.bias.data = (
            shared.kv.weight.data[rows],
            shared.kv.bias.data[rows],
        )
        np.testing.assert_allclose(own(x, pair).data, own(x, memory).data, atol=1e-6)
        assert abs(own.kv.weight.data).max() > 0.5 * (6 / 16) ** 0.5


def test_tied_parameters_are_listed_once():
    tied, untied = make(), make(tied=False)
    names = {name for name, _ in untied.named_parameters()}
    assert names - {name for name, _ in tied.named_parameters()} == {"target.weight", "head.weight"}
    shared = [p for p in tied.parameters() if p is tied.source.weight]
    assert len(shared) == 1 and tied.target.weight is tied.source.weight


def test_post_norm_has_no_norm_at_the_end():
    norms = {name for name, _ in make(norm="pre").named_parameters()}
    norms -= {name for name, _ in make(norm="post").named_parameters()}
    assert norms == {
        f"{side}_norm.{x}" for side in ("encoder", "decoder") for x in ("weight", "bias")
    }


def test_parameters_and_dropout_depend_on_the_seed():
    one, same, other = make(seed=1), make(seed=1), make(seed=2)
    batch = one_batch()
    assert one.loss(batch).item() == same.loss(batch).item()
    assert (one.source.weight.data != other.source.weight.data).any()
    same.random.step = 1
    assert one.loss(batch).item() != same.loss(batch).item()


def test_dropout_repeats_in_recomputation():
    kept, recomputed, batch = make(dropout=0.3), make(dropout=0.3), one_batch()
    kept.loss(batch).backward()
    checkpoint(lambda _: recomputed.loss(batch), Tensor(np.zeros(1))).backward()
    for (name, a), b in zip(kept.named_parameters(), recomputed.parameters(), strict=True):
        np.testing.assert_array_equal(a.grad, b.grad, err_msg=name)


def test_gradients_do_not_depend_on_the_loaders_order():
    batch = one_batch()
    plain = dataclasses.replace(batch, source_order=None, target_order=None)
    one, two = make(), make()
    one.loss(batch).backward()
    two.loss(plain).backward()
    np.testing.assert_array_equal(one.source.weight.grad, two.source.weight.grad)


def test_state_round_trip_through_another_model():
    one, two, batch = make(seed=1), make(seed=2), one_batch()
    two.load_state(one.state())
    assert one.eval().loss(batch).item() == two.eval().loss(batch).item()
    with pytest.raises(CheckpointError, match="another model.*encoder.1"):
        make(layers=(1, 2)).load_state(one.state())


def test_sentences_longer_than_the_model_takes_are_refused():
    model = make()
    for pair, side in ((([5] * 12, [6]), "source"), (([5], [6] * 12), "target")):
        with pytest.raises(ValueError, match=f"the {side} is 13 tokens.*max_length, 12"):
            model.loss(one_batch([pair]))
    model.loss(one_batch([([5] * 11, [6] * 11)]))


def test_pack_is_the_source_side_of_a_batch():
    model = make()
    batch, sources = one_batch(), [PAIRS[i][0] for i in one_batch().sentences]
    packed = model.pack(sources)
    for name in ("source", "source_positions", "cu_source"):
        mine, want = getattr(packed, name), getattr(batch, name)
        assert mine.dtype == np.int32
        np.testing.assert_array_equal(mine, want)
    assert packed.max_source == batch.max_source == 6


def test_attention_maps_are_probabilities_over_visible_positions():
    model = make(dropout=0.5)
    maps = model.attention_maps([5, 6, 7], [8, 9])
    assert {k: [m.shape for m in v] for k, v in maps.items()} == {
        "encoder": [(2, 4, 4)] * 2, "decoder": [(2, 3, 3)] * 2, "cross": [(2, 3, 4)] * 2,
    }  # fmt: skip
    for stack in maps.values():
        for attention in stack:
            np.testing.assert_allclose(attention.sum(-1), 1, rtol=1e-5)
    assert all((np.triu(m, 1) == 0).all() for m in maps["decoder"])
    assert model.training and all(layer.attention.maps is None for layer in model.encoder)


def test_attention_maps_show_what_the_model_computes():
    """With one-hot values per key, cross-attention returns its attention map."""
    model = make(layers=(1, 1), heads=1, norm="post", positions="learned").eval()
    cross = model.decoder[0].cross_attention
    seen = {}
    attend, project = cross.attend, model.memory

    def watched(*args, **context):
        seen["out"] = attend(*args, **context)
        return seen["out"]

    def naming(memory):
        ((k, _),) = project(memory)
        return [(k, np.eye(k.shape[1], 8, dtype=np.float32).reshape(1, k.shape[1], 1, 8))]

    cross.attend, model.memory = watched, naming
    (attention,) = model.attention_maps([5, 6, 7], [8, 9])["cross"]
    np.testing.assert_allclose(seen["out"].data[0, :, :4], attention[0], atol=1e-6)


def test_learns_eight_sentences_by_heart(rng):
    pairs = [
        (rng.integers(4, 20, n).tolist(), rng.integers(4, 20, m).tolist())
        for n, m in rng.integers(1, 7, (8, 2))
    ]
    model, batch = make(d_model=32, ffn=64, dropout=0.0), one_batch(pairs)
    moments = [(np.zeros(p.shape), np.zeros(p.shape)) for p in model.parameters()]
    for step in range(1, 121):
        model.zero_grad()
        loss = model.loss(batch, label_smoothing=0.0)
        loss.backward()
        for p, (m, v) in zip(model.parameters(), moments, strict=True):
            m += 0.1 * (p.grad - m)
            v += 0.01 * (p.grad**2 - v)
            rate = 5e-3 / (1 - 0.9**step)
            p.data -= (rate * m / (np.sqrt(v / (1 - 0.99**step)) + 1e-9)).astype(np.float32)
    assert loss.item() < 0.05
    model.eval()
    stepper = model.stepper(model.pack([source for source, _ in pairs]), 8)
    token, out = np.full(8, BOS, np.int32), []
    for position in range(8):
        token = stepper.step(token, position).argmax(-1).astype(np.int32)
        out.append(token)
    for (_, target), got in zip(pairs, np.stack(out, axis=1).tolist(), strict=True):
        assert got[: got.index(EOS)] == target


FAULTS = [
    ({"d_model": 10, "heads": 4}, "heads is 4"),
    ({"vocab": 0}, "vocab is 0"),
    ({"layers": (2,)}, "two numbers"),
    ({"layers": (0, 1)}, "encoder_layers is 0"),
    ({"dropout": 1.0}, "dropout is 1.0"),
    ({"norm": "sandwich"}, "'pre' or 'post'"),
    ({"positions": "relative"}, "'sinusoidal' or 'learned' or 'rotary'"),
    ({"activation": "swish"}, "'relu' or 'gelu'"),
    ({"kv_heads": 3}, "kv_heads is 3; .* divide heads, 2"),
    ({"d_model": 6, "positions": "rotary"}, "an even number for rotary"),
    ({"pad_vocab": 1}, "True or False"),
    ({"d_model": 9, "heads": 3}, "even"),
    ({"ffn": 2.5}, "whole number"),
]


@pytest.mark.parametrize(("options", "message"), FAULTS, ids=lambda x: str(x)[:24])
def test_invalid_configurations_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(TINY, **options)


def test_configuration_survives_json():
    import json

    text = json.dumps(dataclasses.asdict(TINY))
    assert TranslationConfig(**json.loads(text)) == TINY


def test_runs_on_both_backends(xp):
    model, batch = make(dropout=0.0), one_batch()
    want = model.loss(batch).item()
    for p in model.parameters():
        p.data = xp.asarray(p.data)
    moved = {
        name: tuple(map(xp.asarray, value)) if isinstance(value, tuple)
        else xp.asarray(value) if isinstance(value, np.ndarray) else value
        for name, value in vars(batch).items()
    }  # fmt: skip
    loss = model.loss(dataclasses.replace(batch, **moved))
    loss.backward()
    assert all(isinstance(p.grad, xp.ndarray) for p in model.parameters())
    np.testing.assert_allclose(loss.item(), want, rtol=1e-4)
