"""gpuattn bench train: training steps of whole models, beside PyTorch's."""

from collections.abc import Sequence
from dataclasses import replace

import click
import numpy as np

from gpuattn.bench import results
from gpuattn.bench.cases import Cell
from gpuattn.bench.train import cases as train_cases
from gpuattn.bench.train import measure as train
from gpuattn.bench.train.charts import draw_steps
from gpuattn.cli.bench.table import (
    begin,
    colored,
    console,
    describe,
    json_option,
    missing_option,
    peers_option,
    plot_option,
    short,
    show_missing,
)
from gpuattn.cli.shared.options import GroupedCommand, GroupedOption, NearChoice, device_option
from gpuattn.runtime.device import array_module, choose_device


@click.command("train", cls=GroupedCommand)
@click.option(
    "--model", "models", multiple=True, type=NearChoice(train_cases.CELLS), cls=GroupedOption,
    group="Cells", help="This model only; may be given several times.",
)  # fmt: skip
@click.option(
    "--batch", "batches", multiple=True, type=click.IntRange(1), cls=GroupedOption,
    group="Cells", metavar="N", help="Batches of N texts; may be given several times.",
)  # fmt: skip
@peers_option
@missing_option
@plot_option
@device_option
@json_option
def command(
    models: tuple[str, ...],
    batches: tuple[int, ...],
    device: str,
    path: str | None,
    peers: bool,
    missing: bool,
    plot: str | None,
) -> None:
    """Time training steps of whole models.

    With and without CUDA graphs: the step that gpuattn train runs. --batch 8 --batch 128: each
    model with each of these batches.
    """
    xp = array_module(choose_device(device)[0])
    names = models or train_cases.MODELS
    chosen: Sequence[Cell] = [cell for name, cell in train_cases.CELLS.items() if name in names]
    if xp is np:
        click.echo("No GPU: NumPy on small float32 models, without peers or graphs.")
        chosen = [cell._replace(case=train_cases.small(cell.case), peers=()) for cell in chosen]
    if batches:
        chosen = [_with_batch(cell, count) for cell in chosen for count in batches]
    measured, chosen, pyplot = begin(xp, path, chosen, plot, missing=missing, with_peers=peers)
    measured.add(chosen, describe, _rate, measure=train.measure, with_peers=peers)
    _show(measured.rows, measured.ceilings)
    if measured.rows and peers and xp is not np:
        rows = measured.document["rows"]
        click.echo(f"train: {results.verdict(rows, train_cases.TABLE)}")
    if measured.document["rows"] and plot:
        draw_steps(pyplot, measured.document, plot)
    measured.finish()


def _with_batch(cell, count):
    return cell._replace(case=replace(cell.case, shape=(count, cell.case.shape[1])))


def _rate(row):
    return f"{row['tokens_per_s']:10,.0f} tokens/s"


def _show(rows, ceilings):
    if not rows:
        return
    where = console()
    where.print(_table(rows, ceilings))
    show_missing(where, rows)
    for reason in dict.fromkeys(row["no_graph"] for row in rows if "no_graph" in row):
        where.print(f"[dim]{reason}[/]")


def _table(rows, ceilings):
    from rich.table import Table

    names = list(dict.fromkeys(name for row in rows for name in row["peers"]))
    title = "[bold]training step[/], milliseconds; tokens of targets"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("model, batch")
    heads = ["graph", "eager", "gain", *names, *["ratio"] * bool(names), "tokens/s"]
    memory = any("peak_bytes" in row for row in rows)
    heads += ["TFLOP/s", "MFU", *["GiB" + "/peers" * bool(names)] * memory]
    for head in heads:
        table.add_column(head, justify="right")
    for row in rows:
        graph = row["us"] if row["impl"] == "graph" else None
        cells = [str(results.case_of(row)), _ms(graph), _ms(row["eager_us"])]
        cells += [f"{row['eager_us'] / graph:.2f} x" if graph else "-"]
        cells += [_ms(row["peers"].get(name)) for name in names]
        cells += [colored(row["ratio_to_best_peer"])] * bool(names)
        cells += [f"{row['tokens_per_s']:,.0f}", short(row["tflops"])]
        cells += [f"{row['tflops'] / ceilings['matmul_tflops']:.0%}"]
        if memory:
            peaks = [row["peak_bytes"].get(name) for name in [row["impl"], *names]]
            cells.append("/".join("-" if n is None else f"{n / 2**30:.2f}" for n in peaks))
        table.add_row(*cells)
    return table


def _ms(us):
    return "-" if us is None else f"{us / 1e3:.2f}"
