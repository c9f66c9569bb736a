"""Shared by the commands of ``gpuattn bench``: options, measuring cell by cell, tables."""

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import click

from gpuattn.bench import comparison, results, timing
from gpuattn.bench.cases import Cell
from gpuattn.bench.peers.timing import versions
from gpuattn.cli.shared.options import GroupedOption, NearChoice, PathName
from gpuattn.errors import UnsupportedError
from gpuattn.report.plot import import_pyplot

WIDTH = 140  # of the tables where there is no terminal


def _of_table(*names, **settings):
    return click.option(*names, cls=GroupedOption, group="Table", **settings)


peers_option = _of_table(
    "--peers", is_flag=True, help="Also time PyTorch, torch.compile, quack, ... if installed."
)
missing_option = _of_table("--missing", is_flag=True, help="Only cells that the --json file lacks.")
only_option = _of_table("--only", type=NearChoice(["forward", "backward"]), help="One direction.")
impl_option = _of_table(
    "--impl", metavar="NAME", help="This implementation instead of the chosen one."
)
plot_option = _of_table("--plot", type=PathName(dir_okay=False), help="Draw the table.")
json_option = click.option(
    "--json", "path", type=PathName(dir_okay=False),
    help="Also write all samples here, beside those of the same commit and GPU.",
)  # fmt: skip


def command_line(*files: str | None) -> str:
    """Return what was typed, with the paths of ``files`` shortened to their names."""
    words = [Path(word).name if word in files else word for word in sys.argv[1:]]
    return shlex.join(["gpuattn", *words])


class Measured:
    """The rows of cells that were measured one after the other.

    ``ceilings``: measured rates of this machine. ``document``: the content of the file ``path``,
    or what it would be without a file.
    """

    def __init__(self, xp: ModuleType, path: str | None, line: str) -> None:
        self.xp, self.path = xp, path
        self.rows: list[dict] = []
        self.failed: list[str] = []
        self.ceilings = timing.ceilings(xp)
        click.echo(
            f"ceilings measured here: product {rate(self.ceilings['matmul_tflops'])}, "
            f"copy {self.ceilings['copy_tbs']:.3f} TB/s"
        )
        self.fresh = results.document(self.rows, line, xp, self.ceilings)
        self.fresh["versions"] |= versions()
        self.document = (path and results.read(path, self.fresh)) or self.fresh

    def add(
        self, chosen: Sequence[Cell], describe: Callable[[Cell], str], rate: Callable[[dict], str],
        *, measure: Callable | None = None, impl: str | None = None, with_peers: bool = False,
    ) -> None:  # fmt: skip
        """Measure cells by ``measure`` (``comparison.measure``), and print a line for each.

        ``describe(cell)`` and ``rate(row)`` return the parts of that line. A cell that fails is a
        line on standard error, and the others are measured.
        """
        measure = measure or comparison.measure
        for number, cell in enumerate(chosen, 1):
            place = f"{number:3}/{len(chosen)} {describe(cell)}"
            try:
                row = measure(cell, self.xp, self.ceilings, impl, with_peers)
            except Exception as error:  # noqa: BLE001 the other cells are measured
                self.fail(place, describe(cell), error)
            else:
                self.keep(place, row, rate)

    def fail(self, place: str, what: str, error: Exception) -> None:
        """Take note that a cell failed, and print it."""
        self.failed.append(f"{what}: {_reason(error)}")
        click.echo(f"{place} {_reason(error)}", err=True)

    def keep(self, place: str, row: dict, rate: Callable[[dict], str]) -> None:
        """Add a row, also to the file, and print its line, which begins with ``place``."""
        self.rows.append(row)
        ratio = row["ratio_to_best_peer"]
        beside = f"  ratio {ratio:.3f}" if ratio else ""
        click.echo(f"{place} {row['impl']:12} {row['us']:10.1f} us {rate(row)}{beside}", err=True)
        if self.path:
            self.document = results.write(self.path, self.fresh)

    def finish(self) -> None:
        """Print what the file lacks. Raises UnsupportedError if a cell was not measured."""
        if self.path and (lacks := results.absent(self.document["rows"])):
            count = f"{len(lacks)} of the required figures"
            click.echo(f"{self.path} does not hold {count} yet", err=True)
        if self.failed:
            raise UnsupportedError("not measured:\n" + "\n".join(self.failed))


def begin(
    xp: ModuleType, path: str | None, chosen: Sequence[Cell], plot: str | None, *,
    missing: bool = False, with_peers: bool = False,
) -> tuple[Measured, Sequence[Cell], Any]:  # fmt: skip
    """Return (Measured, the cells to measure, pyplot or None without a ``plot``).

    ``missing``: only the cells that the file ``path`` lacks. Raises UsageError for no cell, and
    for ``missing`` without a file.
    """
    if missing and not path:
        raise click.UsageError("--missing needs the file that lacks cells: --json FILE")
    if not chosen:
        raise click.UsageError("no cell of the table is like that")
    pyplot = import_pyplot() if plot else None  # fails before anything is measured
    measured = Measured(xp, path, command_line(path, plot))
    if missing:
        known = measured.document["rows"]
        chosen = [cell for cell in chosen if not results.holds(known, cell, with_peers)]
    return measured, chosen, pyplot


def _reason(error):
    known = isinstance(error, AssertionError | UnsupportedError)
    return str(error) if known else f"{type(error).__name__}: {error}"


# ---- tables -------------------------------------------------------------------------------------


def console() -> Any:
    """Return the rich Console that tables are printed on."""
    from rich.console import Console

    here = Console(highlight=False)
    return here if here.is_terminal else Console(highlight=False, width=WIDTH)


def show_missing(where: Any, rows: Sequence[dict]) -> None:
    """Print each reason why a peer was not measured once."""
    from rich.markup import escape

    missing = ((name, why) for row in rows for name, why in row["peers_missing"].items())
    for name, why in dict.fromkeys(missing):
        where.print(f"[dim]without {name}: {escape(why)}[/]")


def describe(cell: Cell) -> str:
    """Return op, problem and direction of a cell."""
    return f"{cell.op} {cell.case} {cell.direction}"


def tflops(row: dict) -> str:
    """Return the TFLOP/s of a row as text."""
    return f"{rate(row['tflops']):>14}"


def rate(tflops: float) -> str:
    """Return a rate of FLOPs as text, with three digits: those of a CPU are GFLOP/s."""
    return f"{short(tflops)} TFLOP/s" if tflops >= 1 else f"{short(tflops * 1e3)} GFLOP/s"


def short(rate: float) -> str:
    """Return a number with three digits."""
    return f"{rate:.0f}" if rate >= 100 else f"{rate:.3g}"


def colored(ratio: float | None) -> str:
    """Return a ratio to the best peer as markup."""
    if ratio is None:
        return "-"
    return f"[{'green' if ratio >= 1 else 'red'}]{ratio:.2f}[/]"
