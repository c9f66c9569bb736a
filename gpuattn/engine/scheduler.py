"""Which requests are in the slots of a search, and when; nothing here touches a device.

A search has S slots. Steps are queued in bursts; between two bursts requests leave their slots and
others join. The device is one burst ahead of what the host knows, so a slot is known to be over
when a reading of a past burst says so, or when as many steps are queued as its request can take.

Admission computes the sources or prompts of all that join at once, a launch of some hundred
microseconds whatever their number, while a free slot wastes its share of each step. In simulations
of 3,003 log-normal lengths in 512 slots, an admission taken as 0.6 steps and a look as 0.03, texts
that end by themselves took 218 steps when requests join as soon as a sixth of the slots is free,
222 with a quarter, 244 with a half; 229 if others wait for bursts of 4 steps instead of 2; batch
after batch 432 or more.
"""

import itertools
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import numpy as np

from gpuattn.errors import problem

BURST = 4  # steps between two looks at which requests are over
BURST_WAITING = 2  # while others wait for slots
LEAST_SHARE = 6  # requests join when one slot in so many is free
PATIENCE = 64  # admissions after which a request is before newer ones of one priority more
ROUND = 1 << 48  # between the ranks of two admissions: more than requests ever come


@dataclass(eq=False, slots=True)
class Ticket:
    """The place of a ``request`` in the queue or in a slot.

    ``steps``: the most that it takes. ``cost``: what it takes of the budget. ``state``: "waiting",
    "running", "over" or "cancelled". ``slot``: where it runs, or ran last. ``since``: bursts before
    it joined. ``last``: the number of the step that is its last one at most. ``told``: tokens of
    its text that its owner was told of. ``rank``: the lowest joins first. ``keys``: those that
    it needs room for, at least, since it was put back.
    """

    request: Any
    steps: int
    cost: int
    priority: int
    rank: int
    state: str = field(default="waiting", init=False)
    slot: int = field(default=-1, init=False)
    since: int = field(default=0, init=False)
    last: int = field(default=0, init=False)
    told: int = field(default=0, init=False)
    keys: int = field(default=0, init=False)


_rank = attrgetter("rank")


