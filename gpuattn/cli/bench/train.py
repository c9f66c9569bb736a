"""gpuattn bench train: training steps of whole models, beside PyTorch's."""

import sys
from collections.abc import Sequence
from dataclasses import replace

import click
import numpy as np

from gpuattn.bench import results
from gpuattn.bench.cases import Cell
from gpuattn.bench.train import cases as train_cases
from gpuattn.bench.train import measure as train
from gpuattn.bench.train import ranks as together
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
from gpuattn.cli.shared.gpus import gpus_option, run_on
from gpuattn.cli.shared.options import GroupedCommand, GroupedOption, NearChoice, device_option
from gpuattn.errors import UnsupportedError
from gpuattn.parallel.agreement import silent
from gpuattn.parallel.world import connected, discover
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
@gpus_option
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    models: tuple[str, ...],
    batches: tuple[int, ...],
    device: str,
    gpus: int | str | None,
    path: str | None,
    peers: bool,
    missing: bool,
    plot: str | None,
) -> None:
    """Time training steps of whole models.

    With and without CUDA graphs: the step that gpuattn train runs. --batch 8 --batch 128: each
    model with each of these batches. --gpus: the step of several GPUs, each with such a batch,
    beside that of one; --peers then times PyTorch's DDP and FSDP2.
    """
    code = run_on(gpus, device, ["gpuattn", "bench", "train", *ctx.meta["arguments"]])
    if code is not None:
        sys.exit(code)
    if gpus is not None or discover().size > 1:
        if plot or missing:
            raise click.UsageError("--plot and --missing are for the step of one GPU")
        _on_ranks(models, batches, device, path, peers)
        return
    xp = array_module(choose_device(device)[0])
    if xp is np:
        click.echo("No GPU: NumPy on small float32 models, without peers or graphs.")
    chosen: Sequence[Cell] = _chosen(models, batches, xp)
    measured, chosen, pyplot = begin(xp, path, chosen, plot, missing=missing, with_peers=peers)
    measured.add(chosen, describe, _rate, measure=train.measure, with_peers=peers)
    _show(measured.rows, measured.ceilings)
    if measured.rows and peers and xp is not np:
        rows = measured.document["rows"]
        click.echo(f"train: {results.verdict(rows, train_cases.TABLE)}")
    if measured.document["rows"] and plot:
        draw_steps(pyplot, measured.document, plot)
    measured.finish()


def _chosen(models, batches, xp):
    """Return the Cells that options name."""
    names = models or train_cases.MODELS
    chosen = [cell for name, cell in train_cases.CELLS.items() if name in names]
    if xp is np:
        chosen = [cell._replace(case=train_cases.small(cell.case), peers=()) for cell in chosen]
    return [_with_batch(cell, count) for cell in chosen for count in batches] or chosen


def _on_ranks(models, batches, device, path, peers):
    """Time steps of all ranks together; one GPU alone is a rank, too. Rank 0 tells."""
    with connected(device=lambda: choose_device(device)[0]) as ranks:
        xp = array_module(choose_device(device)[0])
        if ranks.size == 1 and xp is not np:
            from gpuattn.parallel.nccl import NCCL

            ranks = NCCL(ranks)
        chosen, measured = _chosen(models, batches, xp), None
        if ranks.rank == 0:
            measured, chosen, _ = begin(xp, path, chosen, None)
        ceilings = ranks.gather(measured and measured.ceilings)[0]
        for number, cell in enumerate(chosen, 1):
            place = f"{number:3}/{len(chosen)} {describe(cell)}"
            try:
                row = together.measure(cell, xp, ranks, ceilings, peers)
            except AssertionError as error:  # on all ranks
                if measured:
                    measured.fail(place, describe(cell), error)
            else:
                if measured:
                    measured.keep(place, row, _rate)
        failed = [] if measured is None else measured.failed
        if measured and measured.rows:
            where = console()
            where.print(_table_of_ranks(measured.rows))
            show_missing(where, measured.rows)
        if any(ranks.gather(len(failed))):
            told = UnsupportedError("not measured:\n" + "\n".join(failed))
            raise silent(told, ranks.rank > 0)


def _table_of_ranks(rows):
    from rich.table import Table

    names = list(dict.fromkeys(name for row in rows for name in row["peers"]))
    title = (
        "[bold]training step of several GPUs[/], milliseconds; a batch on each; tokens of targets"
    )
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("model, batch")
    for head in ("GPUs", "one", *together.WAYS, "efficiency", "waits", *names, "ratio", "tokens/s"):
        table.add_column(head, justify="right")
    for row in rows:
        cells = [str(results.case_of(row)), str(row["ranks"]), _ms(row["alone_us"])]
        cells += [_ms(row["ways"][way]["us"]) for way in together.WAYS]
        cells += [f"{row['efficiency']:.3f}", f"{row['wait_share']:.1%}"]
        cells += [_ms(row["peers"].get(name)) for name in names]
        cells += [colored(row["ratio_to_best_peer"]), f"{row['tokens_per_s']:,.0f}"]
        table.add_row(*cells)
    return table


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
