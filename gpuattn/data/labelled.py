"""Texts with labels: a file of lines, and their packed batches."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gpuattn.data.batching import PackedLoader, PackedTexts, token_order
from gpuattn.data.rows import RowPairs, Rows
from gpuattn.data.text import decode_line, raw_lines
from gpuattn.data.tokenizer import PAD
from gpuattn.errors import DataError
from gpuattn.typing import Array, StrPath

COLUMNS = "a text, a tab, its label, and no line of titles"
HEADS = ("label", "labels", "class", "category", "target")  # titles of a column of labels
MOST_BYTES = 1 << 20  # of a line
SHOWN, SHOWN_CHARACTERS = 5, 40  # names of classes, and characters of a line, in an error


class Labelled(NamedTuple):
    """``texts``, the name of the class of each in ``labels``, and their ``lines``, from 1."""

    texts: list[str]
    labels: list[str]
    lines: list[int]

    def numbers(self, names: Sequence[str]) -> np.ndarray:
        """Return the labels as places in ``names``, int32 (texts,)."""
        places = {name: i for i, name in enumerate(names)}
        return np.array([places[label] for label in self.labels], np.int32)

    def some(self, rows: Sequence[int]) -> "Labelled":
        """Return those of these rows."""
        texts, labels, lines = ([values[i] for i in rows] for values in self)
        return Labelled(texts, labels, lines)  # type: ignore[arg-type]


def read_labelled(
    path: StrPath, *, names: Sequence[str] = (), digests: dict[str, str] | None = None
) -> Labelled:
    """Return the Labelled of a file, plain or ``.gz``, UTF-8: a line is a text, a tab, its label.

    Outer spaces are stripped, empty lines left out. ``names``: of the classes there may be; none:
    any. ``digests``: a dict that gets {path: SHA-256 of the text, unpacked}.
    Raises DataError for a missing, empty, damaged or non-UTF-8 file, for a line of another form,
    and for a label that is not among the ``names``; the message names file and line.
    """
    texts, labels, lines = [], [], []
    known = set(names)
    for number, raw in enumerate(raw_lines(path, MOST_BYTES, digests), 1):
        if raw is None:
            raise _fault(path, number, "", f"is longer than {MOST_BYTES:,} bytes")
        line = decode_line(path, number, raw).rstrip("\r\n")
        if not line.strip():
            continue
        text, *columns = (column.strip() for column in line.split("\t"))
        if len(columns) != 1:
            found = f"has {len(columns)} tabs" if columns else "has no tab"
            raise _fault(path, number, line, found)
        if not text or not columns[0]:
            raise _fault(path, number, line, f"has no {'label' if text else 'text'}")
        if known and columns[0] not in known:
            raise DataError(
                f"{path}, line {number}: the label {columns[0]!r} is unseen in training; accepted: "
                f"{some_of(names)}"
            )
        texts.append(text)
        labels.append(columns[0])
        lines.append(number)
    if not texts:
        raise DataError(f"{path} is empty; accepted: lines of {COLUMNS}")
    if labels[0].lower() in HEADS and labels[0] not in labels[1:]:
        raise _fault(path, lines[0], f"{texts[0]}\t{labels[0]}", "has titles of columns")
    return Labelled(texts, labels, lines)


def class_names(labels: Sequence[str]) -> tuple[str, ...]:
    """Return the distinct labels in order; that of numbers where all of them are."""
    found = sorted(set(labels))
    if all(name.isdecimal() for name in found):
        found.sort(key=int)
    return tuple(found)


def some_of(names: Sequence[str]) -> str:
    """Return names for an error: the first ones."""
    more = f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else ""
    return ", ".join(map(repr, names[:SHOWN])) + more


def _fault(path, number, line, found):
    shown = line if len(line) <= SHOWN_CHARACTERS else f"{line[:SHOWN_CHARACTERS]}..."
    of = f": {shown!r}" if shown else ""
    return DataError(f"{path}, line {number}, {found}{of}; accepted: lines of {COLUMNS}")


# ---- batches ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LabelBatch(PackedTexts):
    """B texts, of which text i has ``labels[i]``, the number of its class.

    ``rows`` (B,): where each text begins. ``sentences`` (B,): indices into the loader's texts.
    ``all_tokens``, ``target_tokens``: tokens, and texts, without those that
    ``fixed_shape.fixed_texts`` adds, whose labels are ``IGNORED``.
    """

    rows: Array
    labels: Array
    sentences: np.ndarray
    all_tokens: int
    target_tokens: int


class LabelLoader(PackedLoader):
    """Epochs of LabelBatches: texts of near-equal length together, in a random order of batches.

    ``ids``: the token ids of each text, with the marks around it. ``labels`` (texts,): numbers of
    classes. ``tokens``, ``seed``, ``world``: as of a PackedLoader, whose errors it has.
    """

    def __init__(
        self, ids: Sequence[Sequence[int]], labels: np.ndarray, tokens: int, seed: int,
        world: int = 1,
    ) -> None:  # fmt: skip
        ends = np.cumsum([len(text) for text in ids])
        texts = Rows(np.concatenate([np.asarray(text, np.int32) for text in ids]), ends)
        self.labels = np.asarray(labels, np.int32)
        pairs = RowPairs(texts, Rows(self.labels, np.arange(1, len(ids) + 1)))
        super().__init__(pairs, tokens, seed, world=world)

    def _batch(self, sentences):
        tokens, positions, bounds = self.pairs.source.gather(sentences, PAD, False)
        return LabelBatch(
            tokens, positions, bounds, int(np.diff(bounds).max()), token_order(tokens),
            bounds[:-1], self.labels[sentences], sentences, len(tokens), len(sentences),
        )  # fmt: skip
