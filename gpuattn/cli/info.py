"""gpuattn info: what a run is and how it went."""

import json

import click

from gpuattn.cli.options import run_argument
from gpuattn.train.config import to_toml
from gpuattn.train.run import RunFolder, summary


@click.command("info")
@run_argument
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(folder, as_json):
    """Show the options, size and scores of the run in DIR."""
    found = summary(folder)
    if as_json:
        click.echo(json.dumps(found, indent=2, ensure_ascii=False))
        return
    for name, value in found.items():
        shown = f"{value:,}" if isinstance(value, int) else value
        if name not in ("options", "best"):
            click.echo(f"{name:12} {shown}")
    for name, value in (found["best"] or {}).items():
        click.echo(f"{'best ' + name:20} {value}")
    click.echo(to_toml(RunFolder(folder).config()), nl=False)
