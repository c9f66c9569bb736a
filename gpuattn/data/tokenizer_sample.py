"""The tokenizer of a store that is given none: learned from a bounded sample of its sources."""

import json
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from gpuattn.data.sources import BLOCK, STANDARD, Reader, Source, spread
from gpuattn.data.tokenizer import BaseTokenizer, CharTokenizer, Tokenizer
from gpuattn.errors import DataError

SAMPLE = 12 << 20  # bytes of text that subwords are learned from
PIECE = 1000  # characters: SentencePiece learns nothing from lines much longer


def learned(plan: Any, kept: list[bytes], say: Callable[[str], None]) -> BaseTokenizer:
    """Return a plan's own tokenizer, or learn it. ``kept``: gets what is read of standard input."""
    if isinstance(plan.tokenizer, BaseTokenizer):
        return plan.tokenizer
    if plan.tokenizer == "chars":
        return _characters(plan)
    say("learning a tokenizer from a sample")
    sizes = [source.stat()[0] for source in plan.files]
    lines = []
    for source, size in zip(plan.files, sizes, strict=True):
        if source.path == STANDARD:
            kept += islice(Reader(source).blocks(), SAMPLE // BLOCK)
            chunks = iter(kept)
        else:
            chunks = spread(source, max(BLOCK, SAMPLE * size // sum(sizes)) if size else BLOCK)
        lines += [line for chunk in chunks for line in _lines(source, chunk)]
    if not any(lines):
        names = ", ".join(source.path for source in plan.files[:3])
        raise DataError(f"{names}: there is no text to learn a tokenizer from")
    return Tokenizer.train(lines, plan.vocab_size, plan.seed)


def _characters(plan):
    """Return the tokenizer of all characters, of all sources."""
    found: set[str] = set()
    for source in plan.files:
        for chunk in Reader(source).chunks(any_cut=not source.is_rows):
            found.update(*_texts(source, chunk))
    if len(plan.files) > 1 or plan.files[0].is_rows:
        found.add("\n")  # between documents
    return CharTokenizer.train(found)


def _lines(source: Source, chunk: bytes) -> Iterator[str]:
    """Yield the lines of a chunk, long ones in parts."""
    for text in _texts(source, chunk):
        for line in text.split("\n"):
            yield from (line[i : i + PIECE] for i in range(0, len(line), PIECE))


def _texts(source, chunk):
    """Yield the texts of a chunk. What cannot be read is left out: the tokens come from a second
    reading, which names file and line."""
    text = chunk.decode(errors="ignore")
    if not source.is_rows:
        yield text
        return
    for line in text.split("\n"):
        try:
            row = json.loads(line)
            found = row if isinstance(row, str) else row[source.field or "text"]
            yield str(found).encode(errors="ignore").decode()
        except (ValueError, LookupError, TypeError):
            continue
