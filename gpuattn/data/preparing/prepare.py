"""Makes a token store of text of any size: reads, tokenises in parallel, writes part by part.

A run that is killed goes on behind its last whole part when it is started again with the same
sources and options. It reads what comes before in the same file again, without tokenising it, and
compares its SHA-256.

Memory does not grow with the text: 10 GB of generated text in one file, a learned vocabulary of
16,000 and two processes that tokenise took 325 MB at most in all three, file cache not counted.
"""

import hashlib
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gpuattn.data.preparing.parallel_tokenize import Job, Rules, Tokens, hashes, select, tokenized
from gpuattn.data.preparing.plan import Plan
from gpuattn.data.preparing.sources import BLOCK, Reader
from gpuattn.data.preparing.store_writer import StoreWriter, last_position
from gpuattn.data.preparing.tokenizer_sample import learned
from gpuattn.data.store import PROGRESS, TOKENIZER, VALID, TokenStore, is_store
from gpuattn.data.tokenizer import EOS, CharTokenizer, tokenizer_from_bytes
from gpuattn.errors import ConfigError, DataError
from gpuattn.lock import LOCK, locked
from gpuattn.typing import StrPath
from gpuattn.units import duration

PART = 64 << 20  # bytes of text in a part: what a kill loses at most
WORTH_A_WORKER = 4  # blocks of text
PAIR_LINES = 1 << 14  # of a job, at most
SEEN = "seen"  # hashes of the pairs that are kept, while duplicates are left out
LEAST_SHARE = 1 / 4  # of the bytes of a text that its store takes, at least
WHOLE = 1 << 64  # hashes are below


class Done(NamedTuple):
    """How far it is: bytes of text read in ``seconds`` by this process, the ``share`` of all files,
    None where it is unknown."""

    text: int
    seconds: float
    share: float | None

    def describe(self) -> str:
        """Return MB, MB/s, and the time left where that is known."""
        text = f"{self.text / 1e6:,.0f} MB, {self.text / self.seconds / 1e6:.1f} MB/s"
        if not self.share:
            return text
        return f"{text}, {duration(self.seconds * (1 / self.share - 1))} left"


def prepare(
    plan: Plan,
    out: StrPath,
    say: Callable[[str], None] = lambda text: None,
    progress: Callable[[Done], None] = lambda done: None,
) -> TokenStore:
    """Return the store of a plan, made in the folder ``out`` unless it is there.

    ``say`` is given sentences, ``progress`` a Done after each chunk. Raises DataError for sources
    that cannot be used and ConfigError for options that cannot, or a folder that is something else
    or in use; the folder never holds a store then.
    """
    plan.check()
    out = Path(out)
    with locked(out):
        key = plan.key()
        if is_store(out):
            store = TokenStore(out)
            if plan.from_stream or store.head["key"] != key:
                raise ConfigError(
                    f"{out} is a token store of other sources or options. Choose another --out, or "
                    "delete it"
                )
            say(f"{out} is already prepared")
            return store
        return _Preparation(plan, out, key, say, progress).run()


class _Step(NamedTuple):
    """What a job was made of. ``unit`` and ``chunk`` count from 0; ``digests``: SHA-256 of each
    side up to its end; ``held``: whether the document is held out; ``last``: whether it is the
    empty step that ends the unit."""

    unit: int
    chunk: int
    digests: list[str]
    held: bool
    size: int
    last: bool


