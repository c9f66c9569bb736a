"""One search and the requests in its slots: bursts of steps are queued, and read one behind."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from gpuattn.decode.stepper import Hypothesis
from gpuattn.engine.pages import PAGE
from gpuattn.engine.scheduler import BURST, Scheduler, Ticket
from gpuattn.rng import Key
from gpuattn.runtime.readback import Reading

MOST_READ = 2  # results that are being read; beyond, their oldest is waited for


@dataclass(eq=False, slots=True)
class Request:
    """What a slot works on: the tokens of a source, or of a prompt as int32 (n,), and the most new
    tokens.

    ``prefix``: the tokens that a translation begins with. ``number``, ``key``: of a sampled text,
    as of ``decode.sample.sample``. ``owner``: who asked. ``read``: False for a prompt that is still
    as it was given, see ``generation.read``.
    """

    tokens: Any
    limit: int
    prefix: Sequence[int] = ()
    number: int = 0
    key: Key | None = None
    owner: Any = None
    read: bool = True


class Lane:
    """Runs the requests of a Scheduler in a search with as many slots.

    ``search``: a TranslationSearch or Generation. ``scheduler``: its requests are Requests.
    ``run(name, shape, step)``: calls ``step()``, or replays it as a graph. ``tell(request,
    tokens)``: called with the next tokens of a text as soon as they are certain.
    ``at_once``: whether results are read as soon as a text is complete; otherwise when slots are
    needed or all are complete. ``behind``: bursts that are queued before the one before is read: 1
    on a GPU, which then never waits for the host, 0 on NumPy.
    """

    def __init__(
        self, search: Any, scheduler: Scheduler, run: Callable[[str, Any, Callable], None], *,
        tell: Callable[[Request, list[int]], None] | None = None, at_once: bool = False,
        behind: int = 1,
    ) -> None:  # fmt: skip
        self.search, self.scheduler, self._run = search, scheduler, run
        self._tell = tell
        self._at_once, self._behind = at_once, behind
        self._looks: deque[tuple[int, Reading]] = deque()
        self._reads: deque[tuple[list[Ticket], Reading]] = deque()

    @property
    def busy(self) -> bool:
        """Whether some request waits, runs or is being read."""
        return self.scheduler.busy or bool(self._reads)

    def turn(self) -> list[tuple[Request, list[Hypothesis]]]:
        """Queue a burst, let requests leave and join; return those that are over with results.

        All launches go to the current stream. A search that has no free slot, no text that is
        complete and nobody who waits costs a copy of S bytes for each burst, and no launch.
        """
        scheduler, search = self.scheduler, self.search
        steps = self._burst()
        # a burst in one graph: between its steps launches overlap, between graphs they do not
        whole = BURST if steps == BURST else 1
        for _ in range(0, steps, whole):
            self._run("steps", (search, whole), partial(_repeat, search.step, whole))
        if steps and (search.may_end or self._tell):
            reading = Reading(*search.progress(bool(self._tell)))
            self._looks.append((scheduler.bursts, reading))
        while len(self._looks) > self._behind:
            self._look(*self._looks.popleft())
        if stopped := scheduler.stopped():
            search.stop(stopped)
        ended = scheduler.ended()
        if ended and (self._at_once or scheduler.joining() or len(ended) == len(scheduler.running)):
            self._reads.append((scheduler.release(), Reading(*search.results())))
        self._leave(ticket.slot for ticket in ended)
        self.join()
        if not scheduler.running:
            self._looks.clear()
        return self._found()

    def join(self) -> None:
        """Let requests join, and queue what they begin with; ``turn`` does it as well."""
        if joined := self.scheduler.admit(self._fits if self.search.pages else None):
            self._begin(joined)

    # ---- pages of a PagedGeneration ----

    def _burst(self):
        """Return how many steps to queue now. The texts have pages for them.

        Where pages are lacking, those that came last go back to the queue.
        """
        scheduler, pages = self.scheduler, self.search.pages
        steps = scheduler.burst()
        if not pages:
            return steps
        running = {ticket.slot for ticket in scheduler.running}
        self._leave(pages.full.keys() - running)  # they were cancelled
        while steps and not self.search.provide(steps):
            holders = [ticket for ticket in scheduler.running if ticket.slot in pages]
            last = max(holders, key=lambda ticket: ticket.rank)
            last.keys = int(pages.keys[last.slot]) + PAGE
            self._leave([last.slot])
            scheduler.put_back(last)
        return steps

    def _leave(self, slots):
        """Free the pages of slots whose texts need no more steps."""
        for slot in slots if self.search.pages else ():
            self.search.pages.leave(slot)

    def _fits(self, ticket, slot):
        """Return whether there are pages for a request in a slot, which are its own then.

        One more than it had when it was put back, so that it is not at once again.
        """
        request = ticket.request
        return self.search.join(slot, request.tokens, request.limit, ticket.keys)

    # ---- results ----

    def _look(self, burst, reading):
        """Learn what was so behind a burst."""
        read = reading.values()
        if self._tell:
            tickets = [ticket for ticket in self.scheduler.running if ticket.since < burst]
            texts = self.search.certain(read, [ticket.slot for ticket in tickets])
            for ticket, length, tokens in zip(tickets, *texts, strict=True):
                if length > ticket.told:
                    new = tokens[ticket.told : length].tolist()
                    ticket.told += len(new)
                    self._tell(ticket.request, new)
        self.scheduler.look(read[0], burst)

    def _begin(self, joined):
        for part in self.search.portions([ticket.request.tokens for ticket in joined]):
            slots = [joined[i].slot for i in part]
            requests = [joined[i].request for i in part]
            texts = [request.tokens for request in requests]
            limits = [request.limit for request in requests]
            if requests[0].key is None:
                self.search.load(texts, limits, [one.prefix for one in requests], slots=slots)
            else:
                own = [one.number for one in requests], [one.key for one in requests]
                self.search.load(texts, limits, *own, slots=slots)
            self._run("begin", (self.search, *self.search.shape), self.search.begin)
        self.search.prepare()

    def _found(self):
        """Return the requests whose results have arrived, and wait for them if nothing runs."""
        found = []
        while self._reads:
            tickets, reading = self._reads[0]
            if self.scheduler.running and len(self._reads) <= MOST_READ and not reading.ready():
                break
            self._reads.popleft()
            requests = [ticket.request for ticket in tickets]
            slots, told = [t.slot for t in tickets], [t.told for t in tickets]
            del tickets  # fewer objects that a garbage collection looks at
            limits = [request.limit for request in requests]
            results = self.search.hypotheses(reading.values(), slots, limits)
            texts = zip(requests, told, results, strict=True)
            for request, known, result in texts if self._tell else ():
                if result and len(result[0].tokens) > known:
                    self._tell(request, result[0].tokens[known:])
            found += zip(requests, results, strict=True)
        return found


def _repeat(step, count):
    for _ in range(count):
        step()
