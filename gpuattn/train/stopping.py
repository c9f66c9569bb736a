"""Stop on signals: the first one finishes and saves an update, the second exits at once.

Before training has begun, when there is nothing to save, the first one exits at once, too.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from typing import Any


def _signals():
    """Return SIGINT, SIGTERM and SIGHUP; no SIGHUP on Windows or where ``nohup`` ignores it."""
    hangup = getattr(signal, "SIGHUP", None)
    heard = hangup is not None and signal.getsignal(hangup) != signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([hangup] if heard else [])]


class StopOnSignal:
    """A context that handles SIGINT, SIGTERM and SIGHUP; calling it returns whether one came.

    ``first``: called at the first signal; while ``begun()`` is false it raises SystemExit.
    ``last``: called at the second signal, before the process exits. ``signal``: the number of the
    first one, or None. ``exit_code``: 128 plus that number.
    """

    def __init__(
        self, first: Callable[[], None] = lambda: None, last: Callable[[], None] = lambda: None,
        begun: Callable[[], bool] = lambda: True,
    ) -> None:  # fmt: skip
        self.signal: int | None = None
        self._first, self._last, self._begun = first, last, begun
        self._before: dict[int, Any] = {}

    def __enter__(self):
        for number in _signals():
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_):
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __call__(self) -> bool:
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        assert self.signal is not None, "no signal came"
        return 128 + self.signal

    def _note(self, number, frame):
        if self.signal is not None:
            try:
                self._last()
            finally:
                os._exit(128 + number)
        self.signal = number
        # The signal interrupted a print, or the terminal is gone.
        with contextlib.suppress(RuntimeError, OSError):
            self._first()
        if not self._begun():
            sys.exit(self.exit_code)
