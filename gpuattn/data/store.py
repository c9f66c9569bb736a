"""A token store: texts or pairs as token ids in plain files, read by memory map.

The folder holds

- ``SIDE.bin``: the ids of a side end to end, uint16 (uint32 for over 65,536 pieces), little endian;
- ``SIDE.idx``: uint64, where each row ends in ``SIDE.bin``, in tokens;
- ``tokenizer``: the bytes of the tokenizer;
- ``store.json``, the head. It is written last: a folder with a head is whole;
- ``valid/``, where a share is held out: a store of the same form.

Kind "text" has the side "text". A row is a document: a file, a JSON line or a row of Parquet. All
ids together are what ``encode_text`` gives for the text; with ``documents`` in the head each
document ends with ``eos``. Kind "pairs" has the sides "source" and "target"; row i of one is the
translation of row i of the other, and each row ends with ``eos``.

The head (JSON): ``format``, ``kind``, ``documents``, ``dtype``, ``byteorder``, ``vocab`` (ids),
``tokenizer`` (SHA-256), ``sides``; ``rows``; ``tokens``, ``longest`` (tokens of a row), ``largest``
(id) and ``unigram`` (entropy of the ids in nats) by side; ``lengths``: ``edges`` and by side how
many rows have at most so many tokens, and more than the edge before; ``counts``: what was read;
``skipped``: what was left out, by reason; ``sources``: files with size and SHA-256; ``mix``: named
ranges of rows and tokens with their weights; ``parts``: ``rows``, ``tokens`` by side and ``sha256``
by file of each appended part; ``valid``: the digest of the head in ``valid/``; ``digest``:
SHA-256 of the head without it.
"""

import hashlib
import json
import sys
import threading
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from gpuattn.data.tokenizer import EOS, BaseTokenizer, tokenizer_from_bytes
from gpuattn.errors import DataError
from gpuattn.typing import StrPath

FORMAT = "gpuattn-tokens/1"
HEAD, TOKENIZER, VALID = "store.json", "tokenizer", "valid"
SIDES = {"text": ("text",), "pairs": ("source", "target")}
PROGRESS = "progress.jsonl"  # of a store that is being written
BLOCK = 1 << 22  # entries that ``check`` holds at a time


def is_store(path: StrPath) -> bool:
    """Return whether a path is a folder with a head: a whole store, of any version."""
    return (Path(path) / HEAD).is_file()


