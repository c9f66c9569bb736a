"""Batches padded to a fixed shape: their contents, and that padding changes no result."""

import numpy as np
import pytest

from gpuattn.data.batching import BATCHING, IGNORED, PackedLoader
from gpuattn.data.fixed_shape import LENGTH, SENTENCES, fixed_shape
from gpuattn.data.tokenizer import PAD
from gpuattn.models.translation import TranslationConfig, TranslationModel

BUDGET, LONGEST = 300, 40


def batches(seed=0, count=150, batching="packed"):
    return list(PackedLoader(some_pairs(seed, count), BUDGET, seed, batching=batching).epoch(0))


def some_pairs(seed=0, count=150):
    rng = np.random.default_rng(seed)

    def sentence():
        return rng.integers(4, 60, rng.integers(0, LONGEST)).tolist()

    return [(sentence(), sentence()) for _ in range(count)]


def test_padding_is_ignored_and_shapes_are_few():
    shapes = set()
    for batch in batches():
        fixed = fixed_shape(batch, BUDGET, LONGEST)
        assert (fixed.source_tokens, fixed.target_tokens) == (len(batch.source), len(batch.labels))
        for side, more, fill in [
            ("source", "source", PAD), ("target_in", "target", PAD), ("labels", "target", IGNORED),
        ]:  # fmt: skip
            ids, before = getattr(fixed, side), getattr(batch, side)
            assert ids.shape == (BUDGET,) and ids.dtype == np.int32
            assert (ids[: len(before)] == before).all() and (ids[len(before) :] == fill).all()
            bounds, longest = getattr(fixed, f"cu_{more}"), getattr(fixed, f"max_{more}")
            old = getattr(batch, f"cu_{more}")
            assert (bounds[: len(old)] == old).all() and bounds[-1] == BUDGET
            assert bounds.dtype == np.int32 and (len(bounds) - 1) % SENTENCES == 0
            lengths = np.diff(bounds)
            assert lengths.min() >= 0 and lengths.max() <= longest <= LONGEST
            assert longest % LENGTH == 0 or longest == LONGEST
            positions = getattr(fixed, f"{more}_positions")
            want = np.concatenate([np.arange(n) for n in lengths])
            assert (positions == want).all() and positions.dtype == np.int32
        assert (fixed.target_order.order == np.argsort(fixed.target_in, kind="stable")).all()
        shapes.add((len(fixed.cu_source), fixed.max_source, fixed.max_target))
    assert len(shapes) < 4


def test_a_full_batch_is_not_padded():
    (batch,) = PackedLoader([([5] * 9, [6] * 9)], 10, seed=0).epoch(0)
    fixed = fixed_shape(batch, 10, 10)
    for name in ("source", "target_in", "labels", "source_positions"):
        assert (getattr(fixed, name) == getattr(batch, name)).all()


@pytest.mark.parametrize("batching", ["bucketed", "padded"])
def test_each_side_of_a_rectangle_is_rounded_up(batching):
    shapes, part = set(), 64
    for batch in batches(batching=batching):
        fixed = fixed_shape(batch, BUDGET, LONGEST)
        for side, before, cu in (
            (fixed.source, batch.source, fixed.cu_source),
            (fixed.labels, batch.labels, fixed.cu_target),
        ):
            assert len(side) in (BUDGET, -(-len(before) // part) * part) and cu[-1] == len(side)
        assert len(fixed.cu_source) == len(fixed.cu_target)
        assert (fixed.source_tokens, fixed.target_tokens) == (
            batch.source_tokens, batch.target_tokens,
        )  # fmt: skip
        assert (fixed.target_order.order == np.argsort(fixed.target_in, kind="stable")).all()
        shapes.add((len(fixed.source), len(fixed.labels), fixed.max_source, fixed.max_target))
    assert len(shapes) < 25


@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
@pytest.mark.parametrize("batching", BATCHING)
def test_padding_changes_neither_loss_nor_gradients(positions, batching):
    model = TranslationModel(
        TranslationConfig(
            vocab=60, d_model=16, heads=2, layers=(1, 1), ffn=16, dropout=0.0, max_length=LONGEST,
            positions=positions,
        ),
    )  # fmt: skip
    each = batches(batching=batching)
    batch = min(each, key=lambda batch: batch.target_tokens)  # has the most padding
    pairs = some_pairs()
    (plain,) = PackedLoader([pairs[i] for i in batch.sentences], BUDGET, seed=0).epoch(0)

    def run(batch):
        for parameter in model.parameters():
            parameter.grad = None
        loss = model.loss(batch)
        loss.backward()
        return loss.data, [parameter.grad for parameter in model.parameters()]

    want, wanted = run(plain)
    for padded in (batch, fixed_shape(batch, BUDGET, LONGEST)):
        loss, grads = run(padded)
        np.testing.assert_allclose(loss, want, rtol=1e-6)
        for grad, other in zip(grads, wanted, strict=True):
            np.testing.assert_allclose(grad, other, atol=4e-6 * abs(other).max() + 1e-9)
