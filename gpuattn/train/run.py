"""The folder of a run: all that is needed to go on training, or to use what it learned.

``config.toml``, ``tokenizer.model``, ``best`` and ``last`` (weights), ``state`` (everything a
continuation needs), ``metrics.jsonl``, ``valid/`` (what the model wrote at each evaluation).
"""

import math
import shutil
from pathlib import Path

from gpuattn.arrays import to_gpu
from gpuattn.data.tokenizer import tokenizer_from_bytes
from gpuattn.errors import CheckpointError, ConfigError, DataError
from gpuattn.optim.averaging import average_tensors
from gpuattn.train import checkpoint
from gpuattn.train.config import (
    GPT2,
    TRANSLATION,
    differences,
    option_key,
    plain,
    read_toml,
    resolve,
    to_toml,
)
from gpuattn.train.device import choose_device
from gpuattn.train.language_task import LanguageTask
from gpuattn.train.metrics import MetricsLog, rank, write_text
from gpuattn.train.translation_task import TranslationTask

TASKS = {TRANSLATION: TranslationTask, GPT2: LanguageTask}  # by ``TrainConfig.model``
TOKENIZER = "tokenizer.model"
UNBEGUN = (TOKENIZER, ".config.toml.tmp")  # what a run has that was killed before it began
SNAPSHOTS = "checkpoints"  # weights that --average needs


