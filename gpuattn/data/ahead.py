"""Batches made by a thread while the step before computes."""

import threading
import weakref
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

DEPTH = 4  # batches that wait, at most


class Ahead:
    """An iterator whose items a thread computes, up to ``depth`` of them before they are needed.

    Their order and content are those of ``items``; what it raises is raised by the call that asks
    for the item. The thread ends with the items, or when nothing refers to the Ahead any more.
    """

    def __init__(self, items: Iterator[Any], depth: int = DEPTH) -> None:
        self._room, stop = threading.Semaphore(depth), threading.Event()
        self._ready: SimpleQueue[Any] = SimpleQueue()
        self._next: list[Any] = []
        work = (items, self._room, self._ready, stop)
        threading.Thread(target=_work, args=work, name="batches", daemon=True).start()
        weakref.finalize(self, _end, self._room, stop)

    def __iter__(self):
        return self

    def __next__(self):
        if self.ended():
            raise StopIteration
        kind, value = self._next.pop()
        if kind is _ERROR:
            self._next.append((_END, None))
            raise value
        self._room.release()
        return value

    def ended(self) -> bool:
        """Return whether there is no further item; waits until that is known."""
        if not self._next:
            self._next.append(self._ready.get())
        return self._next[0][0] is _END


_ITEM, _ERROR, _END = object(), object(), object()


def _work(items, room, ready, stop):
    """Put the items of an iterator into a queue, as far as there is room."""
    try:
        room.acquire()
        for item in items:
            if stop.is_set():
                return
            ready.put((_ITEM, item))
            room.acquire()
        ready.put((_END, None))
    except BaseException as error:  # noqa: BLE001 it is raised where the item would be
        ready.put((_ERROR, error))


def _end(room, stop):
    stop.set()
    room.release()
