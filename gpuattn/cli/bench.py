"""gpuattn bench: how fast each implementation of an op is here."""

import json
import shlex
import sys
from pathlib import Path

import click

from gpuattn.bench import run
from gpuattn.bench.samples import DTYPES, SAMPLES
from gpuattn.cli.kernels import parse_shape
from gpuattn.cli.options import NearChoice, device_option

HEADER = f"{'op':18} {'shape':>18} {'direction':>17} {'implementation':>14} {'us':>10} {'GB/s':>8}"


@click.command("bench")
@click.argument("ops", nargs=-1, metavar="[OP]...", type=NearChoice(SAMPLES))
@click.option("--shape", help="Such as 8192x1024; the meaning of the axes depends on the op.")
@click.option("--dtype", type=NearChoice(DTYPES), help="Default: bfloat16, float32 on NumPy.")
@device_option
@click.option(
    "--json", "path", type=click.Path(dir_okay=False), help="Also write all samples here."
)
def command(ops, shape, dtype, device, path):
    """Time OPS (default: all), forward and with backward, every implementation that accepts.

    A result is checked against the reference before it is timed.
    """
    rows, shape = [], parse_shape(shape)
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
        words = [Path(word).name if word == path else word for word in sys.argv[1:]]
        document = run.document(rows, shlex.join(["gpuattn", *words]), run.backend(device))
        Path(path).write_text(json.dumps(document, indent=1) + "\n")
