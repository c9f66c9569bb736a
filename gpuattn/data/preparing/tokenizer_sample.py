"""The tokenizer of a store that is given none: learned from a bounded sample of its sources."""

import json
from collections.abc import Callable, Iterator
from itertools import islice

import numpy as np

from gpuattn.data.preparing.encoder import LAST_CODE, code_points
from gpuattn.data.preparing.plan import Plan
from gpuattn.data.preparing.sources import BLOCK, STANDARD, Reader, Source, spread
from gpuattn.data.text import one_line_end, pieces
from gpuattn.data.tokenizer import BaseTokenizer, CharTokenizer, Tokenizer
from gpuattn.errors import DataError

SAMPLE = 12 << 20  # bytes of text that subwords are learned from


def learned(plan: Plan, kept: list[bytes], say: Callable[[str], None]) -> BaseTokenizer:
    """Return a plan's own tokenizer, or learn it. ``kept``: gets what is read of standard input."""
    if isinstance(plan.tokenizer, BaseTokenizer):
        return plan.tokenizer
    if plan.tokenizer == "chars":
        return _characters(plan)
    say("learning a tokenizer from a sample")
    lines: list[str] = []
    for source, chunk in _sample(plan.files, kept):
        lines += _lines(source, chunk)
    if not any(lines):
        raise _no_text(plan)
    return Tokenizer.train(lines, plan.vocab_size, plan.seed)


def _sample(files, kept):
    """Yield (source, chunk), ``SAMPLE`` bytes in all. Each file adds its share to what may be read;
    a block is read, or a whole smaller file, once there is enough for it."""
    total, room = max(sum(source.stat()[0] for source in files), 1), 0.0
    for source in files:
        if source.path == STANDARD:
            kept += islice(Reader(source).blocks(), SAMPLE // BLOCK)
            yield from ((source, block) for block in kept)
            continue
        size = source.stat()[0]
        room += SAMPLE * size / total
        if size and room >= min(size, BLOCK):
            yield from ((source, chunk) for chunk in spread(source, int(room)))
            room = 0.0


def _characters(plan):
    """Return the tokenizer of all characters, of all sources."""
    found = np.zeros(LAST_CODE + 1, bool)
    for source in plan.files:
        for chunk in Reader(source).chunks(any_cut=not source.is_rows):
            for text in _texts(source, chunk):
                found[code_points(text)] = True
    if not found.any():
        raise _no_text(plan)
    if len(plan.files) > 1 or plan.files[0].is_rows:
        found[ord("\n")] = True  # between documents
    return CharTokenizer.train(map(chr, np.flatnonzero(found)))


def _no_text(plan):
    for source in plan.files[:3]:
        if source.path != STANDARD:
            next(Reader(source).chunks(), None)  # raises an error for a line that is too long
    names = ", ".join(source.path for source in plan.files[:3])
    return DataError(f"{names}: there is no text to learn a tokenizer from")


def _lines(source: Source, chunk: bytes) -> Iterator[str]:
    """Yield the lines of a chunk, long ones in parts."""
    for text in _texts(source, chunk):
        yield from pieces(text)


def _texts(source, chunk):
    """Yield the texts of a chunk. What cannot be read is left out: the tokens come from a second
    reading, which names file and line."""
    text = chunk.decode(errors="ignore")
    if not source.is_rows:
        yield one_line_end(text)
        return
    for line in text.split("\n"):
        try:
            row = json.loads(line)
            found = row if isinstance(row, str) else row[source.field or "text"]
            yield one_line_end(str(found).encode(errors="ignore").decode())
        except (ValueError, LookupError, TypeError):
            continue