class _Preparation:
    """One run of ``prepare``: jobs are made ahead, results are taken in order."""

    def __init__(self, plan, out, key, say, progress):
        self.plan, self.out, self.key, self.say, self.progress = plan, out, key, say, progress
        self.units = plan.units
        self.readers: dict[int, list[Reader]] = {}
        sizes = [source.stat()[0] for source in plan.files]
        self.bounds = np.cumsum([0, *sizes])  # bytes of the files before each
        self.begin, self.read, self.of_part = time.monotonic(), 0, 0
        self.kept: list[bytes] = []  # of standard input, for the sample
        _check_folder(out)
        _check_room(out, sum(sizes))
        position = last_position(out)
        if position and position["key"] != key:
            say("the sources or options have changed: beginning anew")
            position = None
        if position:
            self.tokenizer = tokenizer_from_bytes((out / TOKENIZER).read_bytes())
        else:
            self.tokenizer = learned(plan, self.kept, say)
            shutil.rmtree(out / VALID, ignore_errors=True)  # of other options
            (out / SEEN).unlink(missing_ok=True)
        extra = () if plan.duplicates else (SEEN,)
        common = (self.tokenizer, "pairs" if plan.pairs else "text", plan.documents)
        first = StoreWriter(out, *common, extra, parts=None if position else 0)
        self.writers = [first]
        if plan.valid:
            self.writers.append(StoreWriter(out / VALID, *common, parts=first.parts))
        self.state = {
            "key": key, "unit": 0, "chunk": 0, "digests": [], "counts": {}, "skipped": {},
            "open": [False, False], "groups": [],
        } | (position or {})  # fmt: skip
        self.counts, self.skipped = Counter(self.state["counts"]), Counter(self.state["skipped"])
        self.sources: list[dict[str, Any]] = []  # that ended in this part
        self.seen = _Seen(out / SEEN) if not plan.duplicates else None
        if position:
            say(f"goes on behind part {first.parts}: {first.rows:,} rows are there")

    def run(self):
        plan = self.plan
        rules = Rules(
            self.tokenizer.to_bytes(), plan.documents, plan.longest, plan.max_ratio,
            hashes=bool(plan.valid or not plan.duplicates),
        )  # fmt: skip
        workers = plan.workers
        if not plan.from_stream:  # a process takes a quarter of a second to begin
            workers = min(workers, 1 + int(self.bounds[-1]) // (WORTH_A_WORKER * BLOCK))
        results = tokenized(rules, self._jobs(), workers)
        try:
            for step, tokens in results:
                self._take(step, tokens)
                self._report(step)
            self._check_whole()
            if self.of_part or self.sources or not self.writers[0].parts:
                self._end_part(len(self.units), 0, [])
            return self._finish()
        except BaseException:
            results.close()
            whole = self.writers[0].parts
            for writer in reversed(self.writers):
                writer.close() if whole else writer.discard()
            raise

    # ---- reading ----

    def _jobs(self) -> Iterator[tuple[_Step, Job]]:
        """Yield a job for each chunk behind the last whole part; an empty one ends a unit."""
        start = self.state["unit"], self.state["chunk"]
        for index, unit in enumerate(self.units[start[0] :], start[0]):
            rows = bool(self.plan.pairs) or unit[0].is_rows
            kind = "pairs" if self.plan.pairs else "rows" if rows else "text"
            paths, name = tuple(source.path for source in unit), unit[0].field or "text"
            self.readers[index] = [Reader(source, self.kept) for source in unit]
            found = [hashlib.sha256() for _ in unit]
            line, number, held, digests = 1, -1, False, [d.hexdigest() for d in found]
            for number, data in enumerate(self._chunks(self.readers[index])):
                for digest, side in zip(found, data, strict=True):
                    digest.update(side)
                digests = [digest.hexdigest() for digest in found]
                if number == 0 and not rows and self.plan.valid:
                    held = bool(_held(hashes([data[0].decode(errors="replace")]), self.plan)[0])
                if (index, number) >= start:
                    step = _Step(index, number, digests, held, sum(map(len, data)), False)
                    yield step, Job(kind, paths, line, data, name)
                elif (index, number + 1) == start and digests != self.state["digests"]:
                    raise DataError(
                        f"{' or '.join(paths)} has changed since part {self.writers[0].parts} was "
                        f"written. Delete {self.out} and prepare it again"
                    )
                line += data[0].count(b"\n")
            if (index, number + 1) < start:
                raise DataError(f"{' or '.join(paths)} has become shorter. Delete {self.out}")
            empty = tuple(b"" for _ in unit)
            step = _Step(index, number + 1, digests, held, 0, True)
            yield step, Job("text", paths, line, empty)

    def _chunks(self, readers):
        """Yield tuples of bytes, by side."""
        if len(readers) == 1:
            any_cut = isinstance(self.tokenizer, CharTokenizer) and not readers[0].source.is_rows
            yield from ((data,) for data in readers[0].chunks(any_cut))
            return
        some, size, counts = [], 0, [0, 0]
        for pair in zip_longest(*(reader.lines() for reader in readers)):
            counts = [n + (line is not None) for n, line in zip(counts, pair, strict=True)]
            if None in pair:
                continue  # only to count
            some.append(pair)
            size += len(pair[0]) + len(pair[1])
            if size >= BLOCK or len(some) == PAIR_LINES:
                yield _joined(some)
                some, size = [], 0
        if counts[0] != counts[1]:
            one, other = (reader.source.path for reader in readers)
            raise DataError(
                f"{one} has {counts[0]:,} lines, {other} has {counts[1]:,}; accepted: one "
                "translation for each line"
            )
        if some:
            yield _joined(some)

    # ---- writing ----

    def _take(self, step: _Step, tokens: Tokens) -> None:
        """Write the tokens of a chunk; at the end of a unit note its source."""
        unit = self.units[step.unit]
        if self.plan.mix and unit[0].group not in [name for name, _ in self.state["groups"]]:
            self.state["groups"].append([unit[0].group, self._sizes()])
        if not step.last:
            self.counts.update(tokens.counts)
            self.skipped.update(tokens.skipped)
        if self.plan.pairs or unit[0].is_rows:
            if not step.last:
                self._take_rows(tokens)
        else:
            self._take_text(step, tokens)
        self.read += step.size
        self.of_part += step.size
        if step.last:
            self.sources += [
                {"name": source.path, "group": source.group, "size": source.stat()[0], "sha256": d}
                for source, d in zip(unit, step.digests, strict=True)
            ]
        if self.of_part >= PART:
            done = (
                (step.unit + 1, 0, []) if step.last else (step.unit, step.chunk + 1, step.digests)
            )
            self._end_part(*done)

    def _take_text(self, step, tokens):
        writer, split = self.writers[step.held], int(step.held)
        ids, state = tokens.ids[0], self.state
        end = self.tokenizer.line_end
        if not step.chunk and len(ids) and state["open"][split]:
            ids = np.concatenate([[end], ids]).astype(writer.dtype)
        if step.last:
            if not step.chunk:
                self.skipped["empty file"] += 1
                return
            ids = np.array([EOS] * self.plan.documents, writer.dtype)
        ends = np.array([len(ids)] * step.last, np.int64)
        writer.add({"text": ids}, {"text": ends})
        if not step.last:
            state["open"][split] = not self.plan.documents and int(ids[-1]) != end

    def _take_rows(self, tokens):
        keep = np.ones(len(tokens.ends[0]), bool)
        if self.seen:
            keep = self.seen.fresh(tokens.hashes)
            self.skipped["duplicate"] += int((~keep).sum())
            self.writers[0].add_extra(SEEN, tokens.hashes[keep])
        held = _held(tokens.hashes, self.plan) if self.plan.valid else np.zeros(len(keep), bool)
        for writer, chosen in zip(self.writers, (keep & ~held, keep & held), strict=False):
            rows = [select(*row, chosen) for row in zip(tokens.ids, tokens.ends, strict=True)]
            ids = {side: row[0] for side, row in zip(writer.sides, rows, strict=True)}
            writer.add(ids, {side: row[1] for side, row in zip(writer.sides, rows, strict=True)})

    def _end_part(self, unit, chunk, digests):
        self.state |= {"unit": unit, "chunk": chunk, "digests": digests}
        self.state |= {"counts": dict(self.counts), "skipped": dict(self.skipped)}
        for writer in reversed(self.writers):  # the first one's line ends the part
            writer.end_part(self.state | {"sources": self.sources})
        self.of_part, self.sources = 0, []

    def _check_whole(self):
        """Raise DataError where a store or a source of a mix would be empty."""
        for writer in self.writers:
            if not writer.rows or not min(writer.tokens.values()):
                reasons = "".join(f"; {n:,} with {why}" for why, n in self.skipped.items() if n)
                names = ", ".join(source.path for source in self.plan.files[:3])
                if writer.folder != self.out:
                    reasons += " to hold out. Give more documents or a larger --valid"
                raise DataError(f"{names}: there is no text{reasons}")
        for part in self._mix(0):
            if part["rows"][0] == part["rows"][1]:
                name = part["name"]
                raise DataError(f"{name} of the mix has no text; leave it out or give it text")

    def _finish(self):
        """Write the heads, the store's own last."""
        facts = {
            "key": self.key,
            "counts": dict(self.counts),
            "skipped": {reason: n for reason, n in self.skipped.items() if n},
            "sources": [s for position in self.writers[0].positions for s in position["sources"]],
        }
        held = None
        mixes = [self._mix(split) for split in range(len(self.writers))]
        if len(self.writers) > 1:
            held = self.writers[1].finish(key=self.key, mix=mixes[1])["digest"]
        self.writers[0].finish(**facts, mix=mixes[0], valid=held)
        for writer in self.writers:
            writer.clean()
        return TokenStore(self.out)

    def _sizes(self):
        return [{"rows": writer.rows, "tokens": writer.tokens} for writer in self.writers]

    def _mix(self, split):
        """Return the ranges of the groups: [{name, weight, rows, tokens by side}]."""
        groups = self.state["groups"]
        bounds = [sizes[split] for _, sizes in groups] + [self._sizes()[split]]
        found = []
        for (name, _), begin, end in zip(groups, bounds, bounds[1:], strict=False):
            tokens = {side: [begin["tokens"][side], end["tokens"][side]] for side in end["tokens"]}
            found.append({"name": name, "weight": self.plan.mix[name],
                          "rows": [begin["rows"], end["rows"]], "tokens": tokens})  # fmt: skip
        return found

    def _report(self, step):
        before = self.bounds[step.unit * len(self.units[0])]
        now = sum(reader.consumed for reader in self.readers[step.unit])
        share = None if self.plan.from_stream else float((before + now) / max(self.bounds[-1], 1))
        self.progress(Done(self.read, time.monotonic() - self.begin, share))
        if step.last:
            del self.readers[step.unit]


class _Seen:
    """The hashes of pairs that came before: 8 bytes each, in sorted arrays of growing size."""

    def __init__(self, path):
        """``path``: hashes of an earlier process."""
        self._sorted = [np.unique(np.fromfile(path, np.uint64))] if path.exists() else []

    def fresh(self, found: np.ndarray) -> np.ndarray:
        """Return which of ``found`` (N,) come for the first time, (N,) bool, and remember them."""
        new = np.zeros(len(found), bool)
        new[np.unique(found, return_index=True)[1]] = True
        for known in self._sorted:
            at = np.minimum(np.searchsorted(known, found), len(known) - 1)
            new &= known[at] != found if len(known) else True
        self._sorted.append(np.sort(found[new]))
        while len(self._sorted) > 1 and len(self._sorted[-2]) <= 2 * len(self._sorted[-1]):
            self._sorted.append(np.sort(np.concatenate([self._sorted.pop(), self._sorted.pop()])))
        return new


def _joined(pairs):
    """Return the lines of pairs by side, as bytes."""
    return tuple(b"".join(b"%s\n" % line for line in side) for side in zip(*pairs, strict=True))


def _held(found: np.ndarray, plan: Plan) -> np.ndarray:
    """Return which hashes belong to what is held out."""
    return found < np.uint64(int(plan.valid * WHOLE))


def _check_folder(out: Path) -> None:
    """Raise ConfigError where the folder has files of something else."""
    others = [path.name for path in out.iterdir() if path.name != LOCK]
    if others and PROGRESS not in others:
        raise ConfigError(f"{out} has other files, such as {others[0]}. Choose another --out")


def _check_room(out: Path, size: int) -> None:
    """Raise DataError where the disk has surely too little room for the store of a text."""
    free = shutil.disk_usage(out).free
    if free < LEAST_SHARE * size:
        raise DataError(
            f"{out}: {free / 1e6:,.0f} MB are free, and the store of {size / 1e6:,.0f} MB of text "
            "takes about half as much. Free some space or choose another --out"
        )
