"""ViT: sizes, kinds of images, windows in training, mixtures, and every gradient."""

import numpy as np
import pytest

from gpuattn.errors import ConfigError
from gpuattn.models import ViT, ViTConfig
from gpuattn.models.vit import cubic
from gpuattn.ops.loss.cross_entropy import cross_entropy

TINY = ViTConfig(5, 8, 4, 3, d_model=12, heads=3, layers=2, ffn=20)


def model_of(config=TINY, seed=1):
    """A model whose weights are large enough to see every part of it."""
    rng, model = np.random.default_rng(seed), ViT(config, seed)
    for p in model.parameters():
        p.data = p.data + rng.standard_normal(p.shape, dtype="f4") * np.float32(0.2)
    return model


def pictures(*shape):
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)


def test_uint8_images_are_normalised_by_the_config_and_seen_in_the_middle():
    model = model_of(ViTConfig(5, 8, 4, 3, 12, 3, 2, 20, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.1)))
    images = pictures(2, 10, 13, 3)
    floats = (images[:, 1:9, 2:10] / np.float32(255) - [0.4, 0.5, 0.6]) / [0.2, 0.3, 0.1]
    want = model.logits(floats.astype("f4")).data
    np.testing.assert_allclose(model.logits(images).data, want, atol=1e-5)
    assert model.states(images).shape == (2, 5, 12) and want.shape == (2, 5)


def test_training_sees_random_windows_by_the_step():
    model, labels = model_of(), np.arange(4, dtype=np.int32)
    images = pictures(4, 9, 9, 3)
    losses = []
    for step in (0, 0, 1):
        model.random.step = step
        losses.append(float(model.loss(images, labels, pad=2, flip=True)))
    assert losses[0] == losses[1] != losses[2]
    model.eval()
    want = float(cross_entropy(model.logits(images), labels))
    assert float(model.loss(images, labels, pad=2, flip=True)) == pytest.approx(want, rel=1e-6)


def test_mixtures_have_the_losses_of_both_labels():
    model, labels = model_of().eval(), np.array([0, 4], np.int32)
    images, mix = pictures(2, 8, 8, 3), np.array([0.25, 0.5], "f4")
    floats = images / np.float32(255) * 2 - 1
    share = mix[:, None, None, None]
    logits = model.logits((floats * share + floats[::-1] * (1 - share)).astype("f4"))
    own, other = (cross_entropy(logits, x, reduction="none").data for x in (labels, labels[::-1]))
    want = (own * mix + other * (1 - mix)).mean()
    assert float(model.loss(images, labels, mix=mix)) == pytest.approx(want, rel=1e-5)


def test_stochastic_depth_leaves_out_branches_of_whole_images():
    model = model_of(ViTConfig(5, 8, 4, 3, 12, 3, 2, 20, stochastic_depth=0.5))
    same = np.broadcast_to(pictures(1, 8, 8, 3), (64, 8, 8, 3))
    found = {tuple(row) for row in model.logits(same).data.round(4)}
    assert 3 <= len(found) <= 4  # both branches of the second layer, or one, or none
    assert len({tuple(row) for row in model.eval().logits(same).data.round(4)}) == 1


def test_gradient_of_every_parameter_agrees_with_differences(rng):
    model = ViT(ViTConfig(3, 4, 2, 1, d_model=6, heads=2, layers=1, ffn=8))
    for p in model.parameters():
        p.data = rng.standard_normal(p.shape) * 0.5
    images, weights = rng.standard_normal((2, 4, 4, 1)), rng.standard_normal((2, 3))

    def loss():
        return np.sum(model.logits(images) * weights)

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


def test_sizes_and_work():
    base = ViTConfig()
    d, layer = 768, 12 * 768 * 768
    assert (base.tokens, base.patch_width) == (197, 768)
    matrices = 12 * layer * 197 + 196 * d * d + 1000 * d
    assert base.flops([197, 197]) == 2 * (6 * matrices + 12 * d * 12 * 197**2)
    model = ViT(ViTConfig(layers=1))
    each = layer + 9 * d + 4 * d
    ends = d * d + d + d + 197 * d + 2 * d + 1000 * (d + 1)
    assert sum(p.size for p in model.parameters()) == each + ends
    for small in (model.positions, model.class_token, model.head.weight):
        assert 0.035 < np.abs(small.data).max() <= 0.04
    assert np.abs(model.patch.weight.data).max() > 0.06  # Xavier's


