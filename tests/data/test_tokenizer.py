"""Tokenizers: lossless, deterministic, saved as bytes, with helpful errors."""

import subprocess
import sys

import pytest

from gpuattn.data.generated import GENERATED, generate
from gpuattn.data.tokenizer import (
    CharTokenizer,
    TextStream,
    Tokenizer,
    tokenizer_from_bytes,
)
from gpuattn.errors import ConfigError, DataError

CORPUS = [
    "Two dogs run over the snow.",
    "Zwei Hunde laufen über den Schnee.",
    "A man in an orange hat is looking at something.",
    "Ein Mann mit einem orangefarbenen Hut schaut etwas an.",
] * 20
# Repeated spaces, characters that Unicode normalization would change, characters that training has
# not seen, and the names of the special tokens.
ODD = [
    "",
    " ",
    "  two   spaces  ",
    "tab\there",
    "ﬁ Å ① ½ \u3000 ｗｉｄｅ e\u0301",
    "日本語 и русский",
    "👩\u200d👩\u200d👧 \U0001f600",
    "<s> </s> <unk> <pad> <0x41>",
    "line end\r",
    "\x00\x7f\u2028",
]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(CORPUS, 400)


def test_lossless_without_unk(tokenizer):
    for line in CORPUS[:4] + ODD:
        ids = tokenizer.encode(line)
        assert tokenizer.decode(ids) == line
        assert all(4 <= i < len(tokenizer) for i in ids)
    assert tokenizer.encode_lines(ODD) == [tokenizer.encode(line) for line in ODD]


def test_specials(tokenizer):
    assert (tokenizer.pad, tokenizer.bos, tokenizer.eos, tokenizer.unk) == (0, 1, 2, 3)
    ids = tokenizer.encode("Zwei Hunde")
    assert tokenizer.decode([1, *ids, 2, 0, 0]) == "Zwei Hunde"
    assert tokenizer.pieces[:4] == ["<pad>", "<s>", "</s>", "<unk>"]
    assert len(tokenizer.pieces) == len(tokenizer)


def test_invalid_utf8_still_decodes(tokenizer):
    """A model may generate any bytes; decoding them still gives text."""
    first = tokenizer.pieces.index("<0xC3>")
    assert "\ufffd" in tokenizer.decode([first, first])


def test_training_is_deterministic_and_models_are_saved(tokenizer, tmp_path):
    assert Tokenizer.train(CORPUS, 400).to_bytes() == tokenizer.to_bytes()
    again = Tokenizer.from_bytes(tokenizer.to_bytes())
    tokenizer.save(tmp_path / "tokenizer.model")
    loaded = Tokenizer.load(tmp_path / "tokenizer.model")
    for other in (again, loaded, tokenizer_from_bytes(tokenizer.to_bytes())):
        assert other.pieces == tokenizer.pieces
        assert other.encode(CORPUS[0]) == tokenizer.encode(CORPUS[0])


def test_vocabulary_is_an_upper_limit():
    assert len(Tokenizer.train(CORPUS, 350)) == 350
    small = Tokenizer.train(["a b"], 8000)
    assert 260 < len(small) < 300
    assert small.decode(small.encode("b a c")) == "b a c"


def test_sample_of_a_long_corpus(monkeypatch):
    monkeypatch.setattr("gpuattn.data.tokenizer.MAX_TRAINING_LINES", 10)
    lines = [f"{word} {word}" for word in "abcdefghijklmnopqrstuvwxyz"]
    models = [Tokenizer.train(lines, 300, seed=seed).to_bytes() for seed in (0, 0, 1)]
    assert models[0] == models[1] != models[2]


def test_errors():
    with pytest.raises(ConfigError, match=r"vocab_size is 265; this text needs 268 or more"):
        Tokenizer.train(["hello world"], 265)
    assert len(Tokenizer.train(["hello world"], 268)) == 268
    for lines in ([], ["", ""]):
        with pytest.raises(DataError, match="no text"):
            Tokenizer.train(lines, 300)
    for data in (b"no model at all" * 9, b""):
        with pytest.raises(DataError):
            Tokenizer.from_bytes(data)


