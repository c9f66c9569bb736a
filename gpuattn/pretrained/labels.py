"""The names of classes in a config.json: id2label and label2id."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpuattn.data.class_names import ClassNames
from gpuattn.errors import PretrainedError
from gpuattn.pretrained import files
from gpuattn.pretrained.settings import Settings
from gpuattn.typing import StrPath

DEFAULT_CLASSES = 2  # of transformers, where config.json names none


def describe_labels(names: Sequence[str]) -> dict[str, Any]:
    """Return the keys of config.json for names of classes; none for no names."""
    if not names:
        return {}
    return {
        "id2label": {str(i): name for i, name in enumerate(names)},
        "label2id": {name: i for i, name in enumerate(names)},
    }


def numbered_labels(classes: int) -> dict[str, Any]:
    """Return the keys of config.json for classes without names, as transformers calls them."""
    return describe_labels([f"LABEL_{i}" for i in range(classes)])


def count_labels(settings: Settings) -> int:
    """Return how many classes a config.json has."""
    labels = settings.get("id2label", None)
    return len(labels) if labels else settings.size("num_labels", DEFAULT_CLASSES)


def read_labels(folder: StrPath) -> ClassNames:
    """Return the names of the classes in config.json.

    Raises PretrainedError for a folder without them, with damaged ones, or whose head is for
    another purpose than to choose one of its classes.
    """
    faults: list[str] = []
    config = files.read_config(Path(folder), faults)
    count = Settings(config, faults).size("num_labels", DEFAULT_CLASSES)
    labels, purpose = config.get("id2label"), config.get("problem_type")
    labels = labels or numbered_labels(count)["id2label"]
    numbers = sorted(labels, key=int) if isinstance(labels, dict) and all(
        key.isdecimal() for key in labels) else []  # fmt: skip
    if not numbers or [int(n) for n in numbers] != list(range(len(numbers))):
        faults.append(f"{files.CONFIG}: id2label names no classes 0, 1, 2, ...")
    elif len(numbers) == 1 or purpose not in (None, "single_label_classification"):
        faults.append(
            f"{files.CONFIG}: num_labels is {len(numbers)}, problem_type is {purpose!r}; accepted: "
            "two or more classes, of which one is right"
        )
    if faults:
        raise PretrainedError(Path(folder), faults)
    return ClassNames([str(labels[n]) for n in numbers])
