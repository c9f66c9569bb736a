"""The weights of a search's step, in the form that the step reads."""

from typing import Any


class Packed:
    """A search with a ``decoder``, which packs weights, or None where its step is op by op.

    ``outdated``: whether the weights may be others than those that were packed last.
    """

    decoder: Any = None
    outdated = True

    def refresh(self, *, changed: bool) -> None:
        """Begin the work of another call. ``changed``: whether the weights may have changed."""
        self.outdated |= changed

    def prepare(self) -> None:
        """Pack the weights as they are now, if they may have changed.

        Before the first step, but behind ``begin``: then no source or prompt waits until the host
        has queued this.
        """
        if self.outdated and self.decoder:
            self.decoder.pack()
        self.outdated = False
