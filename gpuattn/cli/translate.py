"""gpuattn translate: one line in, exactly one line out."""

import contextlib
import json
import os
import stat
import sys
import time
from collections.abc import Sequence
from typing import Any, BinaryIO

import click

from gpuattn.cli.shared.decoding import (
    batch_tokens_option,
    cache_options,
    decoding_options,
    loading_options,
    search_options,
)
from gpuattn.cli.shared.gpus import gpus_option, shared_user
from gpuattn.cli.shared.lines import LineErrors, arriving
from gpuattn.cli.shared.options import BEAMS, GroupedCommand, GroupedOption, PathName, run_argument
from gpuattn.cli.shared.progress import LineProgress
from gpuattn.cli.shared.streams import STANDARD, reading, writing
from gpuattn.data.text import read_raw_lines
from gpuattn.errors import DataError
from gpuattn.parallel.world import is_first
from gpuattn.runs.loading import load_run
from gpuattn.tasks.users.translator import Translation

PREFIXES = "the prefix file has {} lines, and the input {}; accepted: a line for each"
FILES: dict[str, Any] = {"cls": GroupedOption, "group": "Files", "metavar": "FILE",
                         "type": PathName()}  # fmt: skip
OUTPUT: dict[str, Any] = {"cls": GroupedOption, "group": "Form of the output"}


@click.command("translate", cls=GroupedCommand)
@run_argument
@click.option("--input", "source", default=STANDARD, **FILES,
              help="UTF-8 text to translate.  [default: -, standard input]")  # fmt: skip
@click.option("--output", "target", default=STANDARD, **FILES,
              help="Replaced when all is translated.  [default: -, standard output]")  # fmt: skip
@click.option("--prefix-file", **FILES,
              help="What each translation begins with: a line for each, or an empty one.",
              )  # fmt: skip
@decoding_options
@search_options
@click.option("--nbest", type=BEAMS, help="Print the N best of each line, numbered.", **OUTPUT)
@click.option("--scores", is_flag=True, **OUTPUT,
              help="Print log-probabilities, divided as in the search.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object a line.", **OUTPUT)
@cache_options
@batch_tokens_option
@gpus_option
@loading_options
@click.pass_context
def command(
    ctx: click.Context,
    folder: str,
    source: str,
    target: str,
    prefix_file: str | None,
    nbest: int | None,
    scores: bool,
    as_json: bool,
    no_kv_cache: bool,
    device: str,
    dtype: str,
    gpus: int | str | None,
    **options: Any,
) -> None:
    """Translate standard input with the run in DIR, a line for each line; empty lines stay.

    \b
    gpuattn translate runs/toy < phrases.txt > translations.txt
    gpuattn translate runs/toy --input phrases.txt --output translations.txt
    gpuattn translate runs/toy                  a prompt; leave it with Ctrl-D

    With --nbest a line of input gives up to N lines: its number, the score (--scores), the text.
    With --json: line, text, score (the log-probability), normalised (what --scores prints), tokens
    (their number, the end mark included), time (seconds from reading the line on); with --nbest
    also a list, nbest. A line that cannot be translated gives an empty one (with --json its error)
    and a message; the exit code is then 1. With --gpus, or by ranks of mpirun, each of them
    translates a part of the lines, and rank 0 alone reads and writes.
    """
    prefixes = None

    def loaded():
        nonlocal prefixes
        translator = load_run(folder, device=device, dtype=dtype, task="translation")
        translator.check_lengths(options["min_length"], options["max_length"])
        prefixes = read_raw_lines(prefix_file) if prefix_file and is_first() else None
        return translator

    with shared_user(ctx, gpus, device, loaded) as (translator, ranks):
        if translator is None:
            return
        options["kv_cache"] = not no_kv_cache
        form: dict[str, Any] = {"nbest": nbest, "scores": scores, "as_json": as_json}
        errors = _translate(translator, source, target, options, prefixes, form, ranks)
    sys.exit(1 if errors else 0)


