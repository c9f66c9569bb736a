"""The state of a run: its position and its arrays, as they are saved so that it can continue."""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gpuattn.arrays import get_xp
from gpuattn.errors import CheckpointError, DataError
from gpuattn.parallel.communicator import Communicator
from gpuattn.runs.config import TrainConfig
from gpuattn.runs.metrics import is_right, rank
from gpuattn.runtime import checkpoint
from gpuattn.runtime.training_step import TrainingStep
from gpuattn.train.meter import SPENT
from gpuattn.units import AUTO, Length

AUTO_SECONDS = 45  # ``eval_every`` "auto": between evaluations, if an epoch takes longer,
AUTO_COST = 10  # and at least this many times the seconds of the last evaluation
EXACT_EVALUATIONS = 2  # in a row that reach ``until`` end a run


class Outcome(NamedTuple):
    """How a run ended: ``finished``, or stopped before that; the ``best`` row of metrics so far, or
    None; the number of the last ``update``."""

    finished: bool
    best: dict | None
    update: int


@dataclasses.dataclass
class Position:
    """The position of a run in its data and its length. Saved as JSON.

    ``update``: updates done. ``batch``: the next one of ``epoch``. ``draws``: batches computed,
    which number the dropout. ``seconds``: spent training. ``tokens``: of targets. ``averaged``:
    updates of the moving average. ``evaluated``: [update, epoch, seconds] of the last evaluation;
    ``evaluation``: the seconds that it took, and for which saving held up training. ``best``: the
    row of metrics of the best one; ``worse``: evaluations since then; ``right``: the last ones in
    a row that reached ``until``. ``finished``: what ended the run, or ""; ``early``: whether it
    ended before its length. ``data``: the corpus's fingerprint. ``parts``: into how many each
    batch is cut to fit the memory. ``spent``: seconds, tokens of both sides and model FLOPs of
    updates alone, and all joules of the GPU.
    """

    update: int = 0
    epoch: int = 0
    batch: int = 0
    draws: int = 0
    seconds: float = 0.0
    tokens: int = 0
    averaged: int = 0
    evaluated: list = dataclasses.field(default_factory=lambda: [0, 0, 0.0])
    evaluation: float = 0.0
    best: dict | None = None
    worse: int = 0
    right: int = 0
    finished: str = ""
    early: bool = False
    data: int = 0
    parts: int = 1
    spent: dict = dataclasses.field(default_factory=lambda: dict.fromkeys(SPENT, 0.0))

    def is_evaluation_due(self, config: TrainConfig) -> bool:
        """Return whether ``eval_every`` of a config asks for an evaluation now."""
        every = config.eval_every
        if every == AUTO and (config.patience or config.average):
            every = Length(1, "e")  # these count evaluations: the clock must not decide
        now = (self.update, self.epoch, self.seconds)
        since = {u: b - a for u, a, b in zip("ues", self.evaluated, now, strict=True)}
        if isinstance(every, Length):
            return since[every.unit] >= every.amount
        if config.length.unit == "s" and not self.evaluation:
            # measure one, so that the last one ends in time
            return since["e"] >= 1 or 2 * self.seconds >= config.length.amount
        spent = since["s"] - self.evaluation
        return spent >= AUTO_COST * self.evaluation and (since["e"] >= 1 or spent >= AUTO_SECONDS)

    def judge(self, row: dict, config: TrainConfig) -> None:
        """Take the row of metrics of an evaluation, which may end the run before its length."""
        if self.best is None or rank(row) > rank(self.best):
            self.best, self.worse = row, 0
        else:
            self.worse += 1
        until = config.until
        self.right = self.right + 1 if until and is_right(row, until) else 0
        if 0 < config.patience <= self.worse:
            self.finished = f"no better evaluation in {self.worse}"
        elif self.right == EXACT_EVALUATIONS:
            self.finished = f"{until:g} % exact of every kind in {self.right} evaluations in a row"

    def share(self, config: TrainConfig, corpus: Any, saving: float) -> float:
        """Return how much of a run is done, 0 to 1. ``saving``: seconds that a save takes now."""
        amount, unit = config.length
        if unit == "e":
            done = float(self.epoch)
            if self.batch:
                batches = corpus.loader(self.epoch).batches(self.epoch)  # or about as many
                done += self.batch / max(batches, self.batch + 1)
        else:
            done = self.update if unit == "u" else self.seconds
        if unit == "s":
            last = (self.evaluation + saving) * (2 if config.average > 1 else 1)
            amount -= min(last, amount / 2)
        return min(1.0, done / amount)


