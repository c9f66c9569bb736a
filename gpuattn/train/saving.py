"""Saving beside training: a copy of the state in host memory, which a thread writes.

Training is held up by the copy alone, and by the save before if that is not on the disk yet. The
thread works on large arrays without Python's lock. No such thread exists between two saves.
"""

import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from gpuattn.arrays import check_indices
from gpuattn.errors import CheckpointError
from gpuattn.runtime.device import is_out_of_memory
from gpuattn.runtime.readback import HostCopy

Arrays = dict[str, np.ndarray]


class Saves:
    """The saves of a run, one at a time. A context that waits for the last one at its end.

    What a save raises in the thread is raised here by the next ``check``, ``wait`` or ``begin``,
    once. ``seconds``: that the last save took beside training. ``ended``: when it did, by
    ``time.perf_counter``; infinity while it is being written.
    """

    def __init__(self) -> None:
        self.seconds, self.ended = 0.0, float("-inf")
        self._copy = HostCopy()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def __enter__(self) -> "Saves":
        return self

    def __exit__(self, kind, error, trace):
        try:
            self.wait()
        except CheckpointError as failed:
            if error is None:
                raise
            warnings.warn(str(failed), stacklevel=2)  # and the other error goes on
        finally:
            self._copy = HostCopy()  # frees the memory

    def prepare(self, arrays: dict[str, Any]) -> None:
        """Take the host memory of a copy of {name: flat array}.

        Raises CheckpointError where there is too little.
        """
        try:
            self._copy.prepare(arrays)
        except Exception as error:
            if is_out_of_memory(error):
                raise _without_memory(error) from error
            raise

    def begin(self, arrays: dict[str, Any], write: Callable[[Arrays], None]) -> None:
        """Copy {name: flat array} and let a thread call ``write`` with the copies.

        Waits first until the save before is written. Raises IndexError if a kernel met an index
        out of range.
        """
        self.wait()
        check_indices()
        self._copy.begin(arrays)
        self.ended = float("inf")
        self._thread = threading.Thread(target=self._write, args=(write,), name="gpuattn-save")
        self._thread.start()

    def _write(self, write):
        begin = time.perf_counter()
        try:
            write(self._copy.values())
        except BaseException as error:  # noqa: BLE001 raised by ``wait``
            self._error = _without_memory(error) if is_out_of_memory(error) else error
        end = time.perf_counter()
        self.seconds, self.ended = end - begin, end

    @property
    def writing(self) -> bool:
        """Whether a save is being written."""
        return self.ended == float("inf")

    def hold(self) -> None:
        """Let the current stream wait for the copy, before the arrays change."""
        self._copy.hold()

    def check(self) -> None:
        """Raise what a save raised, if it has ended."""
        if not self.writing:
            self.wait()

    def wait(self) -> None:
        """Wait until nothing is being written; raise what the save raised.

        An interrupt waits too: the lock of the folder is held until the thread has ended.
        """
        interrupt = None
        while self._thread is not None:
            try:
                self._thread.join()
                self._thread = None
            except KeyboardInterrupt as error:
                interrupt = error
        failed, self._error = self._error, None
        if interrupt:
            raise interrupt from failed
        if failed:
            raise failed


def _without_memory(error):
    """Return a CheckpointError for an error of memory, which the Trainer would answer with smaller
    batches."""
    return CheckpointError(
        f"cannot save: a copy of the state does not fit this machine's memory ({error}); what was "
        "saved before is intact. End other programs, or choose a smaller --dim or fewer --layers"
    )


def saved_or_why(save: Callable[[None], None]) -> str:
    """Save, and return a sentence about it: parameters with inf or NaN are never written."""
    try:
        save(None)
    except CheckpointError as error:
        return f"Nothing newer was saved: {error}"
    return "All is saved as it was then"
