"""gpuattn train: builds a TrainConfig from options, runs it, and prints the next command."""

import dataclasses
import shlex
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import click

from gpuattn.cli.shared.gpus import gpus_option, run_on
from gpuattn.cli.shared.options import (
    GroupedCommand,
    GroupedOption,
    NearChoice,
    Parsed,
    PathName,
    device_option,
)
from gpuattn.cli.shared.progress import LEVELS, new_report
from gpuattn.cli.shared.training import HELP, config_option, options_of, preset_option, resolved
from gpuattn.parallel.agreement import together
from gpuattn.parallel.watchdog import TIMEOUT
from gpuattn.parallel.world import connected
from gpuattn.runs.folder import RunFolder
from gpuattn.runs.metrics import describe
from gpuattn.runtime.device import choose_device
from gpuattn.tasks.registry import task_of
from gpuattn.train.progress import Listener
from gpuattn.train.session import train
from gpuattn.train.sharding import SHARD
from gpuattn.train.stopping import StopOnSignal
from gpuattn.units import number

EPILOG = """\b
gpuattn train                                 English to German phrases, until it is right
gpuattn train dates --out runs/dates          another built-in task
gpuattn train train.en train.de --valid val.en val.de --out runs/de --for 30e --batch 8k
gpuattn train --lm book.txt --tokenizer chars GPT-2, character by character
gpuattn train --lm stores/web                 on a token store, see gpuattn prepare
gpuattn train --lm text.txt --mask 15%        BERT, by hidden tokens of lines
gpuattn train --pairs stores/de --valid val.en val.de --out runs/de
gpuattn train --model vit photos              a folder for each class, or an .npz
gpuattn train --classify reviews.tsv          BERT; a line: a text, a tab, its label
gpuattn train --from all-MiniLM-L6-v2 --classify reviews.tsv --out runs/reviews
gpuattn train --config runs/de/config.toml --seed 2 --out runs/de2
gpuattn train --from opus-mt-en-de train.en train.de --freeze encoder --out runs/tuned

The same command continues a stopped run. Options may also stand in a TOML file
(--config) or in variables such as GPUATTN_TRAIN_LR; a flag wins over a variable, a variable over
the file, the file over a preset.
"""


@click.command("train", cls=GroupedCommand, epilog=EPILOG)
@click.argument("what", nargs=-1, metavar="[TASK | SRC TGT]")
@click.option("--valid", nargs=2, type=PathName(), metavar="SRC TGT", cls=GroupedOption,
              group="Data", help="For validation; default: some pairs are held out.")  # fmt: skip
@click.option("--out", type=PathName(file_okay=False), cls=GroupedOption, group="Folder",
              help="The run's folder.  [default: runs/TASK]")  # fmt: skip
@click.option("--overwrite", is_flag=True, cls=GroupedOption, group="Folder",
              help="Delete the run that is in the folder.")  # fmt: skip
@click.option("--tensorboard", is_flag=True, cls=GroupedOption, group="Folder",
              help="Write the metrics as TensorBoard events, too: OUT/tensorboard.")  # fmt: skip
@config_option("Folder")
@preset_option
@click.option("--log-level", type=NearChoice(LEVELS), cls=GroupedOption, group="Messages",
              help="debug: progress in lines; error: no warnings.  [default: info]")  # fmt: skip
@click.option("--quiet", is_flag=True, cls=GroupedOption, group="Messages",
              help="The same as --log-level warning: only warnings and errors.")  # fmt: skip
@device_option
@gpus_option
@click.option("--shard", type=NearChoice(SHARD), default="auto", show_default=True,
              cls=GroupedOption, group="Machine",
              help="node: the ranks of a machine share the optimizer's state; auto: on GPUs.",
              )  # fmt: skip
@click.option("--timeout", type=Parsed(number(0, above=True), "SECONDS"), default=TIMEOUT,
              show_default=True, cls=GroupedOption, group="Machine",
              help="End all ranks when none has got on for so long; 6 times that at the start.",
              )  # fmt: skip
