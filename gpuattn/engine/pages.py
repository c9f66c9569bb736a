"""Which pages of a key-value cache hold which tokens; nothing here touches a device.

A page holds the keys and values of PAGE successive tokens of a text, in every layer. Full pages of
prompts are shared by all texts that begin alike, at the same time and later; what comes behind
them is a text's own. Pages and prefix reuse: Kwon et al., "Efficient memory management for large
language model serving with PagedAttention" (2023).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gpuattn.errors import problem

PAGE = 64  # keys; with 16 decode_attention took 15 % longer on an H200
SIZE = PAGE * np.dtype(np.int32).itemsize  # bytes of the tokens of a page


def pages_of(keys: int) -> int:
    """Return how many pages so many keys take."""
    return -(-keys // PAGE)


def new_pages(prompts: Sequence[Sequence[int]], limits: Sequence[int]) -> list[int]:
    """Return how many pages each text needs that none before it has.

    The texts begin with ``prompts`` and grow by ``limits`` tokens.
    """
    known: dict[tuple[int, bytes], int] = {}
    found = []
    for prompt, limit in zip(prompts, limits, strict=True):
        tokens, before, count = np.asarray(prompt[:-1], np.int32), 0, len(known)
        every = tokens.tobytes()
        for i in range(0, len(every) - SIZE + 1, SIZE):
            before = known.setdefault((before, every[i : i + SIZE]), len(known) + 1)
        own = pages_of(len(tokens) + limit) - len(tokens) // PAGE
        found.append(own + len(known) - count)
    return found


def mostly_shared(prompts: Sequence[Sequence[int]]) -> bool:
    """Return whether half of the prompts' tokens, or more, are in pages that others have too."""
    pages = sum(pages_of(len(prompt) - 1) for prompt in prompts)
    shared = pages - sum(new_pages(prompts, [0] * len(prompts)))
    return 0 < sum(map(len, prompts)) <= 2 * PAGE * shared


class Run(NamedTuple):
    """``pages`` that follow one another; ``tokens``: theirs, and what came behind them.

    ``key``: the page before, 0 at the beginning of a text, and the tokens of the first page.
    """

    key: tuple[int, bytes]
    tokens: bytes
    pages: list[int]

    def shared(self, tokens: bytes, at: int, most: int) -> int:
        """Return how many pages, up to ``most``, hold what ``tokens`` have from byte ``at`` on.

        That the first one does is known.
        """
        for i in range(1, min(most, len(self.pages))):
            begin = i * SIZE
            if self.tokens[begin : begin + SIZE] != tokens[at + begin : at + begin + SIZE]:
                return i
        return min(most, len(self.pages))


class PagePool:
    """Pages 1 to ``count`` - 1; page 0 is nobody's, and takes the writes of slots without a text.

    A page is free, used by one or more texts, or idle: used by none, but known, so that a text with
    the same tokens up to its end uses it again. Idle pages are given away when none is free, the
    longest unused first, and a page never before the known ones that follow it in a text. Raises
    ValueError for a count below 2.
    """

    def __init__(self, count: int) -> None:
        if count < 2:
            raise ValueError(problem("PagePool", "count", count, "2 or more"))
        self.count = count
        self._free = list(range(count - 1, 0, -1))
        self._users = [0] * count
        # what is known: runs of pages that follow one another, by the page before and the tokens
        # of the first one, and by each of their pages
        self._runs: dict[tuple[int, bytes], Run] = {}
        self._known: dict[int, Run] = {}
        self._idle: dict[int, None] = {}  # in the order in which they were left

    @property
    def available(self) -> int:
        """The number of pages that are free or idle."""
        return len(self._free) + len(self._idle)

    def join(self, tokens: np.ndarray, count: int) -> tuple[list[int], int] | None:
        """Return (``count`` pages for a text that begins with ``tokens``, how many were known).

        The full pages of ``tokens``, int32 (n,), are known from now on; ``count``: at least their
        number. Returns None, and changes nothing, where too few pages are available.
        """
        every, full = tokens.tobytes(), len(tokens) // PAGE
        pages: list[int] = []
        while (known := len(pages)) < full:
            at = known * SIZE
            key = pages[-1] if pages else 0, every[at : at + SIZE]
            run = self._runs.get(key)
            if run is None:
                break
            pages += run.pages[: run.shared(every, at, full - known)]
        if count - known > self.available - sum([page in self._idle for page in pages]):
            return None
        for page in pages:
            self._idle.pop(page, None)
            self._users[page] += 1
        pages += self.take(count - known)
        if known < full:
            self._runs[key] = run = Run(key, every[at:], pages[known:full])
            self._known |= dict.fromkeys(run.pages, run)
        return pages, known

    def first_of_run(self, page: int) -> int:
        """Return the first page of those that became known together with a known page."""
        return self._known[page].pages[0]

    def take(self, count: int) -> list[int]:
        """Return ``count`` pages for one text; so many must be available."""
        assert count <= self.available
        while len(self._free) < count:
            page = next(iter(self._idle))
            del self._idle[page]
            run = self._known.pop(page)
            last = run.pages.pop()
            assert last == page, "a page that others follow is given away"
            if not run.pages:
                del self._runs[run.key]
            self._free.append(page)
        cut = len(self._free) - count
        pages = self._free[cut:]
        del self._free[cut:]
        pages.reverse()
        for page in pages:
            self._users[page] = 1
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """Take back the pages of a text, in the order of its tokens."""
        for page in reversed(pages):  # so that a page is idle before the one that it follows
            self._users[page] -= 1
            assert self._users[page] >= 0, "released twice"
            if not self._users[page]:
                if page in self._known:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def forget(self) -> None:
        """Know no tokens any more: what they computed is out of date."""
        self._free += self._idle
        self._idle, self._known, self._runs = {}, {}, {}


