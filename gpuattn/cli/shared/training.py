"""The options of a training run on a command line, and the TrainConfig that they give."""

import shlex
from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from gpuattn.cli.shared.options import GroupedOption, NearChoice, Parsed, PathName
from gpuattn.data import generated
from gpuattn.models.kinds import MODELS
from gpuattn.runs.config import OPTIONS, TrainConfig, option_key, parse_option, read_toml, resolve
from gpuattn.runs.fine_tuning import fine_tuning
from gpuattn.tasks.registry import models_with, task_for
from gpuattn.tasks.task import DATA_FILES
from gpuattn.units import OneOf, flag, shown

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


def options_of(group: str) -> list[click.Option]:
    """Return the click options under one heading of HELP."""
    return [_option(name, group, *shown) for name, shown in HELP[group].items()]


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
