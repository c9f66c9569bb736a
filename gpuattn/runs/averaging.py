"""The mean of the weights of several runs, or of the checkpoints of one, as a run of its own."""

from collections.abc import Sequence

from gpuattn.errors import CheckpointError, ConfigError
from gpuattn.optim.averaging import average_tensors
from gpuattn.pretrained.tokens import files_of
from gpuattn.runs.folder import RunFolder
from gpuattn.runtime import checkpoint
from gpuattn.typing import StrPath


def average_runs(paths: Sequence[StrPath], out: StrPath, last: int | None = None) -> int:
    """Write the mean of weights as a new run folder; return how many were averaged.

    ``paths``: folders of runs of one model, whose best weights count; or one folder, whose
    checkpoints kept for averaging count, all or the ``last`` ones. Raises CheckpointError when they
    do not fit together, ConfigError when there is nothing to average or ``out`` is taken.
    """
    runs, new = [RunFolder(path) for path in paths], RunFolder(out)
    with new.lock():
        if new.exists():
            raise ConfigError(f"{out} is a run already. Choose another --out")
        return _write_mean(runs, new, last)


def _write_mean(runs, new, last):
    config, tokenizer = runs[0].config(), runs[0].tokenizer()
    for run in runs[1:]:
        other = run.tokenizer()
        if files_of(other) != files_of(tokenizer):
            raise CheckpointError(f"{run.path} and {runs[0].path} have different tokenizers")
        if getattr(other, "names", ()) != getattr(tokenizer, "names", ()):
            raise CheckpointError(f"{run.path} and {runs[0].path} have different classes")
    model = runs[0].new_model(config, tokenizer)
    expected = dict(model.named_parameters())
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
    new.create(config, {}, tokenizer, model=model)
    checkpoint.save(new.path, "best", weights, {"averaged": count})
    new.metrics.add("averaged", update=0, count=count)
    return count
