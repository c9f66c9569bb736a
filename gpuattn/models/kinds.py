"""The registry of models: what ``--model`` may name, and all that depends on a model's kind.

A model's module calls ``register``; ``gpuattn.models`` imports the module. Options, checks, memory
plans and FLOPs are then found here: nothing else names a model.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gpuattn.models.config import ModelConfig
from gpuattn.nn.module import Module


def accept(options: Any) -> None:
    """Check nothing: the ``check`` of a model that takes every combination of options."""


@dataclass(frozen=True)
class ModelKind:
    """A model that training, translating and sampling know by ``name``.

    ``task``: the name of the ``tasks.task.Task`` that feeds it, and so says how its loss is called.
    ``model``: ``(config, seed=)`` to a Module with ``loss``, ``stepper`` and ``checkpoint``.
    ``configure``: (a ``runs.config.TrainConfig``, number of tokens) to the ModelConfig, which knows
    the FLOPs and the memory of a step.
    ``options``: fields of a TrainConfig that only some models have, this one among them.
    ``defaults``: of fields, where they differ from those of a TrainConfig; ``device_defaults``:
    {"numpy" or "cuda": defaults there}; ``presets``: {name: values}, for ``--preset``.
    ``notes``: {field: what else its help says for this model}.
    ``check``: raises ConfigError for values of a TrainConfig that the model does not take.
    """

    name: str
    task: str
    model: Callable[..., Module]
    configure: Callable[[Any, int], ModelConfig]
    options: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    device_defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)
    check: Callable[[Any], None] = accept


MODELS: dict[str, ModelKind] = {}  # by name; the first is the default of --model


def register(kind: ModelKind) -> ModelKind:
    """Add a kind of model; return it. Raises ValueError where its name is taken."""
    if kind.name in MODELS:
        raise ValueError(f"register: there is a model {kind.name!r} already; choose another name")
    MODELS[kind.name] = kind
    return kind


def new_model(options: Any, tokenizer: Any) -> Any:
    """Return the model that a run begins with, by its TrainConfig and its tokenizer."""
    kind = MODELS[options.model]
    return kind.model(kind.configure(options, len(tokenizer)), seed=options.seed)
