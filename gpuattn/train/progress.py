"""What a run tells while it goes on. The command line puts a progress bar behind it."""

from typing import NamedTuple


class Progress(NamedTuple):
    """Where a run stands.

    ``seconds``: spent training. ``share``: of the whole run, 0 to 1. ``loss``: mean per target
    token since the last report. ``rate``: source and target tokens a second. ``milliseconds``: of
    an update. ``eta``: seconds left, as far as one can tell. ``memory``: bytes.
    On a GPU, where known: ``mfu``, model FLOPs (``models.flops``) as a share of what large products
    reach on it (``cuda.ceilings``); ``watts`` that it draws, ``joules`` that the run has used.
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


class Report:
    """Hears from a run, and says nothing. Subclasses show what they like.

    ``begun``: whether training has begun, so that a stop saves it.
    """

    begun = False

    def begin(self):
        """Hear that all is read and training begins."""
        self.begun = True

    def say(self, topic, text):
        """Hear a sentence; ``topic`` is a word such as "data", "model", "valid"."""

    def progress(self, progress):
        """Hear a Progress, every few updates."""

    def close(self):
        """Hear that nothing more comes."""
