"""How fast text becomes tokens, and tokens batches, without a model; start and memory beside it."""

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gpuattn.data.batching import LanguageModelLoader, PackedLoader
from gpuattn.data.preparing.plan import Plan
from gpuattn.data.preparing.prepare import Done, prepare
from gpuattn.data.preparing.sources import Source
from gpuattn.data.preparing.store_writer import StoreWriter
from gpuattn.data.store import TokenStore
from gpuattn.data.tokenizer import EOS, SPECIALS, CharTokenizer
from gpuattn.environment import usable_cores
from gpuattn.tasks.stored import row_pairs

CASES = {  # kind of a store -> (batch, tokens of a block or None) in tokens
    "text": ((8_192, 256), (32_768, 1024), (491_520, 1024)),
    "pairs": ((8_000, None), (25_000, None)),
}
MEGABYTES = 64  # of text that is prepared
LONGEST = 257  # tokens of a sentence, as train has it
ROWS = {"text": 30_000, "pairs": 1_200_000}  # of generated stores: pairs packed by windows
MEAN, SPREAD, ROW = 3.2, 0.6, 2048  # log of the tokens of a sentence; tokens of a document


def loading(store: TokenStore, seconds: float) -> Iterator[dict[str, Any]]:
    """Yield a row for each of CASES of a store: ``what``, ``start`` (seconds from opening it to the
    first batch), ``tokens_per_s`` over ``seconds``, and ``memory`` (bytes that are no file cache,
    None where they are unknown)."""
    for tokens, block in CASES[store.kind]:
        memory, begin = anonymous_memory(), time.perf_counter()
        batches = _epochs(TokenStore(store.folder), tokens, block)
        next(batches)
        ready, count = time.perf_counter(), 0
        while (spent := time.perf_counter() - ready) < seconds:
            count += next(batches).all_tokens
        what = f"packed pairs of {tokens:,}" if block is None else f"blocks of {block:,} x "
        what += "" if block is None else f"{tokens // block}"
        now = anonymous_memory()
        held = None if now is None or memory is None else now - memory
        yield {"what": what, "start": ready - begin, "tokens_per_s": count / spent, "memory": held}


def _epochs(store, tokens, block):
    """Yield the batches of all epochs."""
    if block is None:
        loader = PackedLoader(row_pairs(store), tokens, 1, longest=LONGEST)
    else:
        loader = LanguageModelLoader(store.tokens("text"), block, tokens // block, 1)
    number = 0
    while True:
        yield from loader.epoch(number)
        number += 1


def anonymous_memory() -> int | None:
    """Return the bytes of this process that are no file cache; None where Linux does not tell."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon"):
                return int(line.split()[1]) * 1024
    return None


@contextlib.contextmanager
def generated(kind: str, rows: int | None = None) -> Iterator[TokenStore]:
    """Return a context with a store of generated ids, of Zipf's frequencies and the lengths of
    sentences, that is deleted at its end."""
    rng, count = np.random.default_rng(0), rows or ROWS[kind]
    tokenizer = CharTokenizer(map(chr, range(0x4E00, 0x4E00 + 20_000)))
    words = np.minimum(rng.zipf(1.2, 1 << 18) + SPECIALS, len(tokenizer)) - 1
    lengths = np.full(count, ROW)
    if kind == "pairs":
        lengths = np.clip(rng.lognormal(MEAN, SPREAD, count), 2, LONGEST - 1).astype(np.int64)
    with tempfile.TemporaryDirectory() as folder:
        writer = StoreWriter(Path(folder), tokenizer, kind)
        for begin in range(0, count, 1 << 17):
            ends = np.cumsum(lengths[begin : begin + (1 << 17)])
            ids = np.resize(words, ends[-1])
            ids[ends - 1] = EOS
            writer.add(dict.fromkeys(writer.sides, ids), dict.fromkeys(writer.sides, ends))
        writer.end_part(None)
        writer.finish()
        writer.clean()
        yield TokenStore(folder)


def preparing(megabytes: int, workers: int) -> dict[str, Any]:
    """Return a row on ``gpuattn prepare`` of generated text: fields as those of ``loading``, and
    ``mb_per_s``, its bytes of text a second; learning the tokenizer is counted."""
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text"
        done: list[Done] = []
        text.write_text(_some_text(megabytes << 20))
        memory = anonymous_memory()
        plan = Plan(sources=(Source(str(text), "text"),), workers=workers)
        store = prepare(plan, Path(folder) / "store", progress=done.append)
        now, (size, spent, _) = anonymous_memory(), done[-1]
        return {
            "what": f"preparing {megabytes} MB, {workers} processes",
            "start": 0.0,
            "tokens_per_s": store.head["tokens"]["text"] / spent,
            "memory": None if now is None or memory is None else now - memory,
            "mb_per_s": size / spent / 1e6,
        }


def _some_text(size):
    """Return text of about ``size`` characters, with words of Zipf's frequencies."""
    rng = np.random.default_rng(0)
    letters = rng.choice(list("etaoinshrdlucmfwypvbgk"), (50_000, 8))
    words = [
        " " + "".join(row[:n]) for row, n in zip(letters, rng.integers(2, 9, 50_000), strict=True)
    ]
    ids = np.minimum(rng.zipf(1.15, size // 6), len(words)) - 1
    return "\n".join("".join(words[i] for i in line) for line in np.array_split(ids, size // 100))


def measure(
    stores: tuple[str, ...], seconds: float, tell: Callable[[dict[str, Any]], None]
) -> list[dict[str, Any]]:
    """Return the rows of stores in folders, or of preparing and of generated stores; ``tell`` gets
    each row at once.

    Raises DataError for a folder that is no store.
    """
    rows = []
    if not stores:
        rows.append(preparing(MEGABYTES, usable_cores()))
        tell(rows[0])
    for name in stores or CASES:
        place = contextlib.nullcontext(TokenStore(name)) if stores else generated(name)
        with place as store:
            for row in loading(store, seconds):
                rows.append(row)
                tell(row)
    return rows
