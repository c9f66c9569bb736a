"""Loaders: each sentence once per epoch, budgets kept, data set by (seed, epoch, rank, world)."""

import hashlib

import numpy as np
import pytest
from count_calls import count_calls

from gpuattn.data.batching import (
    BATCHING,
    IGNORED,
    LanguageModelLoader,
    PackedLoader,
    token_order,
)
from gpuattn.data.tokenizer import BOS, EOS, PAD
from gpuattn.errors import ConfigError, DataError


def corpus(rng, count, longest=40, empty=0.0):
    """Return pairs of id lists whose sides have similar lengths."""
    pairs = []
    for n in rng.integers(1, longest, size=count):
        m = int(np.clip(n + rng.integers(-4, 5), 1, longest))
        n = 0 if rng.random() < empty else n
        pairs.append((rng.integers(4, 500, size=n).tolist(), rng.integers(4, 500, size=m).tolist()))
    return pairs


def same(one, other):
    """Return whether two batches are bitwise equal."""
    return all(
        np.array_equal(a, b) if not isinstance(a, tuple) else all(map(np.array_equal, a, b))
        for a, b in zip(vars(one).values(), vars(other).values(), strict=True)
    )


# pairs, budget, ranks, batching, share of empty sources
CASES = [
    (1, 41, 1, "packed", 0.0),
    (7, 41, 1, "packed", 0.0),
    (300, 41, 1, "padded", 0.0),
    (300, 64, 1, "packed", 0.0),
    (300, 64, 1, "bucketed", 0.1),
    (500, 300, 1, "packed", 0.2),
    (500, 100_000, 1, "packed", 0.0),
    (500, 130, 4, "packed", 0.0),
    (41, 5000, 3, "packed", 0.0),
    (8, 5000, 8, "padded", 0.0),
]


@pytest.mark.parametrize(("count", "tokens", "world", "batching", "empty"), CASES)
def test_an_epoch_has_every_sentence_once(count, tokens, world, batching, empty, rng):
    pairs = corpus(rng, count, empty=empty)
    for epoch in range(3):
        seen, counts = [], []
        for rank in range(world):
            loader = PackedLoader(pairs, tokens, 5, rank, world, batching)
            batches = list(loader.epoch(epoch))
            counts.append(len(batches))
            assert len(batches) == loader.batches(epoch)
            for batch in batches:
                assert len(batch.sentences)
                assert len(batch.source) <= tokens
                assert len(batch.labels) <= tokens
                seen += batch.sentences.tolist()
        assert len(set(counts)) == 1
        assert sorted(seen) == list(range(count))


def test_contents_of_a_packed_batch(rng):
    pairs = corpus(rng, 200, empty=0.1)
    for batch in PackedLoader(pairs, 150, 0).epoch(0):
        assert batch.target_tokens == len(batch.labels)
        assert batch.source_tokens == len(batch.source)
        sides = (batch.cu_source, batch.cu_target)
        bounds = zip(*(part for cu in sides for part in (cu[:-1], cu[1:])), strict=True)
        for sentence, (s0, s1, t0, t1) in zip(batch.sentences, bounds, strict=True):
            source, target = pairs[sentence]
            assert batch.source[s0:s1].tolist() == [*source, EOS]
            assert batch.target_in[t0:t1].tolist() == [BOS, *target]
            assert batch.labels[t0:t1].tolist() == [*target, EOS]
            assert batch.source_positions[s0:s1].tolist() == list(range(len(source) + 1))
            assert batch.target_positions[t0:t1].tolist() == list(range(len(target) + 1))
        assert batch.cu_source[-1] == len(batch.source)
        assert batch.max_source == np.diff(batch.cu_source).max()
        assert batch.max_target == np.diff(batch.cu_target).max()
        for name, value in vars(batch).items():
            for array in value if isinstance(value, tuple) else (value,):
                assert isinstance(array, int) or array.dtype == np.int32, name


def test_orders_give_the_embedding_gradient(rng):
    for batch in PackedLoader(corpus(rng, 100), 400, 0).epoch(0):
        for ids, order in (
            (batch.source, batch.source_order),
            (batch.target_in, batch.target_order),
        ):
            grad = rng.standard_normal((len(ids), 3))
            wanted = np.zeros((500, 3))
            np.add.at(wanted, ids, grad)
            got = np.zeros((500, 3))
            got[order.ids] = np.add.reduceat(grad[order.order], order.segments)
            np.testing.assert_allclose(got, wanted, atol=1e-12)


