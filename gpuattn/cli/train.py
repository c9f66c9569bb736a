"""gpuattn train: builds a TrainConfig from options, runs it, and prints the next command."""

import dataclasses
import shlex
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

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
from gpuattn.data import generated
from gpuattn.models.kinds import MODELS
from gpuattn.parallel.agreement import together
from gpuattn.parallel.watchdog import TIMEOUT
from gpuattn.parallel.world import connected
from gpuattn.runs.config import (
    OPTIONS,
    TrainConfig,
    option_key,
    parse_option,
    read_toml,
    resolve,
)
from gpuattn.runs.fine_tuning import fine_tuning
from gpuattn.runs.folder import RunFolder
from gpuattn.runs.metrics import describe
from gpuattn.runtime.device import choose_device
from gpuattn.tasks.registry import models_with, task_for, task_of
from gpuattn.tasks.task import DATA_FILES
from gpuattn.train.progress import Listener
from gpuattn.train.session import train
from gpuattn.train.sharding import SHARD
from gpuattn.train.stopping import StopOnSignal
from gpuattn.units import OneOf, flag, number, shown

HELP = {  # heading -> {field of TrainConfig: (placeholder, help)}
    "Data": {
        "pairs": ("STORE", "Pairs that gpuattn prepare has made, instead of two files."),
        "lm": ("FILE|STORE", "One text to learn instead, by a language model or bert."),
        "valid_lm": ("FILE|STORE", "For validation; otherwise the end of the text is held out."),
        "documents": ("", "Attend within documents only: of a store of prepare --documents."),
        "mask": ("P%", "Share of the tokens of --lm that bert learns to guess."),
        "tokenizer": ("", "Of a text: subwords, or its characters."),
        "images": ("DIR|NPZ", "Images to tell apart instead: a folder for each class, or an .npz."),
        "valid_images": ("DIR|NPZ", "For validation; otherwise a tenth of the images is held out."),
        "shift": ("N", "Most pixels by which training moves an image."),
        "flip": ("", "Whether training mirrors half of the images."),
        "mixup": ("X", "Mix two images of a batch by shares from Beta(X, X); 0: never."),
        "classify": ("FILE", "Texts to tell apart instead: lines of a text, a tab, its label."),
        "valid_classify": ("FILE", "For validation; otherwise a tenth of the lines is held out."),
        "vocab_size": ("N", "Largest number of subwords, shared by both languages."),
        "max_len": ("N", "Longest sentence, in tokens."),
        "on_long": ("", "What to do about longer sentences."),
        "seed": ("N", "Decides data order, first parameters and dropout."),
    },
    "Model": {
        "model": ("", "A translator, language model, encoder (bert), or classifier of images."),
        "dim": ("N", "Width."),
        "heads": ("N", "Attention heads; they divide the width."),
        "kv_heads": ("N", "Heads of keys and values; they divide --heads.  [default: as many]"),
        "layers": ("N[:N]", "4, or 4:2 for encoder and decoder."),
        "ffn": ("N", "Width inside the feed-forward networks."),
        "block": ("N", "Tokens that a language model sees."),
        "image_size": ("N", "Side of the images that vit sees, in pixels; of an .npz its own."),
        "patch": ("N", "Side of a patch; it divides --image-size."),
        "channels": ("N", "Of images: 1, gray, or 3."),
        "bias": ("", "Whether linear layers and norms of a language model add one."),
        "dropout": ("P", "Share of activations set to zero."),
        "attention_dropout": ("P", "The same for attention probabilities."),
        "stochastic_depth": (
            "P",
            "Share of images for which vit's last layer leaves a branch out.",
        ),
        "layer_drop": ("P", "Share of updates in which a layer of a model of texts is left out."),
        "norm": ("", "Normalise before or after each branch."),
        "positions": ("", "How positions are encoded."),
        "activation": ("", "In the feed-forward networks; swiglu adds a third matrix."),
        "origin": ("FOLDER", "Fine-tune a Hugging Face folder, with its tokenizer or classes."),
        "freeze": ("PATTERNS", "Parameters to leave as they are, such as 'embedding,layers.0'."),
        "init_from": ("RUN", "Begin with another run's best weights, and its tokenizer."),
        "pad_vocab": ("", "Bring the vocabulary's tables to a multiple of 64 rows: faster."),
    },
    "Optimisation": {
        "batch": ("N|auto", "Tokens of a batch on its longer side, such as 8k; auto: what fits."),
        "batching": ("", "Sentences end to end, or padded to one length: sorted, or at random."),
        "accumulate": ("N", "Batches summed for an update."),
        "replicas": (
            "N",
            "Shares of the data, each with its batches; ranks divide them.  [default: a rank one]",
        ),
        "outer_every": (
            "N",
            "Updates that each replica makes alone before a step of all (DiLoCo); 0: none.",
        ),
        "checkpoint": ("", "Recompute layers to save memory; full: also logits in slices."),
        "optimizer": ("", "What updates the parameters."),
        "beta2": ("P", "Decay of the mean squared gradient, of adamw and adam."),
        "lr": ("X", "Largest learning rate."),
        "lr_floor": ("P", "Share of lr where cosine and linear end."),
        "lr_decay": ("N", "Updates after which cosine and linear end; 0: with the run."),
        "schedule": ("", "How it falls after the warm-up."),
        "warmup": ("N|P%", "Updates, or a share of the run such as 5%."),
        "label_smoothing": ("P", "Probability spread over the whole vocabulary."),
        "clip": ("X", "Largest norm of the gradient; 0: no clipping."),
        "weight_decay": ("X", "Of matrices; adam and sgd add it to the gradient."),
        "precision": (
            "",
            "auto: bf16 on a GPU, fp16 before 8.0, fp32 on NumPy; pure-bf16: no fp32 masters.",
        ),
        "threads": ("N|auto", "Of BLAS on NumPy; auto: the fastest, measured during the run."),
        "deterministic": ("", "The same bits in every run on a GPU too; 1 to 2 % slower."),
    },
    "Length of the run": {
        "length": ("N[e|u|s|m]", "30e epochs, 8000u updates, or 90s: planned to end by then."),
        "patience": ("N", "Stop after N evaluations without a better one; 0: never."),
        "until": (
            "P",
            "Stop when two evaluations in a row have P % of every kind exact; 0: never.",
        ),
    },
    "Evaluation and checkpoints": {
        "eval_every": ("N[e|u|s]", "auto: 1e or 45s, a tenth of the time at most."),
        "score_pairs": ("N", "Validation sentences translated each time."),
        "beam": ("N", "Of translations later; in training it is 1."),
        "length_penalty": ("X", "Exponent of the length that scores are divided by."),
        "ema": ("P", "Decay of a moving average of the parameters; 0: none."),
        "average": ("N", "Average the last N checkpoints at the end; 0: none."),
    },
}
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


