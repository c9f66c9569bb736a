"""gpuattn prepare: text of any size to a token store."""

import shlex
import sys
import time
from pathlib import Path

import click

from gpuattn.cli.shared.options import COUNT, GroupedCommand, GroupedOption, Parsed, PathName
from gpuattn.data.preparing.plan import Plan
from gpuattn.data.preparing.prepare import PART, Done, prepare
from gpuattn.data.preparing.sources import find_sources
from gpuattn.data.store import TOKENIZER, TokenStore
from gpuattn.data.tokenizer import BaseTokenizer, tokenizer_from_bytes
from gpuattn.environment import usable_cores
from gpuattn.errors import ConfigError, DataError
from gpuattn.runs import folder as runs
from gpuattn.units import duration, number, parse_count

SECONDS = 1  # between lines of progress on a terminal, PLAIN_SECONDS elsewhere
PLAIN_SECONDS = 10
EPILOG = """\b
gpuattn prepare book.txt --out stores/book
gpuattn prepare crawl/ 'news/*.jsonl.zst' --documents --valid 0.005 --out stores/web
gpuattn prepare --pairs train.en train.de --max-ratio 3 --no-duplicates --out stores/de
zcat dump.gz | gpuattn prepare - --tokenizer runs/book --out stores/dump

The same command continues one that was stopped.
"""


def _option(*names, group, **settings):
    return click.option(*names, cls=GroupedOption, group=group, **settings)


@click.command("prepare", cls=GroupedCommand, epilog=EPILOG)
@click.argument("sources", nargs=-1, metavar="[SOURCE]...", type=PathName())
@_option("--out", required=True, type=PathName(file_okay=False), group="Folder",
         help="The store's folder.")  # fmt: skip
@_option("--pairs", nargs=2, multiple=True, type=PathName(), metavar="SRC TGT", group="Sources",
         help="Two files whose lines are translations of each other; may be repeated.")  # fmt: skip
@_option("--field", metavar="NAME", group="Sources",
         help="The field with the text, of JSON lines and Parquet.  [default: text]")  # fmt: skip
@_option("--mix", metavar="NAME=X,...", group="Sources",
         help="Weights of sources, by their names without folder and ending.")  # fmt: skip
@_option("--tokenizer", metavar="FILE|DIR|chars", group="Tokens",
         help="A tokenizer, or the run or store of one.  [default: learn subwords]")  # fmt: skip
@_option("--vocab-size", type=Parsed(parse_count, "N"), default="10k", show_default=True,
         group="Tokens", help="The most subwords to learn.")  # fmt: skip
@_option("--documents", is_flag=True, group="Tokens",
         help="End each file, JSON line or row with the end mark.")  # fmt: skip
@_option("--valid", type=Parsed(number(0, below=1), "X"), default=0.0, group="Rows",
         help="Hold out this share of documents or pairs, chosen by their text.")  # fmt: skip
@_option("--longest", type=COUNT, group="Rows",
         help="Leave out pairs with a side of more than N tokens.")  # fmt: skip
@_option("--max-ratio", type=Parsed(number(1), "X"), group="Rows",
         help="Leave out pairs with one side more than X times as long as the other.")  # fmt: skip
@_option("--no-duplicates", is_flag=True, group="Rows",
         help="Leave out pairs that came before; takes 8 to 16 bytes for each pair.")  # fmt: skip
@_option("--workers", type=COUNT, group="Machine",
         help="Processes that tokenise.  [default: as many as CPUs]")  # fmt: skip
