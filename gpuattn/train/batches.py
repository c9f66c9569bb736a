"""The batches of a run, epoch after epoch, made ahead by a thread."""

from collections.abc import Sequence
from typing import Any

from gpuattn.data.ahead import Ahead
from gpuattn.data.batching import of_rank
from gpuattn.train.state import Position


class Batches:
    """The batches of ``own`` of all ``replicas`` of a run. ``corpus``: that of a Task."""

    def __init__(self, corpus: Any, own: Sequence[int], replicas: int) -> None:
        self._corpus, self._own, self._replicas = corpus, own, replicas
        self._ahead: Ahead | None = None

    def restart(self) -> None:
        """Let the next call of ``next`` begin at the position it is given."""
        self._ahead = None

    def next(self, at: Position) -> tuple[Any, ...]:
        """Return a batch of each replica, and advance the epoch and the batch of a position."""
        if self._ahead is None:
            loader = self._corpus.loader(at.epoch)
            world = getattr(loader, "world", 1)
            assert world == self._replicas, f"{type(loader).__name__} is for {world} replicas"
            loaders = [of_rank(loader, replica) for replica in self._own]
            epochs = (each.epoch(at.epoch, at.batch) for each in loaders)
            self._ahead = Ahead(zip(*epochs, strict=True))
            if self._ahead.ended():  # smaller batches now, and the end was only about there
                self._end(at)
                return self.next(at)
        batches = next(self._ahead)
        at.batch += 1
        if self._ahead.ended():
            self._end(at)
        return batches

    def _end(self, at):
        at.epoch, at.batch, self._ahead = at.epoch + 1, 0, None
