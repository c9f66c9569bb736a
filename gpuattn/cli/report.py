"""gpuattn report: the page of a run."""

import click

from gpuattn.cli.shared.options import run_argument
from gpuattn.report.page import write_page


@click.command("report")
@run_argument
def command(folder: str) -> None:
    """Write DIR/report.html, one file that shows the run in any browser: curves, samples, attention
    maps, the profile of a step (where gpuattn profile DIR was run), options and versions.

    A run writes it when it ends; this writes it again, or for a run that was stopped. Prints the
    file it wrote.
    """
    click.echo(write_page(folder))
