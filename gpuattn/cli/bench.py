"""gpuattn bench: how fast each implementation of an op is here, and ops beside their peers."""

import shlex
import sys
from pathlib import Path

import click

from gpuattn.bench import results, run
from gpuattn.bench.fused_cases import TABLES
from gpuattn.bench.samples import DTYPES, SAMPLES
from gpuattn.bench.train_cases import CELLS
from gpuattn.cli import bench_attention, bench_fused, bench_roofline, bench_train
from gpuattn.cli.kernels import parse_shape
from gpuattn.cli.options import GroupedCommand, GroupedOption, NearChoice, PathName, device_option

ATTENTION, FUSED, TRAIN = "attention", "fused", "train"
HEADER = f"{'op':18} {'shape':>18} {'direction':>17} {'implementation':>14} {'us':>10} {'GB/s':>8}"
OF_TABLES = "peers", "missing", "only", "impl"
OF_ATTENTION = "features", "published", "head_dim", "causal", "length"
NOT_OF_TRAIN = "only", "impl"


def _option(*names, **settings):
    return click.option(*names, cls=GroupedOption, **settings)


def _of_ops(*names, **settings):
    return _option(*names, group="For ops", **settings)


def _of_tables(*names, **settings):
    return _option(*names, group="For tables", **settings)


def _of_attention(*names, **settings):
    return _option(*names, group="For attention", **settings)


@click.command("bench", cls=GroupedCommand)
@click.argument(
    "ops",
    nargs=-1,
    metavar="[OP]...",
    type=NearChoice([*{**SAMPLES, **TABLES}, ATTENTION, FUSED, TRAIN]),
)
@_of_ops("--shape", help="Such as 8192x1024; the meaning of the axes depends on the op.")
@_of_ops("--dtype", type=NearChoice(DTYPES), help="Default: bfloat16, float32 on NumPy.")
@_of_tables("--peers", is_flag=True, help="Time PyTorch, torch.compile, quack, ... beside ours.")
@_of_tables("--missing", is_flag=True, help="Only cells that the --json file has not yet.")
@_of_tables("--only", type=NearChoice(["forward", "backward"]), help="One direction.")
@_of_tables("--impl", metavar="NAME", help="This implementation instead of the chosen one.")
@_of_tables("--plot", type=PathName(dir_okay=False), help="Draw the table, or the roofline.")
@_of_tables("--roofline", is_flag=True, help="One problem of every op, FLOP/s over FLOPs a byte.")
@_of_attention("--features", is_flag=True, help="Dropout, bias, windows, packed captions, ...")
@_of_attention("--published", is_flag=True, help="48 heads, ever longer, with peak memory.")
@_of_attention("--head-dim", type=int, metavar="D", help="Only heads of this size.")
@_of_attention("--causal/--full", default=None, help="Only with, or only without the causal mask.")
@_of_attention("--length", type=int, metavar="T", help="Only sequences of this length.")
@_option(
    "--model",
    "models",
    multiple=True,
    type=NearChoice(CELLS),
    group="For train",
    help="This model only; may be given several times.",
)
@device_option
@click.option(
    "--json", "path", type=PathName(dir_okay=False),
    help="Also write all samples here, beside those of the same commit and GPU.",
)  # fmt: skip
def command(ops, shape, dtype, device, path, plot, roofline, models, **options):
    """Time OPS (default: all), forward and with backward, every implementation that accepts.

    \b
    gpuattn bench linear --shape 8192x512x2048
    gpuattn bench attention --peers --json attention.json --plot attention.png
    gpuattn bench softmax layer_norm --peers
    gpuattn bench train --model base --peers
    gpuattn bench --roofline --plot roofline.png

    "attention" and softmax, layer_norm, rms_norm, dropout_add_norm, cross_entropy, embedding,
    adamw and beam_step ("fused": all of these) are tables: each direction by itself, in CUDA
    graphs, beside the peers. A result is checked against the reference before it is timed.
    "train" is an update of whole models.
    """
    files = path, plot
    words = [Path(word).name if word in files else word for word in sys.argv[1:]]
    line, shape = shlex.join(["gpuattn", *words]), parse_shape(shape)
    kind = _kind(ops, roofline)
    _check(kind, shape or dtype, plot, models, options)
    xp = run.backend(device)
    if kind == "roofline":
        bench_roofline.chart(xp, path, line, plot)
    elif kind == ATTENTION:
        bench_attention.table(xp, path, line, plot=plot, **options)
    elif kind == TRAIN:
        given = {name: options[name] for name in OF_TABLES if name not in NOT_OF_TRAIN}
        bench_train.table(xp, path, line, models, **given)
    elif kind == FUSED:
        ops = list(TABLES) if FUSED in ops else list(dict.fromkeys(ops))
        given = {name: options[name] for name in OF_TABLES}
        bench_fused.table(xp, path, line, ops, plot=plot, shape=shape, dtype=dtype, **given)
    else:
        _ops(ops, shape, dtype, device, path, line)


def _kind(ops, roofline):
    """Return which table is asked for, or None for the list of implementations."""
    if roofline:
        if ops:
            raise click.UsageError("--roofline is of all ops: name none")
        return "roofline"
    for alone in (ATTENTION, TRAIN):
        if alone in ops:
            if ops != (alone,):
                raise click.UsageError(f"{alone} goes alone")
            return alone
    tables = [op for op in ops if op in TABLES or op == FUSED]
    if tables and len(tables) < len(ops):
        others = ", ".join(op for op in ops if op not in tables)
        raise click.UsageError(f"{', '.join(tables)}: tables by themselves, without {others}")
    return FUSED if tables else None


def _check(kind, given, plot, models, options):
    """Raise UsageError for options that mean nothing here."""
    options = {name: value for name, value in options.items() if value not in (None, False)}
    for name in options:
        if name in OF_ATTENTION and kind != ATTENTION:
            word = name.replace("_", "-")
            raise click.UsageError(f"--{word} is for: gpuattn bench attention")
        if kind in (None, "roofline"):
            raise click.UsageError(f"--{name} is for tables: gpuattn bench attention, or fused")
        if kind == TRAIN and name in NOT_OF_TRAIN:
            raise click.UsageError(f"train goes without --{name}")
    if models and kind != TRAIN:
        raise click.UsageError("--model is for: gpuattn bench train")
    if plot and kind == TRAIN:
        raise click.UsageError("train goes without --plot")
    if plot and kind is None:
        raise click.UsageError("--plot is for tables: gpuattn bench attention, or fused")
    if given and kind in (ATTENTION, TRAIN, "roofline"):
        raise click.UsageError(f"{kind} goes without --shape and --dtype")


def _ops(ops, shape, dtype, device, path, line):
    rows = []
    for op in ops or SAMPLES:
        for row in run.bench(op, shape, dtype, device):
            if not rows:
                click.echo(HEADER)
            rows.append(row)
            size = "x".join(map(str, row["case"]["shape"]))
            rate = f"{row['gbs']:8.1f}" if row["gbs"] else " " * 8
            click.echo(
                f"{row['op']:18} {size:>18} {row['direction']:>17} {row['impl']:>14} "
                f"{row['us']:10.1f} {rate}"
            )
    if path:
        results.write(path, run.document(rows, line, run.backend(device)))
