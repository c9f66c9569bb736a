"""The user of a model whose lines ranks share: each computes a part, and rank 0 gets them all."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from gpuattn.parallel.communicator import Communicator
from gpuattn.parallel.dealing import Dealing

NOTIFY = "notify"  # option of a method: called with the number of lines, after some of them


class Dealt:
    """The user of a model on rank 0, whose lines all ranks compute, while the others ``serve``.

    It has all that the user has. Of a method that the user names in ``by_line`` each rank computes
    a part of the lines: {method: its options with a value for each line, and NOTIFY if it has
    that}. Its first argument is the lines, and it returns a sequence of as many results.
    """

    def __init__(self, user: Any, ranks: Communicator) -> None:
        self._user, self._ranks = user, ranks

    def __getattr__(self, name: str) -> Any:
        shared = name in self._user.by_line
        return functools.partial(self._shared, name) if shared else getattr(self._user, name)

    def _shared(
        self, name: str, lines: Sequence[Any], *given: Any,
        notify: Callable[[int], None] | None = None, **options: Any,
    ) -> list[Any]:  # fmt: skip
        work = name, list(lines), given, options
        self._ranks.gather(work)
        return _computed(self._user, self._ranks, work, notify)

    def close(self) -> None:
        """Let ``serve`` of the other ranks return."""
        self._ranks.gather(None)


def serve(user: Any, ranks: Communicator) -> None:
    """On a rank other than 0: compute lines of a ``Dealt`` until it closes."""
    while (work := ranks.gather(None)[0]) is not None:
        _computed(user, ranks, work)


def _computed(user, ranks, work, notify=None):
    """Return the results of all lines."""
    (name, lines, given, options), deal, own = work, Dealing(ranks), 0
    of_lines = user.by_line[name]

    def on_some(count):
        nonlocal own
        own += count
        deal.note()
        if notify is not None:
            notify(count)

    def computed(chosen):
        mine = {
            key: [value[i] for i in chosen] if key in of_lines and value is not None else value
            for key, value in options.items()
        }
        mine |= {NOTIFY: on_some} if NOTIFY in of_lines else {}
        return getattr(user, name)([lines[i] for i in chosen], *given, **mine)

    found = deal.lines(lines, computed)
    if notify is not None:
        notify(len(lines) - own)
    return found
