"""gpuattn translate: one line in, exactly one line out."""

import sys
from collections.abc import Sequence
from typing import Any, BinaryIO

import click

from gpuattn.cli.decoding import decoding_options, loading_options
from gpuattn.cli.options import BEAMS, PathName, run_argument
from gpuattn.cli.streams import STANDARD, reading, writing
from gpuattn.errors import DataError
from gpuattn.runs.folder import load_run


@click.command("translate")
@run_argument
@click.option("--input", "source", metavar="FILE", type=PathName(), default=STANDARD,
              help="UTF-8 text to translate.  [default: -, standard input]")  # fmt: skip
@click.option("--output", "target", metavar="FILE", type=PathName(), default=STANDARD,
              help="Replaced when all is translated.  [default: -, standard output]")  # fmt: skip
@decoding_options
@click.option("--nbest", type=BEAMS, help="Print the N best of each line, numbered.")
@click.option("--scores", is_flag=True, help="Print log-probabilities, divided as in the search.")
@click.option("--no-kv-cache", is_flag=True, help="Recompute the whole prefix at each token.")
@loading_options
def command(
    folder: str,
    source: str,
    target: str,
    beam: int | None,
    length_penalty: float | None,
    nbest: int | None,
    scores: bool,
    no_kv_cache: bool,
    device: str,
    dtype: str,
) -> None:
    """Translate standard input with the run in DIR, a line for each line; empty lines stay.

    \b
    gpuattn translate runs/toy < phrases.txt > translations.txt
    gpuattn translate runs/toy --input phrases.txt --output translations.txt
    gpuattn translate runs/toy                  a prompt; leave it with Ctrl-D

    With --nbest a line of input gives up to N lines: its number, the score (--scores), the text.
    A line that cannot be translated gives an empty one and a message; the exit code is then 1.
    """
    translator = load_run(folder, device=device, dtype=dtype, task="translation")
    options = {"beam": beam, "length_penalty": length_penalty, "kv_cache": not no_kv_cache}
    prompt = source == STANDARD and sys.stdin.isatty()
    if prompt:
        click.echo("Type a line and press Enter; Ctrl-D ends.", err=True)
    with reading(source) as stream, writing(target) as out:
        writer = Writer(out, translator, nbest, scores, options)
        for lines in _batches(stream, prompt):
            writer.write(lines)
    if prompt:
        click.echo(err=True)  # the shell's prompt begins on its own line
    sys.exit(1 if writer.failed else 0)


class Writer:
    """Translates lists of lines and writes them to a binary stream, counting the lines."""

    def __init__(
        self,
        out: BinaryIO,
        translator: Any,
        nbest: int | None,
        scores: bool,
        options: dict[str, Any],
    ) -> None:
        self.translator, self.nbest, self.scores = translator, nbest, scores
        self.out, self.options = out, options
        self.line, self.failed = 0, False

    def write(self, lines: Sequence[bytes]) -> None:
        """Translate raw lines and flush, so that a reader sees them at once."""
        texts = [self._decoded(self.line + i, raw) for i, raw in enumerate(lines, 1)]
        found = self.translator.nbest(texts, self.nbest or 1, **self.options)
        for hypotheses in found:
            self.line += 1
            for text, value in hypotheses:
                columns = [str(self.line)] if self.nbest else []
                columns += [f"{value:.4f}"] if self.scores else []
                self.out.write(("\t".join([*columns, text]) + "\n").encode())
        self.out.flush()

    def _decoded(self, number, raw):
        """Return the text of a line; for an unusable line print a message and return ""."""
        try:
            text = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()  # with a BOM or not
            self.translator.check(text)
        except (UnicodeDecodeError, DataError) as error:
            what = "not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
            click.echo(f"gpuattn: error: line {number}: {what}", err=True)
            self.failed = True
            return ""
        return text


def _batches(stream, prompt):
    """Yield lists of complete lines: all that have arrived, or at a prompt one at a time."""
    rest = b""
    while True:
        if prompt:
            click.echo("> ", nl=False, err=True)
        data = stream.readline() if prompt else stream.read1(1 << 16)
        if not data:
            break
        *lines, rest = (rest + data).split(b"\n")
        if lines:
            yield lines
    if rest:
        yield [rest]