def _translate(translator, source, target, options, prefixes, form, ranks):
    """Translate a file to another one; return how many lines could not be translated."""
    prompt = source == STANDARD and sys.stdin.isatty()
    if prompt:
        click.echo("Type a line and press Enter; Ctrl-D ends.", err=True)
    with reading(source) as stream, writing(target) as out, contextlib.ExitStack() as stack:
        size, progress = _size(stream), None
        if size and not (target == STANDARD and sys.stdout.isatty()):
            progress = LineProgress("translate", size)
            stack.callback(progress.close)
        writer = Writer(out, translator, options, prefixes, progress, **form)
        for lines in arriving(stream, prompt, ranks):
            writer.write(lines)
        writer.close()
    if prompt:
        click.echo(err=True)  # the shell's prompt begins on its own line
    return writer.errors.count


class Writer:
    """Translates lists of lines and writes them to a binary stream.

    ``options``: of ``Translator.nbest``. ``prefixes``: the raw lines of the prefix file, or None.
    ``nbest``, ``scores``, ``as_json``: the form of the output, as the command has them.
    """

    def __init__(
        self,
        out: BinaryIO,
        translator: Any,
        options: dict[str, Any],
        prefixes: Sequence[bytes] | None,
        progress: LineProgress | None,
        *,
        nbest: int | None,
        scores: bool,
        as_json: bool,
    ) -> None:
        self.out, self.translator, self.options = out, translator, options
        self.prefixes, self.progress = prefixes, progress
        self.nbest, self.scores, self.as_json = nbest, scores, as_json
        self.line, self.errors = 0, LineErrors()

    def write(self, lines: Sequence[bytes]) -> None:
        """Translate raw lines and flush, so that a reader sees them at once."""
        begun = time.perf_counter()
        if self.progress:
            self.progress.begin(len(lines), sum(map(len, lines)) + len(lines))
        rows = self._with_prefixes(lines)
        found = [
            self.errors.checked(number, raws, self._check)
            for number, raws in enumerate(rows, self.line + 1)
        ]
        usable = [texts for texts, _ in found if texts]
        translations = iter(self._translations(usable))
        spent = time.perf_counter() - begun
        for texts, message in found:
            self.line += 1
            best = next(translations) if texts else [Translation()]
            show = self._json(best, message, spent) if self.as_json else self._columns(best)
            self.out.write(show.encode())
        self.out.flush()
        if len(rows) < len(lines):
            raise DataError(PREFIXES.format(self.line, "more"))

    def close(self) -> None:
        """Raise DataError if the prefix file has lines that belong to none of the input."""
        if self.prefixes is not None and len(self.prefixes) > self.line:
            raise DataError(PREFIXES.format(len(self.prefixes), self.line))

    def _with_prefixes(self, lines):
        """Return tuples of a raw line and, where there is a file of them, its prefix."""
        if self.prefixes is None:
            return [(line,) for line in lines]
        here = self.prefixes[self.line : self.line + len(lines)]
        return list(zip(lines, here, strict=False))

    def _check(self, line, prefix=""):
        self.translator.check(line)
        self.translator.check_prefix(prefix, self.options.get("max_length"))

    def _translations(self, usable):
        lines = [texts[0] for texts in usable]
        prefixes = None if self.prefixes is None else [prefix for _, prefix in usable]
        notify = self.progress.add if self.progress else None
        return self.translator.nbest(
            lines, self.nbest or 1, prefixes=prefixes, notify=notify, **self.options
        )

    def _columns(self, best):
        """Return a line of text for each translation."""
        number = [str(self.line)] if self.nbest else []
        return "".join(
            "\t".join([*number, *([f"{one.score:.4f}"] if self.scores else []), one.text]) + "\n"
            for one in best
        )

    def _json(self, best, message, spent):
        row = {"line": self.line}
        if message:
            return json.dumps(row | {"error": message}) + "\n"
        row |= _figures(best[0]) | {"time": round(spent, 4)}
        if self.nbest:
            row["nbest"] = [_figures(one) for one in best]
        return json.dumps(row, ensure_ascii=False) + "\n"


def _figures(one: Translation) -> dict[str, Any]:
    return {
        "text": one.text, "score": one.logprob, "normalised": one.score, "tokens": one.tokens
    }  # fmt: skip


def _size(stream):
    """Return the bytes of a regular file, or 0 for anything else."""
    try:
        status = os.fstat(stream.fileno())
    except OSError:  # not of the system
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0
