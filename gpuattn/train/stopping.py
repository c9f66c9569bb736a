"""Stop when asked: the first signal lets an update finish and be saved, the second ends at once.

Before there is anything to save the first one ends at once too, also where reading waits.
"""

import contextlib
import os
import signal
import sys


def _signals():
    """Return those that end a run: Ctrl-C, an end that is asked for, a terminal that is closed.

    Windows has no SIGHUP, and under ``nohup`` a run is to outlive its terminal.
    """
    hangup = getattr(signal, "SIGHUP", None)
    heard = hangup is not None and signal.getsignal(hangup) != signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([hangup] if heard else [])]


class StopOnSignal:
    """A context in which SIGINT, SIGTERM and SIGHUP are noted in ``signal``; called, it tells
    whether one has come. ``exit_code``: 128 and its number. ``first``, ``last``: called as a first
    signal comes, and before a second one ends the process. While ``begun()`` is false the first
    one raises SystemExit with the exit code."""

    def __init__(self, first=lambda: None, last=lambda: None, begun=lambda: True):
        self.signal, self._first, self._last, self._begun = None, first, last, begun
        self._before = {}

    def __enter__(self):
        for number in _signals():
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
        # The signal came in the midst of a print, or what was printed to is gone.
        with contextlib.suppress(RuntimeError, OSError):
            self._first()
        if not self._begun():
            sys.exit(self.exit_code)