@click.pass_context
def command(
    ctx: click.Context, what: tuple[str, ...], valid: tuple[str, str] | None, out: str | None,
    overwrite: bool, tensorboard: bool, config_file: str | None, log_level: str | None, quiet: bool,
    device: str, gpus: int | str | None, shard: str, timeout: float, **values: Any,
) -> None:  # fmt: skip
    """Train a translator: on a built-in TASK (toy, dates, reverse), or on two text files whose
    lines are translations of each other. Or train a language model, on one text: --lm FILE; or an
    encoder, by hidden tokens of the lines of a text: --model bert --lm FILE; or a classifier of
    texts, on lines of a text, a tab and its label: --classify FILE; or one of images, on a folder
    with a folder for each class: --model vit DIR. Text of any size: gpuattn prepare makes a token
    store of it, and train does by itself of files above 8 MB. Ctrl-C saves; the same command
    continues."""

    def understood():
        chosen = choose_device(device)[0]
        config, origins = resolved(ctx, what, valid, config_file, values, chosen)
        name = task_of(config).run_name(config)
        if out is None and not name:
            example = "such as --out runs/mine"
            raise click.UsageError(f"--out DIR is needed for files of yours, {example}")
        return config, origins, Path(out or f"runs/{name}"), _level(log_level, quiet)

    code = run_on(gpus, device, ["gpuattn", "train", *ctx.meta["arguments"]])
    if code is not None:
        sys.exit(code)
    debug = getattr(ctx.find_root().command, "debug", False)
    with connected(debug, lambda: choose_device(device)[0], timeout) as communicator:
        config, origins, target, level = together(communicator, understood)
        if origins["replicas"] == "default":
            config = dataclasses.replace(config, replicas=_replicas(target, communicator))
        if is_rank_0 := communicator.rank == 0:
            report = new_report(level)
        else:
            report = Listener()
            warnings.simplefilter("ignore")
        first = partial(_stopping, ctx, report)
        with StopOnSignal(first, report.close, lambda: report.begun) as stop:
            try:
                outcome = train(
                    config, target, origins=origins, device=device, listener=report, stop=stop,
                    overwrite=overwrite, command=_typed(ctx), tensorboard=tensorboard,
                    communicator=communicator, shard=shard,
                )  # fmt: skip
            finally:
                report.close()
        codes = communicator.gather(stop.exit_code if stop() else 0)
    if not outcome.finished:
        done = f"after update {outcome.update:,}; all is saved"
        report.say("stopped", f"{done}. Go on: {_typed(ctx)}")
        sys.exit(max(codes))
    if not is_rank_0:
        return
    task = task_of(config)
    assert outcome.best is not None  # a finished run was evaluated
    report.say("done", describe(outcome.best))
    example = task.example(config)
    piped = f"echo {shlex.quote(example)} | " if example is not None else ""
    report.say("next", f"{piped}{task.command} {shlex.quote(str(target))}")


command.params[1:1] = [option for group in HELP for option in options_of(group)]


def _replicas(target, communicator):
    """Return the replicas of a run where no option says it: those that it has, or one a rank."""
    folder = RunFolder(target)

    def read():
        known = communicator.rank == 0 and communicator.size > 1 and folder.exists()
        return folder.config().replicas if known else communicator.size

    return communicator.gather(together(communicator, read))[0]


def _level(log_level, quiet):
    """Return the requested one of LEVELS; "error" silences Python's warnings too."""
    if quiet and log_level not in (None, "warning"):
        raise click.UsageError(f"--quiet and --log-level {log_level}; accepted: one of them")
    if log_level == "error":
        warnings.simplefilter("ignore")
    return "warning" if quiet else log_level or "info"


def _stopping(ctx, report):
    """Print what the first signal does."""
    if report.begun:
        report.say("stopping", "saving first; once more ends at once, unsaved")
    else:
        report.say("stopped", f"before training began. Go on: {_typed(ctx)}")


def _typed(ctx):
    """Return the command line that continues the run."""
    kept = [argument for argument in ctx.meta["arguments"] if argument != "--overwrite"]
    return shlex.join(["gpuattn", "train", *kept])