@pytest.mark.parametrize("change, error", [
    ({"patch": 3}, "patch is 3; accepted: a divisor of image, 8"),
    ({"channels": 2}, "channels is 2; accepted: 1 or 3"),
    ({"mean": (0.5,)}, r"mean is \(0.5,\); accepted: 3 numbers"),
    ({"activation": "swiglu"}, "activation is 'swiglu'"),
    ({"stochastic_depth": 1}, "stochastic_depth is 1; accepted"),
    ({"image": 0}, "image is 0; accepted: a whole number"),
])  # fmt: skip
def test_sizes_that_do_not_fit(change, error):
    with pytest.raises(ConfigError, match=f"ViTConfig: {error}"):
        ViTConfig(**{"image": 8, "patch": 4, "channels": 3, **change})


@pytest.mark.parametrize("images, error", [
    (np.zeros((1, 8, 8, 3)), r"images.dtype is float64; accepted: uint8, or float32"),
    (np.zeros((1, 3, 8, 8), "f4"), r"images.shape is .*accepted: \(B, 8, 8, 3\)"),
    (np.zeros((1, 7, 8, 3), "u1"), "size is 8; accepted: 1 to 7, the smaller side"),
    (np.zeros((1, 8, 8, 1), "u1"), "mean is 3 numbers; accepted: 1"),
])  # fmt: skip
def test_images_that_do_not_fit(images, error):
    with pytest.raises((TypeError, ValueError), match=error):
        ViT(TINY).logits(images)


def test_an_encoder_has_no_logits():
    model = ViT(ViTConfig(0, 8, 4, 3, 12, 3, 1, 20))
    with pytest.raises(ConfigError, match="classes is 0"):
        model.logits(pictures(1, 8, 8, 3))


CUBIC = {  # rows: weights of torch.nn.functional.interpolate, bicubic, align_corners False
    (3, 5): [[1.096, -0.096, 0], [0.612, 0.46, -0.072], [0, 1, 0], [-0.072, 0.46, 0.612],
             [0, -0.096, 1.096]],
    (4, 2): [[0.5, 0.59375, -0.09375, 0], [0, -0.09375, 0.59375, 0.5]],
    (2, 3): [[1.086806, -0.086806], [0.5, 0.5], [-0.086806, 1.086806]],
}  # fmt: skip


@pytest.mark.parametrize("sizes", CUBIC, ids=str)
def test_cubic_interpolation(sizes):
    np.testing.assert_allclose(cubic(*sizes), CUBIC[sizes], atol=1e-6)
    np.testing.assert_array_equal(cubic(7, 7), np.eye(7))


def test_positions_for_another_image_size(rng):
    model = ViT(ViTConfig(3, 6, 2, 1, 8, 2, 1, 12), 1).eval()
    other = model.with_image(10)
    rows, down, across = other.positions.data, 3, 1
    assert rows.shape == (26, 8) and not other.training
    weights, grid = np.array(CUBIC[3, 5]), model.positions.data[1:].reshape(3, 3, 8)
    want = sum(
        weights[down, a] * weights[across, b] * grid[a, b] for a in range(3) for b in range(3)
    )
    np.testing.assert_allclose(rows[1 + 5 * down + across], want, atol=1e-6)
    np.testing.assert_array_equal(rows[0], model.positions.data[0])
    images = rng.standard_normal((2, 10, 10, 1)).astype(np.float32)
    assert other.logits(images).shape == (2, 3)
    np.testing.assert_array_equal(model.with_image(6).positions.data, model.positions.data)
    with pytest.raises(ConfigError, match="patch is 2; accepted: a divisor of image, 9"):
        model.with_image(9)


def test_a_new_head_leaves_the_rest():
    model = ViT(ViTConfig(3, 6, 2, 1, 8, 2, 1, 12), 1)
    state, new = model.state(), model.with_classes(5, seed=2)
    for name, values in new.state().items():
        assert name.startswith("head") or values.tobytes() == state[name].tobytes(), name
    assert new.head.weight.shape == (5, 8) and new.config.classes == 5
    again = model.with_classes(5, seed=2)
    assert again.head.weight.data.tobytes() == new.head.weight.data.tobytes()
