"""A Hugging Face folder without its weights: what a run that began with one keeps of it, also where
it put a new head on the model."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpuattn.errors import CheckpointError
from gpuattn.files import write_bytes, write_text
from gpuattn.nn.module import uninitialised
from gpuattn.pretrained import files
from gpuattn.pretrained.architecture import ARCHITECTURES
from gpuattn.pretrained.folder import Origin, files_beside, wanted
from gpuattn.pretrained.labels import describe_labels
from gpuattn.pretrained.settings import Settings

NAMES = "names.json"  # of the tensors, by the rules and in the folder's files


def write_origin(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write what ``model_of`` needs, and the tokenizer. ``model``: of ``load_pretrained``.

    Raises OSError where the disk does.
    """
    origin: Origin = model.origin
    folder.mkdir(parents=True, exist_ok=True)
    architecture = ARCHITECTURES[origin.config["model_type"]]
    for name, data in files_beside(model, architecture, tokenizer).items():
        write_bytes(folder / name, data)
    noted = {"names": origin.names, "copies": origin.copies, "task": origin.task}
    write_text(folder / NAMES, json.dumps(noted, indent=1))
    write_text(folder / files.CONFIG, json.dumps(origin.config, indent=2, ensure_ascii=False))


def model_of(folder: Path) -> Any:
    """Return the model of ``write_origin``, with arbitrary weights. CheckpointError for a damaged
    folder."""
    faults: list[str] = []
    config = files.read_config(folder, faults)
    noted = files.read_json(folder / NAMES, faults)
    try:
        names, task = dict(noted["names"]), noted["task"]
        architecture = ARCHITECTURES[config["model_type"]]
        settings = Settings(config, faults, preprocessor=files.read_preprocessor(folder, faults))
        own = architecture.configure(settings, set(names), task)
        if faults:
            raise ValueError("; ".join(faults))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder} is damaged: {'; '.join(faults) or error}") from error
    make: Any = architecture.model
    with uninitialised():
        model = make(own)
    copies, kept = tuple(noted["copies"]), files.read_kept(folder)
    model.origin = Origin(config, names, copies, task, files=kept)
    return model


def with_new_head(model: Any, names: Sequence[str], seed: int) -> Any:
    """Return ``model.with_classes`` for classes of these names, which is saved as such a folder.

    ``model``: of ``load_pretrained``. ``seed``: of the new weights.
    """
    new, origin = model.with_classes(len(names), seed), model.origin
    architecture = ARCHITECTURES[origin.config["model_type"]]
    own = architecture.describe(new.config)["architectures"]
    config = {key: value for key, value in origin.config.items() if key != "num_labels"}
    config |= {"architectures": own, **describe_labels(names)}
    there = {name: architecture.written(name) for name in wanted(architecture, new)}
    new.origin = Origin(config, there, (), None, files=origin.files)
    return new.train(model.training)
