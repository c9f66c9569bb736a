"""Models from Hugging Face folders and into them, bit for bit."""

import contextlib
import math
import os
import shutil
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from gpuattn.arrays import FLOATS, to_cpu
from gpuattn.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    PretrainedError,
    problem,
    type_of,
)
from gpuattn.nn.module import uninitialised
from gpuattn.pretrained import files
from gpuattn.pretrained.architecture import (
    ARCHITECTURES,
    Architecture,
    matches,
)
from gpuattn.pretrained.labels import describe_labels
from gpuattn.pretrained.settings import Settings
from gpuattn.runtime.cold_start import start_libraries
from gpuattn.runtime.device import array_module, choose_device
from gpuattn.tensor_file import has_bits_of, is_finite
from gpuattn.typing import DType, StrPath

BLOCK = 1 << 23  # values of a tensor that are read together


@dataclass(frozen=True)
class Origin:
    """What a loaded model keeps of its folder, for saving it: config.json, {name by the rules: name
    in the file}, the names of tied copies, the tensors that are kept as they are, and {name: bytes}
    of files beside."""

    config: dict[str, Any]
    names: dict[str, str]
    copies: tuple[str, ...]
    task: str | None
    kept: dict[str, np.ndarray] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Found:
    """A folder that can be loaded: ``tensors`` by the names of the rules, none of them read."""

    path: Path
    architecture: Architecture
    model: Any  # with arbitrary weights
    tensors: dict[str, files.Stored]
    origin: Origin


# ---- loading ------------------------------------------------------------------------------------


def load_pretrained(
    folder: StrPath, *, dtype: DType | None = None, device: str = "auto", task: str | None = None
) -> Any:
    """Return the model of a local folder; the public function is ``gpuattn.load_pretrained``."""
    found = open_folder(folder, task)
    kind = _dtype(found, dtype)
    faults: list[str] = []
    xp = array_module(choose_device(device)[0])
    if xp is not np:
        start_libraries()
    for path, parameter in found.model.named_parameters():
        parts = list(found.architecture.parts(path, parameter.shape, found.model.config))
        padded = sum(math.prod(part.shape) for part in parts) < parameter.size
        parameter.data = (xp.zeros if padded else xp.empty)(parameter.shape, kind)
        for part in parts:
            if not _read_into(part.view(parameter.data), found.tensors[part.name], xp):
                faults.append(f"{found.origin.names[part.name]} holds inf or NaN")
    faults += _unequal_copies(found)
    if faults:
        raise PretrainedError(found.path, faults)
    kept = set(found.tensors) - set(wanted(found.architecture, found.model))
    kept = {name for name in kept if matches(name, found.architecture.kept)}
    own = {name: np.array(found.tensors[name].map()) for name in sorted(kept)}
    found.model.origin = replace(found.origin, kept=own)
    return found.model


