"""How many threads BLAS uses for a run on NumPy: measured, recorded, and kept when it goes on.

A product that is split over another number of threads may round differently. A run therefore
records each choice with the update from which it holds, and computes an update that it repeats
after a stop with the same number again: it goes on bit for bit.
"""

import contextlib
import os
import time

from gpuattn.units import AUTO

STEPS, ENOUGH = 3, 0.3  # what is timed with each number: so many steps, or so many seconds of them
WORTH = 0.95  # more threads are used where they take at most this share of the time
CHANGED = 1.6  # a rate that differs by this factor from the one before calls for a new choice


class BlasThreads:
    """Chooses the number of BLAS threads of a run and tells others of each choice.

    ``asked``: a number, or "auto": the fastest, measured before the first update and again when
    the rate of tokens changes much. ``step``: computes the gradients of one batch, to be timed.
    ``record``: {update: number} of the choices so far; set it to those of a run that goes on.
    ``on_choice(update, number, sentence)``: called with each new choice, before it is used.
    """

    def __init__(self, asked, step):
        from threadpoolctl import ThreadpoolController

        self._libraries = ThreadpoolController().select(user_api="blas").lib_controllers
        self._asked, self._step = asked, step
        self.record, self.on_choice = {}, lambda update, number, sentence: None
        self._begun, self._update, self._rate, self._due = False, 0, None, False

    def describe(self):
        """Return what computes the products, such as "openblas 0.3.30 Haswell"."""
        found = [library.info() for library in self._libraries]
        return ", ".join(
            " ".join(filter(None, (i["internal_api"], i["version"], i.get("architecture"))))
            for i in found
        )

    @contextlib.contextmanager
    def kept(self):
        """Give each library its own number back at the end of a block."""
        before = [library.num_threads for library in self._libraries]
        try:
            yield
        finally:
            for library, number in zip(self._libraries, before, strict=True):
                library.set_num_threads(number)

    def restart(self):
        """Let ``next`` begin anew, with what was recorded, or else a choice."""
        self._begun = False

    def _begin(self, update):
        recorded = self._recorded(update)
        if self._asked not in (AUTO, recorded):
            self.record = {u: n for u, n in self.record.items() if u < update}
            other = f", no longer {recorded}: bits may differ from those of before"
            self._choose(update, self._asked, f"BLAS uses {self._asked}{other if recorded else ''}")
        elif recorded is None:
            self._measure(update)
        else:
            self._use(recorded)
        self._begun, self._rate, self._due = True, None, False

    def next(self, update):
        """Set what holds for the update that comes now."""
        self._update = update
        if not self._begun:
            self._begin(update)
        elif update in self.record:
            self._use(self.record[update])
            self._rate, self._due = None, False
        elif self._due:
            self._measure(update)

    def observe(self, rate):
        """Hear the tokens a second since the last time; a large change calls for a new choice."""
        repeats = max(self.record, default=0) > self._update  # updates from before a stop
        if self._asked != AUTO or repeats or len(candidates()) == 1:
            return
        if self._rate is None:
            self._rate = rate
        self._due = not 1 / CHANGED < rate / self._rate < CHANGED

    def _recorded(self, update):
        held = [u for u in self.record if u <= update]
        return self.record[max(held)] if held else None

    def _measure(self, update):
        """Time some steps with 1, 2, 4, ... threads while that helps, and use the fastest."""
        self._rate, self._due = None, False
        if not self._libraries:
            return
        numbers = candidates()
        if len(numbers) == 1:
            self._choose(update, numbers[0], f"BLAS uses {numbers[0]}, as there is one core")
            return
        before, times = self._recorded(update), {}
        self._step()
        for number in numbers:
            self._use(number)
            times[number] = self._time()
            best = min(times, key=times.get)
            if number > best:
                break
        fewest = min(n for n in times if times[n] * WORTH <= times[best])
        shown = ", ".join(f"{1000 * seconds:.3g} ms with {n}" for n, seconds in times.items())
        if fewest == before:
            self._use(fewest)
            return
        change = f", before {before}" if before else ""
        self._choose(update, fewest, f"BLAS uses {fewest}{change} (a step takes {shown})")

    def _time(self):
        begin, steps = time.perf_counter(), 0
        while steps < STEPS and time.perf_counter() - begin < ENOUGH:
            self._step()
            steps += 1
        return (time.perf_counter() - begin) / steps

    def _choose(self, update, number, sentence):
        self.record[update] = number
        self.on_choice(update, number, sentence)
        self._use(number)

    def _use(self, number):
        for library in self._libraries:
            library.set_num_threads(number)


def candidates():
    """Return the numbers of threads to try: powers of two and as many as there are cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return sorted({2**i for i in range(cores.bit_length()) if 2**i <= cores} | {cores})
