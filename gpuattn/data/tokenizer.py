"""Text to token ids and back, without loss: SentencePiece for translation, characters for
language models.

SentencePiece: Kudo and Richardson, EMNLP 2018. Byte-pair encoding: Sennrich et al., ACL 2016.
"""

import abc
import io
import json
import re
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import Any, Self

import numpy as np

from gpuattn.data.class_names import ClassNames, LabelledTokenizer
from gpuattn.errors import ConfigError, DataError
from gpuattn.typing import StrPath

PAD, BOS, EOS, UNK = range(4)
SPECIALS = 4
INCOMPLETE = "\ufffd"  # stands for bytes that are no character
MAX_TRAINING_LINES = 1_000_000


class BaseTokenizer(abc.ABC):
    """What the tokenizers share: ids 0 to 3 are padding, begin, end and unknown.

    ``units``: what the ids stand for. ``specials``: those that are no text. ``marks``: those
    around a text that an encoder reads. ``mask`` hides a token from it: the id of the unknown,
    which no text of these tokenizers has, so that vocabularies and stores need none more.
    """

    pad, bos, eos, unk = PAD, BOS, EOS, UNK
    marks, mask = (BOS, EOS), UNK
    specials = range(SPECIALS)
    units: str

    @property
    def target(self) -> Self:
        """The tokenizer of translations: the same for both languages."""
        return self

    @property
    @abc.abstractmethod
    def line_end(self) -> int:
        """The id that ends a line of a text."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """Return how many ids there are."""

    @classmethod
    @abc.abstractmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Return the tokenizer that ``to_bytes`` wrote. DataError for anything else."""

    @abc.abstractmethod
    def to_bytes(self) -> bytes:
        """Return the tokenizer as bytes."""

    @abc.abstractmethod
    def encode(self, line: str) -> list[int]:
        """Return the ids of one line, without ``bos`` and ``eos``."""

    @abc.abstractmethod
    def piece(self, i: int) -> str:
        """Return the name of an id, for people to read."""

    @abc.abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Return the text that ``ids`` spell; specials among them are dropped."""

    def save(self, path: StrPath) -> None:
        """Write ``to_bytes()`` to a file."""
        Path(path).write_bytes(self.to_bytes())

    @classmethod
    def load(cls, path: StrPath) -> Self:
        """Read what ``save`` wrote. DataError for a file that is something else."""
        return cls.from_bytes(Path(path).read_bytes())

    @abc.abstractmethod
    def encode_text(self, text: str) -> list[int]:
        """Return the ids of lines, with ``line_end`` between them."""

    @abc.abstractmethod
    def decode_text(self, ids: Iterable[int]) -> str:
        """Return the lines that ``ids`` spell: what ``encode_text`` was given."""

    def encode_lines(self, lines: Iterable[str]) -> list[list[int]]:
        """Return the ids of each line."""
        return [self.encode(line) for line in lines]

    def encode_marked(self, lines: Iterable[str]) -> list[list[int]]:
        """Return the ids of each line between ``marks``."""
        begin, end = self.marks
        return [[begin, *ids, end] for ids in self.encode_lines(lines)]


class Tokenizer(BaseTokenizer):
    """Subwords by SentencePiece.

    Nothing is normalised, and what is not in the vocabulary is spelled in bytes: decoding returns
    exactly the line, and ``<unk>`` is never produced.
    """

    units = "subwords"

    def __init__(self, model: bytes) -> None:
        """``model``: the bytes of a SentencePiece model. Raises DataError for anything else."""
        from sentencepiece import SentencePieceProcessor

        self._model = bytes(model)
        try:
            self._processor = SentencePieceProcessor(model_proto=self._model)
            ids = [
                getattr(self._processor, f"{name}_id")() for name in ("pad", "bos", "eos", "unk")
            ]
        except RuntimeError as error:
            raise DataError(
                f"Tokenizer: {len(self._model)} bytes that are no SentencePiece model"
            ) from error
        if ids != [PAD, BOS, EOS, UNK]:
            raise DataError(
                f"Tokenizer: pad, bos, eos, unk have the ids {ids}; accepted: [0, 1, 2, 3], "
                "as Tokenizer.train gives them"
            )

    @classmethod
    def train(cls, lines: Iterable[str], vocab_size: int, seed: int = 0) -> Self:
        """Learn a byte-pair encoding from ``lines``: the same one for the same arguments.

        ``vocab_size``: the most pieces to have, 4 specials and 256 bytes among them; a small
        corpus gets fewer. ``seed`` draws the sample when there are over a million lines.
        Raises DataError without text, ConfigError when ``vocab_size`` cannot hold the characters.
        """
        lines = [line for line in lines if line]
        if not lines:
            raise DataError("Tokenizer.train: lines has no text; accepted: at least one line")
        if len(lines) > MAX_TRAINING_LINES:
            rng = np.random.Generator(np.random.Philox(seed))
            chosen = rng.choice(len(lines), MAX_TRAINING_LINES, replace=False)
            lines = [lines[i] for i in np.sort(chosen)]
        characters = len(set().union(*lines) | {" "})
        least = SPECIALS + 256 + characters
        if vocab_size < least:
            raise ConfigError(
                f"Tokenizer.train: vocab_size is {vocab_size}; this text needs {least} or more "
                f"(4 specials, 256 bytes, {characters} characters)"
            )
        while True:
            try:
                return cls(_train_sentencepiece(lines, vocab_size))
            except RuntimeError as error:
                # "Vocabulary size too high (800). Please set it to a value <= 301."
                limit = re.search(r"value <= (\d+)", str(error))
                if not limit or int(limit[1]) >= vocab_size:
                    raise
                vocab_size = int(limit[1])

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        return cls(data)

    def to_bytes(self) -> bytes:
        """Return the SentencePiece model."""
        return self._model

    def __len__(self):
        return self._processor.get_piece_size()

    @property
    def pieces(self) -> list[str]:
        """The vocabulary, by id; a piece that begins a word begins with U+2581."""
        return [self.piece(i) for i in range(len(self))]

    def piece(self, i: int) -> str:
        return self._processor.id_to_piece(int(i))

    def encode(self, line: str) -> list[int]:
        """Return the ids of one line, without ``bos`` and ``eos``."""
        return self._processor.encode(line)

    def encode_lines(self, lines: Iterable[str]) -> list[list[int]]:
        """Return the ids of each line, faster than one by one."""
        return self._processor.encode(list(lines))

    def decode(self, ids: Iterable[int]) -> str:
        """Return the line that ``ids`` spell; specials among them are dropped."""
        return self._processor.decode([int(i) for i in ids if i >= SPECIALS])

    @property
    def line_end(self) -> int:
        return self._processor.piece_to_id("<0x0A>")

    def encode_text(self, text: str) -> list[int]:
        """Return the ids of lines, with ``line_end`` between them."""
        first, *others = self.encode_lines(text.split("\n"))
        return [*first, *chain.from_iterable((self.line_end, *line) for line in others)]

    def decode_text(self, ids: Iterable[int]) -> str:
        """Return the lines that ``ids`` spell: what ``encode_text`` was given."""
        end = self.line_end
        lines: list[list[int]] = [[]]
        for i in ids:
            if i == end:
                lines.append([])
            else:
                lines[-1].append(i)
        return "\n".join(map(self.decode, lines))


def _train_sentencepiece(lines, vocab_size):
    from sentencepiece import SentencePieceTrainer

    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        vocab_size=vocab_size,
        model_type="bpe",
        character_coverage=1.0,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        byte_fallback=True,
        split_digits=True,
        num_threads=1,
        pad_id=PAD,
        bos_id=BOS,
        eos_id=EOS,
        unk_id=UNK,
        minloglevel=2,
    )
    return model.getvalue()


class CharTokenizer(BaseTokenizer):
    """One id for each character of the training text, in code point order, after the specials."""

    units = "characters and marks"

    def __init__(self, characters: Iterable[str]) -> None:
        """``characters``: distinct characters; the first one gets the id 4."""
        self.characters = "".join(characters)
        self._ids = {character: i for i, character in enumerate(self.characters, SPECIALS)}

    @classmethod
    def train(cls, lines: Iterable[str]) -> Self:
        """Learn the characters of ``lines``: any strings, or one long one. DataError if empty."""
        characters = sorted(set().union(*lines))
        if not characters:
            raise DataError("CharTokenizer.train: lines has no text; accepted: one character")
        return cls(characters)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        try:
            return cls(json.loads(data)["characters"])
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"CharTokenizer: {len(data)} bytes that are no such tokenizer"
            ) from error

    def to_bytes(self) -> bytes:
        """Return a small JSON text."""
        return json.dumps({"characters": self.characters}).encode()

    def __len__(self):
        return SPECIALS + len(self.characters)

    def piece(self, i: int) -> str:
        return self.characters[i - SPECIALS] if i >= SPECIALS else ""

    def encode(self, line: str) -> list[int]:
        """Return the ids of a text. DataError names a character that training has not seen."""
        try:
            return [self._ids[character] for character in line]
        except KeyError as error:
            unknown = error.args[0]
            raise DataError(
                f"CharTokenizer.encode: character {unknown!r} at {line.index(unknown)} was not in "
                f"the training text; accepted: {self.characters!r}"
            ) from None

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text that ``ids`` spell; specials among them are dropped."""
        return "".join(self.characters[i - SPECIALS] for i in ids if i >= SPECIALS)

    @property
    def line_end(self) -> int:
        return self._ids.get("\n", SPECIALS)  # a text of one line has none: its first character

    def encode_text(self, text: str) -> list[int]:
        return self.encode(text)

    def decode_text(self, ids: Iterable[int]) -> str:
        return self.decode(ids)


