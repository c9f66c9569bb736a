"""gpuattn bench: how fast each implementation of an op is here, and attention beside its peers."""

import shlex
import sys
from pathlib import Path

import click

from gpuattn.bench import results, run
from gpuattn.bench.samples import DTYPES, SAMPLES
from gpuattn.cli import bench_attention
from gpuattn.cli.kernels import parse_shape
from gpuattn.cli.options import GroupedCommand, GroupedOption, NearChoice, device_option

ATTENTION = "attention"
HEADER = f"{'op':18} {'shape':>18} {'direction':>17} {'implementation':>14} {'us':>10} {'GB/s':>8}"


def _option(*names, **settings):
    return click.option(*names, cls=GroupedOption, **settings)


def _of_ops(*names, **settings):
    return _option(*names, group="For ops", **settings)


def _of_attention(*names, **settings):
    return _option(*names, group="For attention", **settings)


@click.command("bench", cls=GroupedCommand)
@click.argument("ops", nargs=-1, metavar="[OP]...", type=NearChoice([*SAMPLES, ATTENTION]))
@_of_ops("--shape", help="Such as 8192x1024; the meaning of the axes depends on the op.")
@_of_ops("--dtype", type=NearChoice(DTYPES), help="Default: bfloat16, float32 on NumPy.")
@_of_attention("--peers", is_flag=True, help="Time PyTorch's backends and FlashAttention-4 too.")
@_of_attention("--features", is_flag=True, help="Dropout, bias, windows, packed captions, ...")
@_of_attention("--published", is_flag=True, help="48 heads, ever longer, with peak memory.")
@_of_attention("--missing", is_flag=True, help="Only cells that the --json file has not yet.")
@_of_attention("--only", type=NearChoice(["forward", "backward"]), help="One direction.")
@_of_attention("--head-dim", type=int, metavar="D", help="Only heads of this size.")
@_of_attention("--causal/--full", default=None, help="Only with, or only without the causal mask.")
@_of_attention("--length", type=int, metavar="T", help="Only sequences of this length.")
@_of_attention("--impl", metavar="NAME", help="This implementation instead of the chosen one.")
@_of_attention("--plot", type=click.Path(dir_okay=False), help="Draw TFLOP/s over length here.")
@device_option
@click.option(
    "--json", "path", type=click.Path(dir_okay=False),
    help="Also write all samples here, beside those of the same commit and GPU.",
)  # fmt: skip
def command(ops, shape, dtype, device, path, **attention):
    """Time OPS (default: all), forward and with backward, every implementation that accepts.

    \b
    gpuattn bench softmax --shape 8192x1024
    gpuattn bench attention --peers --json attention.json --plot attention.png

    "attention" is a table of its own: each direction by itself, in CUDA graphs, beside the peers.
    A result is checked against the reference before it is timed.
    """
    files = path, attention["plot"]
    words = [Path(word).name if word in files else word for word in sys.argv[1:]]
    line = shlex.join(["gpuattn", *words])
    if ATTENTION in ops:
        if ops != (ATTENTION,) or shape or dtype:
            raise click.UsageError("attention goes alone, without --shape and --dtype")
        bench_attention.table(run.backend(device), path, line, **attention)
        return
    given = [name for name, value in attention.items() if value not in (None, False)]
    if given:
        raise click.UsageError(f"--{given[0].replace('_', '-')} is for: gpuattn bench attention")
    _ops(ops, parse_shape(shape), dtype, device, path, line)


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
