"""Files of texts with labels: what is read, what is refused; their batches."""

import gzip
import hashlib

import numpy as np
import pytest

from gpuattn.data.batching import token_order
from gpuattn.data.class_names import LabelledTokenizer
from gpuattn.data.labelled import LabelLoader, class_names, read_labelled
from gpuattn.data.tokenizer import CharTokenizer, Tokenizer, tokenizer_from_bytes
from gpuattn.errors import DataError

FORM = "accepted: lines of a text, a tab, its label, and no line of titles"


@pytest.mark.parametrize("name", ["a.tsv", "a.tsv.gz"])
def test_texts_labels_and_lines(tmp_path, name):
    text = "\ufeffthe cat \tanimal\r\n\n a  car\t thing\n \nthe rat\tanimal"
    data, digests = text.encode(), {}
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    found = read_labelled(tmp_path / name, digests=digests)
    assert found == (["the cat", "a  car", "the rat"], ["animal", "thing", "animal"], [1, 3, 5])
    assert found.numbers(["thing", "animal"]).tolist() == [1, 0, 1]
    assert found.some([2]) == (["the rat"], ["animal"], [5])
    assert digests == {str(tmp_path / name): hashlib.sha256(data).hexdigest()}


def test_names_are_sorted_and_numbers_by_value():
    assert class_names(["b", "10", "a", "b"]) == ("10", "a", "b")
    assert class_names(["10", "9", "1", "9"]) == ("1", "9", "10")


@pytest.mark.parametrize("content, error", [
    (b"a\tx\nb c\n", f"line 2, has no tab: 'b c'; {FORM}"),
    (b"a\tb\tx\n", "line 1, has 2 tabs: 'a\\tb\\tx'"), (b"a\t \n", "line 1, has no label: 'a\\t '"),
    (b"\tx\n", "line 1, has no text"), (b"", f"is empty; {FORM}"), (b"\n \n", "is empty"),
    (b"sentence\tLabel\na\tx\n", "line 1, has titles of columns: 'sentence\\tLabel'"),
    (b"a\tx\n\xff\tx\n", "line 2, byte 1, is not UTF-8"),
    (b"a\tx\n" + b"b" * (1 << 20) + b"\tx\n", "line 2, is longer than 1,048,576 bytes"),
    (b"a\tx\nb\tz\n", "line 2: the label 'z' is unseen in training; accepted: 'x', 'y'"),
    (b"%s no tab\n" % (b"w" * 99), "has no tab: '" + "w" * 40 + "...'"), (None, "No such file"),
])  # fmt: skip
def test_what_is_wrong_with_a_file_is_named(tmp_path, content, error):
    path = tmp_path / "a.tsv"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError) as found:
        read_labelled(path, names=("x", "y") if content and b"z" in content else ())
    assert str(path) in str(found.value) and error in str(found.value)


def test_label_as_a_label_is_no_title(tmp_path):
    (tmp_path / "a").write_text("a text\tlabel\nother\tlabel\n")
    assert read_labelled(tmp_path / "a").labels == ["label", "label"]


def test_batches_hold_each_text_with_its_label_once():
    rng = np.random.default_rng(0)
    ids = [[1, *rng.integers(4, 50, n), 2] for n in rng.integers(0, 9, 60)]
    labels = rng.integers(0, 5, 60)
    seen = []
    for batch in LabelLoader(ids, labels, 40, seed=3).epoch(1):
        bounds = batch.cu_seqlens
        assert len(batch.tokens) == bounds[-1] == batch.all_tokens <= 40
        assert (batch.rows == bounds[:-1]).all() and batch.max_seqlen == np.diff(bounds).max()
        assert batch.target_tokens == len(batch.labels) == len(batch.sentences)
        for i, begin, end, label in zip(batch.sentences, bounds, bounds[1:], batch.labels,
                                        strict=False):  # fmt: skip
            assert batch.tokens[begin:end].tolist() == ids[i] and label == labels[i]
            assert batch.positions[begin:end].tolist() == list(range(end - begin))
        assert (batch.order.order == token_order(batch.tokens).order).all()
        seen += batch.sentences.tolist()
    assert sorted(seen) == list(range(60))
    other = [batch.sentences for batch in LabelLoader(ids, labels, 40, seed=3).epoch(2)]
    assert np.concatenate(other).tolist() != seen


@pytest.mark.parametrize("tokenizer", [
    CharTokenizer.train(["a [b]\n"]), Tokenizer.train(["a rose is a rose"], 280),
], ids=["chars", "subwords"])  # fmt: skip
def test_a_tokenizer_with_names_as_bytes(tokenizer, tmp_path):
    both = LabelledTokenizer(tokenizer, ["a\nb", "\t[", "ü"])
    both.save(tmp_path / "x")
    found = tokenizer_from_bytes((tmp_path / "x").read_bytes())
    assert found.names == both.names and len(found) == len(tokenizer)
    assert found.tokenizer.to_bytes() == tokenizer.to_bytes() and found.units == tokenizer.units
    assert found.encode_marked(["a"]) == [[1, *tokenizer.encode("a"), 2]]
