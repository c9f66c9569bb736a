"""The tasks by name, and the one of a config."""

from typing import Any

from gpuattn.models.kinds import MODELS
from gpuattn.tasks.language import LanguageTask
from gpuattn.tasks.task import Task
from gpuattn.tasks.translation import TranslationTask

TASKS: dict[str, type[Task]] = {task.name: task for task in (TranslationTask, LanguageTask)}


def task_of(config: Any) -> type[Task]:
    """Return the kind of Task that trains the model of a TrainConfig."""
    return TASKS[MODELS[config.model].task]


def models_of(task: type[Task]) -> list[str]:
    """Return the names of the models that a kind of Task trains, its default first."""
    return [name for name, kind in MODELS.items() if kind.task == task.name]


def models_with(option: str) -> list[str]:
    """Return the names of the models that have a field of TrainConfig: all, where none claims it
    for itself or for its task."""
    claims = {name: kind.options + TASKS[kind.task].options for name, kind in MODELS.items()}
    return [name for name, options in claims.items() if option in options] or list(MODELS)
