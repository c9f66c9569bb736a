"""The scheduler with a fake device: nothing lost, nothing twice, bounds kept, no starvation."""

import numpy as np
import pytest

from gpuattn.engine.scheduler import PATIENCE, Scheduler


class Device:
    """Counts down what is in each slot; a reading is known ``behind`` bursts later, as on a GPU."""

    def __init__(self, scheduler, lengths, behind=1):
        self.scheduler, self.lengths, self.behind = scheduler, lengths, behind
        self.left = [0] * scheduler.slots
        self.looks, self.joined, self.over = [], [], []
        self.steps = self.admissions = 0

    def turn(self):
        s = self.scheduler
        steps = s.burst()
        self.put_back()
        self.steps += steps
        if steps:
            self.left = [max(0, left - steps) for left in self.left]
            self.looks.append((s.bursts, [left == 0 for left in self.left]))
        while len(self.looks) > self.behind:
            s_burst, flags = self.looks.pop(0)
            s.look(flags, s_burst)
        for slot in s.stopped():
            self.left[slot] = 0
        for ticket in s.release():
            assert self.left[ticket.slot] == 0, "released while it runs"
            self.over.append(ticket)
        new = s.admit(self.fits)
        for ticket in new:
            assert self.left[ticket.slot] == 0, "two in one slot"
            self.left[ticket.slot] = self.lengths[ticket.request]
        self.joined += new
        self.admissions += bool(new)

    def put_back(self):
        """Let requests go back to the queue for which something is lacking: here nothing is."""

    def fits(self, ticket, slot):
        assert ticket.state == "waiting" and not self.left[slot]
        return True

    def check(self):
        s = self.scheduler
        slots = [ticket.slot for ticket in s.running]
        assert len(set(slots)) == len(slots) <= s.slots and all(0 <= x < s.slots for x in slots)
        assert s.budget is None or sum(ticket.cost for ticket in s.running) <= s.budget


@pytest.mark.parametrize("seed", range(30))
def test_any_order_of_events(seed):
    """Requests come and are cancelled at any time; each is over once or cancelled once."""
    rng = np.random.default_rng(seed)
    slots, budget = int(rng.integers(1, 13)), [None, 20][rng.integers(2)]
    bursts = {"burst": int(rng.integers(1, 6)), "burst_waiting": int(rng.integers(1, 4))}
    scheduler = Scheduler(slots, budget=budget, **bursts)
    count = 60
    limits = rng.integers(1, 30, count)
    lengths = [int(rng.integers(1, limit + 1)) for limit in limits]
    device = Device(scheduler, lengths, behind=int(rng.integers(2)))
    tickets, cancelled = [], set()
    while scheduler.busy or len(tickets) < count:
        for _ in range(min(rng.integers(0, 8), count - len(tickets))):
            i = len(tickets)
            given = {"cost": int(rng.integers(1, 9)), "priority": int(rng.integers(-1, 3))}
            tickets.append(scheduler.add(i, steps=int(limits[i]), **given))
        if rng.integers(3) == 0 and tickets:
            ticket = tickets[rng.integers(len(tickets))]
            was = ticket.state
            assert scheduler.cancel(ticket) == (was in ("waiting", "running"))
            assert not scheduler.cancel(ticket)
            if was in ("waiting", "running"):
                cancelled.add(ticket.request)
        device.turn()
        device.check()
    over = [ticket.request for ticket in device.over]
    assert len(set(over)) == len(over) and not cancelled & set(over)
    assert set(over) | cancelled == set(range(count))
    device.turn()  # what was cancelled last leaves its slot
    assert sorted(scheduler._free) == list(range(slots)) and not scheduler.running


class Lacking(Device):
    """A device where something may be lacking at any time, for all but one request."""

    random = np.random.default_rng(3)

    def put_back(self):
        running = sorted(self.scheduler.running, key=lambda ticket: ticket.rank)
        while len(running) > 1 and self.random.integers(3) == 0:
            ticket = running.pop()
            self.scheduler.put_back(ticket)
            assert ticket.state == "waiting" and ticket not in self.scheduler.ended()

    def fits(self, ticket, slot):
        return not self.scheduler.running or self.random.integers(3) > 0