@pytest.mark.parametrize("top", [10, 70_000])
def test_token_order(rng, top):
    ids = rng.integers(0, top, size=1000).astype(np.int32)
    order = token_order(ids)
    assert np.array_equal(order.order, np.argsort(ids, kind="stable"))
    assert np.array_equal(order.ids, np.unique(ids))
    assert np.array_equal(order.segments, np.unique(np.sort(ids), return_index=True)[1])
    assert [part.size for part in token_order(ids[:0])] == [0, 0, 0]


@pytest.mark.parametrize("batching", BATCHING)
def test_an_epoch_resumes_at_any_batch(rng, batching):
    pairs = corpus(rng, 300)
    for rank in range(2):
        whole = list(PackedLoader(pairs, 200, 9, rank, 2, batching).epoch(4))
        for start in (0, 1, len(whole) - 1, len(whole)):
            loader = PackedLoader(pairs, 200, 9, rank, 2, batching)
            next(loader.epoch(1))
            rest = list(loader.epoch(4, start))
            assert len(rest) == len(whole) - start
            assert all(map(same, rest, whole[start:]))


@pytest.mark.parametrize(
    ("batching", "bits"),
    list(zip(BATCHING, ["270927539a1d", "11a48ec29201", "00ad0f8601d9"], strict=True)),
)
def test_bits_of_batches_stay(rng, batching, bits):
    """A run resumes with the batches that it would have had: a change of bits needs a version."""
    found = hashlib.sha256()
    loader = PackedLoader(corpus(rng, 300), 200, 9, 1, 2, batching)
    text = LanguageModelLoader(rng.integers(4, 60_000, size=500), block=16, batch=5, seed=3)
    for batch in (*loader.epoch(4), *text.epoch(2)):
        for value in (value for value in vars(batch).values() if value is not None):
            for part in value if isinstance(value, tuple) else (value,):
                found.update(np.asarray(part, "<i4").tobytes())
    assert found.hexdigest()[:12] == bits


def test_epochs_seeds_and_ranks_differ(rng):
    pairs = corpus(rng, 300)

    def sentences(epoch, *arguments):
        loader = PackedLoader(pairs, 200, *arguments)
        return [batch.sentences.tolist() for batch in loader.epoch(epoch)]

    first = sentences(0, 1)
    assert first == sentences(0, 1)
    assert first != sentences(1, 1)
    assert first != sentences(0, 2)
    assert sentences(0, 1, 0, 2) + sentences(0, 1, 1, 2) != first
    assert sentences(0, 1, 0, 2)[0] == first[0]
    assert sentences(0, 1, 1, 2)[0] == first[1]


def test_batches_are_full_and_their_lengths_similar(rng):
    """Packed batches are the fullest, then rectangles of sorted sentences, then of random ones."""
    pairs = corpus(rng, 4000)
    packed, sorted_, random = (PackedLoader(pairs, 400, 0, batching=name) for name in BATCHING)
    print(f"fill: {packed.fill(0):.1%}, {sorted_.fill(0):.1%}, {random.fill(0):.1%}")
    assert packed.fill(0) > 0.97 > sorted_.fill(0) > 0.85 > 0.65 > random.fill(0) > 0.4

    def spread(loader):
        lengths = np.array([len(source) for source, _ in pairs])
        return np.mean([np.ptp(lengths[batch.sentences]) for batch in loader.epoch(0)])

    assert spread(packed) < 0.7 * spread(random) and spread(sorted_) < 0.3 * spread(random)
    for loader in (packed, sorted_):
        sizes = [len(batch.sentences) for batch in loader.epoch(0)]
        assert sizes not in (sorted(sizes), sorted(sizes, reverse=True))