# ---- arrays -------------------------------------------------------------------------------------


def arrays_of(step: TrainingStep) -> dict[str, Any]:
    """Return {name: flat array} of everything that updates change, which a save copies."""
    return _shared(step) | (step.outer.arrays() if step.outer else {})


def _shared(step):
    """Return those of the ``arrays_of`` a step that are the same on all ranks, if none is alone."""
    arrays = step.workspace.buffers() | {"optimizer_state": step.optimizer.state.array}
    return arrays | ({"average": step.average.average} if step.average else {})


def weights_of(step: TrainingStep, arrays: dict[str, Any]) -> dict[str, Any]:
    """Return {name: float32 array} of copies of the ``arrays_of`` a step: the weights to use.

    They are those of the moving average, as ``average.applied`` rounds them, if there is one.
    """
    masters = arrays["masters"]
    used = arrays.get("average", masters).astype(masters.dtype, copy=False)
    return step.workspace.weights(used)


def tensors_of(step: TrainingStep, arrays: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return {name: array} of the ``arrays_of`` a step, or of copies, by the names in a file."""
    arrays = arrays or arrays_of(step)
    others = {"optimizer_state": arrays["optimizer_state"]}
    if "average" in arrays:
        others["average"] = arrays["average"][: step.workspace.saved]
    for name in step.outer.arrays() if step.outer else ():
        others[name] = arrays[name][: step.workspace.saved]
    return step.workspace.state_dict(arrays) | others


def synchronize(
    step: TrainingStep, at: Position, facts: Any, ranks: Communicator, whole: Any = None
) -> tuple[Any, Position]:
    """Set the arrays of a step to those of rank 0; return its (facts, Position).

    ``whole``: what ``load`` returned there.
    """
    workspace = step.workspace
    first = ranks.gather((facts, at, workspace.frozen) if ranks.rank == 0 else None)[0]
    if workspace.part is None:
        for array in _shared(step).values():
            ranks.broadcast(array)
        if step.outer:
            step.outer.scatter()
    else:
        whole = None if ranks.rank else whole or _whole_of(step, workspace.initial)
        step.exchange.scatter(arrays_of(step), whole)
        workspace.initial = None
    if ranks.rank == 0 and workspace.part is None:
        return facts, at
    workspace.sync_model()
    if ranks.rank:
        facts, at, values = first
        workspace.load_frozen(values)
        if step.average:
            step.average.updates = at.averaged
    return facts, at


def _whole_of(step, masters):
    """Return {name: NumPy array} as ``arrays_of`` a new step, whose workspace holds a part."""
    size, state = step.workspace.size, step.optimizer.state.array
    found = {name: np.zeros(size, np.float32) for name in step.workspace.buffers()}
    found |= {"masters": masters, "optimizer_state": np.zeros(state.size, state.dtype)}
    return found | ({"average": masters.copy()} if step.average else {})


def load(folder: str | Path, step: TrainingStep, data: int) -> tuple[Position, Any]:
    """Set the arrays of a step to the state in a run folder; return its Position, and None.

    Where the workspace holds a part, they are set by ``synchronize`` alone, and instead of None
    whole arrays are returned for it. ``data``: the fingerprint of the corpus. Raises
    CheckpointError for a damaged state or one of another model or version, DataError for one of
    another training text.
    """
    whole = None
    if step.workspace.part is not None:
        whole = _whole_of(step, np.zeros(step.workspace.size, np.float32))
    tensors, scalars = checkpoint.load(folder, "state", tensors_of(step, whole))
    try:
        at = Position(**scalars)
    except TypeError as error:
        raise CheckpointError(f"the state in {folder} is of another version") from error
    if at.data != data:
        raise DataError(
            f"the training text is not the one that {folder} began with, so the run cannot go on. "
            "Put the text back, or use another --out"
        )
    xp = get_xp(step.workspace.masters)
    step.optimizer.state.array[...] = xp.asarray(tensors.pop("optimizer_state"))
    if step.average:
        average = tensors.pop("average")
        if whole is None:
            step.average.average[: average.size] = xp.asarray(average)
        else:
            whole["average"][: average.size] = average
        step.average.updates = at.averaged
    for name, array in step.outer.arrays().items() if step.outer else ():
        given = tensors.pop(name)
        array[: given.size] = get_xp(array).asarray(given)
    buffers = whole and {name: whole[name] for name in step.workspace.buffers()}
    step.workspace.load_state_dict(tensors, buffers)
    return at, whole
