"""The folder of a run: all that is needed to resume training or to use the model.

``config.toml``, ``tokenizer.model``, ``best`` and ``last`` (weights), ``state`` (everything that
resuming needs), ``metrics.jsonl``, ``valid/`` (what the model wrote at each evaluation),
``digests.toml`` (SHA-256 of the text files, and of the weights that it began with); ``origin/``,
with the tokenizer, of a run that began with a folder of Hugging Face.
"""

import contextlib
import math
import shlex
import shutil
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpuattn.data.tokenizer import tokenizer_from_bytes
from gpuattn.errors import CheckpointError, ConfigError, DataError
from gpuattn.files import write_text
from gpuattn.lock import LOCK, locked
from gpuattn.models.kinds import new_model
from gpuattn.nn.module import uninitialised
from gpuattn.optim.averaging import average_tensors
from gpuattn.pretrained.folder import tokenizer_of
from gpuattn.pretrained.origin import model_of, write_origin
from gpuattn.runs.config import (
    TrainConfig,
    differences,
    option_key,
    plain,
    read_toml,
    resolve,
    to_toml,
)
from gpuattn.runs.metrics import MetricsLog, rank
from gpuattn.runtime import checkpoint
from gpuattn.tasks.registry import task_of
from gpuattn.tasks.task import DATA_FILES
from gpuattn.tensor_file import digest
from gpuattn.typing import Array, StrPath
from gpuattn.units import shown

CONFIG, TOKENIZER, DIGESTS = "config.toml", "tokenizer.model", "digests.toml"
ORIGIN = "origin"  # of a run that began with a folder of Hugging Face
# files of a run that was killed before it began
UNBEGUN = (LOCK, TOKENIZER, ORIGIN, DIGESTS, f".{DIGESTS}.tmp", f".{CONFIG}.tmp")
CHECKPOINTS = ("state", "best", "last")
MODEL_OPTIONS = (
    "model", "tokenizer", "dim", "heads", "kv_heads", "layers", "ffn", "bias", "norm",
    "positions", "activation", "pad_vocab", "block", "max_len", "image_size", "patch", "channels",
)  # fmt: skip
SNAPSHOTS = "checkpoints"  # weights that --average needs