def _read_into(place, stored, xp):
    """Write a tensor into its place in a parameter; return whether all of it is finite.

    At most ``BLOCK`` values are in host memory at a time, or one row of ``place``.
    """
    each = max(1, place.size // max(1, len(place)))
    rows, finite = max(1, BLOCK // each), True
    for first in range(0, len(place), rows):
        part = place[first : first + rows]
        values = stored.map_values(first * each, part.size)
        finite &= is_finite(values)
        part[...] = xp.asarray(values).reshape(part.shape)
    return finite


def _unequal_copies(found):
    names = found.origin.names
    for name in found.origin.copies:
        other = found.architecture.tied[name]
        if not has_bits_of(found.tensors[name].map(), found.tensors[other].map()):
            yield (
                f"{names[name]} is not equal to {names[other]}; accepted: a copy, or "
                f'"tie_word_embeddings": false in {files.CONFIG}'
            )


def open_folder(folder: StrPath, task: str | None = None) -> Found:
    """Return what is in a folder, checked but for the values of the weights, which are not read.

    Raises PretrainedError that lists every fault, ConfigError for another task.
    """
    folder = Path(folder)
    faults: list[str] = []
    config = files.read_config(folder, faults)
    unread: set[str] = set()
    stored = files.find_tensors(folder, faults, unread)
    architecture = _architecture(config, faults)
    if architecture is None:
        raise PretrainedError(folder, faults)
    if task is not None and task not in architecture.tasks:
        accepted = " or ".join(map(repr, architecture.tasks))
        raise ConfigError(problem("load_pretrained", "task", repr(task), accepted))
    tensors, names = _named(architecture, stored or {}, task, faults)
    settings = Settings(config, faults, preprocessor=files.read_preprocessor(folder, faults))
    before = len(faults)
    model_config = _configured(architecture, settings, set(tensors), task)
    if model_config is None or stored is None or len(faults) > before:
        raise PretrainedError(folder, faults)
    with uninitialised():
        model: Any = architecture.model(model_config).eval()
    there = {architecture.plain(name) for name in unread}
    copies = _check_names(architecture, model, tensors, names, there, faults)
    if faults:
        raise PretrainedError(folder, faults)
    _warn(folder, settings)
    origin = Origin(config, names, copies, task, files=files.read_kept(folder))
    return Found(folder, architecture, model, tensors, origin)


def kind_of(folder: StrPath) -> tuple[str, str]:
    """Return the model_type of a folder and the task that it is used for, by its config.json."""
    faults: list[str] = []
    config = files.read_config(Path(folder), faults)
    architecture = _architecture(config, faults)
    if architecture is None:
        raise PretrainedError(folder, faults)
    return architecture.model_type, architecture.usual_task(config)


def tokenizer_of(folder: StrPath) -> Any:
    """Return the tokenizer of a folder, or what its architecture has in the place of one.

    Raises PretrainedError for a folder that cannot be used.
    """
    return ARCHITECTURES[kind_of(folder)[0]].tokenizer(folder)


def describe_folder(folder: StrPath) -> dict[str, Any]:
    """Return a description of a folder that JSON can hold; no weights are read.

    ``task``: what the model is for. ``options``: the config of the model. Raises PretrainedError
    that lists every fault.
    """
    found = open_folder(folder)
    names, own = found.origin.names, wanted(found.architecture, found.model)
    others = [name for name in found.tensors if name not in own]
    return {
        "folder": str(found.path),
        "model": found.architecture.model_type,
        "task": found.architecture.usual_task(found.origin.config),
        "parameters": sum(map(math.prod, own.values())),
        "vocabulary": found.model.config.vocab,
        "units": found.model.config.units,
        "dtype": str(_dtype(found, None)),
        "copies": [names[name] for name in others if name in found.origin.copies],
        "ignored": [names[name] for name in others if name not in found.origin.copies],
        "options": asdict(found.model.config),
    }


def _architecture(config, faults):
    """Return the Architecture of a config.json, or None and a fault."""
    kind = config.get("model_type")
    found = ARCHITECTURES.get(kind) if isinstance(kind, str) else None
    if found is None and config:
        accepted = " or ".join(map(repr, ARCHITECTURES))
        faults.append(f"{files.CONFIG}: model_type is {kind!r}; accepted: {accepted}")
    return found


def _named(architecture, stored, task, faults):
    """Return {name by the rules: Stored} and {name by the rules: name in the file}."""
    left_out = architecture.tasks[task] if task else ()
    tensors, names = {}, {}
    for name, one in stored.items():
        plain = architecture.plain(name)
        if matches(plain, left_out):
            continue
        if plain in names:
            faults.append(f"{names[plain]} and {name} are the same tensor of the model")
        tensors[plain], names[plain] = one, name
    return tensors, names


def _configured(architecture, settings, names, task):
    try:
        return architecture.configure(settings, names, task)
    except ConfigError as error:
        settings.faults.append(f"{files.CONFIG}: {error}")
        return None


def _check_names(architecture, model, tensors, names, unread, faults):
    """Add faults of names, shapes and dtypes; return the names of tied copies.

    ``unread``: names of tensors that have a fault already, and are not missing.
    """
    own, tied = wanted(architecture, model), architecture.tied
    copies = tuple(name for name in tensors if name in tied and name not in own)
    for name, shape in own.items():
        if name in tensors:
            faults += _misfits(names[name], tensors[name], shape)
        elif name not in unread:
            untied = f'; {files.CONFIG} has "tie_word_embeddings": false' * (name in tied)
            faults.append(f"{architecture.written(name)} is missing{untied}")
    for name, stored in tensors.items():
        if name in copies:
            faults += _misfits(names[name], stored, own.get(tied[name], stored.shape))
        elif name not in own and not matches(name, {**architecture.ignored, **architecture.kept}):
            kind = architecture.model_type
            faults.append(f"{names[name]} {stored.shape} has no place in this {kind}")
    return copies


def wanted(architecture: Architecture, model: Any) -> dict[str, tuple[int, ...]]:
    """Return {name by the rules: shape} of the tensors that a model is made of."""
    return {
        part.name: part.shape
        for path, parameter in model.named_parameters()
        for part in architecture.parts(path, parameter.shape, model.config)
    }


def _misfits(name, stored, shape):
    """Yield sentences on a tensor of another shape or kind."""
    if stored.shape != shape:
        turned = ": it looks transposed" if stored.shape == shape[::-1] else ""
        yield f"{name} has the shape {stored.shape}; config.json asks for {shape}{turned}"
    if stored.dtype not in FLOATS:
        yield f"{name} is {stored.dtype}; accepted: {', '.join(map(str, FLOATS))}"


def _warn(folder, settings):
    notes, unknown = settings.notes, settings.unknown()
    if unknown:
        notes = [*notes, f"not known, and not used: {', '.join(unknown)}"]
    if notes:
        warnings.warn(f"{folder / files.CONFIG}: {'; '.join(notes)}", stacklevel=5)


def _dtype(found, asked):
    """Return the dtype of the model: as asked, else the widest of the tensors."""
    if asked is None:
        kinds = [np.dtype(stored.dtype) for stored in found.tensors.values()]
        return max((kind for kind in kinds if kind in FLOATS), key=lambda kind: kind.itemsize)
    with contextlib.suppress(TypeError):
        if np.dtype(asked) in FLOATS:
            return np.dtype(asked)
    accepted = ", ".join(map(str, FLOATS))
    raise ConfigError(problem("load_pretrained", "dtype", repr(asked), accepted))


# ---- saving -------------------------------------------------------------------------------------


def save_pretrained(
    model: Any, folder: StrPath, tokenizer: Any = None, beside: Mapping[str, bytes] | None = None
) -> None:
    """Write a model as a folder; the public function is ``gpuattn.save_pretrained``.

    ``beside``: {name: bytes} of more files, but for those that the model's own folder had.
    """
    folder = Path(folder)
    architecture = _architecture_of(model)
    tensors = tensors_of(model, architecture)
    bad = [name for name, values in tensors.items() if not is_finite(values)]
    if bad:
        raise CheckpointError(f"cannot save {folder}: {', '.join(bad[:5])} hold inf or NaN")
    if tokenizer is not None:
        check_tokenizer(tokenizer, model)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"cannot save {folder}: it exists and is not empty. Choose another")
    config = config_of(model, architecture, getattr(tokenizer, "names", ()))
    new = folder.with_name(f".{folder.name}-{os.getpid()}.tmp")
    try:
        new.mkdir(parents=True)
        others = dict(beside or {}) | files_beside(model, architecture, tokenizer)
        _write(new, tensors, config, others)
        if folder.exists():
            folder.rmdir()  # Windows replaces no folder
        os.replace(new, folder)
    except OSError as error:
        reason = error.strerror or error
        raise CheckpointError(f"cannot save {folder}: {reason}; nothing is written") from error
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _architecture_of(model):
    """Return the Architecture that a model is saved as. Raises ConfigError where there is none."""
    fitting = [a for a in ARCHITECTURES.values() if type(model) is a.model]
    if not fitting:
        accepted = ", ".join(sorted({a.model.__name__ for a in ARCHITECTURES.values()}))
        got = type_of(model)
        raise ConfigError(problem("save_pretrained", "model", got, accepted))
    origin = getattr(model, "origin", None)
    config = origin.config if origin else fitting[0].describe(model.config)
    return ARCHITECTURES[config["model_type"]]


def files_beside(model: Any, architecture: Architecture, tokenizer: Any = None) -> dict[str, bytes]:
    """Return {name: bytes} of what a folder has beside config and weights."""
    origin: Origin | None = getattr(model, "origin", None)
    found = architecture.beside(model.config) | (origin.files if origin else {})
    return found if tokenizer is None else found | architecture.tokenizer_files(tokenizer)


def _write(folder, tensors, config, beside):
    from safetensors.numpy import save_file

    (folder / files.CONFIG).write_bytes(files.to_json(config))
    save_file(tensors, folder / files.WEIGHTS, {"format": "pt"})  # as transformers asks for
    for name, data in beside.items():
        (folder / name).write_bytes(data)


def tensors_of(model: Any, architecture: Architecture) -> dict[str, np.ndarray]:
    """Return {name: array} as a folder has them: for a loaded model, as its own folder has them."""
    origin: Origin | None = getattr(model, "origin", None)
    names, copies = (origin.names, origin.copies) if origin else ({}, ())
    found = dict(origin.kept) if origin else {}
    for path, parameter in model.named_parameters():
        values = to_cpu(parameter.data)
        for part in architecture.parts(path, values.shape, model.config):
            found[part.name] = np.ascontiguousarray(part.view(values)).reshape(part.shape)
    found |= {name: found[architecture.tied[name]] for name in copies}
    return {names.get(name) or architecture.written(name): a for name, a in found.items()}


def config_of(model: Any, architecture: Architecture, names: Sequence[str] = ()) -> dict[str, Any]:
    """Return the content of config.json: for a loaded model that of its folder.

    ``names``: of the classes that the model tells apart, if it does.
    """
    origin: Origin | None = getattr(model, "origin", None)
    dtype = str(model.parameters()[0].dtype)
    if origin is None:
        return architecture.describe(model.config) | describe_labels(names) | {"dtype": dtype}
    config, classes = dict(origin.config), origin.config.get("architectures")
    if origin.task or not isinstance(classes, list) or not set(classes) <= {*architecture.classes}:
        config["architectures"] = architecture.describe(model.config)["architectures"]
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
    return config


def check_tokenizer(tokenizer: Any, model: Any) -> None:
    """Raise DataError for a tokenizer with more tokens than a model's table."""
    if len(tokenizer) > model.config.vocab:
        got, accepted = f"{len(tokenizer):,} tokens", f"up to {model.config.vocab:,}, the table"
        raise DataError(problem("tokenizer", "the vocabulary", got, accepted))
