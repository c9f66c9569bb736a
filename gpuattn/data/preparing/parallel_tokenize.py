"""Tokenises chunks of text in processes, in order and with bounded memory.

Workers are processes of their own, ``python -m`` with this module, that read jobs from a pipe: they
end when the pipe does, also when this process is killed, and leave Ctrl-C to it.
"""

import collections
import contextlib
import json
import os
import pickle
import queue
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np

from gpuattn.data.preparing.encoder import new_encoder
from gpuattn.data.text import MAX_LENGTH, decode_line, one_line_end
from gpuattn.data.tokenizer import EOS, tokenizer_from_bytes
from gpuattn.errors import DataError

AHEAD = 2  # jobs for each worker that are read before their turn


class Rules(NamedTuple):
    """What workers know. ``documents``: end each with ``eos``. ``longest``: tokens of a side,
    ``max_ratio``: of the tokens of both sides; pairs beyond are left out. ``hashes``: wanted."""

    tokenizer: bytes
    documents: bool = False
    longest: int | None = None
    max_ratio: float | None = None
    hashes: bool = False


class Job(NamedTuple):
    """``kind``: "text" (lines of one document), "rows" (JSON lines, a document each) or "pairs".
    ``data``: bytes of whole lines by side; ``line``: the number of the first; ``field``: of rows.
    """

    kind: str
    paths: tuple[str, ...]
    line: int
    data: tuple[bytes, ...]
    field: str | None = None


class Tokens(NamedTuple):
    """Ids by side, where rows end in them, a 64-bit hash of each row if wanted; and counts: of
    what was read, and of pairs left out by reason."""

    ids: tuple[np.ndarray, ...]
    ends: tuple[np.ndarray, ...]
    hashes: np.ndarray | None
    counts: dict[str, int]
    skipped: dict[str, int]


class Worker:
    """Does jobs, one by one."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.tokenizer = tokenizer_from_bytes(rules.tokenizer)
        self.encoder = new_encoder(self.tokenizer)

    def __call__(self, job: Job) -> Tokens:
        """Return the tokens of a job. Raises DataError that names file and line."""
        return {"text": self._text, "rows": self._rows, "pairs": self._pairs}[job.kind](job)

    def _text(self, job):
        text = one_line_end(_decoded(job, 0))
        counts = {"lines": text.count("\n"), "characters": len(text)}
        return Tokens((self._encoded(job, job.line, text),), (_NO_ENDS,), None, counts, {})

    def _rows(self, job):
        end = np.array([EOS if self.rules.documents else self.tokenizer.line_end],
                       self.encoder.dtype)  # fmt: skip
        texts, found, lengths = [], [], []
        for number, line in enumerate(_lines(_decoded(job, 0)), job.line):
            if not line.strip():
                continue
            text = one_line_end(_text_of_row(job, number, line))
            ids = self._encoded(job, number, text)
            ended = text.endswith("\n") and not self.rules.documents
            found += [ids] if ended else [ids, end]
            lengths.append(len(ids) + (not ended))
            texts.append(text)
        ids = np.concatenate(found) if found else end[:0]
        counts = {"lines": sum(text.count("\n") for text in texts),
                  "characters": sum(map(len, texts))}  # fmt: skip
        return Tokens(
            (ids,), (np.cumsum(lengths, dtype=np.int64),), self._hashed(texts), counts, {}
        )

    def _pairs(self, job):
        skipped: collections.Counter[str] = collections.Counter()
        kept = []
        sides = [_lines(_decoded(job, side)) for side in (0, 1)]
        for pair in zip(*sides, strict=True):
            source, target = (line.strip() for line in pair)
            if not source or not target:
                skipped["empty side"] += 1
            elif max(len(source), len(target)) > MAX_LENGTH:
                skipped[f"longer than {MAX_LENGTH:,} characters"] += 1
            else:
                kept.append((source, target))
        rows = []
        for side in (0, 1):
            try:
                rows.append(self.encoder.lines([pair[side] for pair in kept]))
            except DataError as error:
                raise DataError(f"{job.paths[side]}, after line {job.line}: {error}") from None
        good = self._filtered([np.diff(ends, prepend=0) - 1 for _, ends in rows], skipped)
        ids, ends = zip(*(select(*row, good) for row in rows), strict=True)
        texts = [f"{s}\n{t}" for (s, t), keep in zip(kept, good, strict=True) if keep]
        return Tokens(ids, ends, self._hashed(texts), {"pairs": len(sides[0])}, dict(skipped))

    def _filtered(self, lengths, skipped):
        """Return which pairs to keep by their lengths in tokens, without end marks."""
        good = np.ones(len(lengths[0]), bool)
        longer, shorter = np.maximum(*lengths), np.minimum(*lengths)
        if self.rules.longest is not None:
            good = longer <= self.rules.longest
            skipped[f"longer than {self.rules.longest:,} tokens"] += int((~good).sum())
        if self.rules.max_ratio is not None:
            uneven = good & (longer > self.rules.max_ratio * shorter)
            skipped[f"lengths beyond {self.rules.max_ratio:g} to 1"] += int(uneven.sum())
            good &= ~uneven
        return good

    def _hashed(self, texts):
        return hashes(texts) if self.rules.hashes else None

    def _encoded(self, job, number, text):
        try:
            return self.encoder.text(text)
        except DataError as error:
            raise DataError(f"{job.paths[0]}, from line {number:,} on: {error}") from None


_NO_ENDS = np.empty(0, np.int64)


def hashes(texts: Iterable[str]) -> np.ndarray:
    """Return a 64-bit hash of each text, (texts,) uint64, the same on every machine."""
    found = b"".join(blake2b(text.encode(), digest_size=8).digest() for text in texts)
    return np.frombuffer(found, "<u8")


def select(ids: np.ndarray, ends: np.ndarray, keep: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids of some rows, end to end, and their ends. ``keep``: (rows,) bool."""
    if keep.all():
        return ids, ends
    lengths = np.diff(ends, prepend=0)
    return ids[np.repeat(keep, lengths)], np.cumsum(lengths[keep])