@pytest.mark.parametrize("batching", ["bucketed", "padded"])
def test_contents_of_a_padded_batch(rng, batching):
    pairs = corpus(rng, 200, empty=0.1)
    for batch in PackedLoader(pairs, 150, 0, batching=batching).epoch(0):
        count, chosen = len(batch.sentences), [pairs[i] for i in batch.sentences]
        assert batch.source_tokens == sum(len(source) + 1 for source, _ in chosen)
        assert batch.target_tokens == sum(len(target) + 1 for _, target in chosen)
        for side, ends in (
            (batch.cu_source, batch.max_source),
            (batch.cu_target, batch.max_target),
        ):
            assert side[::2].tolist() == list(range(0, count * ends + 1, ends))
        assert batch.max_source == max(len(source) for source, _ in chosen) + 1
        for name, padding, side, marks in (
            ("source", PAD, 0, ([], [EOS])), ("target_in", PAD, 1, ([BOS], [])),
            ("labels", IGNORED, 1, ([], [EOS])),
        ):  # fmt: skip
            rows = getattr(batch, name).reshape(count, -1)
            for row, pair in zip(rows, chosen, strict=True):
                text = [*marks[0], *pair[side], *marks[1]]
                assert row.tolist() == text + [padding] * (rows.shape[1] - len(text))
        lengths = np.diff(batch.cu_target)
        positions = np.concatenate([np.arange(n) for n in lengths])
        assert (batch.target_positions == positions).all()
        assert (batch.target_order.order == np.argsort(batch.target_in, kind="stable")).all()


def test_an_epoch_is_packed_with_few_calls_a_pair(rng):
    pairs = corpus(rng, 29_000, longest=28)  # as in Multi30k
    loader = PackedLoader(pairs, 4096, 0)
    assert count_calls(lambda: list(loader.epoch(0))) < 5 * len(pairs)


def test_errors(rng):
    pairs = [([5] * 9, [6] * 3), ([5] * 3, [6] * 30)]
    with pytest.raises(ConfigError, match="tokens is 30; pair 1 alone has 31"):
        PackedLoader(pairs, 30, 0)
    PackedLoader(pairs, 31, 0)
    with pytest.raises(DataError, match="2 pairs for 3 ranks"):
        PackedLoader(pairs, 31, 0, rank=0, world=3)
    with pytest.raises(DataError, match="0 pairs"):
        PackedLoader([], 31, 0)
    with pytest.raises(ConfigError, match="rank is 2; accepted: 0 to 1"):
        PackedLoader(pairs, 31, 0, rank=2, world=2)
    with pytest.raises(ConfigError, match="'sorted'; accepted: packed, bucketed, padded"):
        PackedLoader(pairs, 31, 0, batching="sorted")
    with pytest.raises(DataError, match="3 batches of one pair each cannot be shared by 2 ranks"):
        PackedLoader([([5] * 9, [6] * 9)] * 3, 10, 0, world=2).batches(0)


# ---- language models ----


def test_random_crops(rng):
    ids = rng.integers(4, 60, size=500)
    text = ids.tobytes()
    loader = LanguageModelLoader(ids, block=16, batch=5, seed=3)
    batch = loader.crops(7)
    assert batch.tokens.shape == batch.labels.shape == (5, 16)
    assert batch.tokens.dtype == batch.labels.dtype == np.int32
    assert np.array_equal(batch.tokens[:, 1:], batch.labels[:, :-1])
    for row, label in zip(batch.tokens, batch.labels[:, -1], strict=True):
        assert np.append(row, label).astype(ids.dtype).tobytes() in text
    again = LanguageModelLoader(ids, 16, 5, 3).crops(7)
    assert np.array_equal(batch.tokens, again.tokens)
    assert not np.array_equal(batch.tokens, loader.crops(8).tokens)
    ranks = [LanguageModelLoader(ids, 16, 5, 3, rank, 2).crops(7).tokens for rank in (0, 1)]
    assert not np.array_equal(*ranks)
    order, segments, found = batch.order
    want = token_order(batch.tokens.ravel())
    assert all(map(np.array_equal, (order, segments, found), want))
    assert batch.target_tokens == batch.all_tokens == 80