@pytest.mark.parametrize("behind", [0, 1])
def test_requests_that_are_put_back(behind):
    """They run from the start again, each to its end, before those that came later."""
    scheduler, rng = Scheduler(4), np.random.default_rng(behind)
    lengths = rng.integers(1, 20, 40).tolist()
    device = Lacking(scheduler, lengths, behind)
    tickets = [scheduler.add(i, steps=steps) for i, steps in enumerate(lengths)]
    while scheduler.busy:
        device.turn()
        device.check()
        running = [ticket.request for ticket in scheduler.running]
        waiting = [ticket.request for ticket in tickets if ticket.state == "waiting"]
        assert not running or not waiting or max(running) < min(waiting)
    assert sorted(ticket.request for ticket in device.over) == list(range(40))
    assert len(device.joined) > 50


def test_what_ran_is_not_withdrawn():
    scheduler = Scheduler(2)
    first, second, third = (scheduler.add(i, steps=9) for i in range(3))
    assert scheduler.admit() == [first, second]
    scheduler.burst()
    scheduler.put_back(second)
    assert scheduler.waiting == 2 and scheduler.withdraw() == [third]
    assert scheduler.waiting == 1 and scheduler.stopped() == [1]
    assert scheduler.admit() == [second] and second.slot == 1


def test_the_first_that_came_joins_first():
    scheduler = Scheduler(3)
    device = Device(scheduler, [3] * 30)
    for i in range(30):
        scheduler.add(i, steps=3)
    while scheduler.busy:
        device.turn()
    assert [ticket.request for ticket in device.joined] == list(range(30))


def test_priority_and_age():
    scheduler = Scheduler(1)
    low, high = scheduler.add("low", steps=1), scheduler.add("high", steps=1, priority=2)
    assert scheduler.admit() == [high] and low.state == "waiting"


def test_none_waits_for_ever():
    """Urgent requests keep coming; a patient one joins after PATIENCE admissions all the same."""
    scheduler = Scheduler(1)
    device = Device(scheduler, [1] * 1000)
    patient = scheduler.add(999, steps=1)
    for i in range(3 * PATIENCE):
        scheduler.add(i, steps=1, priority=1)
        device.turn()
    place = device.joined.index(patient)
    assert 0 < place <= PATIENCE + 1


def test_none_overtakes_one_that_is_too_large_for_now():
    scheduler = Scheduler(4, budget=10)
    device = Device(scheduler, [4, 4, 4, 4])
    for i, cost in enumerate([6, 9, 1, 1]):
        scheduler.add(i, steps=4, cost=cost)
    while scheduler.busy:
        device.turn()
        device.check()
    assert [ticket.request for ticket in device.over] == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="cost is 11; accepted: up to the budget, 10"):
        scheduler.add(4, steps=1, cost=11)
    with pytest.raises(ValueError, match="steps is 0; accepted: 1 or more"):
        scheduler.add(4, steps=0)
    with pytest.raises(ValueError, match="slots is 0"):
        Scheduler(0)


def test_a_reading_from_before_a_request_joined_is_not_about_it():
    scheduler = Scheduler(1)
    for i in range(2):
        scheduler.add(i, steps=9)
    (first,) = scheduler.admit()
    scheduler.burst()
    scheduler.look([True], scheduler.bursts)
    assert scheduler.release() == [first]
    (second,) = scheduler.admit()
    scheduler.look([True], scheduler.bursts)  # queued before it joined
    assert not scheduler.ended()
    scheduler.burst()
    scheduler.look([True], scheduler.bursts)
    assert scheduler.ended() == [second]


def test_known_lengths_need_no_reading():
    """Requests that run up to their limits leave on the step; a burst never goes beyond all."""
    scheduler = Scheduler(2)
    device = Device(scheduler, [3, 7], behind=99)
    for i, limit in enumerate([3, 7]):
        scheduler.add(i, steps=limit)
    while scheduler.busy:
        device.turn()
    assert device.steps == 7


def test_refill_takes_far_fewer_steps_than_batch_after_batch():
    rng = np.random.default_rng(0)
    sources = np.exp(rng.normal(np.log(27) - 0.18, 0.6, 600)).round().clip(1, 150)
    lengths = np.maximum(1, (sources * rng.lognormal(0, 0.25, 600)).round()).astype(int)
    order = np.argsort(-sources, kind="stable")
    scheduler = Scheduler(64)
    device = Device(scheduler, lengths)
    for i in order:
        scheduler.add(i, steps=int(2 * lengths[i] + 16))
    while scheduler.busy:
        device.turn()
    batches = sum(lengths[order[i : i + 64]].max() for i in range(0, 600, 64))
    ideal = lengths.sum() / 64
    assert device.steps < 1.35 * ideal and device.steps < 0.65 * batches
    assert device.admissions < 12 * 600 / 64
