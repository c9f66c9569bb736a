"""Where a run stands: what is saved beside its arrays, so that it can go on."""

import dataclasses

from gpuattn.train.meter import SPENT
from gpuattn.units import AUTO, Length

AUTO_SECONDS = 45  # between evaluations where epochs are longer and it is the trainer's choice
AUTO_COST = 10  # and at least so many times what the last evaluation took


@dataclasses.dataclass
class Position:
    """Where a run stands: all but the numbers in arrays. Saved as JSON.

    ``batch``: the next one of ``epoch``. ``draws``: batches taken, which number the dropout.
    ``seconds``: spent training. ``evaluated``: [update, epoch, seconds] of the last evaluation.
    ``evaluation``: seconds that it took, with its saving. ``best``: the row of metrics of the best
    one. ``worse``: evaluations since then; ``right``: those in a row that reached ``until``.
    ``finished``: what ended the run, or ""; ``early``: whether before its length was reached.
    ``data``: the corpus's fingerprint. ``parts``: into how many each batch is cut, for want of
    memory. ``spent``: by updates alone, seconds, tokens of both sides and model FLOPs; joules of
    the GPU in all.
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

    def is_evaluation_due(self, config):
        """Tell whether ``eval_every`` of a config wants one now; see AUTO_SECONDS for "auto"."""
        every = config.eval_every
        if every == AUTO and (config.patience or config.average):
            every = Length(1, "e")  # they count evaluations: the clock must not decide
        now = (self.update, self.epoch, self.seconds)
        since = {u: b - a for u, a, b in zip("ues", self.evaluated, now, strict=True)}
        if every != AUTO:
            return since[every.unit] >= every.amount
        if config.length.unit == "s" and not self.evaluation:
            # what one takes has to be known for the last one to end in time
            return since["e"] >= 1 or 2 * self.seconds >= config.length.amount
        spent = since["s"] - self.evaluation
        return spent >= AUTO_COST * self.evaluation and (since["e"] >= 1 or spent >= AUTO_SECONDS)
