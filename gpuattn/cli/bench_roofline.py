"""gpuattn bench --roofline: every op on one chart, by FLOPs a byte, under this machine's roof."""

import numpy as np

from gpuattn.bench import results, roofline
from gpuattn.bench.plot import draw_roofline
from gpuattn.cli.bench_table import begin, console, describe, short, tflops


def chart(xp, path, line, plot):
    """Measure one problem of every op, print where it stands, and draw it to ``plot``."""
    cells = roofline.SMALL if xp is np else roofline.CELLS
    measured, cells, pyplot = begin(xp, path, line, cells, plot)
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
