"""gpuattn bench attention: cells one after the other, then tables and a verdict."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import click
import numpy as np

from gpuattn.bench import cases, results
from gpuattn.bench.cases import Cell
from gpuattn.bench.charts import draw_attention
from gpuattn.bench.samples import DTYPES
from gpuattn.cli.bench.table import (
    begin,
    colored,
    console,
    impl_option,
    json_option,
    missing_option,
    only_option,
    peers_option,
    plot_option,
    short,
    show_missing,
    tflops,
)
from gpuattn.cli.shared.options import GroupedCommand, GroupedOption, NearChoice, device_option
from gpuattn.runtime.device import array_module, choose_device

PEER_COLUMNS = 4  # with more peers they share one column


def _of_cells(*names, **settings):
    return click.option(*names, cls=GroupedOption, group="Cells", **settings)


@click.command("attention", cls=GroupedCommand)
@_of_cells("--features", is_flag=True, help="Dropout, bias, windows, packed captions, ...")
@_of_cells("--published", is_flag=True, help="48 heads, ever longer, with peak memory.")
@_of_cells("--head-dim", type=int, metavar="D", help="Only heads of this size.")
@_of_cells("--causal/--full", default=None, help="Only with, or only without the causal mask.")
@_of_cells("--length", type=int, metavar="T", help="Only sequences of this length.")
@_of_cells(
    "--dtype",
    type=NearChoice(DTYPES),
    help="Default: that of the cells; float32 beside PyTorch's memory-efficient kernel.",
)
@peers_option
@missing_option
@only_option
@impl_option
@plot_option
@device_option
@json_option
def command(
    device: str,
    path: str | None,
    peers: bool,
    features: bool,
    published: bool,
    missing: bool,
    only: str | None,
    plot: str | None,
    impl: str | None,
    dtype: str | None,
    **selection: Any,
) -> None:
    """Time attention over head sizes, masks and lengths.

    Each direction is timed by itself in CUDA graphs. A cell is written to the --json file when it
    is done; --missing continues such a file.
    """
    xp = array_module(choose_device(device)[0])
    chosen: Sequence[Cell]
    if xp is np:
        click.echo("No GPU: NumPy on small float32 problems, without peers, graphs or features.")
        chosen = cases.SMALL
    elif features or published:
        chosen = cases.FEATURES * features + cases.PUBLISHED * published
    else:
        chosen = cases.TABLE + cases.WIDE
    chosen = [_in_dtype(cell, dtype) for cell in chosen if _selected(cell, only, **selection)]
    with_peers = peers or published
    measured, chosen, pyplot = begin(xp, path, chosen, plot, missing=missing, with_peers=with_peers)
    measured.add(chosen, _describe, tflops, impl=impl, with_peers=with_peers)
    _show(measured.rows, measured.ceilings)
    rows = measured.document["rows"]
    if rows and plot:
        draw_attention(pyplot, measured.document, plot)
    if rows and peers:
        click.echo(results.verdict(rows, [_in_dtype(cell, dtype) for cell in cases.TABLE]))
    measured.finish()


def _selected(cell, only, head_dim, causal, length):
    _, tokens, _, size = cell.case.shape
    wanted = (only, head_dim, causal, length)
    found = (cell.direction, size, cell.case.causal, tokens)
    return all(want in (None, value) for want, value in zip(wanted, found, strict=True))


def _in_dtype(cell, dtype):
    """Return the cell in another dtype; of PyTorch's kernels one takes float32."""
    if dtype is None:
        return cell
    peers = ("torch-efficient",) if dtype == "float32" else cell.peers
    return cell._replace(case=replace(cell.case, dtype=dtype), peers=peers)


def _describe(cell):
    _, length, _, head_dim = cell.case.shape
    return f"d{head_dim:<3} T {length:<5} {cell.case} {cell.direction}"


# ---- tables -------------------------------------------------------------------------------------


def _show(rows, ceilings):
    where = console()
    for direction in cases.WORK:
        part = [row for row in rows if row["direction"] == direction]
        if part:
            where.print(_table(direction, part, ceilings))
            show_missing(where, part)


def _table(direction, rows, ceilings):
    from rich.table import Table

    names = list(dict.fromkeys(name for row in rows for name in row["peers"]))
    apart = len(names) <= PEER_COLUMNS
    plain, memory = (any(key in row for row in rows) for key in ("plain_us", "peak_bytes"))
    impls = ", ".join(dict.fromkeys(row["impl"] for row in rows))
    title = f"[bold]{direction}[/], ours: {impls}" + "; peers in TFLOP/s" * bool(names)
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("problem")
    heads = ["d", "T", "us", "TFLOP/s", "of matmul", "GB/s", "of copy"]
    heads += ["to plain"] * plain + [_short_name(name) for name in names] * apart
    heads += [" / ".join(["MiB: ours", *map(_short_name, names)])] * memory
    for head in heads + ["ratio"] * bool(names):
        table.add_column(head, justify="right")
    if not apart:
        table.add_column("peers")
    for row in rows:
        case = cases.Attention.from_dict(row["case"])
        flops = case.flops(direction) / 1e6
        cells = [
            str(case), str(case.shape[3]), str(case.shape[1]), f"{row['us']:.1f}",
            short(row["tflops"]), f"{row['tflops'] / ceilings['matmul_tflops']:.0%}",
            short(row["gbs"]), f"{row['gbs'] / ceilings['copy_tbs'] / 1e3:.0%}",
        ]  # fmt: skip
        if plain:
            cells.append(f"{row['us'] / row['plain_us']:.2f} x" if "plain_us" in row else "")
        rates = {name: _rate(us, flops) for name, us in row["peers"].items()}
        cells += [rates.get(name, "-") for name in names] * apart
        if memory:
            peaks = (row["peak_bytes"].get(name) for name in ["ours", *names])
            cells.append(" / ".join("-" if n is None else f"{n / 2**20:.0f}" for n in peaks))
        if names:
            cells.append(colored(row["ratio_to_best_peer"]))
        if not apart:
            cells.append(", ".join(f"{_short_name(name)} {rate}" for name, rate in rates.items()))
        table.add_row(*cells)
    return table


def _short_name(peer):
    return peer.removeprefix("torch-").replace("flash-attn-4", "fa4")


def _rate(us, flops):
    return "no memory" if us == results.OUT_OF_MEMORY else short(flops / us)
