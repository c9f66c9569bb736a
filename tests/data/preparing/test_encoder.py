"""The fast encoders give exactly the ids of ``encode``."""

import io

import numpy as np
import pytest

from gpuattn.data.preparing import encoder
from gpuattn.data.preparing.encoder import Encoder, new_encoder
from gpuattn.data.tokenizer import EOS, CharTokenizer, Tokenizer
from gpuattn.errors import DataError

WORDS = [
    "the",
    "cat",
    "sat,",
    "on",
    "a",
    "mat.",
    "Äpfel",
    "日本",
    "▁",
    "a▁b",
    "\t",
    "\r",
    "🐈",
    "12",
]
TEXT = "the cat sat, on a mat. the cat\nÄpfel 12 on a 日本\n" * 4


@pytest.fixture(scope="module")
def subwords():
    return Tokenizer.train(TEXT.split("\n"), 300)


def texts(count):
    """Yield texts of words, spaces and line ends in any order."""
    rng = np.random.default_rng(1)
    for _ in range(count):
        marks = [" ", " ", " ", "\n", "\n", ""]
        yield "".join(
            rng.choice(WORDS + marks) + rng.choice(marks) for _ in range(rng.integers(30))
        )


def test_words_by_table(subwords, monkeypatch):
    monkeypatch.setattr(encoder, "WORDS", 12)  # so that the table is emptied
    monkeypatch.setattr(encoder, "LONGEST_WORD", 3)
    fast = new_encoder(subwords)
    assert type(fast) is not Encoder
    for text in ["", "\n", " ", "\n\n", " \n", "\n ", "\n\n\n  \n", *texts(300)]:
        assert fast.text(text).tolist() == subwords.encode_text(text), repr(text)


@pytest.mark.parametrize("kind", ["words", "chars", "plain"])
def test_lines(subwords, kind):
    tokenizer = CharTokenizer.train([TEXT]) if kind == "chars" else subwords
    fast = Encoder(tokenizer) if kind == "plain" else new_encoder(tokenizer)
    lines = ["the cat", "", "Äpfel  on"]
    ids, ends = fast.lines(lines)
    rows = [[*tokenizer.encode(line), EOS] for line in lines]
    assert [row.tolist() for row in np.split(ids, ends[:-1])] == rows
    assert ids.dtype == np.uint16
    assert fast.text(TEXT).tolist() == tokenizer.encode_text(TEXT)


def test_unknown_characters_are_named():
    with pytest.raises(DataError, match="character 'z' at 1"):
        new_encoder(CharTokenizer("ab")).text("az")


@pytest.mark.parametrize("options", [{"model_type": "unigram"}, {"remove_extra_whitespaces": True},
                                     {"normalization_rule_name": "nmt_nfkc"},
                                     {"split_by_whitespace": False}], ids=str)  # fmt: skip
def test_other_models_are_encoded_by_lines(options):
    from sentencepiece import SentencePieceTrainer

    settings = {"model_type": "bpe", "normalization_rule_name": "identity",
                "remove_extra_whitespaces": False} | options  # fmt: skip
    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.split("\n") * 9), model_writer=model, vocab_size=300,
        byte_fallback=True, pad_id=0, bos_id=1, eos_id=2, unk_id=3, minloglevel=2,
        hard_vocab_limit=False, **settings,
    )  # fmt: skip
    assert type(new_encoder(Tokenizer(model.getvalue()))) is Encoder
