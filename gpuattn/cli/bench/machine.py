"""gpuattn bench machine: units, memories, launches and products of this machine."""

import json
from typing import Any

import click

from gpuattn.bench import machine, results
from gpuattn.cli.bench.table import command_line, rate, short
from gpuattn.cli.shared.options import GroupedCommand, PathName, device_option
from gpuattn.files import write_text
from gpuattn.runtime.device import array_module, choose_device


@click.command("machine", cls=GroupedCommand)
@device_option
@click.option("--json", "path", type=PathName(dir_okay=False), help="Also write the figures here.")
def command(device: str, path: str | None) -> None:
    """Measure what decides all other times.

    The units of the device, copies that read every n-th number, memory on the chip, launches with
    and without a CUDA graph, and matrix products in every kind of number.
    """
    xp = array_module(choose_device(device)[0])
    found = machine.measure(xp)
    _show(found)
    if path:
        write_text(path, json.dumps(results.origin(command_line(path), xp) | found, indent=1))


def _show(found: dict[str, Any]) -> None:
    click.echo(found["where"])
    for name, value in found["units"].items():
        click.echo(f"  {value:12,.6g} {name}")
    click.echo("copy of float32 numbers, read and written, by the step from one to the next")
    for stride, tbs in found["copy_tbs"].items():
        click.echo(f"  {stride:12} {_speed(tbs)}")
    click.echo(f"on the chip    {_speed(found['on_chip_tbs'])}")
    graph = found["launch_us"]["graph"]
    inside = "" if graph is None else f", in a CUDA graph {short(graph)} us"
    click.echo(f"a launch       {short(found['launch_us']['alone'])} us{inside}")
    click.echo("products of matrices")
    for kind, value in found["products"].items():
        click.echo(f"  {kind:12} {value if isinstance(value, str) else rate(value)}")


def _speed(tbs):
    return f"{tbs:.3f} TB/s" if tbs >= 0.1 else f"{tbs * 1e3:.3g} GB/s"
