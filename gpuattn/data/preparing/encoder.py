"""Text to arrays of token ids, several times as fast as ``encode`` and with the same ids.

Pieces of our byte-pair tokenizers hold a space at their first place only, so no merge crosses the
space before a word: a line's ids are those of its words, one after the other. Words repeat: a
table gives the ids of those seen before. On English-like text (17 M words, 400 k of them different;
``examples/benchmarks/preparing.py``), a vocabulary of 16,000 and one core: 16 MB/s, SentencePiece
by lines 6.1 MB/s. From file to file on two cores: ``gpuattn prepare`` 24 MB/s, Hugging Face's
``tokenizers`` with the same vocabulary 8.5 to 10.2 MB/s; on Python code 9.1 and 4.5 MB/s. Models
whose pieces or normalisation do not allow this are encoded line by line.
"""

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from gpuattn.data.tokenizer import EOS, BaseTokenizer, CharTokenizer, Tokenizer

WORDS = 1 << 18  # words that the table holds before it is emptied: about 50 MB
LONGEST_WORD = 64  # characters; longer ones hardly repeat
SPACE = "\u2581"  # how SentencePiece writes a space
BYTE_PAIRS = 2  # TrainerSpec.model_type
LAST_CODE = 0x10FFFF


def new_encoder(tokenizer: BaseTokenizer) -> "Encoder":
    """Return the fastest encoder of a tokenizer."""
    if isinstance(tokenizer, CharTokenizer):
        return _CharEncoder(tokenizer)
    if isinstance(tokenizer, Tokenizer) and _words_are_independent(tokenizer):
        return _WordEncoder(tokenizer)
    return Encoder(tokenizer)


class Encoder:
    """Encodes by the tokenizer's own calls. ``dtype``: of the ids, uint16 where they fit."""

    def __init__(self, tokenizer: BaseTokenizer) -> None:
        self.tokenizer = tokenizer
        self.code = "H" if len(tokenizer) <= 1 << 16 else "I"
        self.dtype = np.dtype(self.code)

    def text(self, text: str) -> np.ndarray:
        """Return what ``encode_text`` gives: (tokens,)."""
        return np.array(self.tokenizer.encode_text(text), self.dtype)

    def lines(self, lines: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of lines end to end, each with ``eos``, and where each ends, (lines,)."""
        end = bytes(array(self.code, [EOS]))
        rows = [self._line(line) + end for line in lines]
        lengths = np.fromiter(map(len, rows), np.int64, len(rows)) // self.dtype.itemsize
        return np.frombuffer(b"".join(rows), self.dtype), np.cumsum(lengths)

    def _line(self, line):
        """Return the ids of a line as bytes."""
        return bytes(array(self.code, self.tokenizer.encode(line)))


class _WordEncoder(Encoder):
    def __init__(self, tokenizer):
        super().__init__(tokenizer)
        self._table = _Words(tokenizer, self.code)

    def text(self, text):
        # Each line end becomes a word of its own; "\n \n" has no empty word between, "\n  \n" has.
        text = text.replace("\n", " \n ").replace("\n  \n", "\n \n").replace("\n  \n", "\n \n")
        text = text[text.startswith(" \n") : len(text) - text.endswith("\n ")]
        return np.frombuffer(self._joined(text), self.dtype)

    def _line(self, line):
        return self._joined(line)

    def _joined(self, text):
        if not text:
            return b""
        if len(self._table) > WORDS:
            self._table.clear()
        return b"".join(map(self._table.__getitem__, text.split(" ")))


class _Words(dict):
    """{word: its ids as bytes}, with the space before it; "" is a space before a space."""

    def __init__(self, tokenizer, code):
        super().__init__()
        self._encode, self._code = tokenizer.encode, code
        self._fixed = {"\n": self._bytes([tokenizer.line_end])}
        twice = tokenizer.encode(" ")  # the space, and the one that begins every line
        self._fixed[""] = self._bytes(twice[: len(twice) // 2])

    def _bytes(self, ids):
        return bytes(array(self._code, ids))

    def __missing__(self, word):
        found = self._fixed.get(word) or self._bytes(self._encode(word))
        if len(word) <= LONGEST_WORD:
            self[word] = found
        return found


class _CharEncoder(Encoder):
    def __init__(self, tokenizer):
        super().__init__(tokenizer)
        self._table = np.zeros(LAST_CODE + 1, self.dtype)  # 0 is padding: no character has it
        codes = code_points(tokenizer.characters)
        self._table[codes] = np.arange(len(codes)) + tokenizer.encode(tokenizer.characters[0])[0]

    def text(self, text):
        ids = self._table[code_points(text)]
        if not ids.all():
            self.tokenizer.encode(text)  # raises an error that names the character
        return ids

    def _line(self, line):
        return self.text(line).tobytes()


def code_points(text: str) -> np.ndarray:
    """Return the code point of each character, (characters,) uint32."""
    return np.frombuffer(text.encode("utf-32-le"), "<u4")


def _words_are_independent(tokenizer: Tokenizer) -> bool:
    """Return whether a line's ids are those of its words: byte pairs, nothing normalised."""
    model = _fields(tokenizer.to_bytes())
    trainer, normalizer = _fields(model.get(2, b"")), _fields(model.get(3, b""))
    plain = not normalizer.get(2) and normalizer.get(3, 1) and not normalizer.get(4, 1)
    whole = any(SPACE in piece[1:] for piece in tokenizer.pieces)
    return bool(trainer.get(3) == BYTE_PAIRS and plain and normalizer.get(5, 1) and not whole)


def _fields(data: bytes) -> dict[int, Any]:
    """Return {number: last value} of a protocol buffer's top fields: integers and bytes.

    Of a SentencePiece model 2 is TrainerSpec (3: model_type) and 3 NormalizerSpec (2:
    precompiled_charsmap, 3: add_dummy_prefix, 4: remove_extra_whitespaces, 5: escape_whitespaces).
    """
    found: dict[int, Any] = {}
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 0:
            found[key >> 3], at = _varint(data, at)
            continue
        size = {1: 8, 5: 4}.get(kind)
        if size is None:
            size, at = _varint(data, at)
        found[key >> 3], at = data[at : at + size], at + size
    return found


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
