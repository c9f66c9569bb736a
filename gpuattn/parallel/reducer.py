"""The gradients of an update of several replicas, summed over those of this rank.

A run has a fixed number of replicas, each with its own batches and dropout, and its ranks share
them evenly. So an update is the same for any number of ranks, but for the order of sums.
"""

from collections.abc import Iterable
from typing import Any

from gpuattn.parallel.agreement import silent
from gpuattn.parallel.communicator import Communicator
from gpuattn.runtime.device import is_out_of_memory

Round = tuple[int, tuple[Any, ...]]


class Reducer:
    """Computes the gradients of updates. ``mine``: the replicas of this rank.

    ``step``: a ``runtime.TrainingStep``. ``replicas``: of the run, a multiple of the ranks.
    ``ordered``: whether replicas are summed by one binary tree, so that the bits are the same for
    every number of ranks where both numbers are powers of two. It takes up to log2 of this rank's
    replicas as buffers. ``alone``: whether each rank then updates by its own gradients. ``tokens``:
    target tokens of the last update, of all ranks.
    """

    def __init__(
        self, step: Any, communicator: Communicator, replicas: int, ordered: bool = False,
        alone: bool = False,
    ) -> None:  # fmt: skip
        self.step, self.communicator, self.replicas = step, communicator, replicas
        self._alone, self.tokens = alone, 0
        each = replicas // communicator.size
        self.mine = range(communicator.rank * each, (communicator.rank + 1) * each)
        self._ordered = ordered and each > 1

    def compute(self, rounds: Iterable[Round]) -> None:
        """Compute this rank's gradients of an update that has begun, for ``step.apply``.

        ``rounds``: (draw, a batch of each of this rank's replicas), which are summed. Raises
        MemoryError on all ranks where one of them is out of memory.
        """
        if self.communicator.size == 1:
            self._compute(rounds)
            self.tokens = self.step.update_tokens
            return
        short = None
        try:
            self._compute(rounds)
            self.step.take()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            short = str(error)  # only the text: the error holds the arrays of the step
        found = self.communicator.gather((self.step.update_tokens, short))
        for rank, (_, short) in enumerate(found):
            if short is not None:
                raise silent(MemoryError(f"on rank {rank}: {short}"), self.communicator.rank > 0)
        self.tokens = sum(tokens for tokens, _ in found)
        self.step.put(self.step.update_tokens if self._alone else self.tokens)

    def _compute(self, rounds):
        if self._ordered:
            self._compute_in_order(list(rounds))
            return
        parts = (
            (batch, self._draw(draw, replica))
            for draw, batches in rounds
            for replica, batch in zip(self.mine, batches, strict=True)
        )
        part = next(parts)
        for following in parts:
            self.step.add(*part)
            part = following
        self.step.add(*part, last=True)

    def sum_losses(self) -> None:
        """Let ``step.loss_sum`` and ``loss_tokens`` be those of all ranks. For ``clear_loss``."""
        step = self.step
        if self.communicator.size > 1:
            sums = self.communicator.gather((float(step.loss_sum), step.loss_tokens))
            losses, tokens = zip(*sums, strict=True)
            step.loss_sum[...], step.loss_tokens = sum(losses), sum(tokens)

    def _draw(self, draw, replica):
        return draw * self.replicas + replica

    def _compute_in_order(self, rounds):
        waiting = []  # (replicas in it, sum), each a tree larger than the next
        for place, replica in enumerate(self.mine):
            for draw, batches in rounds:
                self.step.add(batches[place], self._draw(draw, replica))
            grads, count = self.step.take(), 1
            last = replica == self.mine[-1]
            while waiting and (last or waiting[-1][0] == count):
                size, tree = waiting.pop()
                tree += grads
                grads, count = tree, count + size
            if not last:
                waiting.append((count, grads if count > 1 else grads.copy()))
        self.step.workspace.grads[...] = grads
        self.step.put(self.step.update_tokens)