def test_an_epoch_of_crops_has_the_length_of_the_text_and_resumes(rng):
    loader = LanguageModelLoader(rng.integers(4, 60, size=500), block=16, batch=5, seed=3)
    assert loader.batches(2) == 6
    epoch = [batch.tokens.tobytes() for batch in loader.epoch(2)]
    assert len(set(epoch)) == 6
    assert [batch.tokens.tobytes() for batch in loader.epoch(2, start=4)] == epoch[4:]
    assert epoch[0] == loader.crops(12).tokens.tobytes()
    assert LanguageModelLoader(np.arange(17), 16, 5, 3).batches(0) == 1


def test_crops_reach_both_ends():
    loader = LanguageModelLoader(np.arange(10), block=8, batch=64, seed=0)
    assert set(loader.crops(0).tokens[:, 0]) == {0, 1}


def test_crops_of_a_mix_come_from_its_parts_as_often_as_the_weights_say():
    ids, mix = np.arange(1000), [(0, 900, 0.2), (900, 912, 0.8)]
    loader = LanguageModelLoader(ids, 8, 200, 3, mix=mix)
    starts = np.concatenate([loader.crops(step).tokens[:, 0] for step in range(5)])
    assert set(starts[starts >= 900]) == {900, 901, 902, 903} and starts.max() == 903
    assert 0.75 < (starts >= 900).mean() < 0.85 and starts[starts < 900].max() <= 892
    again = LanguageModelLoader(ids, 8, 200, 3, mix=mix)
    assert np.array_equal(again.crops(4).tokens, loader.crops(4).tokens)
    with pytest.raises(DataError, match="a part of the mix has 12 tokens; a block of 12 needs 13"):
        LanguageModelLoader(ids, 12, 2, 3, mix=mix)


@pytest.mark.parametrize("size", [9, 10, 17, 24, 25, 26, 100])
@pytest.mark.parametrize("batch", [1, 3])
def test_blocks_predict_each_token_once(size, batch):
    ids = np.arange(size)
    batches = list(LanguageModelLoader(ids, 8, batch, 0).blocks())
    assert np.concatenate([b.labels.ravel() for b in batches]).tolist() == list(range(1, size))
    for b in batches:
        assert np.array_equal(b.tokens + 1, b.labels)
        assert b.tokens.shape[0] <= batch
        assert b.tokens.shape[1] <= 8


def test_batches_of_documents_have_the_same_tokens_and_end_at_the_marks():
    ids = np.tile([7, 8, 9, EOS, 5, EOS, EOS, 6, 4, 11, 12, 13, 14], 40)
    plain = LanguageModelLoader(ids, 16, 5, 3)
    loader = LanguageModelLoader(ids, 16, 5, 3, documents=True)
    for one, rows in zip((*loader.epoch(2), *loader.blocks()),
                         (*plain.epoch(2), *plain.blocks()), strict=True):  # fmt: skip
        assert np.array_equal(one.tokens, rows.tokens.ravel())
        assert np.array_equal(one.labels, rows.labels.ravel())
        assert all(map(np.array_equal, one.order, rows.order))
        assert one.target_tokens == rows.target_tokens and one.limits == rows.tokens.shape[1:]
        bounds = one.cu_seqlens.tolist()
        starts = [i for i, t in enumerate(one.tokens) if t == EOS or i % one.max_seqlen == 0]
        assert bounds == [*starts, len(one.tokens)] and one.lengths.max() <= one.max_seqlen
        assert one.positions.tolist() == [i - max(b for b in starts if b <= i)
                                          for i in range(len(one.tokens))]  # fmt: skip
        assert {part.dtype for part in (one.tokens, one.positions, one.cu_seqlens)} == {
            np.dtype(np.int32)
        }
        assert set(one.packing) == {"positions", "cu_seqlens", "max_seqlen"} and not rows.packing
        assert rows.lengths.tolist() == [rows.tokens.shape[1]] * len(rows.tokens)


def test_language_model_errors():
    with pytest.raises(DataError, match="the text has 8 tokens; a block of 8 needs 9"):
        LanguageModelLoader(np.arange(8), 8, 1, 0)
    with pytest.raises(ConfigError, match="block is 0, batch is 1"):
        LanguageModelLoader(np.arange(8), 0, 1, 0)
    with pytest.raises(ConfigError, match="rank is 1; accepted: 0 to 0"):
        LanguageModelLoader(np.arange(8), 2, 1, 0, rank=1)