class RunFolder:
    """Paths and files of a run. Nothing is created or changed before ``create``."""

    def __init__(self, path: StrPath) -> None:
        self.path = Path(path)
        self.metrics = MetricsLog(self.path / "metrics.jsonl")

    def exists(self) -> bool:
        """Return whether there is a run here."""
        return (self.path / CONFIG).exists()

    def lock(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that excludes other processes; see ``lock.locked``.

        Raises ConfigError for a folder that is something else.
        """
        if not self.exists():
            self.check_empty()
        return locked(self.path)

    def create(
        self,
        config: TrainConfig,
        origins: Mapping[str, str],
        tokenizer: Any,
        digests: Mapping[str, str] | None = None,
        model: Any = None,
    ) -> None:
        """Begin a run: write the files that never change, the config last.

        ``model``: read where the run begins with a folder of Hugging Face.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if config.origin:
                write_origin(model, tokenizer, self.path / ORIGIN)
            else:
                tokenizer.save(self.path / TOKENIZER)
            (self.path / DIGESTS).unlink(missing_ok=True)  # of a run that never began
            self.keep_digests(digests or {})
            write_text(self.path / CONFIG, to_toml(config, origins))
        except OSError as error:
            raise CheckpointError(
                f"cannot write to {self.path}: {error.strerror}. Choose another --out"
            ) from error

    def remove(self) -> None:
        """Delete the run. ConfigError for a folder that is something else."""
        if self.exists():
            for path in sorted(self.path.iterdir(), key=lambda path: path.name == CONFIG):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                elif path.name != LOCK:  # which this process holds
                    path.unlink()
        elif self._is_taken():
            raise ConfigError(f"{self.path} is not a run of gpuattn: it is left alone")

    def check_empty(self) -> None:
        """Raise ConfigError unless a run may begin here: the folder has no other files."""
        if self._is_taken():
            lost = self._without_config()
            raise ConfigError(
                lost or f"{self.path} exists and is not a run of gpuattn. Choose another --out"
            )

    def _is_taken(self):
        """Return whether there is more than the remains of a run that never began."""
        if not self.path.is_dir():
            return self.path.exists()
        return any(path.name not in UNBEGUN for path in self.path.iterdir())

    def _without_config(self):
        """Return advice for checkpoints without a config.toml, or "" where there are none."""
        if not any(checkpoint.exists(self.path, name) for name in CHECKPOINTS):
            return ""
        typed = [row["command"] for row in self.metrics.read("start") if row.get("command")]
        again = f": {typed[0]}" if typed else ""
        return (
            f"{self.path} has checkpoints and no config.toml; nothing is written over them. Put it "
            "back, or copy the one that the command of this run writes in another --out" + again
        )

    def check_same(self, config: TrainConfig) -> None:
        """Raise ConfigError that lists every option in which a run differs from ``config``.

        ``check_data`` compares the content of files that have other names now.
        """
        found = differences(self.config(), config)
        if found:
            raise ConfigError(self._has_other(found))

    def _has_other(self, found):
        return (
            f"{self.path} is a run with other options: {'; '.join(found)}. Use another --out (and "
            f"--init-from {shlex.quote(str(self.path))} to begin with its weights), or --overwrite "
            "to start from scratch"
        )

    def check_init(self, config: TrainConfig) -> None:
        """Raise ConfigError if ``--init-from`` names this run, or one with another model."""
        if config.init_from is None:
            return
        given = RunFolder(config.init_from)
        if given.path.resolve() == self.path.resolve():
            raise ConfigError(f"--init-from and --out are both {self.path}. Choose another --out")
        there = given.config()
        if there.origin:
            raise ConfigError(
                f"--init-from {given.path} began with {there.origin}. Export it (gpuattn export), "
                "and begin with that folder: --from"
            )
        task, other = task_of(config), task_of(there)
        if there.model == config.model and task is not other and not task.new_head:
            raise ConfigError(
                f"--init-from {given.path} is a run of {other.title(there)!r}, whose head does not "
                f"fit {task.title(config)!r}. Begin with a run of the same task"
            )
        names: Sequence[str] = MODEL_OPTIONS if there.model == config.model else ("model",)
        if there.positions != "learned":  # no weights depend on the longest text
            names = [name for name in names if name not in ("block", "max_len")]
        found = differences(there, config, [name for name in names if config.has(name)])
        if found:
            raise ConfigError(
                f"--init-from {given.path} is a run of another model: {'; '.join(found)}. Give the "
                f"same options: --config {shlex.quote(str(given.path / CONFIG))} has them"
            )

    def needs_init(self, config: TrainConfig) -> bool:
        """Return whether the weights of ``--init-from`` must be read: for a run that has a state,
        only if the option changed."""
        if config.init_from is None:
            return False
        resumes = self.exists() and checkpoint.exists(self.path, "state")
        return not resumes or self.config().init_from != config.init_from

    def check_data(self, config: TrainConfig, digests: Mapping[str, str]) -> None:
        """Raise DataError for a text file that is not the one a run began with.

        ``digests``: {option: SHA-256} of what was read now. Where a run has none noted, other
        names are other options: ConfigError.
        """
        noted, old = self.digests(), self.config()
        for name in (*DATA_FILES, "init_from"):
            path, before = getattr(config, name), getattr(old, name)
            if name in noted and name in digests:
                if noted[name] != digests[name]:
                    raise DataError(_other_content(name, path, self.path))
            elif path != before:
                changed = f"--{option_key(name)} was {shown(before)}, now {shown(path)}"
                raise ConfigError(self._has_other([changed]))

    def digests(self) -> dict[str, str]:
        """Return {option: SHA-256} of the run's data files; {} if they were not recorded."""
        with contextlib.suppress(OSError, ValueError):
            return tomllib.loads((self.path / DIGESTS).read_text(encoding="utf-8"))
        return {}

    def keep_digests(self, digests: Mapping[str, str]) -> None:
        """Record {option: SHA-256} of the run's data files, unless recorded already."""
        noted = self.digests()
        if not digests.keys() <= noted.keys():
            lines = (f'{name} = "{digest}"\n' for name, digest in {**digests, **noted}.items())
            write_text(self.path / DIGESTS, "".join(lines))

    def check_trainable(self) -> None:
        """Raise ConfigError for averaged weights, which training would overwrite."""
        if self.metrics.read("averaged"):
            raise ConfigError(
                f"{self.path} is a mean of weights: of use, but it cannot go on training. "
                "Use another --out, or --overwrite to start from scratch"
            )

    def config(self) -> TrainConfig:
        """Return the TrainConfig. CheckpointError where there is no run."""
        if not self.exists():
            why = "it has no config.toml" if self.path.exists() else "there is no such folder"
            raise CheckpointError(self._without_config() or f"{self.path} is no run: {why}")
        return resolve((CONFIG, read_toml(self.path / CONFIG)))[0]

    def tokenizer(self) -> Any:
        """Return the tokenizer. CheckpointError if it is missing or damaged."""
        if (self.path / ORIGIN).is_dir():
            return tokenizer_of(self.path / ORIGIN)
        path = self.path / TOKENIZER
        try:
            return tokenizer_from_bytes(path.read_bytes())
        except (OSError, DataError) as error:
            raise CheckpointError(f"{path} cannot be used: {error}") from error

    def new_model(self, config: TrainConfig, tokenizer: Any) -> Any:
        """Return the model of a run with arbitrary weights, on the host."""
        if config.origin:
            return model_of(self.path / ORIGIN)
        with uninitialised():
            return new_model(config, tokenizer)

    def snapshots(self) -> list[str]:
        """Return the names of the kept checkpoints for averaging, oldest first."""
        found = (self.path / SNAPSHOTS).glob("update_*.json")
        return sorted({path.name.rsplit("-", 1)[0] for path in found})

    def save_snapshot(self, update: int, weights: dict[str, Array], keep: int) -> None:
        """Save weights for averaging; keep the last ``keep`` snapshots."""
        folder = self.path / SNAPSHOTS
        checkpoint.save(folder, f"update_{update:08d}", weights)
        for name in self.snapshots()[:-keep]:
            for path in folder.glob(f"{name}-*"):
                path.unlink(missing_ok=True)

    def average_snapshots(self, last: int) -> dict[str, Array]:
        """Return the mean of the ``last`` snapshots, as {name: array}."""
        names = self.snapshots()[-last:]
        return average_tensors(checkpoint.load(self.path / SNAPSHOTS, name)[0] for name in names)


def _other_content(name, path, folder):
    """Return the message for a file, or weights, that the run did not begin with."""
    if name == "init_from":
        what, advice = f"the weights of --init-from {path} are not those", "--overwrite"
    else:
        kind = "validation" if name.startswith("valid") else "training"
        data = "data" if name.endswith("images") else "text"
        what, advice = f"the {kind} {data} {path} is not the one", f"put the {data} back"
    return (
        f"{what} that {folder} began with, so the run cannot go on. Use another --out, or {advice}"
    )


def begin_from(config: TrainConfig, model: Any) -> tuple[str, str]:
    """Set a model to the weights that ``--init-from`` names, the best ones or else the last.

    Returns (what they are, in words; the SHA-256 of their values). Raises CheckpointError for a
    folder that is no run, is damaged, or is of another model.
    """
    path = Path(config.init_from or "")
    which = "best" if checkpoint.exists(path, "best") else "last"
    task, own = task_of(config), dict(model.named_parameters())
    head = task.new_head and task is not task_of(RunFolder(path).config())
    weights, notes = checkpoint.load(path, which, None if head else own)
    kept = model.state() if head else {}
    model.load_state(kept | {name: a for name, a in weights.items() if not head or name in own})
    update = f", of update {notes['update']:,}" if "update" in notes else ""
    new = ", with a new head" if head else ""
    return f"the {which} weights of {path}{update}{new}", digest(weights)


def summary(path: StrPath) -> dict[str, Any]:
    """Return a description of a run that JSON can hold: options, sizes, updates, best row of
    metrics.

    ``state``: "finished", "stopped", or for a mean of weights "averaged". ``faults``: sentences on
    files of weights and state that are not as long as they were written.
    """
    folder = RunFolder(path)
    config, tokenizer = folder.config(), folder.tokenizer()
    rows = folder.metrics.read()
    last: dict[str, Any] = next((row for row in reversed(rows) if row["event"] != "start"), {})
    states = {"end": "finished", "averaged": "averaged"}
    valid = [row for row in rows if row["event"] == "valid"]
    if not rows:  # metrics.jsonl is lost or empty
        last, best = (checkpoint.notes(folder.path, which) or {} for which in ("last", "best"))
        valid = [best] if "score" in best else []
    faults = [checkpoint.fault(folder.path, name) for name in ("best", "last", "state")]
    return {
        "folder": str(folder.path),
        "model": config.model,
        "task": task_of(config).describe_data(config),
        "parameters": _count_parameters(folder, config, tokenizer),
        "vocabulary": len(tokenizer),
        "units": tokenizer.units,
        "classes": list(getattr(tokenizer, "names", ())),
        "updates": last.get("update", 0),
        "seconds": round(last.get("seconds", 0.0), 1),
        "state": states.get(last.get("event", ""), "stopped"),
        "faults": list(filter(None, faults)),
        "best": max(valid, key=rank, default=None),
        "options": {option_key(name): plain(value) for name, value in vars(config).items()
                    if value is not None and config.has(name)},
    }  # fmt: skip


def _count_parameters(folder, config, tokenizer):
    """Return the number of parameters: from saved shapes, or else from a new model."""
    for which in ("best", "last"):
        shapes = checkpoint.shapes(folder.path, which)
        if shapes:
            return sum(map(math.prod, shapes.values()))
    return sum(parameter.size for parameter in folder.new_model(config, tokenizer).parameters())
