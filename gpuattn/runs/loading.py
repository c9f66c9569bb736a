"""A trained model from its run folder, or a folder of Hugging Face, ready for use."""

import shlex
import warnings
from typing import Any

from gpuattn.arrays import to_gpu
from gpuattn.errors import ConfigError, problem
from gpuattn.pretrained.files import is_pretrained
from gpuattn.runs.folder import RunFolder
from gpuattn.runtime import checkpoint
from gpuattn.runtime.cold_start import start_libraries
from gpuattn.runtime.device import choose_device
from gpuattn.runtime.precision import has_fast_bfloat16, warn_slow_bfloat16
from gpuattn.runtime.workspace import DTYPES
from gpuattn.tasks.pretrained import load_user
from gpuattn.tasks.registry import task_of
from gpuattn.typing import StrPath

LOAD_DTYPES = ("auto", "float32", "bfloat16", "float16")


def load_run(
    path: StrPath, *, device: str = "auto", dtype: str = "auto", which: str = "best",
    task: str | None = None,
) -> Any:  # fmt: skip
    """Return the Translator, Sampler or Embedder of a folder: see ``gpuattn.load_run``."""
    if is_pretrained(path):
        return load_user(path, device=device, dtype=dtype, task=task)
    folder = RunFolder(path)
    config = folder.config()
    kind = task_of(config)
    if task not in (None, kind.name, kind.new_user.task):
        raise ConfigError(
            f"{path} is a run of --model {config.model}, to be used by: "
            f"{kind.command} {shlex.quote(str(path))}"
        )
    device, _ = choose_device(device)
    chosen = _dtype(dtype, device)
    if device == "cuda":
        start_libraries(chosen)
    tokenizer = folder.tokenizer()
    model = folder.new_model(config, tokenizer).eval()
    if which == "best" and not checkpoint.exists(folder.path, "best"):
        which = "last"
    weights, metadata = checkpoint.load(folder.path, which, dict(model.named_parameters()))
    model.load_state(weights)
    if device == "cuda":
        for parameter in model.parameters():
            parameter.data = to_gpu(parameter.data).astype(chosen, copy=False)
    return kind.new_user(config, model, tokenizer, metadata)


def _dtype(name, device):
    """Return the dtype that a run is loaded in: by "auto" bfloat16, before 8.0 float16.

    NumPy always computes in float32, and warns where 16 bits are asked for.
    """
    if name not in LOAD_DTYPES:
        raise ConfigError(problem("load_run", "dtype", repr(name), ", ".join(LOAD_DTYPES)))
    if device == "numpy":
        if name in ("bfloat16", "float16"):
            text = f"dtype {name} needs a GPU; on NumPy everything is computed in float32"
            warnings.warn(text, stacklevel=3)
        return DTYPES["float32"]
    fast = has_fast_bfloat16()
    if name == "bfloat16" and not fast:
        warn_slow_bfloat16()
    return DTYPES[("bfloat16" if fast else "float16") if name == "auto" else name]
