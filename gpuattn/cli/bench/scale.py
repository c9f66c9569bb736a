"""gpuattn bench scale: the step on many GPUs, predicted from that of one and the measured wire."""

import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from gpuattn.bench import scale
from gpuattn.cli.shared.options import COUNT, GroupedCommand, GroupedOption, Parsed, PathName
from gpuattn.errors import ConfigError
from gpuattn.units import number, parse_count

WIRE: dict[str, Any] = {"cls": GroupedOption, "group": "Machine"}
JOB: dict[str, Any] = {"cls": GroupedOption, "group": "Model"}


@click.command("scale", cls=GroupedCommand)
@click.option("--parameters", type=Parsed(parse_count, "N"), required=True,
              help="Of the model, such as 124M.", **JOB)  # fmt: skip
@click.option("--step", type=Parsed(number(0, above=True), "MS"), required=True,
              help="Of an update on one GPU: gpuattn bench train.", **JOB)  # fmt: skip
@click.option("--update", type=Parsed(number(0, above=True), "MS"),
              help="Of the optimizer in it.  [default: AdamW on an H200]", **JOB)  # fmt: skip
@click.option("--itemsize", type=click.Choice(["2", "4"]), default="2", show_default=True,
              help="Bytes of a gradient.", **JOB)  # fmt: skip
@click.option("--world", type=COUNT, default=1024, show_default=True,
              help="The most GPUs.", **WIRE)  # fmt: skip
@click.option("--each", type=COUNT, default=8, show_default=True,
              help="GPUs of a host.", **WIRE)  # fmt: skip
@click.option("--port", type=Parsed(number(0, above=True), "GB/s"), default=scale.PORT,
              show_default=True, help="Between hosts, of each GPU.", **WIRE)  # fmt: skip
@click.option("--wire", "wire_file", type=PathName(dir_okay=False),
              help="JSON: ranks, and for all_reduce, reduce_scatter and all_gather lists of "
                   "[MiB, us].  [default: two H200s]", **WIRE)  # fmt: skip
@click.option("--least", type=Parsed(number(0, most=1), "P"), default=0.9, show_default=True,
              help="Efficiency below which it is said to break.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    parameters: int, step: float, update: float | None, itemsize: str, world: int, each: int,
    port: float, wire_file: str | None, least: float, as_json: bool,
) -> None:  # fmt: skip
    """Predict an update of data-parallel training on many GPUs.

    \b
    gpuattn bench scale --parameters 124M --step 18.4
    gpuattn bench scale --parameters 210M --step 20.8 --world 128 --port 23

    Nothing is measured by this command: it computes from the step of one GPU, from the times of
    collectives between two H200s, or those of --wire, and, for what was not measured (more than two
    GPUs, several hosts), from constants that it names. Weak scaling, with gradients summed after
    the backward pass, and overlapped with it.
    """
    passed = scale.update_ms(parameters) if update is None else update
    if passed >= step:
        raise ConfigError(f"--update is {passed:.3g} ms; accepted: less than --step, {step:g} ms")
    job = scale.Job(parameters, step, passed, int(itemsize))
    machine = scale.Machine(each, port)
    if wire_file:
        machine = machine._replace(**_read_wire(wire_file))
    rows = scale.table(job, machine, world)
    broken = scale.breaks(rows, least)
    if as_json:
        document = {"job": job._asdict(), "breaks": broken,
                    "predictions": [row._asdict() for row in rows]}  # fmt: skip
        click.echo(json.dumps(document, indent=2))
        return
    table = Table(box=None, pad_edge=False)
    for name in (
        "GPUs", "exchange", "wire ms", "step ms", "efficiency", "overlapped ms", "efficiency",
        "state bytes/parameter",
    ):  # fmt: skip
        table.add_column(name, justify="left" if name == "exchange" else "right")
    for row in rows:
        table.add_row(
            f"{row.world:,}", row.strategy, f"{row.wire:.3f}", f"{row.step:.2f}",
            f"{row.efficiency:.3f}", f"{row.overlapped:.2f}", f"{row.overlapped_efficiency:.3f}",
            f"{row.state:.1f}",
        )  # fmt: skip
    Console(width=110).print(table)
    for name, words in scale.STRATEGIES.items():
        click.echo(f"{name}: {words}")
    known = f"{machine.ranks} GPUs of a host"
    click.echo(
        f"Predicted. Measured are the step of one GPU and the wire between {known}; assumed are "
        f"{scale.HOP:g} us a further hop inside a host, {scale.PORT_HOP:g} us and {port:g} GB/s a "
        "GPU between hosts, that no rank is late, and that gradients become final evenly."
    )
    if broken is None:
        click.echo(
            f"Overlapped, the efficiency stays at {least:g} or above up to {rows[-1].world:,} GPUs."
        )
    else:
        click.echo(
            f"It breaks at {broken:,} GPUs: the best efficiency, overlapped, falls below {least:g}."
        )


def _read_wire(path):
    """Return the fields of a Machine that a file holds."""
    try:
        given = json.loads(Path(path).read_text())
        ranks = int(given["ranks"])
        wire = {
            name: tuple((float(mib), float(us)) for mib, us in given[name])
            for name in scale.MEASURED
        }
        right = ranks > 1 and all(rows and list(rows) == sorted(rows) for rows in wire.values())
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(_wrong(path)) from error
    if not right:
        raise ConfigError(_wrong(path))
    return {"ranks": ranks, "wire": wire}


def _wrong(path):
    names = ", ".join(scale.MEASURED)
    return (
        f"{path} is no table of collectives; accepted: a JSON object with ranks (2 or more) and "
        f"{names}, each a list of [MiB, us] by rising size"
    )