def _decoded(job, side):
    data = job.data[side]
    zero = data.find(b"\0")
    if zero >= 0:
        line = job.line + data.count(b"\n", 0, zero)
        raise DataError(
            f"{job.paths[side]}, line {line}, is not text: it has a zero byte. Leave the file out"
        )
    try:
        return data.decode()
    except UnicodeDecodeError:
        for number, line in enumerate(data.split(b"\n"), job.line):
            decode_line(job.paths[side], number, line)
        raise


def _lines(text):
    return text.removesuffix("\n").split("\n")


def _text_of_row(job, number, line):
    """Return the text of a JSON line: a string, or the job's field of an object."""
    try:
        row = json.loads(line)
        text = row if isinstance(row, str) else row[job.field]
    except (ValueError, LookupError, TypeError) as error:
        why = (
            f"has no field {error}" if isinstance(error, KeyError) else f"is no such JSON: {error}"
        )
        raise DataError(
            f"{job.paths[0]}, line {number}, {why}; accepted: a line of JSON for each document, "
            f"such as {{{json.dumps(job.field)}: ...}}, or --field NAME"
        ) from None
    if not isinstance(text, str):
        raise DataError(f"{job.paths[0]}, line {number}: {job.field!r} is no text: {text!r:.60}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{job.paths[0]}, line {number}, is no Unicode text: {error}") from None
    return text


def tokenized(
    rules: Rules, jobs: Iterator[tuple[Any, Job]], workers: int
) -> Iterator[tuple[Any, Tokens]]:
    """Yield (tag, Tokens) for each (tag, job), in order. ``workers``: processes; 1: this one.

    At most ``AHEAD`` jobs for each worker are read before their turn. Raises what a job raises, at
    its turn; RuntimeError when a worker was killed.
    """
    if workers == 1:
        worker = Worker(rules)
        yield from ((tag, worker(job)) for tag, job in jobs)
        return
    pool = _Pool(rules, workers)
    waiting: collections.deque = collections.deque()
    try:
        for tag, job in jobs:
            waiting.append((tag, pool.submit(job)))
            if len(waiting) == AHEAD * workers:
                tag, found = waiting.popleft()
                yield tag, found.result()
        while waiting:
            tag, found = waiting.popleft()
            yield tag, found.result()
    finally:
        pool.close()


class _Pool:
    """Processes, each with a thread of this one that hands it jobs."""

    def __init__(self, rules, workers):
        self._threads = ThreadPoolExecutor(workers)
        self._idle = queue.SimpleQueue()
        self._processes = []
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        for _ in range(workers):
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "gpuattn.data.preparing.parallel_tokenize"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment,
            )  # fmt: skip
            self._processes.append(process)
            self._idle.put(process)
            with contextlib.suppress(BrokenPipeError):  # it has ended: its first job tells
                pickle.dump(rules, process.stdin)

    def submit(self, job):
        return self._threads.submit(self._do, job)

    def _do(self, job):
        process = self._idle.get()
        try:
            pickle.dump(job, process.stdin, protocol=5)
            process.stdin.flush()
            done, found = pickle.load(process.stdout)
        except (EOFError, OSError, pickle.UnpicklingError):
            code = process.wait()
            raise RuntimeError(
                f"a process that tokenises has ended (exit code {code}). If the machine is short "
                "of memory, use fewer --workers"
            ) from None
        finally:
            self._idle.put(process)
        if not done:
            raise DataError(found)
        return found

    def close(self):
        for process in self._processes:
            process.kill()
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(BrokenPipeError):  # of what was not written
                    pipe.close()


def serve() -> None:
    """Do the jobs that come through standard input until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a Ctrl-C, which the first process handles
    jobs, results = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no result
    try:
        worker = Worker(pickle.load(jobs))
        while True:
            job = pickle.load(jobs)
            try:
                answer: tuple[bool, Any] = True, worker(job)
            except DataError as error:
                answer = False, str(error)
            pickle.dump(answer, results, protocol=5)
            results.flush()
    except (EOFError, BrokenPipeError):
        os._exit(0)  # the first process has ended; nothing is left to flush


if __name__ == "__main__":
    # Jobs name classes of the module, not of ``__main__``.
    from gpuattn.data.preparing import parallel_tokenize

    parallel_tokenize.serve()
