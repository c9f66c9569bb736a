"""Where text comes from: files, folders, globs and standard input, plain or packed.

Text is UTF-8 of any size and is read in chunks of whole lines, so that memory stays bounded; a line
of more than ``LONGEST_LINE`` bytes is refused. Chunks of the same bytes are always the same.
"""

import contextlib
import glob
import gzip
import importlib
import itertools
import json
import lzma
import os
import sys
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from gpuattn.errors import ConfigError, DataError
from gpuattn.typing import StrPath

STANDARD = "-"  # standard input
BLOCK = 1 << 20  # bytes that are read at a time
LONGEST_LINE = 1 << 20
LONGEST_JSON_LINE = 32 << 20  # a document; the limit of its lines is LONGEST_LINE
PACKED_PIECE = 4 << 10  # zstandard unpacks a piece in one go, whatever comes out
JSON_SUFFIXES = (".jsonl", ".ndjson")
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Source:
    """A file. ``group``: of which argument, for ``--mix``. ``field``: of JSON lines and Parquet."""

    path: str
    group: str
    field: str | None = None

    @property
    def is_parquet(self) -> bool:
        """Whether it is a Parquet file, whose rows are read as JSON lines."""
        return self.path.endswith(".parquet")

    @property
    def is_rows(self) -> bool:
        """Whether each line is a document in JSON."""
        name = self.path
        for suffix in (".gz", ".xz", ".zst"):
            name = name.removesuffix(suffix)
        return self.is_parquet or self.field is not None or name.endswith(JSON_SUFFIXES)

    @property
    def is_plain(self) -> bool:
        """Whether the file's bytes are the text."""
        return self.path != STANDARD and not self.path.endswith((".gz", ".xz", ".zst", ".parquet"))

    def stat(self) -> tuple[int, int]:
        """Return (bytes, time of change in ns) of the file as it lies on the disk."""
        if self.path == STANDARD:
            return 0, 0
        try:
            found = os.stat(self.path)
        except OSError as error:
            raise self.unreadable(error) from None
        return found.st_size, found.st_mtime_ns

    def unreadable(self, error: Any) -> DataError:
        """Return the error of a file that cannot be read."""
        return DataError(f"cannot read {self.path}: {getattr(error, 'strerror', None) or error}")


def find_sources(arguments: Iterable[StrPath], field: str | None = None) -> list[Source]:
    """Return the files of arguments: files, folders (all files in them), globs, ``-``.

    Names that begin with a dot are left out. Sorted by name within an argument. Raises DataError
    for one that names no file.
    """
    found = []
    for argument in map(str, arguments):
        path = Path(argument)
        if path.is_dir():
            files = sorted(str(p) for p in path.rglob("[!.]*") if p.is_file())
        elif argument != STANDARD and glob.has_magic(argument) and not path.exists():
            files = sorted(p for p in glob.glob(argument, recursive=True) if os.path.isfile(p))
        else:
            files = [argument]
        if not files:
            raise DataError(f"{argument} has no files; accepted: a file, a folder, a glob or -")
        group = path.parent.name if glob.has_magic(path.name) else path.name.split(".")[0]
        found += [Source(file, group or argument, field) for file in files]
    again = [path for path, n in _counts(source.path for source in found) if n > 1]
    if again:
        raise ConfigError(f"{again[0]} is given twice; accepted: each file once")
    return found


def _counts(names):
    return [(name, len(list(same))) for name, same in itertools.groupby(sorted(names))]


class Reader:
    """Reads one source from its beginning. ``consumed``: bytes of the file that were read.

    ``kept``: blocks of standard input that were read before, for a sample.
    """

    def __init__(self, source: Source, kept: Iterable[bytes] = ()) -> None:
        self.source, self._kept = source, kept
        self._file: BinaryIO | None = None
        self._size = 0

    @property
    def consumed(self) -> int:
        try:
            return self._file.tell() if self._file else self._size
        except (OSError, ValueError):  # a pipe, or closed
            return self._size

    def chunks(self, any_cut: bool = False) -> Iterator[bytes]:
        """Yield about ``BLOCK`` bytes of whole lines; with ``any_cut`` of whole characters.

        Raises DataError that names the file for what cannot be read, and for a file that changes
        meanwhile.
        """
        before = self.source.stat()
        blocks = self._unchanged(_without_mark(self.blocks()), before)
        return _cut_anywhere(blocks) if any_cut else self._whole_lines(blocks)

    def lines(self) -> Iterator[bytes]:
        """Yield the lines without their ends."""
        for chunk in self.chunks():
            yield from chunk.removesuffix(b"\n").split(b"\n")

    def blocks(self) -> Iterator[bytes]:
        """Yield the unpacked bytes in blocks."""
        source = self.source
        try:
            yield from self._kept
            if source.path == STANDARD:
                yield from iter(lambda: sys.stdin.buffer.read(BLOCK), b"")
                return
            with open(source.path, "rb") as self._file:
                yield from _unpacked(source, self._file)
                self._size = self._file.seek(0, os.SEEK_END)
        except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
            raise source.unreadable(error) from error

    def _unchanged(self, blocks, before):
        """Pass blocks on as long as the file is as it was, also behind the last one."""
        for block in itertools.chain(blocks, [b""]):
            if self.source.stat() != before:
                raise DataError(f"{self.source.path} has changed while it was read: prepare again")
            yield block

    def _whole_lines(self, blocks):
        limit = LONGEST_JSON_LINE if self.source.is_rows else LONGEST_LINE
        rest, line = b"", 1
        for block in blocks:
            cut = block.rfind(b"\n") + 1
            if len(rest) + (block.find(b"\n") if cut else len(block)) > limit:
                raise DataError(
                    f"{self.source.path}, line {line}, is longer than {limit >> 20} MiB. Break it: "
                    f"fold -s -w 1000 {self.source.path}"
                )
            if cut:
                chunk, rest = rest + block[:cut], block[cut:]
                line += chunk.count(b"\n")
                yield chunk
            else:
                rest += block
        if rest:
            yield rest


