"""Batches padded to a fixed shape: their contents, and that padding changes no result."""

import numpy as np
import pytest

from gpuattn.data.batching import BATCHING, IGNORED, LanguageModelLoader, PackedLoader
from gpuattn.data.fixed_shape import (
    LENGTH,
    SENTENCES,
    fixed_documents,
    fixed_shape,
    fixed_texts,
)
from gpuattn.data.labelled import LabelLoader
from gpuattn.data.tokenizer import EOS, PAD
from gpuattn.models.gpt2 import GPT2, GPT2Config
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


def test_texts_with_labels_get_ignored_ones():
    rng = np.random.default_rng(0)
    ids = [rng.integers(4, 60, n).tolist() for n in rng.integers(2, LONGEST, 150)]
    labels, shapes = rng.integers(0, 3, 150), set()
    for batch in LabelLoader(ids, labels, BUDGET, 0).epoch(0):
        fixed = fixed_texts(batch, BUDGET, LONGEST)
        count, size = len(batch.rows), len(batch.tokens)
        assert (fixed.target_tokens, fixed.all_tokens) == (count, size)
        assert (fixed.tokens[size:] == PAD).all() and fixed.tokens.shape == (BUDGET,)
        assert (fixed.order.order == np.argsort(fixed.tokens, kind="stable")).all()
        assert (fixed.labels[:count] == batch.labels).all() and fixed.labels[count:].max() < 0
        assert (fixed.rows[:count] == batch.rows).all() and len(fixed.rows) % SENTENCES == 0
        assert len(fixed.rows) == len(fixed.labels) == len(fixed.cu_seqlens) - 1
        assert (np.diff(fixed.rows) >= 0).all() and fixed.rows.max() < BUDGET
        assert np.diff(fixed.cu_seqlens).max() <= fixed.max_seqlen <= LONGEST
        assert fixed.cu_seqlens[-1] == BUDGET
        shapes.add((len(fixed.rows), fixed.max_seqlen))
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


def test_batches_of_documents_have_few_shapes_and_the_same_results(rng):
    ids = np.where(rng.random(2000) < 0.2, EOS, rng.integers(4, 60, 2000))
    loader = LanguageModelLoader(ids, 16, 8, 0, documents=True)
    batch = loader.crops(0)
    fixed = fixed_documents(batch)
    assert np.array_equal(fixed.cu_seqlens[: len(batch.cu_seqlens)], batch.cu_seqlens)
    assert len(fixed.cu_seqlens) == SENTENCES + 1 and set(fixed.lengths[len(batch.lengths) :]) == {
        0
    }
    assert fixed.cu_seqlens.dtype == np.int32 and fixed.tokens is batch.tokens
    assert {len(fixed_documents(b).cu_seqlens) for b in loader.epoch(0)} == {SENTENCES + 1}
    model = GPT2(GPT2Config(vocab=60, d_model=16, heads=2, layers=1, block=16))
    losses = [model.loss(b.tokens, b.labels, **b.packing).item() for b in (batch, fixed)]
    assert losses[0] == losses[1]
    rows = LanguageModelLoader(ids, 16, 8, 0).crops(0)
    assert fixed_documents(rows) is rows
