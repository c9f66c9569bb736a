"""The tokenizer of Marian: a SentencePiece model for each language, and one vocabulary."""

import copy
import json
from collections.abc import Iterable
from typing import Any

from gpuattn.data.tokenizer import Tokenizer
from gpuattn.errors import DataError

SOURCE, TARGET, VOCAB = "source.spm", "target.spm", "vocab.json"
END, UNKNOWN, PADDING = "</s>", "<unk>", "<pad>"
SPACE = "\u2581"  # begins a piece that begins a word


class PairTokenizer:
    """Pieces by a SentencePiece model of each language; their ids are those of one vocab.json.

    It encodes sources; ``target`` is the one that encodes targets. ``files``: {name: bytes} of the
    folder's files, to save them as they were. ``bos``: the token that the decoder begins with;
    None: padding. A source that begins with the code of a language, as in ``>>fra<< How are you?``,
    has it as its first token. Punctuation stays as it is: transformers normalises it where
    sacremoses is installed.
    Raises DataError for files that are something else.
    """

    units = "subwords"

    def __init__(self, files: dict[str, bytes], bos: int | None = None) -> None:
        self.files = files
        self._ids = _vocabulary(files[VOCAB])
        self._pieces = {i: piece for piece, i in self._ids.items()}
        self._own, self._writer = (_processor(files[name], name) for name in (SOURCE, TARGET))
        self._unknown = self._ids[UNKNOWN]
        marks = (self._ids.get(mark) for mark in (END, UNKNOWN, PADDING))
        self.specials = tuple(sorted(mark for mark in marks if mark is not None))
        self.eos = self._ids[END]
        self.pad = self._ids.get(PADDING, self.eos)
        self.bos = self.pad if bos is None else bos
        self.target = copy.copy(self)
        self.target._own, self.target.target = self._writer, self.target

    def __len__(self):
        return max(self._pieces) + 1

    def encode(self, line: str) -> list[int]:
        """Return the ids of one line, without the mark at its end."""
        code, end, rest = line.partition("<<")
        codes, line = ([code + end], rest) if end and code.startswith(">>") else ([], line)
        found = [*codes, *self._own.encode(line, out_type=str)]
        return [self._ids.get(piece, self._unknown) for piece in found]

    def encode_lines(self, lines: Iterable[str]) -> list[list[int]]:
        """Return the ids of each line."""
        return [self.encode(line) for line in lines]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text that ids of either side spell; marks among them are dropped."""
        pieces = [self.piece(i) for i in ids if i not in self.specials]
        return self._writer.decode_pieces(pieces).replace(SPACE, " ").strip()

    encode_text, decode_text = encode, decode

    def piece(self, i: int) -> str:
        """Return the name of an id, for people to read."""
        return self._pieces.get(int(i), UNKNOWN)


def files_as_pair(tokenizer: Tokenizer) -> dict[str, bytes]:
    """Return the files of a PairTokenizer with the pieces and ids of a run's tokenizer."""
    model, ids = tokenizer.to_bytes(), {piece: i for i, piece in enumerate(tokenizer.pieces)}
    vocabulary = json.dumps(ids, ensure_ascii=False, indent=0).encode()
    return {SOURCE: model, TARGET: model, VOCAB: vocabulary}


def _vocabulary(data):
    """Return {piece: id}."""
    try:
        found = json.loads(data)
    except ValueError as error:
        raise DataError(f"{VOCAB} is no vocabulary: {error}") from error
    ids = list(found.values()) if isinstance(found, dict) else [None]
    if any(type(i) is not int or i < 0 for i in ids) or len(set(ids)) < len(ids):
        raise DataError(f"{VOCAB} is no vocabulary; accepted: an object of pieces and their ids")
    missing = [mark for mark in (END, UNKNOWN) if mark not in found]
    if missing:
        raise DataError(f"{VOCAB} has no {' and no '.join(missing)}")
    return found


def _processor(data: bytes, name: str) -> Any:
    from sentencepiece import SentencePieceProcessor

    try:
        return SentencePieceProcessor(model_proto=data)
    except RuntimeError as error:
        raise DataError(f"{name}: {len(data):,} bytes that are no SentencePiece model") from error
