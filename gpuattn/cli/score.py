"""gpuattn score: how probable given texts are to a model."""

import json
import sys

import click

from gpuattn.cli.shared.decoding import batch_tokens_option, loading_options
from gpuattn.cli.shared.gpus import gpus_option, shared_user
from gpuattn.cli.shared.lines import LineErrors
from gpuattn.cli.shared.options import GroupedCommand, PathName, run_argument
from gpuattn.data.text import read_raw_lines, read_raw_pairs
from gpuattn.parallel.world import is_first
from gpuattn.runs.loading import load_run

TOGETHER = 4096  # lines that are scored together, and then printed


@click.command("score", cls=GroupedCommand)
@run_argument
@click.argument("files", nargs=-1, metavar="{SRC TGT | FILE}", type=PathName())
@click.option("--tokens", is_flag=True, help="Add the log-probability of each token.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object for each line.")
@batch_tokens_option
@gpus_option
@loading_options
@click.pass_context
def command(
    ctx: click.Context,
    folder: str,
    files: tuple[str, ...],
    tokens: bool,
    as_json: bool,
    batch_tokens: int | None,
    gpus: int | str | None,
    device: str,
    dtype: str,
) -> None:
    """Print how probable each line of TGT is as the translation of that line of SRC, to the run in
    DIR; with a language model, how probable each line of FILE is.

    \b
    gpuattn score runs/de test.en test.de
    gpuattn score runs/book sonnets.txt --json

    For each line: its log-probability in nats, a tab, and the mean over its tokens, the end of the
    line counted as one; with --tokens also a tab, and the log-probabilities of the tokens. With
    --json: line, score, normalised, tokens (their number), pieces, logprobs. A line without a score
    gives an empty one (with --json its error) and a message; the exit code is then 1. With --gpus,
    or by ranks of mpirun, each of them scores a part of the lines.
    """
    rows, check = [], str

    def loaded():
        nonlocal rows, check
        user = load_run(folder, device=device, dtype=dtype)
        if user.task == "embedding":
            raise click.UsageError(f"{folder} has an encoder, which has no scores: gpuattn embed")
        if user.task in ("images", "labels"):
            raise click.UsageError(
                f"{folder} has a classifier, which scores no text: gpuattn classify"
            )
        if is_first():
            rows, check = _rows_of(user, files)
        return user

    errors = LineErrors()
    with shared_user(ctx, gpus, device, loaded) as (user, ranks):
        if user is None:
            return
        options = {"batch_tokens": batch_tokens} if batch_tokens else {}
        for begin in range(0, len(rows), TOGETHER * ranks):
            some = list(enumerate(rows[begin : begin + TOGETHER * ranks], begin + 1))
            found = [errors.checked(number, raws, check) for number, raws in some]
            usable = [texts for texts, _ in found if texts]
            scores = iter(user.score([t if len(t) > 1 else t[0] for t in usable], **options))
            for (number, _), (texts, message) in zip(some, found, strict=True):
                scored = next(scores) if texts else None
                line = _json(number, scored, message) if as_json else _columns(scored, tokens)
                click.echo(line)
    sys.exit(1 if errors.count else 0)


def _rows_of(user, files):
    """Return (the lines of the files, as tuples of bytes; the function that checks their texts)."""
    if user.task == "translation":
        if len(files) != 2:
            raise click.UsageError("give a source and a target file for a translator")
        return read_raw_pairs(*files), user.check_pair
    if len(files) != 1:
        raise click.UsageError("give one text file for a language model")
    return [(raw,) for raw in read_raw_lines(*files)], user.check


def _columns(scored, tokens):
    """Return a line of text: empty where there is no score."""
    if scored is None:
        return ""
    columns = [f"{scored.score:.4f}", f"{scored.normalised:.4f}"]
    if tokens:
        columns.append(" ".join(f"{value:.4f}" for value in scored.logprobs))
    return "\t".join(columns)


def _json(number, scored, message):
    row = {"line": number}
    if scored is None:
        return json.dumps(row | {"error": message})
    row |= {"score": scored.score, "normalised": scored.normalised, "tokens": len(scored.logprobs)}
    return json.dumps(row | scored._asdict(), ensure_ascii=False)
