"""The tasks by name, and the one of a config."""

from collections.abc import Mapping
from typing import Any

from gpuattn.models.kinds import MODELS
from gpuattn.tasks.images import ImageTask
from gpuattn.tasks.labels import LabelTask
from gpuattn.tasks.language import LanguageTask
from gpuattn.tasks.masked import MaskedTask
from gpuattn.tasks.task import Task
from gpuattn.tasks.translation import TranslationTask

TASKS: dict[str, type[Task]] = {
    task.name: task for task in (TranslationTask, LanguageTask, ImageTask, MaskedTask, LabelTask)
}


def task_of(config: Any) -> type[Task]:
    """Return the kind of Task that trains the model of a TrainConfig."""
    return task_for(config.model, vars(config))


def task_for(model: str, values: Mapping[str, Any]) -> type[Task]:
    """Return the kind of Task that trains a model on what {field of a TrainConfig: value} names:
    of those that the model has, the first that is chosen by one of the fields, else the first."""
    tasks = [TASKS[name] for name in MODELS[model].tasks]
    chosen = (task for task in tasks if any(values.get(field) for field in task.chosen_by))
    return next(chosen, tasks[0])


def has_option(model: str, task: type[Task], name: str) -> bool:
    """Return whether a model has a field of TrainConfig when this kind of Task trains it: none that
    it has for another task only."""
    kind = MODELS[model]
    of_tasks = any(name in TASKS[other].options for other in kind.tasks)
    if of_tasks and name not in (*kind.options, *task.options):
        return False
    return model in models_with(name)


def models_of(task: type[Task]) -> list[str]:
    """Return the names of the models that a kind of Task trains, its default first."""
    return [name for name, kind in MODELS.items() if task.name in kind.tasks]


def models_with(option: str) -> list[str]:
    """Return the names of the models that have a field of TrainConfig: all, where none claims it
    for itself or for its task."""
    claims = {
        name: {*kind.options, *(field for task in kind.tasks for field in TASKS[task].options)}
        for name, kind in MODELS.items()
    }
    return [name for name, options in claims.items() if option in options] or list(MODELS)
