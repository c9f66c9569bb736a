"""Reading text files; every error names the file and the line."""

import gzip
import tracemalloc

import pytest

from gpuattn.data.generated import Pair
from gpuattn.data.text import encode_pairs, read_language_model, read_parallel
from gpuattn.data.tokenizer import CharTokenizer
from gpuattn.errors import ConfigError, DataError


@pytest.fixture
def write(tmp_path):
    """Write a file and return its path."""

    def write(name, content):
        path = tmp_path / name
        data = content if isinstance(content, bytes) else content.encode()
        if name.endswith(".gz"):
            data = gzip.compress(data)
        path.write_bytes(data)
        return path

    return write


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_pairs(write, suffix):
    source = write("a.en" + suffix, "\ufeffone cat\r\n two  dogs \t\n\nfour\x85\u2028birds")
    target = write("a.de" + suffix, "eine Katze\nzwei Hunde\ndrei\n vier Vögel\n")
    pairs = read_parallel(str(source), target)
    assert pairs == [
        Pair("one cat", "eine Katze", "text"),
        Pair("two  dogs", "zwei Hunde", "text"),
        Pair("four\x85\u2028birds", "vier Vögel", "text"),
    ]
    assert pairs.lines == [1, 2, 4]
    assert pairs.empty == [3]
    assert pairs.too_long == []


def test_long_lines(write):
    source = write("a", "short\n" + "ä" * 51 + "\nlast\n")
    target = write("b", "kurz\nlang\nletzte " + "x" * 300)
    pairs = read_parallel(source, target, max_length=50)
    assert [pair.source for pair in pairs] == ["short"]
    assert pairs.too_long == [2, 3]
    with pytest.raises(DataError, match=r"/a, line 2, is longer than 50 characters"):
        read_parallel(source, target, max_length=50, on_long="error")
    assert len(read_parallel(source, target, max_length=310)) == 3
    with pytest.raises(DataError, match="no usable pair: 0 with an empty side, 3 longer than 2"):
        read_parallel(source, target, max_length=2)
    with pytest.raises(ConfigError, match="'drop'; accepted: skip, error"):
        read_parallel(source, target, on_long="drop")


def test_a_very_long_line_takes_little_memory(write):
    source = write("a", b"one\n" + b"x" * 30_000_000 + b"\nthree\n")
    target = write("b", "eins\nzwei\ndrei\n")
    tracemalloc.start()
    pairs = read_parallel(source, target)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert pairs.lines == [1, 3]
    assert peak < 1_000_000


def lines(count):
    return [f"line {'x' * (i * 37 % 90)} {i}" for i in range(count)]


@pytest.mark.parametrize("extra", [1, 3])
@pytest.mark.parametrize("gap", [0, 41, 99])
@pytest.mark.parametrize("swap", [False, True])
def test_files_of_different_lengths_name_the_inserted_line(write, extra, gap, swap):
    short = lines(100)
    long = short[:gap] + ["inserted " * 5] * extra + short[gap:]
    one, other = write("one", "\n".join(long)), write("other", "\n".join(short))
    with pytest.raises(DataError) as caught:
        read_parallel(*((other, one) if swap else (one, other)))
    message = str(caught.value)
    assert f"/one has {100 + extra}" in message
    assert "/other has 100" in message
    assert f"probably {one}, line {gap + 1}: 'inserted" in message


def test_files_of_different_lengths_name_an_empty_line(write):
    text = lines(20)
    one = write("one", "\n".join([*text[:7], "", *text[7:]]))
    with pytest.raises(DataError, match=r"probably .*/one, line 8: an empty line"):
        read_parallel(one, write("other", "\n".join(text)))


@pytest.mark.parametrize("content", ["", "\n\n  \n"])
def test_empty_file(write, content):
    good, empty = write("good", "a\nb\nc\n"), write("empty", content)
    with pytest.raises(DataError, match=r"/empty is empty"):
        read_parallel(good, empty)
    with pytest.raises(DataError, match=r"/empty is empty"):
        read_language_model(empty)


def test_not_utf8(write):
    good = write("good", "a\nb\n")
    bad = write("bad", "gut\nschön\n".encode("latin-1"))
    for call in (lambda: read_parallel(good, bad), lambda: read_language_model(bad)):
        with pytest.raises(DataError, match=r"/bad, line 2, byte 4, is not UTF-8 \(0xf6\).*iconv"):
            call()


def test_unreadable_files_are_named(write, tmp_path):
    good = write("good", "a\n")
    broken = write("broken.gz", "a\n" * 1000)
    broken.write_bytes(broken.read_bytes()[:-12])
    plain = tmp_path / "plain.gz"
    plain.write_text("a\n")
    flipped = write("flipped.gz", "".join(lines(300)))
    data = bytearray(flipped.read_bytes())
    data[40] ^= 255
    flipped.write_bytes(data)
    for path in (tmp_path / "missing", tmp_path, broken, plain, flipped):
        with pytest.raises(DataError, match=f"{path.name}"):
            read_parallel(good, path)


def test_encode_pairs(write):
    source = write("a", "one\n\nthree!!\nfour")
    target = write("b", "eins\nzwei\ndrei\nvierviervier")
    pairs = read_parallel(source, target)
    tokenizer = CharTokenizer.train(pair.source + pair.target for pair in pairs)
    ids, kept = encode_pairs(pairs, tokenizer, max_tokens=7)
    assert kept == [0, 1]
    assert ids[1] == (tokenizer.encode("three!!"), tokenizer.encode("drei"))
    with pytest.raises(DataError, match=r"line 4 is 12 tokens long; the limit is 7: 'four'"):
        encode_pairs(pairs, tokenizer, max_tokens=7, on_long="error")
    with pytest.raises(DataError, match="each of the 3 pairs is longer than 2 tokens"):
        encode_pairs(pairs, tokenizer, max_tokens=2)
    with pytest.raises(ConfigError, match="accepted: skip, error"):
        encode_pairs(pairs, tokenizer, max_tokens=2, on_long="truncate")


def test_language_model_text(write):
    text = "First Citizen:\r\n\r\n  Before we proceed\u2028any further\n"
    wanted = text.replace("\r\n", "\n")
    assert read_language_model(write("a.txt", text)) == wanted
    assert read_language_model(write("a.txt.gz", "\ufeff" + text)) == wanted
    assert read_language_model(write("a.txt", "one\rline\n")) == "one\rline\n"
