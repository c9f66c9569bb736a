"""gpuattn bench attention: the cells asked for, one after the other, then tables and a verdict."""

import click
import numpy as np
from rich.markup import escape

from gpuattn.bench import attention, cases, results, run, timing
from gpuattn.bench.peers import versions
from gpuattn.bench.plot import draw
from gpuattn.errors import UnsupportedError
from gpuattn.train.plot import import_pyplot

WIDTH = 140  # of the tables where there is no terminal
COLUMNS = 4  # peers that have a column each


def table(xp, path, line, *, peers, features, published, missing, only, plot, impl, **selection):
    """Measure, show and keep the cells; ``path`` holds what is done even if the run is cut off."""
    if missing and not path:
        raise click.UsageError("--missing is what a file lacks: give it, --json FILE")
    if xp is np:
        click.echo("No GPU: NumPy on small float32 problems, without peers, graphs or features.")
        chosen = cases.SMALL
    elif features or published:
        chosen = cases.FEATURES * features + cases.PUBLISHED * published
    else:
        chosen = cases.TABLE + cases.WIDE
    chosen = [cell for cell in chosen if _selected(cell, only, **selection)]
    if not chosen:
        raise click.UsageError("no cell of the table is like that")
    pyplot = import_pyplot() if plot else None  # says at once that there is none
    ceilings, rows, failed = timing.ceilings(xp), [], []
    click.echo(
        f"ceilings measured here: product {ceilings['matmul_tflops']:.1f} TFLOP/s, "
        f"copy {ceilings['copy_tbs']:.3f} TB/s"
    )
    document = run.document(rows, line, xp, ceilings)
    document["versions"] |= versions()
    known = (path and results.read(path, document)) or document
    with_peers = peers or published
    if missing:
        chosen = [cell for cell in chosen if not results.holds(known["rows"], cell, with_peers)]
    for number, cell in enumerate(chosen, 1):
        place = f"{number:3}/{len(chosen)} {_describe(cell)}"
        try:
            row = attention.measure(cell, xp, ceilings, impl, with_peers)
        except (AssertionError, UnsupportedError, MemoryError) as error:
            failed.append(f"{_describe(cell)}: {error}")
            click.echo(f"{place} {error}", err=True)
            continue
        rows.append(row)
        ratio = row["ratio_to_best_peer"]
        rate = f"{row['us']:10.1f} us {_short(row['tflops']):>6} TFLOP/s"
        beside = f"  ratio {ratio:.3f}" if ratio else ""
        click.echo(f"{place} {row['impl']:12} {rate}{beside}", err=True)
        if path:
            known = results.write(path, document)
    _show(rows, ceilings)
    if known["rows"] and plot:
        draw(pyplot, known, plot)
    if known["rows"] and peers:
        click.echo(results.verdict(known["rows"]))
    if path and (lacks := results.absent(known["rows"])):
        click.echo(f"{path} does not hold {len(lacks)} of the required figures yet", err=True)
    if failed:
        raise UnsupportedError("not measured:\n" + "\n".join(failed))


def _selected(cell, only, head_dim, causal, length):
    _, tokens, _, size = cell.case.shape
    wishes = (only, head_dim, causal, length)
    facts = (cell.direction, size, cell.case.causal, tokens)
    return all(wish in (None, fact) for wish, fact in zip(wishes, facts, strict=True))


def _describe(cell):
    _, length, _, head_dim = cell.case.shape
    return f"d{head_dim:<3} T {length:<5} {cell.case} {cell.direction}"


# ---- tables -------------------------------------------------------------------------------------


def _show(rows, ceilings):
    from rich.console import Console

    console = Console(highlight=False)
    console = console if console.is_terminal else Console(highlight=False, width=WIDTH)
    for direction in cases.WORK:
        part = [row for row in rows if row["direction"] == direction]
        if not part:
            continue
        console.print(_table(direction, part, ceilings))
        missing = ((name, why) for row in part for name, why in row["peers_missing"].items())
        for name, why in dict.fromkeys(missing):
            console.print(f"[dim]without {name}: {escape(why)}[/]")


def _table(direction, rows, ceilings):
    from rich.table import Table

    names = list(dict.fromkeys(name for row in rows for name in row["peers"]))
    apart = len(names) <= COLUMNS  # each peer has a column
    plain, memory = (any(key in row for row in rows) for key in ("plain_us", "peak_bytes"))
    impls = ", ".join(dict.fromkeys(row["impl"] for row in rows))
    title = f"[bold]{direction}[/], ours: {impls}" + "; peers in TFLOP/s" * bool(names)
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("problem")
    heads = ["d", "T", "us", "TFLOP/s", "of product", "GB/s", "of copy"]
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
            _short(row["tflops"]), f"{row['tflops'] / ceilings['matmul_tflops']:.0%}",
            _short(row["gbs"]), f"{row['gbs'] / ceilings['copy_tbs'] / 1e3:.0%}",
        ]  # fmt: skip
        if plain:
            cells.append(f"{row['us'] / row['plain_us']:.2f} x" if "plain_us" in row else "")
        rates = {name: _rate(us, flops) for name, us in row["peers"].items()}
        cells += [rates.get(name, "-") for name in names] * apart
        if memory:
            peaks = (row["peak_bytes"].get(name) for name in ["ours", *names])
            cells.append(" / ".join("-" if n is None else f"{n / 2**20:.0f}" for n in peaks))
        if names:
            cells.append(_ratio(row["ratio_to_best_peer"]))
        if not apart:
            cells.append(", ".join(f"{_short_name(name)} {rate}" for name, rate in rates.items()))
        table.add_row(*cells)
    return table


def _short(rate):
    return f"{rate:.0f}" if rate >= 100 else f"{rate:.3g}"


def _short_name(peer):
    return peer.removeprefix("torch-").replace("flash-attn-4", "fa4")


def _rate(us, flops):
    return "no memory" if us == results.OUT_OF_MEMORY else _short(flops / us)


def _ratio(ratio):
    if ratio is None:
        return "-"
    return f"[{'green' if ratio >= 1 else 'red'}]{ratio:.2f}[/]"