def head_digest(head: dict[str, Any]) -> str:
    """Return the SHA-256 of a head without its ``digest``."""
    rest = {name: value for name, value in head.items() if name != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


class TokenStore:
    """A store, opened to read. Arrays are memory maps; nothing is read before it is used.

    ``folder``; ``head``: the dict that the module describes. Opening checks the head and the sizes
    of all files, ``check`` the contents. Raises DataError for a store that is half written, of
    another version, or damaged.
    """

    def __init__(self, folder: StrPath) -> None:
        self.folder = Path(folder)
        self.head = self._read_head()
        itemsize = np.dtype(self.head["dtype"]).itemsize
        for side in self.sides:
            self._has(f"{side}.bin", self.head["tokens"][side] * itemsize)
            self._has(f"{side}.idx", self.head["rows"] * 8)
        self._has(TOKENIZER, None)

    def __len__(self) -> int:
        """Return the number of rows."""
        return self.head["rows"]

    @property
    def kind(self) -> str:
        """ "text" or "pairs"."""
        return self.head["kind"]

    @property
    def sides(self) -> list[str]:
        """The names that ``tokens`` and ``ends`` take."""
        return self.head["sides"]

    @property
    def fingerprint(self) -> str:
        """A SHA-256 that says which tokens these are: equal only for equal contents."""
        named = {name: self.head[name] for name in ("kind", "dtype", "tokenizer", "parts", "mix")}
        return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()

    @cached_property
    def valid(self) -> "TokenStore | None":
        """The store of what is held out, or None."""
        if not self.head["valid"]:
            return None
        found = TokenStore(self.folder / VALID)
        if found.head["digest"] != self.head["valid"]:
            raise self._damaged(f"{VALID} is of another store")
        return found

    def figures(self) -> dict[str, Any]:
        """Return what the head says of the contents: fields as there, and ``files``, ``held_out``
        (rows in ``valid``) and ``lengths``, by side the [more than, up to, rows] that occur."""
        head = self.head
        names = ("kind", "documents", "vocab", "rows", "tokens", "longest", "unigram", "counts",
                 "skipped")  # fmt: skip
        edges = head["lengths"]["edges"]
        ranges = list(zip([0, *edges], edges, strict=False))
        lengths = {
            side: [[*ends, n] for ends, n in zip(ranges, head["lengths"][side], strict=True) if n]
            for side in self.sides
        }
        mix = [{"name": part["name"], "weight": part["weight"],
                "rows": part["rows"][1] - part["rows"][0]} for part in head["mix"]]  # fmt: skip
        held_out = len(self.valid) if self.valid else 0
        return {name: head[name] for name in names} | {
            "files": len(head["sources"]), "held_out": held_out, "mix": mix, "lengths": lengths,
        }  # fmt: skip

    def tokenizer(self) -> BaseTokenizer:
        """Return the tokenizer. Raises DataError if it is not the one that made the tokens."""
        data = (self.folder / TOKENIZER).read_bytes()
        if hashlib.sha256(data).hexdigest() != self.head["tokenizer"]:
            raise self._damaged(f"{TOKENIZER} is not the one that made the tokens")
        return tokenizer_from_bytes(data)

    def tokens(self, side: str) -> np.ndarray:
        """Return the ids of a side, (tokens,) uint16 or uint32, read-only."""
        return self._mapped(f"{side}.bin", self.head["dtype"])

    def ends(self, side: str) -> np.ndarray:
        """Return where each row ends in ``tokens(side)``: (rows,) uint64, read-only."""
        return self._mapped(f"{side}.idx", "uint64")

    def row(self, side: str, i: int) -> np.ndarray:
        """Return the ids of row ``i`` of a side."""
        ends = self.ends(side)
        return self.tokens(side)[int(ends[i - 1]) if i else 0 : int(ends[i])]

    def check(self) -> None:
        """Read everything, ``valid`` too. Raises DataError that names the first damaged part."""
        for _ in self._checking():
            pass

    def _checking(self):
        """Check as ``check`` does, a block of BLOCK entries at each step."""
        vocabulary = len(self.tokenizer())
        if vocabulary != self.head["vocab"]:
            raise self._damaged(f"{TOKENIZER} has {vocabulary} ids, the head {self.head['vocab']}")
        for side in self.sides:
            counts = [part["tokens"][side] for part in self._parts]
            yield from self._check_digests(f"{side}.bin", counts)
            yield from self._check_digests(f"{side}.idx", [part["rows"] for part in self._parts])
            yield from self._check_values(side)
        if self.valid:
            yield from self.valid._checking()

    @property
    def _parts(self):
        return self.head["parts"]

    def _read_head(self):
        path = self.folder / HEAD
        try:
            head = json.loads(path.read_bytes())
        except FileNotFoundError:
            why = f"{HEAD} is missing"
            if (self.folder / PROGRESS).exists():
                why = "it is not whole yet: run the same gpuattn prepare again"
            raise DataError(f"{self.folder} is no token store: {why}") from None
        except (OSError, ValueError) as error:
            raise DataError(f"{self.folder}: cannot read {HEAD}: {error}") from error
        found = head.get("format") if isinstance(head, dict) else None
        if found != FORMAT:
            raise DataError(
                f"{self.folder}: the format is {found!r}; accepted: {FORMAT!r}. Prepare it again"
            )
        if head.get("digest") != head_digest(head):
            raise self._damaged(f"{HEAD} is not as it was written")
        if head["byteorder"] != sys.byteorder:
            raise DataError(
                f"{self.folder}: the byte order is {head['byteorder']}, this machine's is "
                f"{sys.byteorder}. Prepare it again here"
            )
        largest = max(head["largest"].values())
        if largest >= head["vocab"]:
            raise self._damaged(f"a token is {largest}, and the vocabulary has {head['vocab']}")
        return head

    def _has(self, name, size):
        """Raise DataError unless a file exists and has this many bytes."""
        try:
            found = (self.folder / name).stat().st_size
        except OSError as error:
            raise self._damaged(f"{name}: {error.strerror}") from None
        if size is not None and found != size:
            raise self._damaged(f"{name} has {found:,} bytes of {size:,}")

    def _mapped(self, name, dtype):
        path = self.folder / name
        if not path.stat().st_size:  # no memory map is empty
            return np.empty(0, dtype)
        return np.memmap(path, dtype, mode="r")

    def _check_digests(self, name, counts):
        flat, begin = self._mapped(name, self._dtype(name)), 0
        for number, (count, part) in enumerate(zip(counts, self._parts, strict=True), 1):
            digest = hashlib.sha256()
            for at in range(begin, begin + count, BLOCK):
                digest.update(flat[at : min(at + BLOCK, begin + count)])
                yield
            if digest.hexdigest() != part["sha256"][name]:
                raise self._damaged(f"part {number} of {name} is not as it was written")
            begin += count
        if begin != len(flat):
            raise self._damaged(f"the parts of {name} do not add up")

    def _dtype(self, name):
        return "uint64" if name.endswith(".idx") else self.head["dtype"]

    def _check_values(self, side):
        """Raise DataError for a token beyond the vocabulary or a row without its end."""
        tokens, ends = self.tokens(side), self.ends(side)
        for at in range(0, len(tokens), BLOCK):
            largest = int(tokens[at : at + BLOCK].max())
            if largest >= self.head["vocab"]:
                raise self._damaged(
                    f"{side}.bin has the token {largest}; the vocabulary has {self.head['vocab']}"
                )
            yield
        last, marked = 0, self.kind == "pairs" or self.head["documents"]
        for at in range(0, len(ends), BLOCK):
            some = np.concatenate([[last], ends[at : at + BLOCK]]).astype(np.int64)
            last = int(some[-1])
            ordered = last <= len(tokens) and bool((np.diff(some) >= marked).all())
            if not ordered or (marked and (tokens[some[1:] - 1] != EOS).any()):
                raise self._damaged(f"{side}.idx does not fit {side}.bin")
            yield
        if last != len(tokens):
            raise self._damaged(f"{side}.idx ends at {last:,} of {len(tokens):,} tokens")

    def _damaged(self, what):
        return DataError(f"{self.folder} is damaged: {what}. Prepare it again")


class CheckBeside:
    """``TokenStore.check`` in a thread, beside what uses the store. A context that ends it.

    It begins with the first ``poll``, so that it holds up no start.
    """

    def __init__(self, store: TokenStore) -> None:
        self._store, self._end = store, threading.Event()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def __enter__(self) -> "CheckBeside":
        return self

    def __exit__(self, *error: Any) -> None:
        self._end.set()
        if self._thread:
            self._thread.join()

    def poll(self) -> None:
        """Raise the DataError of the check, once it is known."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._check, name="gpuattn-check", daemon=True)
            self._thread.start()
        if self._error:
            raise self._error

    def _check(self):
        try:
            for _ in self._store._checking():
                if self._end.is_set():
                    return
        except Exception as error:  # noqa: BLE001 raised by ``poll``
            self._error = error
