"""Translations that ranks share: each translates a part of the lines, and rank 0 gets them all."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from gpuattn.parallel.agreement import together
from gpuattn.parallel.communicator import Communicator
from gpuattn.tasks.users.translator import Translation, Translator

Stop = Callable[[], bool]


class Dealt:
    """The Translator of rank 0, whose lines all ranks translate, while the others ``serve``.

    It has all that the translator has. ``stopped``: whether a ``stop`` of another rank has left
    lines empty.
    """

    def __init__(self, translator: Translator, ranks: Communicator) -> None:
        self._translator, self._ranks, self.stopped = translator, ranks, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._translator, name)

    def translate(self, lines: Sequence[str], **options: Any) -> list[str]:
        """Return the translation of each line; see ``Translator.translate``."""
        return [found[0].text for found in self.nbest(lines, 1, **options)]

    def nbest(
        self, lines: Sequence[str], n: int, *, prefixes: Sequence[str] | None = None,
        stop: Stop | None = None, notify: Callable[[int], None] | None = None, **options: Any,
    ) -> list[list[Translation]]:  # fmt: skip
        """Return up to ``n`` Translations of each line, in the order of the lines; see
        ``Translator.nbest``."""
        work = list(lines), n, prefixes, options
        self._ranks.gather(work)
        found, stopped = _translated(self._translator, self._ranks, work, stop, notify)
        self.stopped = self.stopped or stopped
        return found

    def close(self) -> None:
        """Let ``serve`` of the other ranks return."""
        self._ranks.gather(None)


def serve(translator: Translator, ranks: Communicator, stop: Stop | None = None) -> None:
    """On a rank other than 0: translate lines of a ``Dealt`` until it closes."""
    while (work := ranks.gather(None)[0]) is not None:
        _translated(translator, ranks, work, stop)


def _translated(translator, ranks, work, stop, notify=None):
    """Return (the lists of Translations of all lines, whether a rank has stopped before)."""
    lines, n, prefixes, options = work
    longest = sorted(range(len(lines)), key=lambda i: -len(lines[i]))
    mine = longest[ranks.rank :: ranks.size]
    given = [lines[i] for i in mine]
    options = options | {"prefixes": prefixes and [prefixes[i] for i in mine]}

    def on_batch(count):
        ranks.note()
        if notify is not None:
            notify(count)

    def translated():
        return translator.nbest(given, n, stop=stop, notify=on_batch, **options) if given else []

    own = together(ranks, translated)
    parts = ranks.gather((own, stop is not None and bool(stop())))
    found: list = [None] * len(lines)
    for rank, (part, _) in enumerate(parts):
        for i, one in zip(longest[rank :: ranks.size], part, strict=True):
            found[i] = one
    if notify is not None:
        notify(len(lines) - len(mine))
    return found, any(stopped for _, stopped in parts)


@contextlib.contextmanager
def user_of_all(task: Any, ranks: Communicator, stop: Stop) -> Iterator[Stop]:
    """On rank 0: let the ``user`` of a Task be one whose lines all ranks translate, in a block.

    Returns a context with the ``stop`` of all ranks. The others call ``serve_user`` meanwhile.
    """
    if ranks.size == 1 or not isinstance(task.user, Translator):
        yield stop
        return
    own, dealt = task.user, Dealt(task.user, ranks)
    task.user = dealt
    try:
        yield lambda: dealt.stopped or stop()
    finally:
        task.user = own
    dealt.close()


def serve_user(task: Any, ranks: Communicator, stop: Stop) -> None:
    """On a rank other than 0: translate for the ``user_of_all`` of rank 0, until its block ends."""
    if isinstance(task.user, Translator):
        serve(task.user, ranks, stop)