def test_training_prints_nothing(tokenizer):
    """SentencePiece's C++ code writes its log to the process's stderr unless told not to."""
    code = "from gpuattn.data.tokenizer import Tokenizer as T; T.train(['hello world'] * 9, 290)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert done.stdout + done.stderr == b""


def test_import_is_lazy():
    code = "import sys, gpuattn.data.tokenizer; assert 'sentencepiece' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", GENERATED)
def test_unseen_pairs_use_trained_pieces(name):
    """All pieces of the test set occur in training, none is a byte, and words have few pieces."""
    train = generate(name, "train", 20_000, 0)
    tokenizer = Tokenizer.train([line for p in train for line in p[:2]], GENERATED[name].vocab_size)
    seen = {i for p in train for i in tokenizer.encode(p.target)}
    pairs = generate(name, "test", 1000, 0)
    ids = [i for p in pairs for i in tokenizer.encode(p.target)]
    assert set(ids) <= seen
    assert all(not tokenizer.pieces[i].startswith("<0x") for i in seen)
    if name == "toy":
        words = sum(len(p.target.split()) for p in pairs if p.kind == "clauses")
        pieces = sum(len(tokenizer.encode(p.target)) for p in pairs if p.kind == "clauses")
        assert pieces / words < 1.4
        numbers = [len(tokenizer.encode(p.target)) for p in pairs if p.kind == "numbers"]
        assert sum(numbers) / len(numbers) < 7


@pytest.mark.parametrize("text", ["", "\n", "a cat", " two \n\n  lines\n", "\u00e9\r\n\tb\n"])
def test_text_of_several_lines_round_trips(text):
    tokenizer = Tokenizer.train(["a cat", "two lines", " two lines"], 300)
    ids = tokenizer.encode_text(text)
    assert ids.count(tokenizer.line_end) == text.count("\n")
    assert tokenizer.decode_text(ids) == text
    assert tokenizer.decode_text([1, *ids, 2]) == text
    characters = CharTokenizer.train(["a\n", text])
    assert characters.decode_text(characters.encode_text(text)) == text
    assert characters.encode_text("\n") == [characters.line_end]
    assert CharTokenizer.train("one line").line_end == 4


def test_characters(tmp_path):
    tokenizer = CharTokenizer.train("hello\nworld é")
    assert tokenizer.characters == "\n dehlorwé"
    assert len(tokenizer) == 4 + 10
    text = "dél\nlow "
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([1, *tokenizer.encode("hello"), 2]) == "hello"
    assert tokenizer.encode_lines(["he", ""]) == [tokenizer.encode("he"), []]
    tokenizer.save(tmp_path / "t")
    assert CharTokenizer.load(tmp_path / "t").characters == tokenizer.characters
    assert isinstance(tokenizer_from_bytes(tokenizer.to_bytes()), CharTokenizer)
    with pytest.raises(DataError, match=r"character 'x' at 2 was not in the training text"):
        tokenizer.encode("dex")
    with pytest.raises(DataError, match="no text"):
        CharTokenizer.train("")
    for data in (b"{", b"{}", b'{"characters": 3}'):
        with pytest.raises(DataError):
            CharTokenizer.from_bytes(data)


def test_a_stream_of_tokens_is_the_same_text(tokenizer):
    """Bytes of a character wait until it is complete; those that never are come at the end."""
    text = " two lines\nnaïve \U0001f600 and 東京\n\nend"
    ids = tokenizer.encode_text(text) + tokenizer.encode("東")[-3:-1]
    parts = []
    stream = TextStream(tokenizer, parts.append)
    for i in ids:
        stream.add([i])
    said = "".join(parts)
    stream.close()
    assert said == text and "".join(parts) == tokenizer.decode_text(ids) == text + "\ufffd" * 2
    assert len(parts) > 12 and all(parts)
