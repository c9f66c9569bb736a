"""Hugging Face folders, used as runs are."""

import shlex
from typing import Any

from gpuattn.errors import ConfigError
from gpuattn.pretrained.architecture import ARCHITECTURES
from gpuattn.pretrained.folder import check_tokenizer, kind_of, load_pretrained, tokenizer_of
from gpuattn.pretrained.generation import search_settings
from gpuattn.pretrained.tokens import load_tokenizer
from gpuattn.tasks.registry import TASKS
from gpuattn.tasks.users.embedder import Embedder
from gpuattn.typing import StrPath

# {task of an architecture: (what uses a model, the command of the shell)}
USERS: dict[str, tuple[Any, str]] = {name: (task.new_user, task.command)
                                     for name, task in TASKS.items()}  # fmt: skip
USERS["embedding"] = (Embedder, "gpuattn embed")


def load_user(
    folder: StrPath, *, device: str = "auto", dtype: str = "auto", task: str | None = None
) -> Any:
    """Return a Translator, Sampler, Embedder, Classifier or TextClassifier of a Hugging Face
    folder, by its architecture.

    ``dtype``: "auto", the widest in the folder, or as ``load_pretrained`` takes it.
    Raises PretrainedError for a folder that cannot be used, ConfigError for another ``task``.
    """
    model_type, usual = kind_of(folder)
    own = task or usual
    if own not in (usual, next(iter(ARCHITECTURES[model_type].tasks))):  # the first needs no head
        command = USERS[usual][1]
        raise ConfigError(
            f"{folder} is a {model_type}, to be used by: {command} {shlex.quote(str(folder))}"
        )
    user = USERS[own][0]
    tokenizer = tokenizer_of(folder) if own == usual else load_tokenizer(folder)
    chosen = None if dtype == "auto" else dtype
    model = load_pretrained(folder, dtype=chosen, device=device, task=own)
    check_tokenizer(tokenizer, model)
    if own == "translation":
        search, most = search_settings(folder, model.config.eos)
        return user(None, model, tokenizer, search=search, most=most)
    return user(None, model, tokenizer)
