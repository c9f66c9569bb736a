"""gpuattn doctor: what works on this machine, and the remedy for what does not."""

import json
import sys

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gpuattn.bench import doctor

MARKS = {"ok": "[green]ok[/]", "missing": "[yellow]off[/]", "broken": "[red]broken[/]"}


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print the checks and versions as JSON.")
def command(as_json: bool) -> None:
    """Say what works on this machine: driver, device, compiler, BLAS, memory, versions.

    Exit code 0 if nothing is broken. A missing GPU is no fault: NumPy runs instead.
    """
    checks = doctor.examine()
    broken = [check.name for check in checks if check.state == "broken"]
    if as_json:
        click.echo(json.dumps(doctor.as_dict(checks), indent=2))
        sys.exit(1 if broken else 0)
    table = Table(box=None, show_header=False, pad_edge=False)
    for check in checks:
        table.add_row(MARKS[check.state], check.name, escape(check.detail))
        if check.remedy:
            table.add_row("", "", f"[bold]try:[/] {escape(check.remedy)}")
    console = Console()
    console.print(table)
    found = ", ".join(f"{name} {version}" for name, version in doctor.versions().items())
    console.print(f"[dim]{found}[/]")
    gpu = next(check for check in checks if check.name == "kernel").state == "ok"
    verdict = "The GPU works." if gpu else "No GPU: everything runs on NumPy."
    console.print(
        f"{verdict} Broken: {', '.join(broken)}." if broken else f"{verdict} All is well."
    )
    sys.exit(1 if broken else 0)