def _unpacked(source: Source, file: Any) -> Iterator[bytes]:
    """Yield the blocks of a file, unpacked."""
    if source.is_parquet:
        yield from _parquet(source, file)
    elif source.path.endswith(".zst"):
        yield from _zstandard(source, file)
    else:
        suffix = source.path.rpartition(".")[2]
        opened: Any = {"gz": gzip.open, "xz": lzma.open}.get(suffix, contextlib.nullcontext)
        with opened(file) as text:
            yield from iter(lambda: text.read(BLOCK), b"")


def _zstandard(source, file):
    zstandard = _optional("zstandard", source)
    unpacker, begun = zstandard.ZstdDecompressor(), False
    frame = unpacker.decompressobj()
    try:
        while packed := file.read(PACKED_PIECE):
            while packed:
                if frame.eof:
                    frame = unpacker.decompressobj()
                data, begun = frame.decompress(packed), True
                packed = frame.unused_data if frame.eof else b""
                yield from (data[i : i + BLOCK] for i in range(0, len(data), BLOCK))
    except zstandard.ZstdError as error:
        raise source.unreadable(error) from error
    if begun and not frame.eof:
        raise source.unreadable("it ends before the end of its data")


def _parquet(source, file):
    """Yield the rows of a column as JSON lines, each a string."""
    parquet = _optional("pyarrow.parquet", source)
    import pyarrow

    try:
        table = parquet.ParquetFile(file)
        column = source.field or "text"
        if column not in table.schema_arrow.names:
            names = ", ".join(table.schema_arrow.names)
            raise DataError(f"{source.path} has no column {column!r}; accepted: --field of {names}")
        for batch in table.iter_batches(batch_size=256, columns=[column]):
            rows = (json.dumps(text, ensure_ascii=False) for text in batch[0].to_pylist())
            yield "".join(f"{row}\n" for row in rows).encode(errors="surrogatepass")
    except pyarrow.ArrowException as error:
        raise source.unreadable(error) from error


def _optional(module, source):
    """Import an optional package or raise ConfigError with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        name = module.split(".")[0]
        raise ConfigError(f"{source.path} needs the package {name}: pip install {name}") from None


def _without_mark(blocks):
    """Drop the byte order mark at the beginning."""
    for number, block in enumerate(blocks):
        yield block.removeprefix(BOM) if number == 0 else block


def _cut_anywhere(blocks):
    """Cut before a character that is not whole, or before a carriage return at the end, as a line
    feed may follow it: at most three bytes go into the next chunk."""
    rest = b""
    for block in blocks:
        chunk = rest + block
        begin = next((i for i in range(1, min(4, len(chunk)) + 1) if chunk[-i] & 0xC0 != 0x80), 0)
        head = chunk[-begin] if begin else 0
        two_bytes = head >= 0xC0 or head == ord("\r")
        size = 4 if head >= 0xF0 else 3 if head >= 0xE0 else 2 if two_bytes else 1
        keep = begin if size > begin else 0
        chunk, rest = chunk[: len(chunk) - keep], chunk[len(chunk) - keep :]
        if chunk:
            yield chunk
    if rest:
        yield rest


def spread(source: Source, budget: int) -> Iterator[bytes]:
    """Yield whole lines, about ``budget`` bytes in all: of a plain file blocks from evenly spaced
    places, of a packed one its beginning."""
    size, _ = source.stat()
    if not source.is_plain or size <= budget:
        for chunk in Reader(source).chunks():
            yield chunk[: chunk.rfind(b"\n", 0, budget) + 1] if len(chunk) > budget else chunk
            budget -= len(chunk)
            if budget <= 0:
                break
        return
    count = max(1, budget // BLOCK)
    with open(source.path, "rb") as file:
        for i in range(count):
            file.seek(i * (size - budget // count) // max(1, count - 1))
            block = file.read(budget // count)
            begin = block.find(b"\n") + 1 if i else 0  # most likely in the middle of a line
            yield block[begin : block.rfind(b"\n") + 1]
