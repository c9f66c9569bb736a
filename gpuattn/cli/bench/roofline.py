"""gpuattn bench roofline: every op on one chart, by FLOPs a byte, under this machine's ceilings."""

from collections.abc import Sequence

import click
import numpy as np

from gpuattn.bench import results, roofline
from gpuattn.bench.cases import Cell
from gpuattn.bench.charts import draw_roofline
from gpuattn.cli.bench.table import (
    begin,
    console,
    describe,
    json_option,
    plot_option,
    short,
    tflops,
)
from gpuattn.cli.shared.options import GroupedCommand, device_option
from gpuattn.runtime.device import array_module, choose_device


@click.command("roofline", cls=GroupedCommand)
@plot_option
@device_option
@json_option
def command(device: str, path: str | None, plot: str | None) -> None:
    """Time one problem of every op.

    Each is compared with the ceilings of this machine: the rates of a copy and of a matmul.
    """
    xp = array_module(choose_device(device)[0])
    cells: Sequence[Cell] = roofline.SMALL if xp is np else roofline.CELLS
    measured, cells, pyplot = begin(xp, path, cells, plot)
    measured.add(cells, describe, tflops)
    if measured.rows:
        console().print(_table(measured.rows, measured.ceilings))
        if plot:
            draw_roofline(pyplot, {**measured.document, "rows": measured.rows}, plot)
    measured.finish()


def _table(rows, ceilings):
    from rich.table import Table

    table = Table(title="[bold]roofline[/]", title_justify="left", box=None, pad_edge=False)
    for head in ("op", "problem", "direction"):
        table.add_column(head)
    for head in ("FLOP/byte", "TFLOP/s", "GB/s", "of the roof"):
        table.add_column(head, justify="right")
    for row in rows:
        intensity, roof = roofline.place(row, ceilings)
        table.add_row(
            row["op"], str(results.case_of(row)), row["direction"], short(intensity),
            short(row["tflops"]), short(row["gbs"]), f"{row['tflops'] / roof:.2f}",
        )  # fmt: skip
    return table
