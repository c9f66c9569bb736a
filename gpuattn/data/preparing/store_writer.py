"""Writes a token store part by part, so that a kill loses at most the part that is not whole.

Tokens are appended to the files of ``gpuattn.data.store``. At the end of a part the files are
flushed to the disk, then a line is added to ``progress.jsonl``: what the part holds and where in
the sources the next one begins. ``StoreWriter`` of the same arguments cuts the files back to the
last whole part and goes on there. The head is written last.
"""

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gpuattn import files
from gpuattn.data.store import (
    BLOCK,
    FORMAT,
    HEAD,
    PROGRESS,
    SIDES,
    TOKENIZER,
    head_digest,
)
from gpuattn.data.tokenizer import BaseTokenizer
from gpuattn.errors import DataError

# Lengths up to an edge, and above the one before, are counted together; the last counts all others.
EDGES = tuple(sorted({0, 1} | {(2 << k) * m // 4 for k in range(1, 30) for m in (2, 3)}))


class StoreWriter:
    """Writes one folder. ``tokenizer``: of all its ids; ``kind``: "text" or "pairs".

    ``documents``: whether documents end with ``eos``. ``extra``: names of files that are appended
    to in the same way and removed at the end. ``parts``: how many whole parts of an earlier process
    to keep, at most. Raises DataError when the disk is full or the folder cannot be written to.
    """

    def __init__(
        self,
        folder: Path,
        tokenizer: BaseTokenizer,
        kind: str,
        documents: bool = False,
        extra: tuple[str, ...] = (),
        parts: int | None = None,
    ) -> None:
        self.folder, self.kind, self.documents = folder, kind, documents
        self.sides = SIDES[kind]
        self.dtype = np.dtype("uint16" if len(tokenizer) <= 1 << 16 else "uint32")
        self._vocab, self._tokenizer = len(tokenizer), tokenizer.to_bytes()
        self._files: dict[str, _Appended] = {}
        self._progress: list[dict[str, Any]] = []
        self._log = folder / PROGRESS
        self._extra = extra
        self._stats = {side: _Statistics(self._vocab) for side in self.sides}
        self.rows = 0
        with _writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._open(parts)

    @property
    def parts(self) -> int:
        """How many parts are whole."""
        return len(self._progress)

    @property
    def positions(self) -> list[Any]:
        """What ``end_part`` was given for each whole part, by this process or an earlier one."""
        return [line["position"] for line in self._progress]

    @property
    def tokens(self) -> dict[str, int]:
        """The tokens by side, of all rows so far."""
        return {side: self._files[f"{side}.bin"].size // self.dtype.itemsize for side in self.sides}

    def add(self, ids: dict[str, np.ndarray], ends: dict[str, np.ndarray]) -> None:
        """Append ids by side, and where rows end in them: as many rows on each side.

        What follows the last end belongs to a row that a later call ends.
        """
        with _writing(self.folder):
            for side in self.sides:
                before = self.tokens[side]
                self._files[f"{side}.bin"].write(ids[side].astype(self.dtype, copy=False))
                placed = ends[side].astype(np.uint64) + np.uint64(before)
                self._files[f"{side}.idx"].write(placed)
                self._stats[side].add(ids[side], placed)
        self.rows += len(ends[self.sides[0]])

    def add_extra(self, name: str, values: np.ndarray) -> None:
        """Append to a file of ``extra``."""
        with _writing(self.folder):
            self._files[name].write(values)

    def end_part(self, position: Any) -> None:
        """Make what was added durable. ``position``: JSON, where the sources go on."""
        with _writing(self.folder):
            written = {name: file.end_part() for name, file in self._files.items()}
            line = {"files": written, "rows": self.rows, "position": position}
            with self._log.open("a", encoding="utf-8") as log:
                log.write(json.dumps(line) + "\n")
                log.flush()
                os.fsync(log.fileno())
        self._progress.append(line)

    def finish(self, **facts: Any) -> dict[str, Any]:
        """Write the head, with ``facts`` in it, and return it."""
        with _writing(self.folder):
            self.close()
            head = self._head() | facts
            head["digest"] = head_digest(head)
            files.replace(self.folder / HEAD, json.dumps(head, indent=1).encode())
        return head

    def clean(self) -> None:
        """Remove the files that a whole store does not need."""
        for name in (PROGRESS, *self._extra):
            (self.folder / name).unlink(missing_ok=True)

    def discard(self) -> None:
        """Remove all files, and the folder if it is empty then."""
        self.close()
        for name in (*self._files, TOKENIZER, PROGRESS):
            (self.folder / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()

    def _open(self, parts):
        """Open the files at the end of the last whole part."""
        self._log.touch()
        self._progress = [json.loads(line) for line in _whole_lines(self._log, parts)]
        names = [f"{side}.{suffix}" for side in self.sides for suffix in ("bin", "idx")]
        for name in (*names, *self._extra):
            size = self._progress[-1]["files"][name]["size"] if self._progress else 0
            self._files[name] = _Appended(self.folder / name, size)
        if not self._progress:
            files.replace(self.folder / TOKENIZER, self._tokenizer)
            return
        self.rows = self._progress[-1]["rows"]
        for side in self.sides:
            self._stats[side].read(self.folder, side, self.dtype)

    def _head(self):
        starts = [{"rows": 0, "files": {}}, *self._progress]
        parts = []
        for before, line in zip(starts, self._progress, strict=False):
            files = line["files"]
            sizes = {
                n: files[n]["size"] - before["files"].get(n, {"size": 0})["size"] for n in files
            }
            names = [name for name in files if name not in self._extra]
            parts.append({
                "rows": line["rows"] - before["rows"],
                "tokens": {s: sizes[f"{s}.bin"] // self.dtype.itemsize for s in self.sides},
                "sha256": {name: files[name]["sha256"] for name in names},
            })  # fmt: skip
        stats = self._stats
        return {
            "format": FORMAT, "kind": self.kind, "documents": self.documents,
            "dtype": self.dtype.name, "byteorder": sys.byteorder, "vocab": self._vocab,
            "tokenizer": hashlib.sha256(self._tokenizer).hexdigest(), "sides": list(self.sides),
            "rows": self.rows, "tokens": self.tokens,
            "longest": {side: stats[side].longest for side in self.sides},
            "largest": {side: stats[side].largest for side in self.sides},
            "unigram": {side: stats[side].entropy() for side in self.sides},
            "lengths": {"edges": list(EDGES)} | {s: stats[s].lengths.tolist() for s in self.sides},
            "counts": {}, "skipped": {}, "sources": [], "mix": [], "parts": parts, "valid": None,
        }  # fmt: skip


class _Appended:
    """A file that grows: its ``size`` in bytes, and the SHA-256 of the part at its end."""

    def __init__(self, path, size):
        self._file = path.open("r+b" if path.exists() else "w+b")
        if self._file.seek(0, os.SEEK_END) < size:
            raise DataError(
                f"{path} has lost its end: delete the folder and prepare the store again"
            )
        self._file.truncate(size)
        self._file.seek(size)
        self.size, self._digest = size, hashlib.sha256()

    def write(self, array):
        data = memoryview(np.ascontiguousarray(array)).cast("B") if array.size else b""
        self._file.write(data)
        self._digest.update(data)
        self.size += len(data)

    def end_part(self):
        self._file.flush()
        os.fsync(self._file.fileno())
        found, self._digest = self._digest.hexdigest(), hashlib.sha256()
        return {"size": self.size, "sha256": found}

    def close(self):
        self._file.close()


class _Statistics:
    """Counts of one side: of each id, and of rows by length."""

    def __init__(self, vocabulary):
        self._ids = np.zeros(vocabulary, np.int64)
        self.lengths = np.zeros(len(EDGES), np.int64)
        self.longest, self._end = 0, 0

    def add(self, ids, ends):
        """``ids`` (N,) follow those before; ``ends``: of rows, in tokens of the whole side."""
        self._ids += np.bincount(ids, minlength=len(self._ids))
        if len(ends):
            lengths = np.diff(ends.astype(np.int64), prepend=self._end)
            at = np.minimum(np.searchsorted(EDGES, lengths), len(EDGES) - 1)
            self.lengths += np.bincount(at, minlength=len(EDGES))
            self.longest, self._end = max(self.longest, int(lengths.max())), int(ends[-1])

    def read(self, folder, side, dtype):
        """Count what the files of an earlier process hold."""
        for name, kind in ((f"{side}.bin", dtype), (f"{side}.idx", np.dtype(np.uint64))):
            with (folder / name).open("rb") as file:
                while data := file.read(BLOCK * kind.itemsize):
                    some = np.frombuffer(data, kind)
                    none = some[:0]
                    self.add(*((some, none) if name.endswith(".bin") else (none, some)))

    @property
    def largest(self):
        return int(np.flatnonzero(self._ids).max(initial=0))

    def entropy(self):
        """Return the entropy of the ids in nats."""
        counts = self._ids[self._ids > 0]
        total = max(int(counts.sum()), 1)
        return float(np.log(total) - (counts * np.log(counts)).sum() / total)


def last_position(folder: Path) -> Any:
    """Return what the last ``end_part`` of an unfinished store was given, or None."""
    log = folder / PROGRESS
    lines = log.read_bytes().split(b"\n")[:-1] if log.exists() else []
    return json.loads(lines[-1])["position"] if lines else None


def _whole_lines(path, most):
    """Return the first ``most`` lines of a log and cut off the others, and one without its end."""
    data = path.read_bytes()
    lines = data.splitlines(keepends=True)[: data.count(b"\n")][:most]
    os.truncate(path, sum(map(len, lines)))
    return lines


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Return a context that turns OSError into a DataError with advice."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"cannot write to {folder}: {error.strerror or error}. Free some space or choose "
            "another --out, then run the same command again: whole parts are kept"
        ) from error
