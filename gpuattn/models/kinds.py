"""The registry of models: what ``--model`` may name, and all that depends on a model's kind.

A model's module calls ``register``; ``gpuattn.models`` imports the module. Options, checks, memory
plans and FLOPs are then found here: nothing else names a model.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gpuattn.models.config import ModelConfig
from gpuattn.nn.module import Module


def accept(options: Any) -> None:
    """Check nothing: the ``check`` of a model that takes every combination of options."""


@dataclass(frozen=True)
class ModelKind:
    """A model that training, translating and sampling know by ``name``.

    ``tasks``: the names of each ``tasks.task.Task`` that can feed it, and so says how its loss is
    called: where its data do not choose one, the first.
    ``model``: ``(config, seed=)`` to a Module with ``checkpoint`` and what its tasks call, such as
    ``loss`` and ``stepper``.
    ``configure``: (a ``runs.config.TrainConfig``, number of tokens) to the ModelConfig, which knows
    the FLOPs and the memory of a step.
    ``options``: fields of a TrainConfig that only some models have, this one among them.
    ``defaults``: of fields, where they differ from those of a TrainConfig; ``device_defaults``:
    {"numpy" or "cuda": defaults there}; ``presets``: {name: values}, for ``--preset``.
    ``notes``: {field: what else its help says for this model}.
    ``check``: raises ConfigError for values of a TrainConfig that the model does not take.
    """

    name: str
    tasks: tuple[str, ...]
    model: Callable[..., Module]
    configure: Callable[[Any, int], ModelConfig]
    options: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    device_defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)
    check: Callable[[Any], None] = accept


SAME = {"dim": "d_model", "image_size": "image"} | {name: name for name in (
    "heads", "kv_heads", "layers", "ffn", "bias", "dropout", "attention_dropout", "norm",
    "positions", "activation", "pad_vocab", "patch", "channels", "stochastic_depth", "layer_drop",
)}  # fmt: skip
"""{field of a TrainConfig: field of a ModelConfig that says the same}."""

MODELS: dict[str, ModelKind] = {}  # by name; the first is the default of --model


def register(kind: ModelKind) -> ModelKind:
    """Add a kind of model; return it. Raises ValueError where its name is taken."""
    if kind.name in MODELS:
        raise ValueError(f"register: there is a model {kind.name!r} already; choose another name")
    MODELS[kind.name] = kind
    return kind


def options_of(config: Any) -> dict[str, Any]:
    """Return {field of a TrainConfig: value} that describe a ModelConfig, as far as they can."""
    found = {ours: getattr(config, own) for ours, own in SAME.items() if hasattr(config, own)}
    layers = found["layers"]
    return found | {"layers": layers if isinstance(layers, tuple) else (layers, layers)}


def new_model(options: Any, tokenizer: Any) -> Any:
    """Return the model that a run begins with, by its TrainConfig and its tokenizer."""
    kind = MODELS[options.model]
    config: Any = kind.configure(options, len(tokenizer))
    if names := getattr(tokenizer, "names", ()):
        config = replace(config, classes=len(names))
    return kind.model(config, seed=options.seed)
