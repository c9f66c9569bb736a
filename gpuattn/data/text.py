"""Text files of the user: parallel corpora, one sentence a line, and plain text."""

import gzip
import hashlib
import shlex
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gpuattn.data.generated import Pair
from gpuattn.errors import ConfigError, DataError
from gpuattn.typing import StrPath

MAX_LENGTH = 2000
BYTES_PER_CHARACTER = 4
ON_LONG = ("skip", "error")


PIECE = 1000  # characters: SentencePiece learns nothing from lines much longer


def pieces(text: str) -> Iterator[str]:
    """Yield the lines of a text, long ones in parts."""
    for line in text.split("\n"):
        yield from (line[i : i + PIECE] for i in range(0, len(line), PIECE))


class Corpus(list):
    """A list of ``Pair``, and the line numbers of the pairs that were left out.

    ``lines``: the line number, from 1, of each pair. ``empty``, ``too_long``: the numbers of the
    lines that were left out because a side has no text, or more than the limit.
    """

    def __init__(
        self,
        pairs: Iterable[Any],
        lines: Sequence[int],
        empty: Sequence[int],
        too_long: Sequence[int],
    ) -> None:
        super().__init__(pairs)
        self.lines = lines
        self.empty = empty
        self.too_long = too_long


def read_parallel(
    source_path: StrPath,
    target_path: StrPath,
    *,
    max_length: int | None = MAX_LENGTH,
    on_long: str = "skip",
    digests: dict[str, str] | None = None,
) -> Any:
    """Read two files, line i of one being the translation of line i of the other.

    Plain or ``.gz``, UTF-8. Outer spaces are stripped, pairs with an empty side left out.
    ``max_length``: the most characters of a line; pairs with a longer one are left out, or with
    ``on_long="error"`` are an error. No longer line is ever held in memory.
    ``digests``: a dict that gets {path: SHA-256 of the text, unpacked} of both.
    Returns a ``Corpus`` of pairs whose kind is ``"text"``.
    Raises DataError for a missing, empty, damaged or non-UTF-8 file, and for files of different
    length; the message names file and line.
    """
    if on_long not in ON_LONG:
        raise ConfigError(f"read_parallel: on_long is {on_long!r}; accepted: {', '.join(ON_LONG)}")
    source = _read_lines(source_path, max_length, on_long, digests)
    target = _read_lines(target_path, max_length, on_long, digests)
    if len(source) != len(target):
        raise DataError(_mismatch(source_path, source, target_path, target))
    pairs, lines, empty, too_long = [], [], [], []
    for number, (one, other) in enumerate(zip(source, target, strict=True), 1):
        if one is None or other is None:
            too_long.append(number)
        elif not one or not other:
            empty.append(number)
        else:
            pairs.append(Pair(one, other, "text"))
            lines.append(number)
    if not pairs:
        raise DataError(
            f"{source_path} and {target_path} have no usable pair: {len(empty)} with an empty side,"
            f" {len(too_long)} longer than {max_length} characters"
        )
    return Corpus(pairs, lines, empty, too_long)


def encode_pairs(
    pairs: Sequence[Any], tokenizer: Any, *, max_tokens: int, on_long: str = "skip"
) -> tuple[list[tuple[list[int], list[int]]], list[int]]:
    """Return (ids, kept): the (source ids, target ids) of pairs, and their indices in ``pairs``.

    Pairs with more than ``max_tokens`` tokens on a side, the end mark not counted, are left out,
    or with ``on_long="error"`` are a DataError that names the line. Raises DataError when none is
    left.
    """
    if on_long not in ON_LONG:
        raise ConfigError(f"encode_pairs: on_long is {on_long!r}; accepted: {', '.join(ON_LONG)}")
    sources = tokenizer.encode_lines([pair.source for pair in pairs])
    targets = tokenizer.target.encode_lines([pair.target for pair in pairs])
    ids, kept = [], []
    for i, (source, target) in enumerate(zip(sources, targets, strict=True)):
        longest = max(len(source), len(target))
        if longest <= max_tokens:
            ids.append((source, target))
            kept.append(i)
        elif on_long == "error":
            line = pairs.lines[i] if isinstance(pairs, Corpus) else i + 1
            raise DataError(
                f"line {line} is {longest} tokens long; the limit is {max_tokens}: "
                f"{pairs[i].source[:60]!r}. Shorten it, raise the limit, or skip long lines"
            )
    if not ids:
        raise DataError(f"each of the {len(pairs)} pairs is longer than {max_tokens} tokens")
    return ids, kept


