"""Tokenizers of folders: marks, text and back, and the files as they were."""

import json
import sys

import pytest

import gpuattn
from gpuattn.data.tokenizer import CharTokenizer
from gpuattn.errors import PretrainedError, UnsupportedError
from gpuattn.models import GPT2, Bert, BertConfig, GPT2Config

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "cats", "eat", "fish"]
MARKS = [{"id": i, "content": WORDS[i], "single_word": False, "lstrip": False, "rstrip": False,
          "normalized": False, "special": True} for i in range(4)]  # fmt: skip
# Texts are lowered, split at spaces, put between [CLS] and [SEP], cut and padded.
TOKENIZER = {
    "version": "1.0", "added_tokens": MARKS, "normalizer": {"type": "Lowercase"},
    "pre_tokenizer": {"type": "Whitespace"}, "decoder": None,
    "truncation": {"max_length": 4, "strategy": "LongestFirst", "stride": 0, "direction": "Right"},
    "padding": {"strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": None,
                "pad_id": 0, "pad_type_id": 0, "pad_token": "[PAD]"},
    "post_processor": {"type": "BertProcessing", "sep": ["[SEP]", 3], "cls": ["[CLS]", 2]},
    "model": {"type": "WordLevel", "vocab": {w: i for i, w in enumerate(WORDS)},
              "unk_token": "[UNK]"},
}  # fmt: skip


def write(folder, **config):
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture
def library():
    return pytest.importorskip("tokenizers", reason="pip install 'gpuattn[pretrained]'")


def test_texts_are_neither_cut_nor_padded(library, tmp_path):
    write(tmp_path)
    tokenizer = gpuattn.load_tokenizer(tmp_path)
    assert tokenizer.encode("Cats eat fish dog") == [2, 4, 5, 6, 1, 3]
    assert tokenizer.encode_lines(["cats", ""]) == [[2, 4, 3], [2, 3]]
    assert tokenizer.decode([2, 4, 5, 3, 0]) == "cats eat"
    assert len(tokenizer) == 7 and tokenizer.specials == (0, 1, 2, 3)
    assert [tokenizer.piece(i) for i in (4, 7)] == ["cats", ""]


def test_what_a_text_begins_with(library, tmp_path):
    for mark in ("[CLS]", {"content": "[CLS]"}):
        write(tmp_path, bos_token=mark)
        assert gpuattn.load_tokenizer(tmp_path).line_end == 2
    write(tmp_path, bos_token="nosuch")
    assert gpuattn.load_tokenizer(tmp_path).line_end == 0


def test_marks_around_a_line_and_the_mask(library, tmp_path):
    write(tmp_path, mask_token="fish")
    tokenizer = gpuattn.load_tokenizer(tmp_path)
    assert (tokenizer.marks, tokenizer.mask) == ((2, 3), 6)
    lines = [[2, 4, 5, 3], [2, 3], [2, 6, 3]]
    assert tokenizer.encode_marked(["cats eat", "", "fish"]) == lines
    assert tokenizer.encode_text("cats eat\n\nfish") == sum(lines, [])  # a mark ends each line
    write(tmp_path)
    assert gpuattn.load_tokenizer(tmp_path).mask is None
    named = MARKS[:3] + [MARKS[3] | {"content": "[MASK]"}]
    vocabulary = {word.replace("[SEP]", "[MASK]"): i for i, word in enumerate(WORDS)}
    other = TOKENIZER | {"added_tokens": named, "post_processor": None}
    other["model"] = TOKENIZER["model"] | {"vocab": vocabulary}
    (tmp_path / "tokenizer.json").write_text(json.dumps(other))
    tokenizer = gpuattn.load_tokenizer(tmp_path)
    assert (tokenizer.marks, tokenizer.mask) == ((), 3)
    assert tokenizer.encode_text("cats\neat") == [4, 5]
    own = CharTokenizer("ab")
    assert own.encode_marked(["ab", ""]) == [[own.bos, 4, 5, own.eos], [own.bos, own.eos]]
    assert own.mask in own.specials and own.decode([own.mask]) == ""


def test_files_are_saved_as_they_were(library, tmp_path):
    write(tmp_path, bos_token="[CLS]")
    model = Bert(BertConfig(9, 8, 2, 1, 12, max_length=6))
    gpuattn.save_pretrained(model, tmp_path / "out", gpuattn.load_tokenizer(tmp_path))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / name).read_bytes()


@pytest.mark.parametrize("text", ["{}", "[", "\xff"])
def test_a_damaged_file(library, tmp_path, text):
    (tmp_path / "tokenizer.json").write_text(text, encoding="latin-1")
    with pytest.raises(PretrainedError, match="tokenizer.json is no tokenizer"):
        gpuattn.load_tokenizer(tmp_path)


def test_the_tokenizer_of_a_run_goes_with_its_model(tmp_path):
    tokenizer = CharTokenizer("abc")
    model = GPT2(GPT2Config(len(tokenizer), 8, 2, 1, 6))
    gpuattn.save_pretrained(model, tmp_path / "out", tokenizer)
    assert gpuattn.load_tokenizer(tmp_path / "out").encode("cab") == [6, 4, 5]
    (tmp_path / "out" / "tokenizer.model").write_bytes(b"another")
    with pytest.raises(PretrainedError, match="no SentencePiece model"):
        gpuattn.load_tokenizer(tmp_path / "out")


def test_without_a_file_or_the_library(tmp_path, monkeypatch):
    with pytest.raises(PretrainedError, match="tokenizer.json is missing. transformers writes it"):
        gpuattn.load_tokenizer(tmp_path)
    write(tmp_path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UnsupportedError, match=r"not installed.*gpuattn\[pretrained\]"):
        gpuattn.load_tokenizer(tmp_path)
