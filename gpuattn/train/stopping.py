"""Stop when asked: the first signal lets an update finish and be saved, the second ends at once."""

import contextlib
import os
import signal


class StopOnSignal:
    """A context in which SIGINT and SIGTERM are noted in ``signal``; called, it tells whether one
    has come. ``exit_code``: 130 or 143 after it. ``first``, ``last``: called as a first signal
    comes, and before a second one ends the process."""

    def __init__(self, first=lambda: None, last=lambda: None):
        self.signal, self._first, self._last = None, first, last
        self._before = {}

    def __enter__(self):
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_):
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __call__(self):
        return self.signal is not None

    @property
    def exit_code(self):
        return 128 + self.signal

    def _note(self, number, frame):
        if self.signal is not None:
            try:
                self._last()
            finally:
                os._exit(128 + number)
        self.signal = number
        with contextlib.suppress(RuntimeError):  # the signal came in the midst of a print
            self._first()