def tokenizer_from_bytes(data: bytes) -> Any:
    """Return what ``to_bytes`` of a tokenizer, of ClassNames or of both wrote. DataError if it is
    none."""
    if data[:1] == b"[":
        names, _, rest = data.partition(b"\n")
        classes = ClassNames.from_bytes(names)
        return LabelledTokenizer(tokenizer_from_bytes(rest), classes.names) if rest else classes
    return (CharTokenizer if data[:1] == b"{" else Tokenizer).from_bytes(data)


class TextStream:
    """Spells tokens of a text as they come: the same text as ``decode_text`` in the end.

    ``say``: called with each next part. Bytes of a character wait until it is complete.
    """

    def __init__(self, tokenizer: BaseTokenizer, say: Callable[[str], None]) -> None:
        self._tokenizer, self._say = tokenizer, say
        self._line: list[int] = []  # tokens since the last line end
        self._said = 0  # characters of that line

    def add(self, tokens: Iterable[int]) -> None:
        """Continue the text."""
        for token in tokens:
            self._line.append(token)
            ends = token == self._tokenizer.line_end
            self._speak("" if ends else INCOMPLETE)
            if ends:
                self._line, self._said = [], 0

    def close(self) -> None:
        """Say what has waited, as no more tokens come."""
        self._speak("")

    def _speak(self, waiting):
        """Say what is new, without characters of ``waiting`` at the end."""
        text = self._tokenizer.decode_text(self._line).rstrip(waiting)
        if len(text) > self._said:
            self._say(text[self._said :])
            self._said = len(text)
