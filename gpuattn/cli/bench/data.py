"""gpuattn bench data: how fast text becomes a token store, and a store batches."""

import json
from pathlib import Path

import click
import numpy as np

from gpuattn.bench import data, results
from gpuattn.cli.bench.table import command_line
from gpuattn.cli.shared.options import PathName


@click.command("data")
@click.argument("stores", nargs=-1, metavar="[STORE ...]", type=PathName(file_okay=False))
@click.option("--seconds", default=3.0, show_default=True, help="Of each row.")
@click.option("--json", "path", type=PathName(dir_okay=False), help="Also write the figures here.")
def command(stores: tuple[str, ...], seconds: float, path: str | None) -> None:
    """Time how batches are made from token stores, or how generated text is prepared and generated
    stores are read: the start, tokens a second, and memory of this process without file cache."""
    click.echo(f"{'batch':28} {'start':>8} {'tokens/s':>10} {'memory':>8}")
    figures = data.measure(stores, seconds, _show)
    if path:
        document = results.origin(command_line(*stores, path), np) | {"data": figures}
        Path(path).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _show(row):
    memory = "-" if row["memory"] is None else f"{row['memory'] / 1e6:.0f} MB"
    rate = f"{row['tokens_per_s'] / 1e6:.1f} M"
    text = f"  {row['mb_per_s']:.1f} MB/s of text" if "mb_per_s" in row else ""
    click.echo(f"{row['what']:28} {row['start']:6.2f} s {rate:>10} {memory:>8}{text}")
