"""NumPy arrays that are read-only while a recorded call has saved them."""

import collections
import contextlib
import contextvars
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from gpuattn.arrays import to_cpu
from gpuattn.modes import without_plans
from gpuattn.typing import Array

_debugging = contextvars.ContextVar("gpuattn_debugging", default=False)
_frozen: dict[int, tuple[int, Array]] = {}  # id of an array -> (how many calls froze it, the array)
# id of a frozen array -> views of it that are no longer frozen
_waiting_views: dict[int, list[Array]] = {}
_lock = threading.Lock()
_done: collections.deque[Array] = collections.deque()  # arrays to unfreeze once the lock is free


def freeze(data: Array, frozen: list) -> None:
    """Make a NumPy array read-only and append it to ``frozen``. Counted: thaw as often."""
    if not isinstance(data, np.ndarray):
        return
    with _lock:
        count, _ = _frozen.get(id(data), (0, None))
        if count or data.flags.writeable:
            data.flags.writeable = False
            _frozen[id(data)] = (count + 1, data)
            frozen.append(data)
    _unfreeze_done()


def thaw(frozen: list) -> None:
    """Unfreeze the arrays in the list ``frozen``, and empty it.

    Garbage collection can call this at any point, also inside ``freeze``: then the thread that
    holds the lock unfreezes the arrays later.
    """
    while frozen:
        _done.append(frozen.pop())
    _unfreeze_done()


def _unfreeze_done():
    while _done and _lock.acquire(blocking=False):
        try:
            with contextlib.suppress(IndexError):  # another thread may have emptied it
                _unfreeze(_done.popleft())
        finally:
            _lock.release()


def _unfreeze(data):
    count, _ = _frozen.pop(id(data))
    if count > 1:
        _frozen[id(data)] = (count - 1, data)
    elif id(data.base) in _frozen:  # NumPy makes no view writeable before its base
        _waiting_views.setdefault(id(data.base), []).append(data)
    else:
        data.flags.writeable = True
        for view in _waiting_views.pop(id(data), ()):
            view.flags.writeable = True


@contextlib.contextmanager
def editable(data: Array) -> Iterator[None]:
    """Make a frozen array writeable inside a block."""
    frozen = id(data) in _frozen
    if frozen:
        data.flags.writeable = True
    try:
        yield
    finally:
        if frozen:
            data.flags.writeable = False


@contextlib.contextmanager
def debug() -> Iterator[None]:
    """Detect in-place edits of saved arrays in a block also by comparing their bytes (slow)."""
    token = _debugging.set(True)
    try:
        with without_plans():
            yield
    finally:
        _debugging.reset(token)


def is_debugging() -> bool:
    """Return whether ``debug`` is active in this thread and context."""
    return _debugging.get()


def fingerprint(data: Array) -> Any:
    """Return a hash of the bytes of an array."""
    return hash(to_cpu(data).tobytes())
