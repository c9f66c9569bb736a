"""Which kind of search a request runs in: how much room, and how many slots."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from gpuattn.arrays import on_gpu
from gpuattn.decode.options import BeamOptions, SampleOptions
from gpuattn.engine import generation
from gpuattn.engine.beam import TranslationSearch
from gpuattn.engine.inputs import rounded
from gpuattn.engine.lane import Request
from gpuattn.engine.paged_generation import generation_of
from gpuattn.engine.pages import PAGE, new_pages, pages_of
from gpuattn.engine.searches import Searches

LEAST_ROOM = 64  # tokens that a slot has room for, at least, where a request alone decides


class Plan(NamedTuple):
    """A kind of search: requests with equal keys share one.

    ``key``: beams, room, and what else the search depends on. ``most``: slots at most.
    ``new(slots)``: makes one. ``fixed``: whether it has that many slots for any requests.
    """

    key: tuple
    most: int
    new: Callable[[int], Any]
    fixed: bool = False

    def slots(self, requests: int, least: int = 1) -> int:
        """Return how many slots are for so many requests, from ``least`` on where it may be."""
        if self.fixed:
            return self.most
        return rounded(min(requests, self.most), self.most, min(least, self.most))


class Plans:
    """Makes the plans of an engine: for a request by itself, or for several together.

    ``max_rows``: rows of a search at most; ``searches`` knows how many tokens fit into memory.
    ``invariant``: several requests have the plans that each has by itself, and on a GPU these have
    all their slots. On NumPy the number of rows changes nothing.
    """

    def __init__(
        self, model: Any, max_rows: int, searches: Searches, *, invariant: bool = False
    ) -> None:
        self.model, self._searches = model, searches
        self._max_rows, self._invariant = max_rows, invariant
        self._fixed = invariant and on_gpu(model.parameters()[0].data)

    def of_source(
        self, request: Request, bos: int, options: BeamOptions, batch_tokens: int | None = None
    ) -> Plan:
        """Return the Plan of a source by its own lengths. Arguments: as of Engine.translations."""
        longest = max(request.limit, len(request.tokens) + 1)
        room = rounded(longest, self.model.config.max_length, LEAST_ROOM)
        return self._translation(room, room, len(request.prefix), bos, options, batch_tokens)

    def of_sources(
        self, requests: Sequence[Request], bos: int, options: BeamOptions,
        batch_tokens: int | None = None,
    ) -> list[tuple[Plan, list[Request]]]:  # fmt: skip
        """Return Plans and the requests that each is for, in their order."""
        if self._invariant or not requests:
            return _grouped(requests, lambda one: self.of_source(one, bos, options, batch_tokens))
        most = self.model.config.max_length
        room = rounded(max([one.limit for one in requests]), most)
        source_room = rounded(max([len(one.tokens) for one in requests]) + 1, most)
        forced = max([len(one.prefix) for one in requests])
        plan = self._translation(room, source_room, forced, bos, options, batch_tokens)
        return [(plan, list(requests))]

    def of_prompt(self, request: Request, options: SampleOptions) -> Plan:
        """Return the Plan of a prompt by its own lengths. Arguments: as of Engine.generate."""
        # a power of two: texts of many lengths share pages in one search, and take what they need
        room = max(LEAST_ROOM, 1 << (keys_of(request) - 1).bit_length())
        return self._generation(min(room, self.model.config.block), options)

    def of_prompts(
        self, requests: Sequence[Request], options: SampleOptions
    ) -> list[tuple[Plan, list[Request]]]:
        """Return Plans and the requests that each is for, in their order."""
        if self._invariant or not requests:
            return _grouped(requests, lambda one: self.of_prompt(one, options))
        room = rounded(max(map(keys_of, requests)), self.model.config.block)
        return [(self._generation(room, options, requests), list(requests))]

    def _translation(self, room, source_room, forced, bos, options, batch_tokens):
        """``forced``: the longest prefix."""
        prefix_room = rounded(forced, room) if forced else 0

        def new(slots):
            return TranslationSearch(
                self.model, slots, options.beam, room, source_room, options=options, bos=bos,
                prefix_room=prefix_room, batch_invariant=self._invariant,
            )  # fmt: skip

        tokens, most = options.beam * room, batch_tokens or self._searches.most_tokens()
        slots = max(1, min(self._max_rows // options.beam, most // tokens))
        key = options.beam, room, source_room, bos, options, prefix_room
        return Plan(key, slots, new, self._fixed)

    def _generation(self, room, options, requests=()):
        """``requests``: those of all texts, the longest first; none: ``room`` for each."""
        rules = {name: getattr(options, name) for name in generation.RULES}
        draws = {name: getattr(options, name) for name in generation.DRAWS}

        def new(slots):
            return generation_of(
                self.model, slots, room, pages=min(slots * pages_of(room), most), draws=draws,
                rules=rules, banned=options.banned, batch_invariant=self._invariant,
            )  # fmt: skip

        most = self._searches.most_tokens() // PAGE
        fitting = most // pages_of(room)
        if fitting < min(len(requests), self._max_rows):  # they may share some
            generation.read(self.model, requests)
            pages = new_pages([one.tokens for one in requests], [one.limit for one in requests])
            fitting = max(fitting, int(np.searchsorted(np.cumsum(pages), most, "right")))
        slots = max(1, min(self._max_rows, fitting))
        return Plan((1, room, options), slots, new, self._fixed)


def keys_of(request: Request) -> int:
    """Return the most keys of a text that continues a prompt."""
    return len(request.tokens) - 1 + request.limit


def _grouped(requests, plan_of):
    found: dict[tuple, tuple[Plan, list[Request]]] = {}
    for request in requests:
        plan = plan_of(request)
        found.setdefault(plan.key, (plan, []))[1].append(request)
    return [*found.values()]