def read_language_model(path: StrPath, digests: dict[str, str] | None = None) -> str:
    """Return the text of a file, plain or ``.gz``, as one string, each line end as ``\\n``.

    ``digests``: a dict that gets {path: SHA-256 of the text, unpacked}.
    Raises DataError for a missing, empty, damaged or non-UTF-8 file.
    """
    parts = []
    for number, raw in enumerate(raw_lines(path, -1, digests), 1):
        parts.append(decode_line(path, number, raw))
    text = one_line_end("".join(parts))
    if not text.strip():
        raise DataError(f"{path} is empty; accepted: a text file")
    return text


def one_line_end(text: str) -> str:
    """Return a text with ``\\n`` for each ``\\r\\n``, the line end of Windows."""
    return text.replace("\r\n", "\n")


def read_raw_lines(path: StrPath) -> list[bytes]:
    """Return the lines of a file, plain or ``.gz``, as bytes. DataError if it cannot be read."""
    return list(raw_lines(path, -1))


def read_raw_pairs(source_path: StrPath, target_path: StrPath) -> list[tuple[bytes, bytes]]:
    """Return the lines of two files, line by line, as bytes.

    Raises DataError for a file that cannot be read, and for files of different length.
    """
    source, target = read_raw_lines(source_path), read_raw_lines(target_path)
    if len(source) != len(target):
        one, other = ([raw.decode(errors="replace").strip() for raw in side]
                      for side in (source, target))  # fmt: skip
        raise DataError(_mismatch(source_path, one, target_path, other))
    return list(zip(source, target, strict=True))


def _read_lines(path, max_length, on_long, digests):
    """Return the stripped lines; None stands for one of more than ``max_length`` characters."""
    lines = []
    limit = BYTES_PER_CHARACTER * max_length + 2
    for number, raw in enumerate(raw_lines(path, limit, digests), 1):
        line = None if raw is None else decode_line(path, number, raw).strip()
        if line is None or len(line) > max_length:
            if on_long == "error":
                raise DataError(
                    f"{path}, line {number}, is longer than {max_length} characters. "
                    "Shorten it, raise the limit, or skip long lines"
                )
            line = None
        lines.append(line)
    if not any(line is None or line for line in lines):
        raise DataError(f"{path} is empty; accepted: a text file, one sentence a line")
    return lines


def raw_lines(path: StrPath, limit: int, digests: dict[str, str] | None = None) -> Iterator[Any]:
    """Yield each line's bytes, or None for one of ``limit`` bytes or more (-1: no limit).

    ``digests`` gets the SHA-256 of all bytes at the end.
    """
    found = hashlib.sha256()
    try:
        with gzip.open(path) if str(path).endswith(".gz") else Path(path).open("rb") as file:
            while raw := file.readline(limit):
                found.update(raw)
                if raw.endswith(b"\n") or len(raw) != limit:
                    yield raw
                    continue
                while rest := file.readline(limit):
                    found.update(rest)
                    if rest.endswith(b"\n"):
                        break
                yield None
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"cannot read {path}: {reason}") from error
    if digests is not None:
        digests[str(path)] = found.hexdigest()


def decode_line(path: StrPath, number: int, raw: bytes) -> str:
    """Return the text of line ``number``, from 1. DataError names file, line and byte."""
    try:
        return raw.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        place = f"{path}, line {number}, byte {error.start + 1}"
        raise DataError(
            f"{place}, is not UTF-8 (0x{raw[error.start]:02x}). "
            f"Convert the file: iconv -f ISO-8859-1 -t UTF-8 {shlex.quote(str(path))}"
        ) from error


def _mismatch(source_path, source, target_path, target):
    """Return a sentence on the lengths of two files, and where one probably has an extra line.

    Translations have similar lengths. Of all places for the gap, the likeliest one makes the
    lengths of the lines before and, shifted by the difference, after it agree best; the last of
    equally likely ones, because files are cut off more often than they lose their beginning.
    """
    counts = (
        f"{source_path} has {len(source)} lines, {target_path} has {len(target)}; "
        "accepted: one translation for each line"
    )
    longer, shorter, path = source, target, source_path
    if len(source) < len(target):
        longer, shorter, path = target, source, target_path
    sizes = [
        np.log1p([len(line) if line is not None else MAX_LENGTH for line in lines])
        for lines in (longer, shorter)
    ]
    extra = len(longer) - len(shorter)
    straight = np.abs(sizes[0][:-extra] - sizes[1])
    shifted = np.abs(sizes[0][extra:] - sizes[1])
    before = np.concatenate([[0], np.cumsum(straight)])
    after = np.concatenate([np.cumsum(shifted[::-1])[::-1], [0]])
    gap = len(shorter) - int(np.argmin((before + after)[::-1]))
    text = (longer[gap] or "")[:60]
    what = f"{text!r}" if text else "an empty line" if longer[gap] == "" else "a very long line"
    return f"{counts}. The first line without a partner is probably {path}, line {gap + 1}: {what}"
