"""What ``Engine.submit`` returns: a request on its way, with its tokens and its result."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from typing import Any


class Handle:
    """A request that was submitted to an Engine.

    Iterating it gives its new tokens as they come, int by int, and ends when it is over; every
    iteration begins with the first token. Sampling, and translating with one beam, give each token
    as it comes; with more beams tokens come once all beams share them, and those behind the point
    where a first text has ended come at the end. Safe to use from any thread.
    """

    def __init__(self, cancel: Callable[["Handle"], None]) -> None:
        self._changed = threading.Condition()
        self._tokens: list[int] = []
        self._cancel = cancel
        self._result: Any = None
        self._error: BaseException | None = None
        self._state = "pending"

    @property
    def state(self) -> str:
        """One of "pending", "done", "failed" and "cancelled"."""
        return self._state

    @property
    def tokens(self) -> list[int]:
        """The tokens so far."""
        return list(self._tokens)

    def done(self) -> bool:
        """Return whether the request is over: ``result`` does not wait."""
        return self._state != "pending"

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the result: a list of Hypotheses, the best first, up to ``nbest``.

        ``timeout``: seconds, then TimeoutError; None waits for ever. Raises CancelledError (of
        concurrent.futures) for a request that was cancelled, and the error of one that failed.
        """
        with self._changed:
            if not self._changed.wait_for(self.done, timeout):
                raise TimeoutError(f"the request is {self._state} after {timeout} s")
        if self._state == "cancelled":
            raise CancelledError
        if self._error is not None:
            raise self._error
        return self._result

    def cancel(self) -> bool:
        """End the request; its slot is free after the present burst of steps.

        Returns False, and does nothing, for one that is over.
        """
        if not self.finish("cancelled"):
            return False
        self._cancel(self)
        return True

    def __iter__(self) -> Iterator[int]:
        given = 0
        while new := self._next(given):
            yield from new
            given += len(new)
        if self._error is not None:
            raise self._error

    def _next(self, given):
        """Wait for tokens behind the first ``given``; return them, none at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self.done() or len(self._tokens) > given)
            return self._tokens[given:]

    # ---- for the engine ----

    def tell(self, tokens: list[int]) -> None:
        """Add tokens that are known now."""
        with self._changed:
            if not self.done():
                self._tokens += tokens
                self._changed.notify_all()

    def finish(self, state: str, result: Any = None, error: BaseException | None = None) -> bool:
        """End the request with a result or an error. Returns False if it was over before."""
        with self._changed:
            if self.done():
                return False
            self._state, self._result, self._error = state, result, error
            if result:
                self._tokens += result[0].tokens[len(self._tokens) :]
            self._changed.notify_all()
            return True
