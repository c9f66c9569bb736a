"""Preparing a store: the same tokens as of the text in memory, however it is stored or cut; a run
that is stopped goes on; what cannot be used is named, and leaves no store."""

import errno
import gzip
import hashlib
import json
import lzma
import os
import shutil

import numpy as np
import pytest

from gpuattn.data.preparing import (
    parallel_tokenize,
    prepare,
    sources,
    store_writer,
    tokenizer_sample,
)
from gpuattn.data.preparing.plan import Plan
from gpuattn.data.preparing.sources import find_sources
from gpuattn.data.store import TokenStore, is_store
from gpuattn.data.text import read_parallel
from gpuattn.data.tokenizer import EOS, CharTokenizer, Tokenizer
from gpuattn.errors import ConfigError, DataError
from gpuattn.lock import locked

WORDS = ["the", "cat", "sat", "on", "a", "mat.", "Äpfel", "日本", "", "12"]


def some_text(seed, lines=60):
    rng = np.random.default_rng(seed)
    return "\n".join(" ".join(rng.choice(WORDS, rng.integers(9))) for _ in range(lines))


TEXT = some_text(0)
SUBWORDS = Tokenizer.train(TEXT.split("\n"), 300)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks and parts of a few lines."""
    for module in (sources, prepare, tokenizer_sample):
        monkeypatch.setattr(module, "BLOCK", 100)
    monkeypatch.setattr(prepare, "PART", 300)
    monkeypatch.setattr(sources, "LONGEST_LINE", 100)


@pytest.fixture
def write(tmp_path):
    """Write a file, return its path."""

    def write(name, content):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    return write


@pytest.fixture
def made(tmp_path):
    """Prepare what is given; returns the store."""

    def made(*paths, out="out", field=None, progress=lambda done: None, **options):
        if "pairs" in options:
            options["pairs"] = tuple(tuple(find_sources(pair)) for pair in options["pairs"])
        options = {"tokenizer": SUBWORDS} | options
        plan = Plan(sources=tuple(find_sources(paths, field)), **options)
        return prepare.prepare(plan, tmp_path / out, progress=progress)

    return made


def tokens(store):
    return store.tokens("text").tolist()


@pytest.mark.parametrize("workers, part", [(1, 300), (2, 300), (1, 1)])
def test_a_text_has_the_tokens_of_its_text(write, made, monkeypatch, workers, part):
    monkeypatch.setattr(prepare, "PART", part)
    store = made(write("a.txt", TEXT), workers=workers)
    assert tokens(store) == SUBWORDS.encode_text(TEXT)
    assert store.ends("text").tolist() == [len(store.tokens("text"))]
    assert len(store.head["parts"]) > 2
    assert store.head["counts"] == {"lines": TEXT.count("\n"), "characters": len(TEXT)}
    assert store.head["sources"][0]["sha256"] == hashlib.sha256(TEXT.encode()).hexdigest()
    store.check()


def test_characters_are_cut_anywhere(write, made):
    text = "äöü日本🐈" * 100
    store = made(write("a.txt", b"\xef\xbb\xbf" + text.encode()), tokenizer="chars")
    assert tokens(store) == CharTokenizer.train([text]).encode(text)


@pytest.mark.parametrize("tokenizer", ["chars", SUBWORDS])
def test_line_ends_of_windows(write, made, tokenizer):
    """Also where a block ends between their two bytes, and in a document."""
    text, document = "ab\n" * 133 + TEXT, json.dumps({"text": "a\r\nb"})
    contents = {
        "a.txt": text, "b.txt": text.replace("\n", "\r\n"),
        "c.jsonl": document.replace("\\r", ""), "d.jsonl": document,
    }  # fmt: skip
    stores = {
        name: tokens(made(write(name, content), out=name[0], tokenizer=tokenizer))
        for name, content in contents.items()
    }
    assert stores["a.txt"] == stores["b.txt"] and stores["c.jsonl"] == stores["d.jsonl"]


def zstd(data):
    return pytest.importorskip("zstandard").ZstdCompressor(write_checksum=True).compress(data)


@pytest.mark.parametrize("suffix, pack", [(".gz", gzip.compress), (".xz", lzma.compress),
                                          (".zst", zstd)])  # fmt: skip
def test_packed_text(write, made, suffix, pack):
    half = len(TEXT) // 2
    data = pack(TEXT[:half].encode()) + pack(TEXT[half:].encode())
    path = write("a.txt" + suffix, data)
    store = made(path)
    assert tokens(store) == SUBWORDS.encode_text(TEXT)
    middle = len(data) // 4
    for broken in (data[:-20], data[:middle] + b"\0\xff" * 4 + data[middle + 8 :]):
        write("a.txt" + suffix, broken)
        with pytest.raises(DataError, match=f"cannot read {path}: "):
            made(path, out="broken")
        assert not is_store(path.replace("a.txt" + suffix, "broken"))


ROWS = [some_text(seed, 3) for seed in range(40)]


def parquet(path, field):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({field: ROWS}), path)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_documents(write, made, kind):
    path = write(f"rows.{kind}", "".join(json.dumps({"body": row}) + "\n" for row in ROWS))
    if kind == "parquet":
        parquet(path, "body")
    store = made(path, field="body", documents=True)
    assert tokens(store) == [i for row in ROWS for i in (*SUBWORDS.encode_text(row), EOS)]
    assert [store.row("text", i)[-1] for i in range(40)] == [EOS] * 40
    plain = made(path, out="plain", field="body")
    text = "".join(row.removesuffix("\n") + "\n" for row in ROWS)
    assert tokens(plain) == SUBWORDS.encode_text(text)


def test_what_is_held_out_stays_when_text_is_added(write, made):
    def held(name, rows):
        path = write(f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        store = made(path, out=name, valid=0.3)
        store.check()
        both = [{tuple(s.row("text", i)) for i in range(len(s))} for s in (store, store.valid)]
        assert len(both[0] | both[1]) == len(rows)
        return both[1]

    some, more = held("some", ROWS[10:]), held("more", ROWS)
    assert some and some < more | some and not some - more


def test_files_of_a_folder_are_documents(write, made, tmp_path):
    for name, text in {"b": "the cat\n", "a": "sat", "c": "", ".hidden": "mat"}.items():
        write(f"texts/{name}.txt", text)
    folder = tmp_path / "texts"
    store = made(folder)
    assert tokens(store) == SUBWORDS.encode_text("sat\nthe cat\n")
    assert len(store) == 2 and store.head["skipped"] == {"empty file": 1}
    ended = made(tmp_path / "texts" / "*.txt", out="ended", documents=True)
    assert tokens(ended) == [*SUBWORDS.encode_text("sat"), EOS,
                             *SUBWORDS.encode_text("the cat\n"), EOS]  # fmt: skip


def rows_of(store):
    return [tuple(store.row(side, i).tolist() for side in store.sides) for i in range(len(store))]


@pytest.fixture
def pair(write):
    """Two files of 80 lines, some of them empty, repeated or of uneven length."""
    one = ["the cat sat", " ", "a", "on a mat.", *some_text(1, 76).split("\n")]
    two = ["the cat", "sat", " ".join(WORDS), "on a mat.", *some_text(2, 76).split("\n")]
    return write("p.en", "\n".join(one)), write("p.de", "\n".join([*two[:-1], two[-1], ""]))


def test_pairs(pair, made):
    expected = [
        tuple([*SUBWORDS.encode(text), EOS] for text in found[:2]) for found in read_parallel(*pair)
    ]
    store = made(pairs=[pair])
    assert rows_of(store) == expected
    assert store.head["skipped"] == {"empty side": 80 - len(expected)}
    store.check()

    filtered = made(pairs=[pair], out="f", longest=12, max_ratio=2, duplicates=False)
    seen, counts = [], {"empty side": 80 - len(expected)}
    for row in expected:
        short, long = sorted(len(side) - 1 for side in row)
        why = ("longer than 12 tokens" if long > 12 else "lengths beyond 2 to 1"
               if long > 2 * short else "duplicate" if row in seen else None)  # fmt: skip
        if why:
            counts[why] = counts.get(why, 0) + 1
        else:
            seen.append(row)
    assert rows_of(filtered) == seen and filtered.head["skipped"] == counts


class Stop(Exception):
    """Ends a preparation at some chunk, as a kill would."""


def stop_after(chunks):
    left = iter(range(chunks))

    def progress(done):
        if next(left, None) is None:
            raise Stop

    return progress


@pytest.mark.parametrize("kind", ["text", "rows", "pairs"])
def test_a_stopped_run_goes_on(write, made, tmp_path, pair, kind, monkeypatch):
    files = [write("a.txt", TEXT), write("b.txt", some_text(5))]
    rows = write("r.jsonl", "".join(json.dumps(row) + "\n" for row in ROWS))
    monkeypatch.setattr(prepare, "PAIR_LINES", 5)
    given, options = {
        "text": (files, {}), "rows": ([rows], {"valid": 0.2, "documents": True}),
        "pairs": ([], {"pairs": [pair], "duplicates": False, "valid": 0.2}),
    }[kind]  # fmt: skip
    whole = made(*given, out="whole", **options)
    for chunks in (2, 6, 5):
        with pytest.raises(Stop):
            made(*given, progress=stop_after(chunks), **options)
        assert not is_store(tmp_path / "out")
    store = made(*given, **options)
    assert store.head == whole.head
    store.check()
    left = {path.name for path in (tmp_path / "out").iterdir()}
    assert left == {path.name for path in (tmp_path / "whole").iterdir()}
    assert store_writer.PROGRESS not in left and prepare.SEEN not in left
    again = made(*given, progress=stop_after(0), **options)  # is there: nothing is read
    assert again.head == whole.head
    with pytest.raises(ConfigError, match="is a token store of other sources or options"):
        made(*given, **options | {"seed": 1})


def test_another_text_begins_anew(write, made):
    path = write("a.txt", TEXT)
    with pytest.raises(Stop):
        made(path, progress=stop_after(8))
    write("a.txt", TEXT[:-5])
    assert tokens(made(path)) == SUBWORDS.encode_text(TEXT[:-5])


def test_a_source_that_changed_in_secret_is_refused(write, made):
    path = write("a.txt", TEXT)
    before = os.stat(path)
    with pytest.raises(Stop):
        made(path, progress=stop_after(8))
    write("a.txt", TEXT[::-1])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(DataError, match="has changed since part"):
        made(path)


BAD = {
    "cannot read .*nothing.txt: No such file": {"nothing.txt": None},
    "there is no text": {"a.txt": ""},
    "a.txt, line 4, byte 3, is not UTF-8 .0xff": {"a.txt": b"a\nb\nc\nde\xff\n"},
    "a.txt, line 2, is not text: it has a zero byte": {"a.txt": b"a\nb\0\n"},
    "a.txt, line 3, is longer than": {"a.txt": "a\n\n" + "b" * 150 + "\n"},
    "a.jsonl, line 2, is no such JSON": {"a.jsonl": '"a"\n{"text\n'},
    "a.jsonl, line 1, has no field 'text'": {"a.jsonl": '{"body": "a"}\n'},
    "a.jsonl, line 1: 'text' is no text: 5": {"a.jsonl": '{"text": 5}\n'},
    "a.jsonl, line 1, is no Unicode text: .* surrogates": {"a.jsonl": '"a \\ud800"\n'},
    "empty has no files": {"empty/": None},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_sources_are_named(write, made, tmp_path, message):
    ((name, content),) = BAD[message].items()
    path = write(name, content) if content is not None else str(tmp_path / name)
    if name.endswith("/"):
        (tmp_path / name).mkdir()
    with pytest.raises(DataError, match=message):
        made(path)
    assert not (tmp_path / "out").exists()


def test_bad_pairs(write, made):
    one, two = write("a", "x\n" * 90), write("b", "y\n" * 75)
    with pytest.raises(DataError, match="a has 90 lines, .*b has 75"):
        made(pairs=[(one, two)])


def test_a_source_that_changes_while_it_is_read(write, made, tmp_path):
    path = write("a.txt", TEXT)

    def grow(done):
        with open(path, "a") as file:
            file.write("more\n")

    with pytest.raises(DataError, match="has changed while it was read"):
        made(path, progress=grow)
    gone = write("b.txt", TEXT)
    with pytest.raises(DataError, match=f"cannot read {gone}: No such file"):
        made(
            write("a.txt", TEXT),
            gone,
            progress=lambda done: os.path.exists(gone) and os.remove(gone),
        )
    assert not is_store(tmp_path / "out")


def test_disks_that_are_full(write, made, tmp_path, monkeypatch):
    path = write("a.txt", TEXT)
    full = shutil.disk_usage(tmp_path)._replace(free=10)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: full)
        with pytest.raises(DataError, match="0 MB are free"):
            made(path)

    def no_space(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        calls = iter([os.fsync] * 6)
        patch.setattr(store_writer.os, "fsync", lambda handle: next(calls, no_space)(handle))
        with pytest.raises(DataError, match="No space left on device. Free some space"):
            made(path)
    assert not is_store(tmp_path / "out")
    assert tokens(made(path)) == SUBWORDS.encode_text(TEXT)


def test_one_process_at_a_time_and_no_other_folder(write, made, tmp_path):
    path = write("a.txt", TEXT)
    with locked(tmp_path / "out"), pytest.raises(ConfigError, match="out is in use"):
        made(path)
    write("other/letter.txt", "dear")
    with pytest.raises(ConfigError, match="other has other files, such as letter.txt"):
        made(path, out="other")


def test_mix(write, made):
    paths = [write("news.txt", TEXT), write("talks.txt", some_text(3))]
    mix = made(*paths, mix={"news": 0.7, "talks": 0.3}).head["mix"]
    first, second = (len(SUBWORDS.encode_text(text)) for text in (TEXT, some_text(3)))
    bounds = [[0, first], [first, first + second + 1]]  # a line end between
    assert [(part["name"], part["weight"], part["rows"], part["tokens"]["text"]) for part in mix] \
        == [("news", 0.7, [0, 1], bounds[0]), ("talks", 0.3, [1, 2], bounds[1])]  # fmt: skip
    with pytest.raises(ConfigError, match="0.7 . 0.2 add up to 0.9"):
        made(*paths, mix={"news": 0.7, "talks": 0.2}, out="b")
    with pytest.raises(ConfigError, match="mix names .'news'.; the sources are"):
        made(*paths, mix={"news": 1.0}, out="b")
    with pytest.raises(DataError, match="void of the mix has no text"):
        made(paths[0], write("void.txt", ""), mix={"news": 0.5, "void": 0.5}, out="b")


def test_a_tokenizer_is_learned_from_a_sample(write, made, monkeypatch):
    paths = [write("a.txt", TEXT * 9), write("b.jsonl", json.dumps({"text": TEXT}) + "\n")]
    monkeypatch.setattr(tokenizer_sample, "SAMPLE", 600)
    store = made(*paths, tokenizer=None, vocab_size=300)
    found = store.tokenizer()
    assert found.decode_text(store.row("text", 0).tolist()) == TEXT * 9
    assert made(*paths, tokenizer=None, vocab_size=300, out="b").fingerprint == store.fingerprint


def test_a_sample_of_one_long_line(write, made):
    with pytest.raises(DataError, match="a.txt, line 1, is longer than"):
        made(write("a.txt", "b" * 500), tokenizer=None)


def test_a_worker_that_is_killed_is_named(write, made, monkeypatch):
    monkeypatch.setattr(parallel_tokenize.sys, "executable", shutil.which("false"))
    with pytest.raises(RuntimeError, match="a process that tokenises has ended .exit code 1"):
        made(write("a.txt", TEXT), workers=2)


def test_a_store_is_opened_by_its_folder(write, made, tmp_path):
    made(write("a.txt", TEXT))
    assert TokenStore(str(tmp_path / "out")).kind == "text"
