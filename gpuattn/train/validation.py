"""The loss on validation batches, which ranks deal out among themselves."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from gpuattn.autodiff import tape
from gpuattn.ops.scalars import add_product
from gpuattn.parallel.communicator import Communicator
from gpuattn.runtime.training_step import TrainingStep
from gpuattn.tasks.task import Task


class ValidLoss:
    """Computes mean cross-entropies per target token, without label smoothing.

    ``step``: of the model of ``task``; its feed and its graphs take the batches.
    """

    def __init__(self, task: Task, step: TrainingStep) -> None:
        self._task, self._step = task, step
        self._total = step.xp.zeros((), "float32")

    def __call__(self, batches: Iterable[Any], ranks: Communicator) -> float:
        """Return the loss of batches, of which each rank computes its part.

        The sum is in the order of the batches: the same bits for any number of ranks.
        """
        tokens, own = 0, []
        self._total[...] = 0
        with self._task.model.evaluating():
            for number, batch in enumerate(batches):
                tokens += batch.target_tokens
                if number % ranks.size == ranks.rank:
                    self._step.feed.load(batch, tokens=batch.target_tokens)
                    self._step.calls("valid", self._step.feed.shape, self._add)
                    ranks.note()
                    if ranks.size > 1:
                        own.append(float(self._total))
                        self._total[...] = 0
        if ranks.size > 1:
            parts = ranks.gather(own)
            for number in range(sum(map(len, parts))):
                self._total += np.float32(parts[number % ranks.size][number // ranks.size])
        return float(self._total) / tokens

    def _add(self):
        feed = self._step.feed
        add_product(self._total, tape.raw(self._task.loss(feed.batch)), feed.numbers.tokens)


def by_all_ranks(trainer: Any, evaluate: Callable[[], Any]) -> Any:
    """Return what ``evaluate()`` returns on rank 0. All ranks of a Trainer call this together."""
    trainer.is_evaluating = True
    row = trainer.communicator.gather(evaluate())[0]
    trainer.is_evaluating = False
    return row
