"""A token store: what is written is read back, and every damage is named."""

import hashlib
import json

import numpy as np
import pytest

from gpuattn.data.preparing.store_writer import StoreWriter, _Statistics
from gpuattn.data.store import HEAD, PROGRESS, TokenStore, head_digest, is_store
from gpuattn.data.tokenizer import EOS, CharTokenizer
from gpuattn.errors import DataError

LETTERS = CharTokenizer("abcdef\n")
FIRST, SECOND = (4, 5, 6, EOS, 7, EOS), (8, 8, EOS)


def written(folder, parts=2):
    """Write three documents in two parts; with ``parts=1`` stop after the first."""
    writer = StoreWriter(folder, LETTERS, "text", documents=True)
    for number, (ids, ends) in enumerate(((FIRST, [4, 6]), (SECOND, [3]))):
        if number < writer.parts:
            continue
        if number == parts:
            writer.close()
            return None
        writer.add({"text": np.array(ids, np.uint16)}, {"text": np.array(ends)})
        writer.end_part(number)
    writer.finish(counts={"documents": 3})
    writer.clean()
    return TokenStore(folder)


def test_what_is_written_is_read(tmp_path):
    store = written(tmp_path / "s")
    assert store.tokens("text").tolist() == [*FIRST, *SECOND]
    assert store.ends("text").tolist() == [4, 6, 9]
    assert store.row("text", 1).tolist() == [7, EOS]
    assert not store.tokens("text").flags.writeable
    assert len(store) == 3 and store.tokenizer().encode("ab") == [4, 5]
    head = store.head
    assert head["counts"] == {"documents": 3} and head["longest"] == {"text": 4}
    counts = np.array([1, 1, 1, 1, 2, 3]) / 9
    assert head["unigram"]["text"] == pytest.approx(-(counts * np.log(counts)).sum())
    rows = dict(zip(head["lengths"]["edges"], head["lengths"]["text"], strict=True))
    assert {edge: n for edge, n in rows.items() if n} == {2: 1, 3: 1, 4: 1}
    store.check()
    assert not (tmp_path / "s" / PROGRESS).exists()
    figures = store.figures()
    assert figures["lengths"] == {"text": [[1, 2, 1], [2, 3, 1], [3, 4, 1]]}
    assert (figures["rows"], figures["files"], figures["held_out"]) == (3, 0, 0)


def test_rows_longer_than_all_edges_are_counted_with_the_last():
    statistics = _Statistics(4)
    statistics.add(np.zeros(0, np.int64), np.array([3_000_000_000]))
    assert statistics.lengths[-1] == statistics.lengths.sum() == 1
    assert statistics.longest == 3_000_000_000


def test_a_part_that_is_not_whole_is_written_again(tmp_path):
    whole = written(tmp_path / "whole")
    folder = tmp_path / "killed"
    assert written(folder, parts=1) is None
    assert not is_store(folder)
    with pytest.raises(DataError, match="it is not whole yet: run the same gpuattn prepare again"):
        TokenStore(folder)
    with (folder / "text.bin").open("ab") as file:
        file.write(b"half a part")
    with (folder / PROGRESS).open("a") as file:
        file.write('{"files": {"te')
    again = written(folder)
    assert again.head == whole.head
    assert again.fingerprint == whole.fingerprint
    again.check()


def edit(name, change):
    """Return a function that changes a file of a store."""

    def damage(folder):
        data = bytearray((folder / name).read_bytes())
        (folder / name).write_bytes(change(data) or data)

    return damage


def rehead(**values):
    """Return a function that changes the head and makes its digest fit."""

    def damage(folder):
        head = json.loads((folder / HEAD).read_text()) | values
        (folder / HEAD).write_text(json.dumps(head | {"digest": head_digest(head)}))

    return damage


def flip(data):
    data[5] ^= 1


def beyond(folder):
    """Write a token beyond the vocabulary, and the digests that fit it."""
    path = folder / "text.bin"
    path.write_bytes(path.read_bytes()[:16] + b"\xff\0")
    head = json.loads((folder / HEAD).read_text())
    found = hashlib.sha256(path.read_bytes()[12:]).hexdigest()
    head["parts"][1]["sha256"]["text.bin"] = found
    rehead(**head)(folder)


AT_OPEN = {
    "the format is 'gpuattn-tokens/9'": rehead(format="gpuattn-tokens/9"),
    "the byte order is big": rehead(byteorder="big"),
    "a token is 99": rehead(largest={"text": 99}),
    "store.json is not as it was written": edit(HEAD, lambda data: data.replace(b"3", b"4")),
    "cannot read store.json": edit(HEAD, lambda data: data[:50]),
    "text.bin has 16 bytes of 18": edit("text.bin", lambda data: data[:16]),
    "text.idx: No such file": lambda folder: (folder / "text.idx").unlink(),
    "no token store: store.json is missing": lambda folder: (folder / HEAD).unlink(),
}


@pytest.mark.parametrize("message", AT_OPEN)
def test_opening_names_the_fault(tmp_path, message):
    written(tmp_path / "s")
    AT_OPEN[message](tmp_path / "s")
    with pytest.raises(DataError, match=message):
        TokenStore(tmp_path / "s")


AT_CHECK = {
    "part 1 of text.bin is not as it was written": edit("text.bin", flip),
    "part 1 of text.idx is not": edit("text.idx", flip),
    "tokenizer is not the one that made the tokens": edit("tokenizer", flip),
    "tokenizer has 11 ids, the head 12": rehead(vocab=12),
    "text.bin has the token 255; the vocabulary has 11": beyond,
}


@pytest.mark.parametrize("message", AT_CHECK)
def test_check_names_the_fault(tmp_path, message):
    written(tmp_path / "s")
    AT_CHECK[message](tmp_path / "s")
    with pytest.raises(DataError, match=message):
        TokenStore(tmp_path / "s").check()
