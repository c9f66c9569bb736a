"""gpuattn plot: curves and attention maps as pictures."""

from pathlib import Path

import click

from gpuattn.cli.shared.options import PathName, run_argument
from gpuattn.report.plot import plot_run


@click.command("plot")
@run_argument
@click.option("--out", type=PathName(file_okay=False), help="Default: DIR/plots.")
@click.option("--sentence", help="Whose attention to draw; default: a held-out one.")
def command(folder: str, out: str | None, sentence: str | None) -> None:
    """Draw the run in DIR: loss and scores, attention maps, and an overview of both; of a language
    model loss and perplexity.

    Needs matplotlib: pip install 'gpuattn[plots]'. Prints the files it wrote.
    """
    for path in plot_run(folder, out or Path(folder) / "plots", sentence):
        click.echo(path)
