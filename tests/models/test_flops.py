"""Model FLOPs: six per weight and token, checked with the weights of real models."""

from types import SimpleNamespace

import numpy as np
import pytest

from gpuattn.data.batching import BATCHING, PackedLoader
from gpuattn.models import GPT2, GPT2Config, TranslationConfig, TranslationModel
from gpuattn.tasks.translation import TranslationTask


def sizes(model, part):
    """Return the number of weights in the matrices whose path begins with ``part``."""
    found = dict(model.named_parameters()).items()
    return sum(p.size for path, p in found if path.startswith(part) and p.ndim == 2)


KINDS = [{}, {"kv_heads": 1, "activation": "swiglu", "positions": "rotary"}]


@pytest.mark.parametrize("kind", KINDS)
def test_each_side_counts_its_own_weights(kind):
    config = TranslationConfig(vocab=128, d_model=16, heads=2, layers=(2, 3), ffn=24, **kind)
    model, source, target = TranslationModel(config), np.array([3, 5, 9]), np.array([4, 4, 7])
    of_source = sizes(model, "encoder.") + sizes(model, "memory.")
    of_target = sizes(model, "decoder.") + 16 * 128
    pairs = 2 * (9 + 25 + 81) + 3 * ((16 + 16 + 49) / 2 + 12 + 20 + 63)
    want = 6 * (of_source * 17 + of_target * 15) + 12 * 16 * pairs
    assert config.flops(source, target) == pytest.approx(want)


@pytest.mark.parametrize("kind", KINDS)
def test_a_language_model_counts_all_but_its_positions(kind):
    config = GPT2Config(vocab=128, d_model=16, heads=2, layers=3, block=8, **kind)
    model = GPT2(config)
    weights = sizes(model, "") - sizes(model, "embedding.position")
    want = 6 * weights * 5 * 8 + 12 * 16 * 3 * 5 * 8 * 8 / 2
    assert config.flops([8] * 5) == pytest.approx(want)
    assert GPT2Config().flops([1024]) == pytest.approx(6 * 123.6e6 * 1024, rel=0.08)


@pytest.mark.parametrize("batching", BATCHING)
def test_batches_count_by_the_lengths_of_their_sentences(batching):
    pairs = [([5] * n, [6] * (n + 1)) for n in (1, 3, 7, 2, 5, 4)]
    batches = list(PackedLoader(pairs, 12, seed=0, batching=batching).epoch(0))
    assert len(batches) > 1
    config = TranslationConfig(vocab=64, d_model=16, heads=2, layers=(1, 1), ffn=16)
    task = SimpleNamespace(model=SimpleNamespace(config=config))
    lengths = [np.array([len(pair[side]) + 1 for pair in pairs]) for side in (0, 1)]
    found = TranslationTask.flops(task, batches)
    assert found == pytest.approx(config.flops(*lengths))
    assert found == pytest.approx(sum(TranslationTask.flops(task, [batch]) for batch in batches))
