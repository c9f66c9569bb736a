"""gpuattn average: average the weights of several checkpoints."""

import click

from gpuattn.cli.shared.options import COUNT, PathName
from gpuattn.runs.averaging import average_runs


@click.command("average")
@click.argument("folders", nargs=-1, required=True, metavar="DIR...", type=PathName())
@click.option("--out", required=True, type=PathName(file_okay=False), help="The new folder.")
@click.option("--last", type=COUNT, help="Of one run: its last N kept checkpoints.")
def command(folders: tuple[str, ...], out: str, last: int | None) -> None:
    """Average the best weights of several runs of one model, or the checkpoints that one run kept
    (gpuattn train --average N), into a new run folder.

    \b
    gpuattn average runs/de --out runs/de-mean
    gpuattn average runs/a runs/b runs/c --out runs/abc
    """
    count = average_runs(folders, out, last)
    click.echo(f"the mean of {count} checkpoints is in {out}", err=True)
