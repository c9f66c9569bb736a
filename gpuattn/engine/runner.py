"""The thread that works on submitted requests."""

import atexit
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from gpuattn.engine.lane import Lane, Request
from gpuattn.engine.plans import Plan
from gpuattn.engine.request import Handle
from gpuattn.engine.scheduler import Scheduler, Ticket
from gpuattn.engine.searches import Searches

LEAST_SLOTS = 8  # of a lane on a GPU, where a step of 8 requests takes as long as one of 1


class Queued(NamedTuple):
    """A request before it has a lane. ``event``: what its launches must wait for."""

    plan: Plan
    request: Request
    priority: int
    event: Any


class Runner:
    """Runs submitted requests in lanes, one for each kind of search, a turn after the other.

    It holds the lock of ``searches`` in each turn. The thread ends when nothing is left to do; the
    next request starts another. A kind without room for its search waits until lanes have emptied,
    and nothing that came later overtakes it.
    """

    def __init__(self, searches: Searches, *, on_gpu: bool) -> None:
        self._searches = searches
        self._behind, self._least = (1, LEAST_SLOTS) if on_gpu else (0, 1)
        self._burst = {} if on_gpu else {"burst": 1, "burst_waiting": 1}
        self._changed = threading.Condition()  # guards the next five
        self._new: list[Queued] = []
        self._calls: deque[tuple[Handle, Callable[[], Any]]] = deque()
        self._cancelled: list[Handle] = []
        self._thread: threading.Thread | None = None
        self._closed = False
        # the thread's own:
        self._pending: dict[tuple, list[Queued]] = {}  # by the keys of plans
        self._current: dict[tuple, Lane] = {}  # the lane that takes requests of a plan
        self._lanes: list[Lane] = []
        self._places: dict[Handle, tuple[Lane, Ticket]] = {}

    def submit(self, queued: Queued) -> None:
        """Work on a request, whose owner is a Handle."""
        self._start(lambda: self._new.append(queued))

    def call(self, handle: Handle, function: Callable[[], Any]) -> None:
        """Finish ``handle`` by what ``function()`` returns or raises: a search by the host."""
        self._start(lambda: self._calls.append((handle, function)))

    def cancel(self, handle: Handle) -> None:
        """Free what a Handle holds, which is cancelled."""
        with self._changed:
            self._cancelled.append(handle)

    def close(self) -> None:
        """Cancel all requests, wait until the thread has ended, and take no more."""
        with self._changed:
            self._closed = True
            thread = self._thread
        if thread is not None:
            thread.join()

    def _start(self, add):
        with self._changed:
            if self._closed:
                raise RuntimeError("submit: the engine is closed; make another Engine")
            add()
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="gpuattn", daemon=True)
                self._thread.start()
                atexit.register(self.close)

    def _work(self):
        try:
            while self._take():
                self._place()
                for lane in list(self._lanes):
                    self._turn(lane)
                self._call()
        except BaseException as error:
            self._end("failed", error)
            raise

    def _take(self):
        """Take over what is new; return whether there is something to do, else end the thread."""
        with self._changed:
            new, self._new = self._new, []
            cancelled, self._cancelled = self._cancelled, []
            closed = self._closed
            if not closed and not (new or self._pending or self._lanes or self._calls):
                self._stop()
                return False
        for queued in new:
            self._pending.setdefault(queued.plan.key, []).append(queued)
        if closed:
            self._end("cancelled")
            return False
        for handle in cancelled:
            if handle in self._places:
                lane, ticket = self._places.pop(handle)
                lane.scheduler.cancel(ticket)
        return True

    def _place(self):
        """Give lanes to pending requests, in the order in which their kinds came."""
        for key, pending in list(self._pending.items()):
            lane = self._current.get(key)
            pending = [queued for queued in pending if not queued.request.owner.done()]
            if not pending:
                del self._pending[key]
                continue
            plan = pending[0].plan
            waiting = len(pending) + (lane.scheduler.waiting if lane else 0)
            if lane is None or lane.scheduler.slots < min(waiting, plan.most):
                try:
                    wider = self._open(plan, waiting)
                except Exception as error:  # noqa: BLE001 ends the requests of this kind alone
                    self._fail([queued.request.owner for queued in pending], error)
                    del self._pending[key]
                    continue
                if wider is None and lane is None:
                    break
                if wider is not None and lane is not None:
                    pending = [*self._withdrawn(lane, plan), *pending]
                lane = wider or lane
            del self._pending[key]
            events = [queued.event for queued in pending]
            with self._searches.lock, self._searches.on_stream(*events):
                pass
            for queued in pending:
                request, scheduler = queued.request, lane.scheduler
                ticket = scheduler.add(request, steps=request.limit, priority=queued.priority)
                self._places[request.owner] = lane, ticket

    def _withdrawn(self, lane, plan):
        """Take back the requests that wait for slots of a lane."""
        tickets = lane.scheduler.withdraw()
        return [Queued(plan, ticket.request, ticket.priority, None) for ticket in tickets]

    def _open(self, plan, waiting):
        """Return a new lane for so many requests, which is the plan's current one, or None."""
        slots = plan.slots(waiting, self._least)
        key = slots, *plan.key
        with self._searches.lock, self._searches.on_stream():
            if self._lanes and not self._searches.fits(key):
                return None
            search = self._searches.take(key, lambda: plan.new(slots))
        lane = Lane(
            search, Scheduler(slots, **self._burst), self._searches.run,
            tell=lambda request, tokens: request.owner.tell(tokens), at_once=True,
            behind=self._behind,
        )  # fmt: skip
        self._lanes.append(lane)
        self._current[plan.key] = lane
        return lane

    def _turn(self, lane):
        try:
            with self._searches.lock, self._searches.on_stream():
                found = lane.turn()
        except Exception as error:  # noqa: BLE001 ends the requests of this lane alone
            mine = [handle for handle, (own, _) in self._places.items() if own is lane]
            self._fail(mine, error)
            self._shut(lane, keep=False)
            return
        for request, result in found:
            if self._places.pop(request.owner, None):
                request.owner.finish("done", result)
        if not lane.busy:
            self._shut(lane, keep=True)

    def _fail(self, handles, error):
        for handle in handles:
            self._places.pop(handle, None)
            handle.finish("failed", error=error)

    def _shut(self, lane, keep):
        self._lanes.remove(lane)
        self._current = {key: own for key, own in self._current.items() if own is not lane}
        with self._searches.lock:
            self._searches.give(lane.search, keep)

    def _call(self):
        """Run one search by the host."""
        with self._changed:
            handle, function = self._calls.popleft() if self._calls else (None, None)
        if handle is None or handle.done():
            return
        try:
            handle.finish("done", function())
        except Exception as error:  # noqa: BLE001 ends this request alone
            handle.finish("failed", error=error)

    def _end(self, state, error=None):
        """Finish all requests, give the searches back, and let the thread end."""
        with self._changed:
            pending = [queued for queue in self._pending.values() for queued in queue]
            owners = [queued.request.owner for queued in (*self._new, *pending)]
            for handle in [*self._places, *owners, *(handle for handle, _ in self._calls)]:
                handle.finish(state, error=error)
            self._new, self._places, self._pending = [], {}, {}
            self._calls.clear()
            for lane in list(self._lanes):
                self._shut(lane, keep=False)
            self._stop()

    def _stop(self):
        """Note that the thread has nothing left to do; the lock is held."""
        self._thread = None
        atexit.unregister(self.close)
