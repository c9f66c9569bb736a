"""gpuattn profile: where the time of one training step goes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from gpuattn.bench.profile import profile
from gpuattn.cli.bench.table import console, rate, short
from gpuattn.cli.shared.options import GroupedCommand, GroupedOption, PathName, device_option
from gpuattn.cli.shared.training import config_option, options_of, preset_option, resolved
from gpuattn.files import write_text
from gpuattn.report.page import PROFILE, describe_padding
from gpuattn.report.plot import import_pyplot
from gpuattn.runs.fine_tuning import load_origin
from gpuattn.runs.folder import RunFolder
from gpuattn.runs.loading import load_run
from gpuattn.runtime.device import choose_device
from gpuattn.tasks.registry import task_of
from gpuattn.units import AUTO

GROUPS = ("Data", "Model", "Optimisation")  # of gpuattn train's options
EPILOG = """\b
gpuattn profile runs/toy                      the step of a run; its report shows the table too
gpuattn profile --lm book.txt --plot step.png
gpuattn profile train.en train.de --preset base --batch 8k --json step.json
"""


@click.command("profile", cls=GroupedCommand, epilog=EPILOG)
@click.argument("what", nargs=-1, metavar="[RUN | TASK | SRC TGT]")
@click.option("--plot", type=PathName(dir_okay=False), cls=GroupedOption, group="Results",
              help="Draw the ops under the roofline as PNG.")  # fmt: skip
@click.option("--json", "path", type=PathName(dir_okay=False), cls=GroupedOption,
              group="Results", help="Write the table here.")  # fmt: skip
@config_option("Data")
@preset_option
@device_option
@click.pass_context
def command(
    ctx: click.Context,
    what: tuple[str, ...],
    plot: str | None,
    path: str | None,
    config_file: str | None,
    device: str,
    **values: Any,
) -> None:
    """Time every op of one training step: launches, microseconds, bytes, FLOPs, and how near the
    roofline each comes. Of the run in the folder RUN, or of what gpuattn train would train with
    the same options.

    On a GPU each kind of call is timed by itself, as a CUDA graph; on NumPy by the clock. In a
    step some run beside others, or in one kernel with them; its own time is given too.
    """
    pyplot = import_pyplot() if plot else None  # fails at once without matplotlib
    chosen = choose_device(device)[0]
    run = RunFolder(what[0]) if len(what) == 1 and RunFolder(what[0]).exists() else None
    model = None
    if run:
        config, tokenizer = run.config(), run.tokenizer()
        if config.origin:
            model = load_run(run.path, device="numpy").model.train()
    else:
        config, tokenizer = resolved(ctx, what, None, config_file, values, chosen)[0], None
        if config.origin:
            model, tokenizer = load_origin(config)
    if config.batch == AUTO:
        raise click.UsageError("--batch auto is what a run finds for itself: give a number here")
    task = task_of(config)(replace(config, accumulate=1, replicas=1), tokenizer, model=model)
    document = profile(task, chosen)
    files = [run.path / PROFILE] if run else []
    files += [Path(path)] if path else []
    for file in files:
        write_text(file, json.dumps(document, indent=1))
    _show(document)
    if plot:
        from gpuattn.bench.charts import draw_profile

        draw_profile(pyplot, document, plot)


command.params[1:1] = [option for group in GROUPS for option in options_of(group)]


def _show(document):
    from rich.table import Table

    for topic in ("where", "model", "update"):
        click.echo(f"{topic:8} {document[topic]}")
    step, reach = document["step_us"], document["ceilings"]
    tflops = document["model_flops"] / step / 1e6
    text = f"{step / 1e3:.3g} ms, {document['tokens']:,} tokens, {rate(tflops)}"
    if reach:
        text += f", MFU {tflops / reach['matmul_tflops']:.1%}"
        click.echo(
            f"{'ceilings':8} product {rate(reach['matmul_tflops'])} in {document['dtype']}, "
            f"copy {reach['copy_tbs']:.3f} TB/s, measured"
        )
    click.echo(f"{'step':8} {text}")
    table = Table(box=None, pad_edge=False)
    table.add_column("op")
    table.add_column("direction")
    heads = ("calls", "launches", "us", "share", "MB", "GFLOP", "GB/s", "TFLOP/s", "of the roof")
    for head in heads:
        table.add_column(head, justify="right")
    for row in document["rows"]:
        table.add_row(row["op"], row["direction"], *_figures(row))
    console().print(table)
    if document["vocabulary"]:
        click.echo(f"{'padding':8} of the vocabulary: {describe_padding(document['vocabulary'])}")
    for name in ("stages", "kinds"):
        parts = (f"{kind} {_share(document, us)}" for kind, us in document[name].items())
        click.echo(f"{name:8} {', '.join(parts)}")
    total = sum(row["us"] for row in document["rows"] if row["calls"])
    click.echo(f"{'ops':8} {total / 1e3:.3g} ms one by one, {total / step:.0%} of the step")


def _share(document, us):
    whole = sum(document["stages"].values())
    return f"{us / 1e3:.3g} ms ({us / whole:.0%})"


def _figures(row):
    """Return the cells of a row, "-" for what is not known."""
    moved, flops, us = row["bytes"], row["flops"], row["us"]
    return [
        f"{row['calls']:,}" if row["calls"] else "-",
        "-" if row["launches"] is None else f"{row['launches']:.0f}",
        f"{us:,.1f}",
        f"{row['share']:.1%}",
        short(moved / 1e6) if moved else "-",
        short(flops / 1e9) if flops else "-",
        short(moved / us / 1e3) if moved else "-",
        short(flops / us / 1e6) if flops else "-",
        "-" if row["roof"] is None else f"{row['roof']:.2f}",
    ]
