"""gpuattn bench decode: whole generations, beside other libraries."""

from collections.abc import Sequence

import click
import numpy as np

from gpuattn.bench import results
from gpuattn.bench.cases import Cell
from gpuattn.bench.charts import draw_decoding
from gpuattn.bench.decode import cases as decode_cases
from gpuattn.bench.decode.measure import Bench
from gpuattn.bench.peers.precompile import compile_ahead
from gpuattn.cli.bench.table import (
    begin,
    colored,
    console,
    json_option,
    missing_option,
    peers_option,
    plot_option,
    short,
    show_missing,
)
from gpuattn.cli.shared.options import GroupedCommand, GroupedOption, NearChoice, device_option
from gpuattn.runtime.device import array_module, choose_device


@click.command("decode", cls=GroupedCommand)
@click.option(
    "--model", "models", multiple=True, type=NearChoice(decode_cases.NAMES), cls=GroupedOption,
    group="Cells", help="This model only; may be given several times.",
)  # fmt: skip
@click.option(
    "--workload", "workloads", multiple=True, type=NearChoice(decode_cases.WORKLOADS),
    cls=GroupedOption, group="Cells",
    help="A: translations of one length, B: of lengths that differ, D: texts.",
)  # fmt: skip
@click.option(
    "--sentences", "counts", multiple=True, type=click.IntRange(1), cls=GroupedOption,
    group="Cells", help="This many sentences only; may be given several times.",
)  # fmt: skip
@peers_option
@missing_option
@plot_option
@device_option
@json_option
def command(
    models: tuple[str, ...], workloads: tuple[str, ...], counts: tuple[int, ...], device: str,
    path: str | None, peers: bool, missing: bool, plot: str | None,
) -> None:  # fmt: skip
    """Time generation: beam search, greedy search and sampling.

    From token ids to token ids, with the host; random weights. Two commands with parts of the
    models and one --json file make one table.
    """
    xp = array_module(choose_device(device)[0])
    chosen: Sequence[Cell] = [
        cell for cell in decode_cases.TABLE
        if cell.case.model in (models or decode_cases.NAMES)
        and cell.case.workload in (workloads or decode_cases.WORKLOADS)
        and (not counts or cell.case.shape[0] in counts)
    ]  # fmt: skip
    if xp is np:
        click.echo("No GPU: NumPy on small float32 models, without peers or graphs.")
        chosen = [cell._replace(case=decode_cases.small(cell.case), peers=()) for cell in chosen]
        chosen = list(dict.fromkeys(chosen))
    measured, chosen, pyplot = begin(xp, path, chosen, plot, missing=missing, with_peers=peers)
    if peers and xp is not np:
        compile_ahead(chosen)
    with Bench() as bench:
        measured.add(
            chosen, lambda cell: f"decode {cell.case}", _rate, measure=bench.measure,
            with_peers=peers,
        )  # fmt: skip
    _show(measured.rows)
    rows = measured.document["rows"]
    if rows and plot:
        draw_decoding(pyplot, measured.document, plot)
    if measured.rows and peers and xp is not np:
        click.echo(f"decode: {results.verdict(rows, decode_cases.TABLE)}")
    measured.finish()


def _rate(row):
    return f"{row['tokens_per_s']:10,.0f} tokens/s"


def _show(rows):
    if not rows:
        return
    where = console()
    where.print(_table(rows))
    show_missing(where, rows)
    for reason in dict.fromkeys(row["no_graph"] for row in rows if "no_graph" in row):
        where.print(f"[dim]{reason}[/]")


def _table(rows):
    from rich.table import Table

    names = list(dict.fromkeys(name for row in rows for name in row["peers"]))
    title = "[bold]generation[/], tokens/s of the best texts"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("model, search, sentences x (given + new)")
    heads = ["gpuattn", *names, *["ratio"] * bool(names), "of floor", "first ms", "step us"]
    memory = any("peak_bytes" in row for row in rows)
    heads += ["J/token"] * any("joules_per_token" in row for row in rows) + ["GiB"] * memory
    for head in heads:
        table.add_column(head, justify="right")
    for row in rows:
        tokens = row["tokens_per_s"] * row["us"]  # times 1e6
        cells = [str(results.case_of(row)), f"{row['tokens_per_s']:,.0f}"]
        times = [row["peers"].get(name) for name in names]
        cells += ["-" if us is None else f"{tokens / us:,.0f}" for us in times]
        cells += [colored(row["ratio_to_best_peer"])] * bool(names)
        first, step = row.get("first_token_us"), row.get("step_us")
        cells += [f"{row['floor_share']:.1%}", "-" if first is None else f"{first / 1e3:.2f}"]
        cells += ["-" if step is None else f"{step:.1f}"]
        if "J/token" in heads:
            joules = row.get("joules_per_token")
            cells.append("-" if joules is None else short(joules))
        if memory:
            size = row.get("peak_bytes", {}).get("gpuattn")
            cells.append("-" if size is None else f"{size / 2**30:.2f}")
        table.add_row(*cells)
    return table
