"""gpuattn bench ops: every implementation of an op that accepts, forward and with backward."""

import click

from gpuattn.bench import ops, results
from gpuattn.bench.samples import DTYPES, SAMPLES
from gpuattn.cli.bench.table import command_line, json_option
from gpuattn.cli.kernels import parse_shape
from gpuattn.cli.shared.options import GroupedCommand, GroupedOption, NearChoice, device_option
from gpuattn.runtime.device import array_module, choose_device

HEADER = f"{'op':18} {'shape':>18} {'direction':>17} {'implementation':>14} {'us':>10} {'GB/s':>8}"


@click.command("ops", cls=GroupedCommand)
@click.argument("names", nargs=-1, metavar="[OP]...", type=NearChoice(SAMPLES))
@click.option("--shape", cls=GroupedOption, group="Problem",
              help="Such as 8192x1024; the meaning of the axes depends on the op.")  # fmt: skip
@click.option("--dtype", type=NearChoice(DTYPES), cls=GroupedOption, group="Problem",
              help="Default: bfloat16, float32 on NumPy.")  # fmt: skip
@device_option
@json_option
def command(
    names: tuple[str, ...], shape: str | None, dtype: str | None, device: str, path: str | None
) -> None:
    """Time every implementation of OPS (default: all).

    Calls are those of a user, with the time of the host.
    """
    size, xp = parse_shape(shape), array_module(choose_device(device)[0])
    rows: list[dict] = []
    for name in names or SAMPLES:
        for row in ops.measure(name, size, dtype, xp):
            if not rows:
                click.echo(HEADER)
            rows.append(row)
            axes = "x".join(map(str, row["case"]["shape"]))
            rate = f"{row['gbs']:8.1f}" if row["gbs"] else " " * 8
            click.echo(
                f"{row['op']:18} {axes:>18} {row['direction']:>17} {row['impl']:>14} "
                f"{row['us']:10.1f} {rate}"
            )
    if path:
        results.write(path, results.document(rows, command_line(path), xp))
