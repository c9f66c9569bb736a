"""Options of a run that begins with a Hugging Face folder: what the folder says, and defaults."""

from dataclasses import replace
from typing import Any

from gpuattn.errors import ConfigError, type_of
from gpuattn.models.kinds import MODELS, options_of
from gpuattn.nn.module import uninitialised
from gpuattn.pretrained.architecture import ARCHITECTURES
from gpuattn.pretrained.folder import (
    check_tokenizer,
    kind_of,
    load_pretrained,
    open_folder,
    tokenizer_of,
)
from gpuattn.tasks.registry import models_with, task_of
from gpuattn.typing import StrPath
from gpuattn.units import AUTO

DEFAULTS: dict[str, Any] = {
    "lr": 5e-5, "schedule": "linear", "warmup": 0.1, "length": "3e", "weight_decay": 0.01,
    "ema": 0.0, "eval_every": AUTO,
}  # fmt: skip
DROPOUTS = ("dropout", "attention_dropout", "stochastic_depth", "layer_drop")
CHANGED = ("image_size", *DROPOUTS)  # options of a model that a run may change
LONGEST = 256  # tokens of a sentence or a block, where the model takes more


def fine_tuning(folder: StrPath) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return ({field of a TrainConfig: default}, {field: value that the folder has}).

    Raises PretrainedError for a folder that cannot be used, ConfigError for a model that no run
    trains.
    """
    model = open_folder(folder).model
    config = model.config
    kind = next((kind for kind in MODELS.values() if kind.model is type(model)), None)
    if kind is None:
        accepted = " or ".join(MODELS)
        raise ConfigError(f"--from {folder} has {type_of(model)}; accepted: {accepted}")
    lengths = {name: min(LONGEST, most) for name, most in _limits(kind.name, config).items()}
    has = {"model": kind.name} | {
        name: value for name, value in options_of(config).items()
        if kind.name in models_with(name) and value is not None
    }  # fmt: skip
    free = {name: has.pop(name) for name in CHANGED if name in has}
    return DEFAULTS | lengths | free, has


def load_origin(config: Any) -> tuple[Any, Any]:
    """Return the model and the tokenizer (of a ViT the names of its classes) of the folder that
    ``--from`` names, for training.

    Raises PretrainedError for a folder that cannot be used, ConfigError for texts longer than the
    model takes, DataError for a tokenizer of another model.
    """
    folder = config.origin
    task, (model_type, usual) = task_of(config), kind_of(folder)
    head = next(iter(ARCHITECTURES[model_type].tasks)) if task.new_head else task.name
    model = load_pretrained(
        folder, dtype="float32", device="numpy", task=None if usual == task.name else head
    ).train()
    tokenizer = tokenizer_of(folder)
    if model.config.vocab:  # a ViT without a classifier has no classes
        check_tokenizer(tokenizer, model)
    if hasattr(model, "encode"):
        own, theirs = (tokenizer.bos, tokenizer.eos), (model.config.bos, model.config.eos)
        if own != theirs:
            raise ConfigError(
                f"--from {folder}: the marks of its tokenizer are {own}, those of its model "
                f"{theirs}; accepted: the same padding, which begins, and end"
            )
    for name, most in _limits(config.model, model.config).items():
        if getattr(config, name) > most:
            key, asked = name.replace("_", "-"), getattr(config, name)
            raise ConfigError(f"{key} is {asked}; accepted: up to {most}, which {folder} takes")
    return model, tokenizer


def with_dropout(model: Any, options: Any) -> Any:
    """Return the model with the dropouts of a TrainConfig: one with the same parameters, or itself
    where they are its own. It is saved with those of its folder."""
    asked = {name: getattr(options, name) for name in DROPOUTS if options.has(name)}
    if all(getattr(model.config, name) == value for name, value in asked.items()):
        return model
    with uninitialised():
        new = type(model)(replace(model.config, **asked))
    data = dict(model.named_tensors())
    for name, tensor in new.named_tensors():
        tensor.data = data[name].data
    new.random.seed, new.origin = model.random.seed, model.origin
    return new.train()


def _limits(name, config):
    """Return {field of a TrainConfig: the most tokens that a model takes} for its ``config``."""
    length = getattr(config, "max_length", 0)
    most = {"block": getattr(config, "block", length), "max_len": length - 1}
    return {field: most[field] for field in most if name in models_with(field)}


def freeze(model: Any, patterns: str) -> None:
    """Freeze what the patterns, with commas between them, describe. ConfigError for others, and
    where nothing is left to train."""
    try:
        model.freeze(*(pattern.strip() for pattern in patterns.split(",")))
    except ValueError as error:
        raise ConfigError(f"--freeze: {error}") from error
    if not model.parameters():
        raise ConfigError(f"--freeze {patterns} leaves nothing to train")