def _option(name, group, placeholder, help):
    parse = OPTIONS[name].metadata["parse"]
    names = tuple(parse.names) if isinstance(parse, OneOf) else ()
    kind = NearChoice(names) if names else Parsed(parse, placeholder)
    for model in MODELS.values():
        if name in model.notes:
            help = f"{help.removesuffix('.')}; of {model.name} {model.notes[name]}."
    key, own = option_key(name), any(name in model.defaults for model in MODELS.values())
    if parse is flag:
        switch = f"--{key}/--no-{key}"
        default = OPTIONS[name].default
        return GroupedOption([switch, name], default=default, help=help, group=group)
    flags = [f"--{key}", name]
    metavar = None if names else placeholder
    if own or OPTIONS[name].default is not None:
        help += f"  [default: {_default(name, percent='%' in placeholder)}]"
    return GroupedOption(flags, type=kind, metavar=metavar, help=help, group=group)


def _default(name, percent=False):
    """Return the default of an option as text, with the defaults of models that differ."""
    texts = {}
    for model in models_with(name):
        value = MODELS[model].defaults.get(name, OPTIONS[name].default)
        slower = MODELS[model].device_defaults.get("numpy", {}).get(name)
        texts[model] = f"{value:.0%}" if percent and type(value) is float else shown(value)
        texts[model] += "" if slower is None else f", on NumPy {shown(slower)}"
    first, *others = texts.values()
    others = (f"; {model}: {text}" for model, text in texts.items() if text != first)
    return first + "".join(others)


