"""Hugging Face folders, used as runs are."""

import shlex
from typing import Any

from gpuattn.errors import ConfigError
from gpuattn.pretrained.folder import check_tokenizer, kind_of, load_pretrained
from gpuattn.pretrained.tokens import load_tokenizer
from gpuattn.tasks.embedder import Embedder
from gpuattn.tasks.registry import TASKS
from gpuattn.typing import StrPath

# {task of an architecture: (what uses a model, the command of the shell)}
USERS: dict[str, tuple[Any, str]] = {name: (task.new_user, task.command)
                                     for name, task in TASKS.items()}  # fmt: skip
USERS["embedding"] = (Embedder, "gpuattn embed")


def load_user(
    folder: StrPath, *, device: str = "auto", dtype: str = "auto", task: str | None = None
) -> Any:
    """Return a Sampler or an Embedder of a Hugging Face folder, by its architecture.

    ``dtype``: "auto", the widest in the folder, or as ``load_pretrained`` takes it.
    Raises PretrainedError for a folder that cannot be used, ConfigError for another ``task``.
    """
    model_type, own = kind_of(folder)
    user, command = USERS[own]
    if task not in (None, own):
        raise ConfigError(
            f"{folder} is a {model_type}, to be used by: {command} {shlex.quote(str(folder))}"
        )
    tokenizer = load_tokenizer(folder)
    chosen = None if dtype == "auto" else dtype
    model = load_pretrained(folder, dtype=chosen, device=device, task=own)
    check_tokenizer(tokenizer, model)
    return user(None, model, tokenizer)
