"""The scalar state of a run, saved beside its arrays so that the run can continue."""

import dataclasses

from gpuattn.runs.config import TrainConfig
from gpuattn.train.meter import SPENT
from gpuattn.units import AUTO, Length

AUTO_SECONDS = 45  # ``eval_every`` "auto": between evaluations, if an epoch takes longer,
AUTO_COST = 10  # and at least this many times the seconds of the last evaluation


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
