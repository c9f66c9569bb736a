"""A place to stand between the tape and the ops, for who wants to see what is called."""

import contextlib
import contextvars

_watch = contextvars.ContextVar("gpuattn_watch", default=None)


@contextlib.contextmanager
def watching(watch):
    """Have ``watch(op, direction, function)`` return what is called in place of each op in a block.

    ``function``: the ``forward`` or ``backward`` of its ``impls.Impl``, as ``direction`` says.
    ``watch`` None: nobody looks, such as while a watcher itself computes.
    """
    token = _watch.set(watch)
    try:
        yield
    finally:
        _watch.reset(token)


def watched(op, direction, function):
    """Return ``function``, or what a watcher has put in its place."""
    watch = _watch.get()
    return function if watch is None else watch(op, direction, function)


def is_watched():
    """Return whether a watcher looks."""
    return _watch.get() is not None
