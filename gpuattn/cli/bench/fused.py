"""gpuattn bench fused: fused ops, as shares of a copy's rate, beside their peers."""

from dataclasses import replace

import click
import numpy as np

from gpuattn.bench import results
from gpuattn.bench.cases import Cell
from gpuattn.bench.charts import draw_shares
from gpuattn.bench.fused import cases as fused_cases
from gpuattn.bench.fused.cases import AXES, FLOPS, TABLES, Fused
from gpuattn.bench.peers.precompile import compile_ahead
from gpuattn.bench.samples import DTYPES
from gpuattn.cli.bench.table import (
    begin,
    colored,
    console,
    describe,
    impl_option,
    json_option,
    missing_option,
    only_option,
    peers_option,
    plot_option,
    short,
    show_missing,
)
from gpuattn.cli.kernels import parse_shape
from gpuattn.cli.shared.options import GroupedCommand, GroupedOption, NearChoice, device_option
from gpuattn.runtime.device import array_module, choose_device

OUTSIDE_GRAPHS = "*"  # marks peers that are timed with the host


@click.command("fused", cls=GroupedCommand)
@click.argument("ops", nargs=-1, metavar="[OP]...", type=NearChoice(TABLES))
@click.option("--shape", cls=GroupedOption, group="Cells",
              help="This problem of one OP instead of its table, such as 8192x1024.")  # fmt: skip
@click.option("--dtype", type=NearChoice(DTYPES), cls=GroupedOption, group="Cells",
              help="Default: bfloat16, float32 on NumPy.")  # fmt: skip
@peers_option
@missing_option
@only_option
@impl_option
@plot_option
@device_option
@json_option
def command(
    ops: tuple[str, ...],
    shape: str | None,
    dtype: str | None,
    device: str,
    path: str | None,
    peers: bool,
    missing: bool,
    only: str | None,
    impl: str | None,
    plot: str | None,
) -> None:
    """Time fused OPS (default: all).

    Each direction is timed by itself in CUDA graphs. OPS: softmax, layer_norm, rms_norm,
    dropout_add_norm, dropout, cross_entropy, embedding, adamw and beam_step. Others: gpuattn bench
    ops.
    """
    xp, names = array_module(choose_device(device)[0]), list(dict.fromkeys(ops or TABLES))
    cells = _cells(xp, names, parse_shape(shape), dtype)
    cells = [cell for cell in cells if only in (None, cell.direction)]
    measured, chosen, pyplot = begin(xp, path, cells, plot, missing=missing, with_peers=peers)
    if peers and xp is not np:
        compile_ahead(chosen)
    measured.add(chosen, describe, _rate, impl=impl, with_peers=peers)
    _show(measured.rows, measured.ceilings)
    rows = measured.document["rows"]
    if rows and plot:
        draw_shares(pyplot, measured.document, plot)
    if rows and peers:
        for op in names:
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
        if op == "dropout":
            case = replace(case, dropout=0.1)
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
            where.print(f"[dim]{OUTSIDE_GRAPHS} with the host: it reads a result to go on[/]")


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
    return f"{row['peers'][name]:.1f}" + OUTSIDE_GRAPHS * (name in row.get("outside_graphs", ()))
