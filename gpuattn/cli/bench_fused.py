"""gpuattn bench softmax layer_norm ...: the fused ops beside their peers, as shares of a copy."""

from dataclasses import replace

import click
import numpy as np

from gpuattn.bench import fused_cases, results
from gpuattn.bench.cases import Cell
from gpuattn.bench.fused_cases import AXES, FLOPS, TABLES, Fused
from gpuattn.bench.peers.precompile import compile_ahead
from gpuattn.bench.plot import draw_shares
from gpuattn.cli.bench_table import begin, colored, console, describe, short, show_missing

BY_HAND = "*"  # marks what is timed outside graphs


def table(xp, path, line, ops, *, peers, missing, only, plot, impl, shape, dtype):
    """Measure, show and keep the cells of ``ops``, or ``shape`` of one op instead of its cells."""
    chosen = _cells(xp, ops, shape, dtype)
    chosen = [cell for cell in chosen if only in (None, cell.direction)]
    measured, chosen, pyplot = begin(
        xp, path, line, chosen, plot, missing=missing, with_peers=peers
    )
    if peers and xp is not np:
        compile_ahead(chosen)
    measured.add(chosen, describe, _rate, impl=impl, with_peers=peers)
    _show(measured.rows, measured.ceilings)
    rows = measured.document["rows"]
    if rows and plot:
        draw_shares(pyplot, measured.document, plot)
    if rows and peers:
        for op in ops:
            click.echo(f"{op}: {results.verdict(rows, TABLES[op])}")
    measured.finish()


def _cells(xp, ops, shape, dtype):
    if shape:
        if len(ops) != 1:
            raise click.UsageError("--shape is for one op: what its axes mean depends on it")
        (op,) = ops
        if len(shape) != len(AXES[op].split(" x ")):
            raise click.UsageError(f"{op} takes a shape of {AXES[op]}, got {shape}")
        case = Fused(op, tuple(shape), dtype or ("float32" if xp is np else "bfloat16"))
        named = next(cell.peers for cell in TABLES[op])
        return [Cell(op, case, direction, named) for direction in FLOPS[op]]
    if xp is np:
        click.echo("No GPU: NumPy on small float32 problems, without peers or graphs.")
        return [cell for cell in fused_cases.SMALL if cell.op in ops]
    cells = [cell for op in ops for cell in TABLES[op]]
    if dtype:
        cells = [cell._replace(case=replace(cell.case, dtype=dtype)) for cell in cells]
    return cells


def _rate(row):
    return f"{short(row['gbs']):>6} GB/s"


# ---- tables -------------------------------------------------------------------------------------


def _show(rows, ceilings):
    where = console()
    for op in dict.fromkeys(row["op"] for row in rows):
        part = [row for row in rows if row["op"] == op]
        where.print(_table(op, part, ceilings))
        show_missing(where, part)
        if any("outside_graphs" in row for row in part):
            where.print(f"[dim]{BY_HAND} with the host: it asks the GPU how to go on[/]")


def _table(op, rows, ceilings):
    from rich.table import Table

    names = list(dict.fromkeys(name for row in rows for name in row["peers"]))
    title = f"[bold]{op}[/] ({AXES[op]})" + "; peers in us" * bool(names)
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for head in ("problem", "direction", "by"):
        table.add_column(head)
    for head in ["us", "GB/s", "of copy", *names, *["ratio"] * bool(names)]:
        table.add_column(head, justify="right")
    for row in rows:
        share = row["gbs"] / 1e3 / ceilings["copy_tbs"]
        cells = [
            str(results.case_of(row)), row["direction"], row["impl"], f"{row['us']:.1f}",
            short(row["gbs"]), f"{share:.2f}",
        ]  # fmt: skip
        cells += [_peer(row, name) for name in names]
        table.add_row(*cells, *[colored(row["ratio_to_best_peer"])] * bool(names))
    return table


def _peer(row, name):
    if name not in row["peers"]:
        return "-"
    return f"{row['peers'][name]:.1f}" + BY_HAND * (name in row.get("outside_graphs", ()))
