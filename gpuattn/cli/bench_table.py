"""What the tables of ``gpuattn bench`` share: measure cell by cell, keep what is done, show it."""

import click

from gpuattn.bench import comparison, results, run, timing
from gpuattn.bench.peers.timing import versions
from gpuattn.errors import UnsupportedError
from gpuattn.report.plot import import_pyplot

WIDTH = 140  # of the tables where there is no terminal


class Measured:
    """The rows of cells that were measured one after the other.

    ``ceilings``: of this machine; ``document``: what the file ``path`` holds now, or would hold.
    """

    def __init__(self, xp, path, line):
        self.xp, self.path, self.rows, self.failed = xp, path, [], []
        self.ceilings = timing.ceilings(xp)
        click.echo(
            f"ceilings measured here: product {self.ceilings['matmul_tflops']:.1f} TFLOP/s, "
            f"copy {self.ceilings['copy_tbs']:.3f} TB/s"
        )
        self.fresh = run.document(self.rows, line, xp, self.ceilings)
        self.fresh["versions"] |= versions()
        self.document = (path and results.read(path, self.fresh)) or self.fresh

    def add(self, chosen, describe, rate, *, measure=None, impl=None, with_peers=False):
        """Measure cells; ``describe(cell)`` and ``rate(row)`` say one and its figure.

        ``measure``: does it, ``comparison.measure`` unless given.
        """
        measure = measure or comparison.measure
        for number, cell in enumerate(chosen, 1):
            place = f"{number:3}/{len(chosen)} {describe(cell)}"
            try:
                row = measure(cell, self.xp, self.ceilings, impl, with_peers)
            except Exception as error:  # noqa: BLE001 the other cells are measured all the same
                self.failed.append(f"{describe(cell)}: {_reason(error)}")
                click.echo(f"{place} {_reason(error)}", err=True)
                continue
            self.rows.append(row)
            ratio = row["ratio_to_best_peer"]
            beside = f"  ratio {ratio:.3f}" if ratio else ""
            click.echo(
                f"{place} {row['impl']:12} {row['us']:10.1f} us {rate(row)}{beside}", err=True
            )
            if self.path:
                self.document = results.write(self.path, self.fresh)

    def finish(self):
        """Say what the file lacks. Raises UnsupportedError if a cell was not measured."""
        if self.path and (lacks := results.absent(self.document["rows"])):
            count = f"{len(lacks)} of the required figures"
            click.echo(f"{self.path} does not hold {count} yet", err=True)
        if self.failed:
            raise UnsupportedError("not measured:\n" + "\n".join(self.failed))


def begin(xp, path, line, chosen, plot, *, missing=False, with_peers=False):
    """Return (Measured, the cells to measure, pyplot if there is to be a ``plot``).

    ``missing``: only what the file lacks. Raises UsageError for a choice that cannot be measured.
    """
    if missing and not path:
        raise click.UsageError("--missing is what a file lacks: give it, --json FILE")
    if not chosen:
        raise click.UsageError("no cell of the table is like that")
    pyplot = import_pyplot() if plot else None  # says at once that there is none
    measured = Measured(xp, path, line)
    if missing:
        known = measured.document["rows"]
        chosen = [cell for cell in chosen if not results.holds(known, cell, with_peers)]
    return measured, chosen, pyplot


def _reason(error):
    known = isinstance(error, AssertionError | UnsupportedError)
    return str(error) if known else f"{type(error).__name__}: {error}"


# ---- tables -------------------------------------------------------------------------------------


def console():
    """Return where tables are printed."""
    from rich.console import Console

    here = Console(highlight=False)
    return here if here.is_terminal else Console(highlight=False, width=WIDTH)


def show_missing(where, rows):
    """Print once why a peer is not there."""
    from rich.markup import escape

    missing = ((name, why) for row in rows for name, why in row["peers_missing"].items())
    for name, why in dict.fromkeys(missing):
        where.print(f"[dim]without {name}: {escape(why)}[/]")


def describe(cell):
    return f"{cell.op} {cell.case} {cell.direction}"


def tflops(row):
    return f"{short(row['tflops']):>6} TFLOP/s"


def short(rate):
    return f"{rate:.0f}" if rate >= 100 else f"{rate:.3g}"


def colored(ratio):
    """Return a ratio to the best peer as markup."""
    if ratio is None:
        return "-"
    return f"[{'green' if ratio >= 1 else 'red'}]{ratio:.2f}[/]"