def command(
    sources: tuple[str, ...], out: str, pairs: tuple[tuple[str, str], ...], field: str | None,
    mix: str | None, tokenizer: str | None, vocab_size: int, documents: bool, valid: float,
    longest: int | None, max_ratio: float | None, no_duplicates: bool, workers: int | None,
) -> None:  # fmt: skip
    """Turn text of any size into a token store: SOURCEs are files, folders, globs or - (standard
    input); plain, .gz, .xz, .zst, JSON lines (.jsonl) or Parquet."""
    _check_usage(sources, pairs, documents, longest or max_ratio or no_duplicates)
    texts = find_sources(sources, field)
    both = [find_sources(pair) for pair in pairs]
    for pair, names in zip(both, pairs, strict=True):
        if len(pair) != 2:
            raise click.UsageError(f"--pairs {shlex.join(names)}; accepted: two files")
    plan = Plan(
        sources=tuple(texts), pairs=tuple((one, other) for one, other in both),
        tokenizer=_tokenizer(tokenizer), vocab_size=vocab_size, documents=documents, valid=valid,
        longest=longest, max_ratio=max_ratio, duplicates=not no_duplicates, mix=_weights(mix),
        workers=workers or usable_cores(),
    )  # fmt: skip
    progress = Progress()
    try:
        store = prepare(plan, out, _say, progress)
    except KeyboardInterrupt:
        progress.end()
        _say(f"stopped; the same command goes on behind the last {PART >> 20} MB that were whole")
        raise
    finally:
        progress.end()
    click.echo(verdict(store, progress.last), err=True)


def _check_usage(sources, pairs, documents, filters):
    if bool(sources) == bool(pairs):
        raise click.UsageError("give SOURCEs, or --pairs SRC TGT")
    if sources and filters:
        raise click.UsageError("--longest, --max-ratio and --no-duplicates are for --pairs")
    if pairs and documents:
        raise click.UsageError("--documents is for texts: pairs always end with the end mark")


def _tokenizer(given: str | None) -> BaseTokenizer | str | None:
    """Return the tokenizer of a file, a run or a store; "chars" and None as they are."""
    if given in (None, "chars"):
        return given
    path = Path(given or "")
    if path.is_dir():
        path /= TOKENIZER if (path / TOKENIZER).exists() else runs.TOKENIZER
    try:
        return tokenizer_from_bytes(path.read_bytes())
    except (OSError, DataError) as error:
        why = getattr(error, "strerror", None) or error
        accepted = "a tokenizer, or the folder of a run or a store"
        raise ConfigError(f"--tokenizer {given}: {why}; accepted: {accepted}") from None


def _weights(text: str | None) -> dict[str, float]:
    """Return {name: weight} of such as ``news=0.7,talks=0.3``."""
    found: dict[str, float] = {}
    for part in text.split(",") if text else ():
        name, equals, weight = part.partition("=")
        if not name or not equals or name in found:
            raise click.UsageError(f"--mix {text}; accepted: such as news=0.7,talks=0.3")
        found[name] = number(0)(weight)
    return found


def _say(text: str) -> None:
    click.echo(text, err=True)


class Progress:
    """Prints MB/s and the time that is left on standard error."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._shown = time.monotonic()
        self.last = Done(0, 0.0, None)

    def __call__(self, done: Done) -> None:
        self.last = done
        every = SECONDS if self._terminal else PLAIN_SECONDS
        if time.monotonic() - self._shown < every:
            return
        self._shown = time.monotonic()
        text = f"{done.share:.0%}  {done.describe()}" if done.share else done.describe()
        click.echo(f"\r\033[K{text}" if self._terminal else text, err=True, nl=not self._terminal)

    def end(self) -> None:
        """Leave the line of a terminal."""
        if self._terminal:
            click.echo("\r\033[K", err=True, nl=False)


def verdict(store: TokenStore, done: Done) -> str:
    """Return one line on a new store."""
    head = store.head
    tokens = " + ".join(f"{head['tokens'][side]:,}" for side in store.sides)
    what = "pairs" if store.kind == "pairs" else "documents" if len(store) > 1 else "document"
    parts = [f"{store.folder}: {len(store):,} {what}, {tokens} tokens"]
    if store.valid:
        parts.append(f"{len(store.valid):,} held out")
    if left := sum(head["skipped"].values()):
        parts.append(f"{left:,} left out")
    if done.seconds:
        parts.append(f"{duration(done.seconds)}, {done.text / done.seconds / 1e6:.1f} MB/s")
    return "; ".join(parts)
