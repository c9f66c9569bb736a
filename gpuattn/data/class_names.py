"""The names of classes: what a classifier's run keeps in the place of, or with, a tokenizer."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpuattn.errors import DataError
from gpuattn.typing import StrPath


class ClassNames:
    """Names by number. ``units``: what is numbered."""

    units = "classes"

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)

    def __len__(self) -> int:
        return len(self.names)

    def piece(self, i: int) -> str:
        """Return the name of a class."""
        return self.names[i]

    def to_bytes(self) -> bytes:
        """Return the names as bytes."""
        return json.dumps(self.names, ensure_ascii=False).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "ClassNames":
        """Return what ``to_bytes`` wrote. DataError for anything else."""
        try:
            names = json.loads(data)
        except ValueError:
            names = None
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise DataError("these are no names of classes: a JSON list of strings is accepted")
        return cls(names)

    def save(self, path: StrPath) -> None:
        """Write ``to_bytes()`` to a file."""
        Path(path).write_bytes(self.to_bytes())


class LabelledTokenizer:
    """The ``tokenizer`` of texts, whose tokens ``len`` counts, and the ``names`` of their classes.

    ``units``: of the tokenizer.
    """

    def __init__(self, tokenizer: Any, names: Sequence[str]) -> None:
        self.tokenizer, self.names, self.units = tokenizer, tuple(names), tokenizer.units

    def __len__(self) -> int:
        return len(self.tokenizer)

    def to_bytes(self) -> bytes:
        """Return names and tokenizer as bytes: see ``data.tokenizer.tokenizer_from_bytes``."""
        return ClassNames(self.names).to_bytes() + b"\n" + self.tokenizer.to_bytes()

    def save(self, path: StrPath) -> None:
        """Write ``to_bytes()`` to a file."""
        Path(path).write_bytes(self.to_bytes())

    def encode_marked(self, lines: Sequence[str]) -> list[list[int]]:
        """Return the ids of each line, with the marks that the model expects around it."""
        return self.tokenizer.encode_marked(lines)