class Prompt(NamedTuple):
    """Tokens to compute for the text in ``slot``, int32 (n,), that follow ``start`` known keys.

    ``round``: those of a round need what rounds before it compute.
    """

    slot: int
    tokens: np.ndarray
    start: int
    round: int


class SlotPages:
    """The pages of the texts in ``slots`` slots, of up to ``room`` keys, out of ``pages`` in all.

    ``table`` (slots, pages of ``room``) int32: key j of a text lies in row j % PAGE of page
    ``table[slot, j // PAGE]``; 0 where the text has none. ``changed``: whether it changed since
    someone reset that. Raises ValueError for fewer pages than one text may need, and page 0.
    """

    def __init__(self, slots: int, room: int, pages: int) -> None:
        if pages <= pages_of(room):
            accepted = f"more than {pages_of(room)}, for one text"
            raise ValueError(problem("SlotPages", "pages", pages, accepted))
        self.pool, self.changed = PagePool(pages), False
        self.table = np.zeros((slots, pages_of(room)), np.int32)
        self.full: dict[int, int] = {}  # how many pages the prompt of each text fills, by slot
        self.keys = np.zeros(slots, np.int64)  # of each text, once its queued steps have run
        self._most = np.zeros(slots, np.int64)
        self._own: dict[int, list[int]] = {}  # the pages of a text, by slot
        self._prompts: list[Prompt] = []
        self._copies: list[tuple[int, int]] = []
        self._rounds: dict[int, int] = {}  # of pages to compute, by the first one of a run
        self._ends: dict[tuple[int, bytes], int] = {}  # pages with the last tokens of prompts

    def __contains__(self, slot: int) -> bool:
        """Return whether a text in the slot has pages."""
        return slot in self._own

    def join(self, slot: int, prompt: Sequence[int], limit: int, keys: int = 0) -> bool:
        """Give a slot without a text one: a prompt, which grows by up to ``limit`` tokens.

        It has pages for ``keys`` then, and for its first step at least. Returns False, and changes
        nothing, where pages are lacking.
        """
        assert slot not in self._own
        tokens = np.asarray(prompt[:-1], np.int32)
        full, most = len(tokens) // PAGE, len(tokens) + limit
        found = self.pool.join(tokens, pages_of(min(max(keys, len(prompt)), most)))
        if found is None:
            return False
        pages, known = found
        self.keys[slot], self._most[slot] = len(tokens), most
        self._own[slot], self.full[slot] = [], full
        self._add(slot, pages)
        if known * PAGE < len(tokens):
            self._read(slot, tokens, known, full)
        return True

    def _read(self, slot, tokens, known, full):
        """Note how the keys of the tokens behind the ``known`` pages of a text come about."""
        pages, end = self._own[slot], tokens[full * PAGE :].tobytes()
        if end:
            before = pages[full - 1] if full else 0
            source = self._ends.setdefault((before, end), pages[full])
            if source != pages[full]:  # an equal prompt, so all full pages are known
                self._copies.append((source, pages[full]))
                return
        run = self.pool.first_of_run(pages[known - 1]) if known else 0
        self._rounds[pages[known]] = number = self._rounds.get(run, -1) + 1
        self._prompts.append(Prompt(slot, tokens[known * PAGE :], known * PAGE, number))

    def to_compute(self) -> tuple[list[Prompt], list[tuple[int, int]]]:
        """Return what is to be computed for the texts that joined since the last call.

        Prompts, and then pages to copy: (from, to) for the last tokens of equal prompts.
        """
        found = self._prompts, self._copies
        self._prompts, self._copies, self._rounds, self._ends = [], [], {}, {}
        return found

    def advance(self, steps: int) -> bool:
        """Give all texts pages for ``steps`` more steps; False, and nothing, if these are lacking.

        Steps beyond the limit of a text need none.
        """
        slots = np.fromiter(self._own, np.int64, len(self._own))
        keys = np.minimum(self.keys[slots] + steps, self._most[slots])
        lacking = -(-keys // PAGE) - np.fromiter(map(len, self._own.values()), np.int64, len(slots))
        if lacking.clip(0).sum() > self.pool.available:
            return False
        for i in np.flatnonzero(lacking > 0):
            self._add(int(slots[i]), self.pool.take(int(lacking[i])))
        self.keys[slots] = keys
        return True

    def leave(self, slot: int) -> None:
        """Take back the pages of the text in a slot, if it has some: no step needs them."""
        if slot in self._own:
            self.pool.release(self._own.pop(slot))
            del self.full[slot]
            self.table[slot], self.changed = 0, True

    def _add(self, slot, pages):
        own = self._own[slot]
        self.table[slot, len(own) : len(own) + len(pages)] = pages
        own += pages
        self.changed = True