class RunFolder:
    """Paths and files of a run. Nothing is created or changed before ``create``."""

    def __init__(self, path):
        self.path = Path(path)
        self.metrics = MetricsLog(self.path / "metrics.jsonl")

    def exists(self):
        """Tell whether a run was begun here."""
        return (self.path / "config.toml").exists()

    def create(self, config, origins, tokenizer):
        """Begin a run: write what never changes, its config last."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            tokenizer.save(self.path / TOKENIZER)
            write_text(self.path / "config.toml", to_toml(config, origins))
        except OSError as error:
            raise CheckpointError(
                f"cannot write to {self.path}: {error.strerror}. Choose another --out"
            ) from error

    def remove(self):
        """Delete the run, if this is one. ConfigError for a folder that is something else."""
        if self.exists():
            shutil.rmtree(self.path)
        elif self._is_taken():
            raise ConfigError(f"{self.path} is not a run of gpuattn: it is left alone")

    def check_empty(self):
        """Raise ConfigError where a run may not begin: something else is there."""
        if self._is_taken():
            raise ConfigError(
                f"{self.path} exists and is not a run of gpuattn. Choose another --out"
            )

    def _is_taken(self):
        """Tell whether there is more than a run that had no time to begin, or no room."""
        if not self.path.is_dir():
            return self.path.exists()
        return any(path.name not in UNBEGUN for path in self.path.iterdir())

    def check_same(self, config):
        """Raise ConfigError that lists every option in which a run differs from ``config``."""
        found = differences(self.config(), config)
        if found:
            raise ConfigError(
                f"{self.path} is a run with other options: {'; '.join(found)}. "
                "Use another --out, or --overwrite to begin anew"
            )

    def check_trainable(self):
        """Raise ConfigError for a mean of weights, which training would write over."""
        if self.metrics.read("averaged"):
            raise ConfigError(
                f"{self.path} is a mean of weights: of use, but it cannot go on training. "
                "Use another --out, or --overwrite to begin anew"
            )

    def config(self):
        """Return the TrainConfig. CheckpointError where there is no run."""
        if not self.exists():
            raise CheckpointError(f"{self.path} is no run: it has no config.toml")
        return resolve(("config.toml", read_toml(self.path / "config.toml")))[0]

    def tokenizer(self):
        """Return the tokenizer. CheckpointError if it is missing or damaged."""
        path = self.path / TOKENIZER
        try:
            return tokenizer_from_bytes(path.read_bytes())
        except (OSError, DataError) as error:
            raise CheckpointError(f"{path} cannot be used: {error}") from error

    def snapshots(self):
        """Return the names of the kept checkpoints for averaging, oldest first."""
        found = (self.path / SNAPSHOTS).glob("update_*.json")
        return sorted({path.name.rsplit("-", 1)[0] for path in found})

    def save_snapshot(self, update, weights, keep):
        """Keep these weights for averaging, and only the last ``keep`` of them."""
        folder = self.path / SNAPSHOTS
        checkpoint.save(folder, f"update_{update:08d}", weights)
        for name in self.snapshots()[:-keep]:
            for path in folder.glob(f"{name}-*"):
                path.unlink(missing_ok=True)

    def average_snapshots(self, last):
        """Return the mean of the last so many kept checkpoints, as {name: array}."""
        names = self.snapshots()[-last:]
        return average_tensors(checkpoint.load(self.path / SNAPSHOTS, name)[0] for name in names)


def new_model(config, tokenizer):
    """Return the model that a run begins with."""
    return TASKS[config.model].new_model(config, tokenizer)


def load_run(path, *, device="auto", which="best", model=None):
    """Return the Translator of a run folder, or the Sampler of a language model's.

    ``device``: "auto", "cuda" or "numpy". ``which``: "best" or "last" weights; where a run has no
    best yet, its last ones. ``model``: what it has to be, "translation" or "gpt2"; None takes any.
    On a GPU it computes in float32.
    Raises CheckpointError for a folder that is no run, or is damaged or of another model;
    ConfigError where ``model`` is another; DeviceMissingError for "cuda" without a GPU.
    """
    folder = RunFolder(path)
    config = folder.config()
    task = TASKS[config.model]
    if model not in (None, config.model):
        raise ConfigError(
            f"{path} is a run of --model {config.model}, to be used by: {task.command} {path}"
        )
    tokenizer = folder.tokenizer()
    device, _ = choose_device(device)
    model = new_model(config, tokenizer).eval()
    if which == "best" and not checkpoint.generations(folder.path, "best"):
        which = "last"
    weights, metadata = checkpoint.load(folder.path, which, dict(model.named_parameters()))
    model.load_state(weights)
    if device == "cuda":
        for parameter in model.parameters():
            parameter.data = to_gpu(parameter.data)
    return task.new_user(config, model, tokenizer, metadata)


def summary(path):
    """Return what a run is, as JSON-able data: options, sizes, updates, best row of metrics.

    ``state``: "finished", "stopped", or for a mean of weights "averaged".
    """
    folder = RunFolder(path)
    config, tokenizer = folder.config(), folder.tokenizer()
    rows = folder.metrics.read()
    last = next((row for row in reversed(rows) if row["event"] != "start"), {})
    states = {"end": "finished", "averaged": "averaged"}
    valid = [row for row in rows if row["event"] == "valid"]
    return {
        "folder": str(folder.path),
        "model": config.model,
        "task": TASKS[config.model].describe_data(config),
        "parameters": _count_parameters(folder, config, tokenizer),
        "vocabulary": len(tokenizer),
        "units": tokenizer.units,
        "updates": last.get("update", 0),
        "seconds": round(last.get("seconds", 0.0), 1),
        "state": states.get(last.get("event"), "stopped"),
        "best": max(valid, key=rank, default=None),
        "options": {option_key(name): plain(value) for name, value in vars(config).items()
                    if value is not None and config.has(name)},
    }  # fmt: skip


def _count_parameters(folder, config, tokenizer):
    """Return how many there are: by what was saved, which is soon read, or by a new model."""
    for which in ("best", "last"):
        shapes = checkpoint.shapes(folder.path, which)
        if shapes:
            return sum(map(math.prod, shapes.values()))
    return sum(parameter.size for parameter in new_model(config, tokenizer).parameters())


def average_runs(paths, out, last=None):
    """Write the mean of weights as a new run folder; return how many were averaged.

    ``paths``: folders of runs of one model, whose best weights count; or one folder, whose
    checkpoints kept for averaging count, all or the ``last`` ones. Raises CheckpointError when they
    do not fit together, ConfigError when there is nothing to average or ``out`` is taken.
    """
    runs, new = [RunFolder(path) for path in paths], RunFolder(out)
    new.check_empty()
    if new.exists():
        raise ConfigError(f"{out} is a run already. Choose another --out")
    config, tokenizer = runs[0].config(), runs[0].tokenizer()
    for run in runs[1:]:
        if run.tokenizer().to_bytes() != tokenizer.to_bytes():
            raise CheckpointError(f"{run.path} and {runs[0].path} have different tokenizers")
    expected = dict(new_model(config, tokenizer).named_parameters())
    if len(runs) == 1:
        count = len(runs[0].snapshots()[-(last or 0) :])
        if count == 0:
            raise ConfigError(
                f"{runs[0].path} has kept no checkpoints. Train with --average N, "
                "or name several runs"
            )
        weights = runs[0].average_snapshots(count)
    else:
        count = len(runs)
        weights = average_tensors(checkpoint.load(run.path, "best", expected)[0] for run in runs)
    new.create(config, {}, tokenizer)
    checkpoint.save(new.path, "best", weights, {"averaged": count})
    new.metrics.add("averaged", update=0, count=count)
    return count