class Scheduler:
    """A queue of requests and the slots that they run in.

    ``slots``: how many requests run at a time. ``budget``: the most of all ``cost`` that run
    together; None: no bound. ``burst``, ``burst_waiting``: steps of a burst, and while others wait.

    Requests join by priority, then by age: one of priority p is before those of priority 0 that
    came up to p * PATIENCE admissions earlier, and behind older ones, so none waits for ever. None
    overtakes one for which there is no budget.
    """

    def __init__(
        self, slots: int, *, budget: int | None = None, burst: int = BURST,
        burst_waiting: int = BURST_WAITING,
    ) -> None:  # fmt: skip
        if slots < 1:
            raise ValueError(problem("Scheduler", "slots", slots, "1 or more"))
        self.slots, self.budget, self.bursts = slots, budget, 0
        self._burst, self._burst_waiting = burst, burst_waiting
        self._least = max(1, slots // LEAST_SHARE)
        self._free = list(range(slots))  # in order
        self._running: dict[int, Ticket] = {}  # by slot
        self._ended: dict[int, Ticket] = {}  # those of them whose texts are complete
        self._steps = self._spent = 0  # steps queued so far; costs of what runs
        self._queue: list[Ticket] = []  # by rank
        self._rounds = 0
        self._numbers = itertools.count()
        self._stopped: list[int] = []  # slots of requests that were cancelled, to be stopped

    @property
    def waiting(self) -> int:
        """The number of requests in the queue."""
        return len(self._queue)

    @property
    def running(self) -> list[Ticket]:
        """The requests in slots."""
        return list(self._running.values())

    @property
    def busy(self) -> bool:
        """Whether some request waits or runs."""
        return bool(self._queue or self._running)

    def add(self, request: Any, *, steps: int, cost: int = 1, priority: int = 0) -> Ticket:
        """Put a request into the queue. ValueError for one that costs more than the budget.

        ``steps``: the most that it takes, 1 or more. ``priority``: a greater one joins earlier.
        """
        if self.budget is not None and cost > self.budget:
            accepted = f"up to the budget, {self.budget}"
            raise ValueError(problem("Scheduler.add", "cost", cost, accepted))
        if steps < 1:
            raise ValueError(problem("Scheduler.add", "steps", steps, "1 or more"))
        rank = (self._rounds - priority * PATIENCE) * ROUND + next(self._numbers)
        ticket = Ticket(request, steps, cost, priority, rank)
        self._push(ticket)
        return ticket

    def extend(self, requests: Sequence[Any], steps: Sequence[int]) -> None:
        """Put requests into the queue as ``add`` does, with the same cost and priority."""
        if not requests:
            return
        if min(steps) < 1:
            raise ValueError(problem("Scheduler.extend", "steps", min(steps), "1 or more"))
        numbered = zip(zip(requests, steps, strict=True), self._numbers, strict=False)
        first = self._rounds * ROUND
        self._queue += [Ticket(one, most, 1, 0, first + n) for (one, most), n in numbered]
        self._queue.sort(key=_rank)

    def cancel(self, ticket: Ticket) -> bool:
        """Take a request out of the queue, or out of its slot at the end of this burst.

        Returns False for one that is over or cancelled already.
        """
        if ticket.state == "waiting":
            self._queue.remove(ticket)
        elif ticket.state == "running":
            self._leave(ticket)
            self._stopped.append(ticket.slot)
        else:
            return False
        ticket.state = "cancelled"
        return True

    def put_back(self, ticket: Ticket) -> None:
        """Take a request out of its slot, to its place in the queue: it will run from the start.

        The slot is free at the end of this burst.
        """
        self._leave(ticket)
        self._stopped.append(ticket.slot)
        ticket.state = "waiting"
        self._push(ticket)

    def withdraw(self) -> list[Ticket]:
        """Take all that never ran out of the queue; return them, first the next to join."""
        found = [ticket for ticket in self._queue if ticket.slot < 0]
        self._queue = [ticket for ticket in self._queue if ticket.slot >= 0]
        return found

    def burst(self) -> int:
        """Return how many steps to queue now, 0 to a burst's, and count them as queued."""
        going = [t for slot, t in self._running.items() if slot not in self._ended]
        if not going:
            return 0
        most = self._burst_waiting if self._queue else self._burst
        steps = min(most, max([ticket.last for ticket in going]) - self._steps)
        self.bursts += 1
        self._steps += steps
        self._ended |= {ticket.slot: ticket for ticket in going if ticket.last <= self._steps}
        return steps

    def look(self, over: Any, burst: int) -> None:
        """Learn which slots were ``over``, bool (S,), behind burst number ``burst``, from 1 on.

        Requests that joined later are not meant by it.
        """
        for slot in np.flatnonzero(over).tolist():
            ticket = self._running.get(slot)
            if ticket is not None and ticket.since < burst:
                self._ended[slot] = ticket

    def joining(self) -> bool:
        """Return whether requests join now, once those that have ended are released."""
        free = len(self._free) + len(self._stopped) + len(self._ended)
        if not self._queue or not free:
            return False
        spent = self._spent - sum([ticket.cost for ticket in self._ended.values()])
        if self.budget is not None and spent + self._queue[0].cost > self.budget:
            return False
        alone = len(self._ended) == len(self._running)
        return alone or free >= min(len(self._queue), self._least)

    def ended(self) -> list[Ticket]:
        """Return the requests in slots whose texts are complete."""
        return list(self._ended.values())

    def release(self) -> list[Ticket]:
        """Free the slots of the requests that have ended, which are over now; return them."""
        ended = self.ended()
        for ticket in ended:
            del self._running[ticket.slot]
            self._spent -= ticket.cost
            ticket.state = "over"
        self._ended = {}
        self._free = sorted([*self._free, *[ticket.slot for ticket in ended]])
        return ended

    def stopped(self) -> list[int]:
        """Free the slots of requests that were cancelled; return them, to be stopped first."""
        stopped, self._stopped = self._stopped, []
        self._free = sorted([*self._free, *stopped])
        return stopped

    def admit(self, fits: Callable[[Ticket, int], bool] | None = None) -> list[Ticket]:
        """Give free slots to the requests that join now; return these, as they were queued.

        ``fits(ticket, slot)``: reserves what else a request needs there; the first for which it
        returns False waits, and all behind it.
        """
        if not self.joining():
            return []
        found = []
        bursts, steps, running = self.bursts, self._steps, self._running
        for ticket, slot in zip(self._queue, self._free, strict=False):
            if self.budget is not None and self._spent + ticket.cost > self.budget:
                break
            if fits and not fits(ticket, slot):
                break
            self._spent += ticket.cost
            ticket.slot, ticket.since = slot, bursts
            ticket.state, ticket.last = "running", steps + ticket.steps
            running[slot] = ticket
            found.append(ticket)
        del self._queue[: len(found)], self._free[: len(found)]
        self._rounds += bool(found)
        return found

    def _leave(self, ticket):
        """Take a request out of its slot."""
        del self._running[ticket.slot]
        self._ended.pop(ticket.slot, None)
        self._spent -= ticket.cost

    def _push(self, ticket):
        if self._queue and self._queue[-1].rank > ticket.rank:
            insort(self._queue, ticket, key=_rank)
        else:
            self._queue.append(ticket)
