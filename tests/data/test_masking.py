"""Texts between separators, and batches in which some of their tokens are hidden."""

from types import SimpleNamespace

import numpy as np
import pytest

from gpuattn.data import packing
from gpuattn.data.batching import token_order
from gpuattn.data.masking import MaskedLoader, Texts

END, FIRST, MASK, OTHER = 2, 1, 3, 9  # the line end of these texts, marks, and another separator
TOKENIZER = type("Vocabulary", (SimpleNamespace,), {"__len__": lambda self: 500})(
    marks=(FIRST, END), mask=MASK, specials=range(4)
)


@pytest.fixture
def texts(rng):
    """300 texts of 1 to 12 tokens from 10 on, in 16 bits."""
    rows = [rng.integers(10, 500, rng.integers(1, 13)) for _ in range(300)]
    return Texts(np.concatenate([[*row, END] for row in rows]).astype(np.uint16), [END], 12)


def batches(texts, share=0.15, epoch=0, start=0, seed=7):
    return list(MaskedLoader(texts, 64, seed, share, TOKENIZER).epoch(epoch, start))


def unmasked(batch):
    tokens = batch.tokens.copy()
    tokens[batch.rows] = batch.labels
    return np.split(tokens, batch.cu_seqlens[1:-1])


@pytest.mark.parametrize("scan", [3, 1 << 20])
def test_texts_lie_between_separators_and_long_ones_are_cut(monkeypatch, scan):
    monkeypatch.setattr("gpuattn.data.masking.SCAN", scan)
    flat = [END, 11, 12, END, END, 13, 14, 15, 16, 17, 18, 19, OTHER, 20]
    texts = Texts(flat, (END, OTHER), 3)
    ids, positions, bounds, places = texts.gather(np.array([4, 0, 1, 2, 3]), (FIRST, END))
    parts = [part.tolist() for part in np.split(ids, bounds[1:-1])]
    inside = [[20], [11, 12], [13, 14, 15], [16, 17, 18], [19]]
    assert parts == [[FIRST, *part, END] for part in inside]
    assert positions.tolist() == [i for part in parts for i in range(len(part))]
    assert texts.lengths(slice(None)).tolist() == [4, 5, 5, 3, 3]
    np.testing.assert_array_equal(np.array(flat)[places[ids > END]], ids[ids > END])
    assert len(Texts([END, END, OTHER], (END, OTHER), 3)) == 0


def test_texts_of_a_memory_map(texts, tmp_path):
    texts.flat.tofile(tmp_path / "ids")
    mapped = Texts(np.memmap(tmp_path / "ids", np.uint16, "r"), [END], 12)
    for one, other in zip(batches(texts), batches(mapped), strict=True):
        assert one.tokens.tobytes() == other.tokens.tobytes()


@pytest.mark.parametrize("whole", [packing.WHOLE, 50])  # planned as one, or by windows
def test_an_epoch_has_every_text_once(texts, monkeypatch, whole):
    monkeypatch.setattr(packing, "WHOLE", whole)
    found = [tuple(text[1:-1]) for batch in batches(texts) for text in unmasked(batch)]
    want = np.split(texts.flat, np.flatnonzero(texts.flat == END) + 1)[:-1]
    assert sorted(found) == sorted(tuple(text[:-1]) for text in want)


@pytest.mark.parametrize("share", [0.15, 0.9, 0.001])
def test_the_share_of_a_batch_is_exact_and_marks_stay(texts, share):
    for batch in batches(texts, share):
        tokens, ends = len(batch.tokens), batch.cu_seqlens
        inside = tokens - 2 * (len(ends) - 1)
        assert tokens == batch.all_tokens <= 64
        assert batch.target_tokens == len(batch.rows) == min(max(1, round(share * tokens)), inside)
        assert (np.diff(batch.rows) > 0).all()
        assert (batch.tokens[ends[:-1]] == FIRST).all() and (
            batch.tokens[ends[1:] - 1] == END
        ).all()
        assert batch.labels.min() >= 10  # no mark is predicted
        assert batch.max_seqlen == batch.lengths.max()
        np.testing.assert_array_equal(batch.order.order, token_order(batch.tokens).order)


def test_a_batch_is_a_function_of_seed_epoch_and_number(texts):
    first, later = batches(texts), batches(texts, start=3)
    for one, other in zip(first[3:], later, strict=True):
        assert one.tokens.tobytes() == other.tokens.tobytes()
        assert one.rows.tobytes() == other.rows.tobytes()
    assert MaskedLoader(texts, 64, 7, 0.15, TOKENIZER).batches(0) == len(first)
    for others in (batches(texts, epoch=1), batches(texts, seed=8)):
        assert len(others) and others[0].tokens.tobytes() != first[0].tokens.tobytes()
    hidden = [  # texts of which other tokens are hidden in another epoch
        {tuple(text): tuple(rows) for batch in batches(texts, epoch=epoch)
         for text, rows in zip(unmasked(batch), _rows_of_texts(batch), strict=True)}
        for epoch in (0, 1)
    ]  # fmt: skip
    assert sum(hidden[1][text] != rows for text, rows in hidden[0].items()) > 100


def _rows_of_texts(batch):
    bounds = np.searchsorted(batch.rows, batch.cu_seqlens)
    starts = batch.cu_seqlens[:-1]
    return np.split(batch.rows - np.repeat(starts, np.diff(bounds)), bounds[1:-1])


def test_most_are_masked_some_exchanged_some_stay(texts):
    found = [batch for epoch in range(20) for batch in batches(texts, epoch=epoch)]
    seen = np.concatenate([batch.tokens[batch.rows] for batch in found])
    labels = np.concatenate([batch.labels for batch in found])
    count = len(labels)
    masked, same = seen == MASK, seen == labels
    for share, part in ((0.8, masked), (0.1, same), (0.1, ~masked & ~same)):
        deviation = np.sqrt(share * (1 - share) / count)
        assert abs(part.mean() - share) < 5 * deviation + 0.001  # a random token may be the same
    assert 4 <= seen[~masked].min() < 10  # from the whole vocabulary, but no special


def test_parts_of_a_mix_come_as_often_as_their_weights_say(texts):
    loader = MaskedLoader(texts, 64, 7, 0.15, TOKENIZER, mix=[(0, 150, 0.8), (150, 300, 0.2)])
    second = {tuple(texts.flat[a : a + n].tolist())
              for a, n in zip(texts.starts[150:], texts.sizes[150:], strict=True)}  # fmt: skip
    found = [tuple(text[1:-1].tolist()) for batch in loader.epoch(0) for text in unmasked(batch)]
    assert len(found) == 300 and abs(sum(text in second for text in found) - 60) <= 5
