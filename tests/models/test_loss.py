"""The loss of states: from all logits, or in slices where logits are large or not kept."""

import numpy as np
import pytest

from gpuattn.models import GPT2, GPT2Config, loss

CONFIG = GPT2Config(vocab=100, d_model=16, heads=2, layers=1, block=8, dropout=0.0)


@pytest.fixture
def sliced(monkeypatch):
    """Return a list of the losses that were computed in slices."""
    calls, inner = [], loss.linear_cross_entropy
    monkeypatch.setattr(
        loss, "linear_cross_entropy", lambda *a, **k: calls.append(1) or inner(*a, **k)
    )
    return calls


def gradients(model, rng):
    """Return the loss on some tokens, and the gradients."""
    tokens = rng.integers(0, 100, (2, 9), np.int32)
    found = model.loss(tokens[:, :-1], tokens[:, 1:])
    found.backward()
    return [found.data, *(parameter.grad for parameter in model.parameters())]


def test_large_logits_are_computed_in_slices(sliced, monkeypatch):
    found = []
    for limit in (2 * 8 * 128 * 4, 2 * 8 * 128 * 4 - 1):
        monkeypatch.setattr(loss, "WHOLE_BYTES", limit)
        found.append(gradients(GPT2(CONFIG), np.random.default_rng(0)))
    assert len(sliced) == 1
    for whole, part in zip(*found, strict=True):
        np.testing.assert_allclose(whole, part, rtol=1e-4, atol=1e-6)


def test_evaluation_and_full_checkpointing_use_slices(sliced):
    model, tokens = GPT2(CONFIG), np.zeros((2, 8), np.int32)
    model.loss(tokens, tokens)
    assert not sliced
    with model.evaluating():
        model.loss(tokens, tokens)
    model.checkpoint = "full"
    model.loss(tokens, tokens)
    assert len(sliced) == 2