def config_option(group: str) -> Callable:
    """Return the option --config, under a heading."""
    return click.option("--config", "config_file", type=PathName(dir_okay=False),
                        cls=GroupedOption, group=group, help="A TOML file of options.")  # fmt: skip


preset_option = click.option(
    "--preset", type=NearChoice(dict.fromkeys(chain(*(m.presets for m in MODELS.values())))),
    cls=GroupedOption, group="Model", help="A size, with what suits it.",
)  # fmt: skip


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


def options_of(group: str) -> list[click.Option]:
    """Return the click options under one heading of HELP."""
    return [_option(name, group, *shown) for name, shown in HELP[group].items()]


command.params[1:1] = [option for group in HELP for option in options_of(group)]


def resolved(
    ctx: click.Context,
    what: tuple[str, ...],
    valid: tuple[str, str] | None,
    config_file: str | None,
    values: Mapping[str, Any],
    device: str,
) -> tuple[TrainConfig, dict[str, str]]:
    """Return ``runs.config.resolve`` of what a command was given, for "numpy" or "cuda"."""
    return resolve(*_layers(ctx, what, valid, config_file, values), device=device)


def _layers(ctx, what, valid, config_file, values):
    """Return the layers of ``runs.config.resolve``, the lowest first."""
    layers = {ParameterSource.ENVIRONMENT: {}, ParameterSource.COMMANDLINE: {}}
    for name, value in values.items():
        source = ctx.get_parameter_source(name)
        if source in layers:
            layers[source][name] = value
    named = layers[ParameterSource.COMMANDLINE]
    from_file = read_toml(config_file) if config_file else {}
    model = named.get("model") or layers[ParameterSource.ENVIRONMENT].get("model")
    named |= _data(what, model or from_file.get("model"))
    if valid:
        named |= {"valid_source": valid[0], "valid_target": valid[1]}
    if what or named.keys() & {"lm", "pairs", "images", "classify"}:
        for name in ("task", *DATA_FILES):
            from_file.pop(name, None)
    given = (
        (str(config_file), from_file),
        ("environment", layers[ParameterSource.ENVIRONMENT]),
        ("command line", named),
    )
    every = {name: value for _, values in given for name, value in values.items()}
    if not every.get("origin"):
        return given
    defaults, has = fine_tuning(every["origin"])
    for name, value in has.items():
        if parse_option(name, every.get(name, value)) != parse_option(name, value):
            raise click.UsageError(
                f"--{option_key(name)} is for a new model; --from {every['origin']} has "
                f"{shown(parse_option(name, value))}"
            )
    return (("default with --from", defaults), *given, (f"from {every['origin']}", has))


def _data(what, model):
    """Return the fields that the positional arguments give, for a model or None."""
    field = task_for(model, {}).argument if model in MODELS else None
    if field and len(what) == 1:
        return {field: what[0]}
    if len(what) == 2:
        return {"source": what[0], "target": what[1]}
    if len(what) > 2:
        raise click.UsageError(
            f"{len(what)} arguments; accepted: a task, or a source and a target file"
        )
    if (
        what
        and what[0] not in generated.GENERATED
        and (Path(what[0]).exists() or Path(what[0]).suffix)
    ):
        quoted = shlex.quote(what[0])
        if Path(what[0]).is_dir():
            raise click.UsageError(
                f"{what[0]} is a folder; a store: --pairs {quoted} or --lm {quoted}; images: "
                f"--images {quoted}"
            )
        raise click.UsageError(
            f"{what[0]} is one file; accepted: a source and a target file, or --lm {quoted}"
        )
    return {"task": what[0]} if what else {}


def _typed(ctx):
    """Return the command line that continues the run."""
    kept = [argument for argument in ctx.meta["arguments"] if argument != "--overwrite"]
    return shlex.join(["gpuattn", "train", *kept])
