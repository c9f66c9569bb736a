"""Tokenizers of Hugging Face folders, by the library tokenizers; Marian's by SentencePiece."""

import json
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

from gpuattn.data.class_names import LabelledTokenizer
from gpuattn.data.tokenizer import BaseTokenizer, tokenizer_from_bytes
from gpuattn.errors import DataError, PretrainedError, UnsupportedError
from gpuattn.pretrained.files import CONFIG
from gpuattn.pretrained.pieces import SOURCE, TARGET, VOCAB, PairTokenizer
from gpuattn.typing import StrPath

JSON, OWN = "tokenizer.json", "tokenizer.model"  # OWN: as runs have it, from ``gpuattn export``
PAIR = (SOURCE, TARGET, VOCAB)
MASKS = ("[MASK]", "<mask>")  # the usual names
BESIDE = ("tokenizer_config.json", "special_tokens_map.json")  # transformers reads them


class PretrainedTokenizer:
    """A tokenizer.json, without the padding and the cutting that it may ask for.

    ``files``: {name: bytes} of the folder's files, to save them as they were. ``specials``: the ids
    of marks, which are no text. ``marks``: those that it puts around a line. ``mask``: the id that
    hides a token, or None. Raises ValueError for a file that the library does not take.
    """

    units = "tokens"

    def __init__(self, files: dict[str, bytes]) -> None:
        tokenizer = _library().Tokenizer
        self.files = files
        try:
            self._tokenizer = tokenizer.from_str(files[JSON].decode())
        except Exception as error:  # noqa: BLE001 the library raises no narrower class
            raise ValueError(f"{JSON} is no tokenizer: {error}") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        added = self._tokenizer.get_added_tokens_decoder()
        self.specials = tuple(sorted(i for i, token in added.items() if token.special))
        self.line_end = self._begin()
        self.marks = tuple(self.encode(""))
        usual = (i for i in self.specials if self.piece(i) in MASKS)
        named = self._token("mask_token")
        self.mask = next(usual, None) if named is None else named

    def __len__(self):
        return self._size

    def encode(self, line: str) -> list[int]:
        """Return the ids of a line, with the marks that the model expects around it."""
        return self._tokenizer.encode(line).ids

    def encode_lines(self, lines: Iterable[str]) -> list[list[int]]:
        """Return the ids of each line, faster than one by one."""
        return [found.ids for found in self._tokenizer.encode_batch(list(lines))]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text that ``ids`` spell; marks among them are dropped."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)

    encode_marked, decode_text = encode_lines, decode

    def encode_text(self, text: str) -> list[int]:
        """Return the ids of a text: where a mark ends a line, those of each line, else as one."""
        if len(self.marks) < 2:
            return self.encode(text)
        return list(chain.from_iterable(self.encode_lines(text.split("\n"))))

    def piece(self, i: int) -> str:
        """Return the name of an id, for people to read."""
        return self._tokenizer.id_to_token(i) or ""

    def _begin(self):
        """Return the id that a text begins with where nothing is given: the mark, or a line end."""
        found = self._token("bos_token")
        if found is not None:
            return found
        return [*self.specials, *self._tokenizer.encode("\n", add_special_tokens=False).ids, 0][0]

    def _token(self, key):
        """Return the id of a token that tokenizer_config.json names, or None."""
        mark = _object(self.files.get(BESIDE[0], b"{}")).get(key)
        mark = mark.get("content") if isinstance(mark, dict) else mark
        return self._tokenizer.token_to_id(mark) if isinstance(mark, str) else None


def load_tokenizer(folder: StrPath) -> Any:
    """Return the tokenizer of a local folder; the public function is ``gpuattn.load_tokenizer``."""
    folder = Path(folder)
    beside = [name for name in BESIDE if (folder / name).exists()]
    try:
        if (folder / SOURCE).exists():
            return PairTokenizer(_read(folder, (*PAIR, *beside)), _decoder_start(folder))
        if (folder / JSON).exists():
            return PretrainedTokenizer(_read(folder, (JSON, *beside)))
        if (folder / OWN).exists():
            return tokenizer_from_bytes((folder / OWN).read_bytes())
    except OSError as error:
        raise PretrainedError(folder, [f"{error.filename}: {error.strerror}"]) from error
    except (ValueError, DataError) as error:
        if isinstance(error, UnsupportedError):
            raise
        raise PretrainedError(folder, [str(error)]) from error
    raise PretrainedError(
        folder,
        [f"{JSON} is missing. transformers writes it: "
         "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"],
    )  # fmt: skip


def files_of(
    tokenizer: BaseTokenizer | PretrainedTokenizer | PairTokenizer | LabelledTokenizer,
) -> dict[str, bytes]:
    """Return {name: bytes} of the files that ``load_tokenizer`` reads."""
    if isinstance(tokenizer, LabelledTokenizer):
        tokenizer = tokenizer.tokenizer
    if isinstance(tokenizer, PretrainedTokenizer | PairTokenizer):
        return tokenizer.files
    return {OWN: tokenizer.to_bytes()}


def _read(folder, names):
    return {name: (folder / name).read_bytes() for name in names}


def _decoder_start(folder):
    """Return the token of config.json that a decoder begins with, or None."""
    path = folder / CONFIG
    found = _object(path.read_bytes() if path.is_file() else b"{}").get("decoder_start_token_id")
    return found if type(found) is int else None


def _library():
    try:
        import tokenizers
    except ImportError as error:
        raise UnsupportedError(
            "load_tokenizer: the library tokenizers is not installed, which reads tokenizer.json. "
            "Run: pip install 'gpuattn[pretrained]'"
        ) from error
    return tokenizers


def _object(data):
    try:
        found = json.loads(data)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
