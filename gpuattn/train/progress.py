"""Progress of a run, and the listener that receives it. The command line shows a progress bar."""

from typing import NamedTuple


class Progress(NamedTuple):
    """The progress of a run.

    ``seconds``: spent training. ``share``: of the whole run, 0 to 1. ``loss``: mean per target
    token since the last Progress. ``rate``: source and target tokens a second. ``milliseconds``: of
    an update. ``eta``: estimated seconds left. ``memory``: bytes. ``at_most``: whether the run may
    end before its length.
    On a GPU, where known: ``mfu``, model FLOPs (``models.flops``) as a share of the measured rate
    of large matrix products (``cuda.ceilings``); ``watts`` that it draws now, ``joules`` that the
    run has used. ``counted``: what the ``rate`` counts. Of several ranks: ``waiting``, the share of
    the time that they wait on average, for each other and for sums of gradients; ``slowest``: the
    rank that waits least.
    """

    update: int
    epoch: int
    seconds: float
    share: float
    loss: float
    learning_rate: float
    rate: float
    milliseconds: float
    eta: float
    memory: int
    at_most: bool = False
    mfu: float | None = None
    watts: float | None = None
    joules: float | None = None
    counted: str = "tokens"
    waiting: float | None = None
    slowest: int | None = None


class Listener:
    """A no-op progress listener. Subclasses show or record what they are told.

    ``begun``: whether training has begun, so that a stop saves it.
    """

    begun = False

    def begin(self) -> None:
        """Called when all data is read and training begins."""
        self.begun = True

    def say(self, topic: str, text: str) -> None:
        """Called with a sentence; ``topic`` is a word such as "data", "model", "valid"."""

    def progress(self, progress: Progress) -> None:
        """Called every few updates."""

    def close(self) -> None:
        """Called last."""
