"""NumPy arrays that are read-only while a recorded call needs them as they are."""

import collections
import contextlib
import contextvars
import threading

import numpy as np

from gpuattn.arrays import to_cpu

_debugging = contextvars.ContextVar("gpuattn_debugging", default=False)
_frozen = {}  # id of an array -> (how many calls froze it, the array)
_waiting_views = {}  # id of a frozen array -> views of it whose calls are done already
_lock = threading.Lock()
_done = collections.deque()  # arrays to give back once the lock is free


def freeze(data, frozen):
    """Make a NumPy array read-only and note it in the list ``frozen``; once for each ``thaw``."""
    if not isinstance(data, np.ndarray):
        return
    with _lock:
        count, _ = _frozen.get(id(data), (0, None))
        if count or data.flags.writeable:
            data.flags.writeable = False
            _frozen[id(data)] = (count + 1, data)
            frozen.append(data)
    _give_back()


def thaw(frozen):
    """Give back what ``freeze`` noted in the list ``frozen``, and empty it.

    A dropped record calls this from wherever Python collects garbage, in the middle of ``freeze``
    too: whoever holds the lock then does the work.
    """
    while frozen:
        _done.append(frozen.pop())
    _give_back()


def _give_back():
    while _done and _lock.acquire(blocking=False):
        try:
            with contextlib.suppress(IndexError):  # another thread may be quicker
                _give_one_back(_done.popleft())
        finally:
            _lock.release()


def _give_one_back(data):
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
def editable(data):
    """Let a frozen array be edited inside a block."""
    frozen = id(data) in _frozen
    if frozen:
        data.flags.writeable = True
    try:
        yield
    finally:
        if frozen:
            data.flags.writeable = False


@contextlib.contextmanager
def debug():
    """Catch raw in-place edits of saved arrays too, by comparing their bytes (slow)."""
    token = _debugging.set(True)
    try:
        yield
    finally:
        _debugging.reset(token)


def is_debugging():
    """Return whether slow checks are on here."""
    return _debugging.get()


def fingerprint(data):
    """Return a number that tells whether the bytes of an array were edited."""
    return hash(to_cpu(data).tobytes())
