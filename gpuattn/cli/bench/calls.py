"""gpuattn bench calls: single calls of ops and plain loops, beside PyTorch eager and CuPy."""

from collections.abc import Sequence

import click
import numpy as np

from gpuattn.bench import results
from gpuattn.bench.calls import cases
from gpuattn.bench.calls.cases import TIMED, Called
from gpuattn.bench.calls.measure import measure
from gpuattn.bench.charts import draw_calls
from gpuattn.cli.bench.table import (
    begin,
    colored,
    console,
    describe,
    json_option,
    missing_option,
    peers_option,
    plot_option,
    show_missing,
)
from gpuattn.cli.shared.options import GroupedCommand, GroupedOption, NearChoice, device_option
from gpuattn.runtime.device import array_module, choose_device


@click.command("calls", cls=GroupedCommand)
@click.argument("ops", nargs=-1, metavar="[OP]...", type=NearChoice(cases.OPS))
@click.option(
    "--timed", "timed", multiple=True, type=NearChoice(TIMED), cls=GroupedOption, group="Cells",
    help="Only this: the host's part, a call until its result is there, or the first one in a new "
    "process with empty or full caches of kernels; may be given several times.",
)  # fmt: skip
@peers_option
@missing_option
@plot_option
@device_option
@json_option
def command(
    ops: tuple[str, ...], timed: tuple[str, ...], device: str, path: str | None, peers: bool,
    missing: bool, plot: str | None,
) -> None:  # fmt: skip
    """Time calls of OPS one by one (default: all).

    Besides ops there are "layer", a Transformer layer by gpuattn.capture, "train", an update of a
    model, and "loop", the plain loop of loss.backward() and optimizer.step(). NumPy calls are shown
    beside the bare NumPy expression.
    """
    xp = array_module(choose_device(device)[0])
    if xp is np:
        click.echo("No GPU: NumPy in float32, without peers.")
    chosen: Sequence = [
        cell for cell in cases.table(xp)
        if (not ops or cell.op in ops) and (not timed or cell.case.timed in timed)
    ]  # fmt: skip
    measured, chosen, pyplot = begin(xp, path, chosen, plot, missing=missing, with_peers=peers)
    measured.add(chosen, describe, _overhead, measure=measure, with_peers=peers)
    for how in TIMED:
        _show([row for row in measured.rows if Called.from_row(row).timed == how], how)
    rows = measured.document["rows"]
    if rows and plot:
        draw_calls(pyplot, measured.document, plot)
    if measured.rows and peers and xp is not np:
        click.echo(f"calls: {results.verdict(rows, cases.TABLE)}")
    measured.finish()


def _overhead(row):
    return f"{row['us'] - row['bare_us']:+8.1f} us to NumPy" if "bare_us" in row else ""


def _show(rows, how):
    if rows:
        where = console()
        where.print(_table(rows, how))
        show_missing(where, rows)


def _table(rows, how):
    from rich.table import Table

    names = list(dict.fromkeys(name for row in rows for name in row["peers"]))
    title = f"[bold]{how}[/]: {TIMED[how]}; us"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    bare = any("bare_us" in row for row in rows)
    for head in ("op", "problem", "direction", "by"):
        table.add_column(head)
    heads = ["gpuattn", *["NumPy", "more"] * bare, *names, *["ratio"] * bool(names)]
    for head in heads:
        table.add_column(head, justify="right")
    for row in rows:
        problem = Called.from_row(row).problem
        cells = [row["op"], problem, row["direction"], row["impl"], f"{row['us']:.1f}"]
        if bare:
            us = row.get("bare_us")
            cells += ["-", "-"] if us is None else [f"{us:.1f}", f"{row['us'] - us:+.1f}"]
        times = [row["peers"].get(name) for name in names]
        cells += ["-" if us is None else f"{us:.1f}" for us in times]
        table.add_row(*cells, *[colored(row["ratio_to_best_peer"])] * bool(names))
    return table
