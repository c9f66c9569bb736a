"""Scaled rotary frequencies: properties of each kind. Values are in tests/pretrained/golden."""

import numpy as np
import pytest

from gpuattn.errors import ConfigError
from gpuattn.models import Llama, LlamaConfig, RotaryScaling

PLAIN = 500_000.0 ** (-np.arange(0, 64, 2) / 64)
TURNS = 8192 * PLAIN / (2 * np.pi)  # in the context of the training


def test_linear_divides_all():
    got = RotaryScaling("linear", 4.0).frequencies(500_000.0, 64)
    np.testing.assert_allclose(got, PLAIN / 4, rtol=1e-14)


@pytest.mark.parametrize("kind, fast", [("llama3", 4.0), ("yarn", 32.0)])
def test_fast_pairs_stay_and_slow_ones_are_divided(kind, fast):
    scaling = RotaryScaling(kind, 8.0, 8192, 1.0, fast, whole=False)
    got = np.array(scaling.frequencies(500_000.0, 64))
    slow, quick = TURNS <= 1, fast <= TURNS
    between = ~slow & ~quick
    assert slow.any() and quick.any() and between.any()
    np.testing.assert_allclose(got[quick], PLAIN[quick], rtol=1e-14)
    np.testing.assert_allclose(got[slow], PLAIN[slow] / 8, rtol=1e-14)
    assert (got[between] < PLAIN[between]).all() and (got[between] > PLAIN[between] / 8).all()
    assert (np.diff(got) < 0).all()


def test_a_factor_of_one_changes_nothing():
    for kind in ("linear", "llama3", "yarn"):
        got = RotaryScaling(kind, 1.0).frequencies(500_000.0, 64)
        np.testing.assert_allclose(got, PLAIN, rtol=1e-14)


def test_decoding_is_that_of_the_whole_text():
    """The cache holds keys that are rotated by scaled frequencies."""
    scaling = RotaryScaling("yarn", 4.0, 5, 0.5, 2.0, scale=1.4)
    config = LlamaConfig(13, 16, 2, 2, 20, 12, kv_heads=1, scaling=scaling)
    model, tokens = Llama(config, 1).eval(), np.arange(12, dtype=np.int32)[None] % 13
    with model.evaluating():
        whole = model.logits(tokens).data[0]
        stepper = model.stepper(tokens[:, :1], 12)
        steps = [stepper.step(tokens[:, i], i) for i in range(12)]
    np.testing.assert_allclose(np.concatenate(steps), whole[:, :13], atol=1e-5)


FAULTS = [
    ({"kind": "dynamic"}, "kind is 'dynamic'; accepted: 'linear'"),
    ({"factor": 0.5}, "factor is 0.5"), ({"slow": 0.0}, "slow is 0.0"),
    ({"fast": 1.0}, "fast is 1.0; accepted: a number above slow, 1.0"),
    ({"scale": 1.2}, "scale is 1.2; accepted: 1 for 'llama3'"), ({"original": 0}, "original is 0"),
]  # fmt: skip


@pytest.mark.parametrize("change, match", FAULTS, ids=[match for _, match in FAULTS])
def test_faults(change, match):
    with pytest.raises(ConfigError, match=match):
        RotaryScaling(**{"kind": "llama3", "factor": 8.0} | change)
    with pytest.raises(ConfigError, match="base is 0.5; accepted: a number above 1 for 'yarn'"):
        LlamaConfig(13, 16, 2, 2, 20, 12, base=0.5, scaling=RotaryScaling("yarn", 2.0))
