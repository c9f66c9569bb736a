"""The number of BLAS threads of a run on NumPy: measured, recorded, and used again on resume.

A matrix product that is split over another number of threads may round differently. A run
therefore records each choice with its first update, and an update that is computed again after a
stop uses the same number: the run continues bit for bit.
"""

import contextlib
import time
from collections.abc import Callable, Iterator

from gpuattn.environment import usable_cores
from gpuattn.parallel.communicator import Communicator
from gpuattn.runs.config import TrainConfig
from gpuattn.units import AUTO

TIMED_STEPS, TIMED_SECONDS = 3, 0.3  # of each number of threads, whichever is reached first
MOST_TIME_SHARE = 0.95  # of fewer threads' time that more threads may take to be chosen
RATE_CHANGE = 1.6  # the factor in tokens a second beyond which the choice is measured again


class BlasThreads:
    """Chooses the number of BLAS threads of a run.

    ``asked``: a number, or "auto": the fastest, measured before the first update and again when
    the tokens a second change by RATE_CHANGE. ``step()``: computes the gradients of one batch, to
    be timed. ``record``: {update: number} of the choices so far; set it to continue a run.
    ``on_choice(update, number, sentence)``: called with each new choice, before it is used.
    """

    def __init__(self, asked: int | str, step: Callable[[], None]) -> None:
        from threadpoolctl import ThreadpoolController

        self._libraries = ThreadpoolController().select(user_api="blas").lib_controllers
        self._asked, self._step = asked, step
        self.record: dict[int, int] = {}
        self.on_choice: Callable[[int, int, str], None] = lambda update, number, sentence: None
        self._begun, self._update, self._due = False, 0, False
        self._rate: float | None = None  # tokens a second that later ones are compared with

    def describe(self) -> str:
        """Return the BLAS libraries, such as "openblas 0.3.30 Haswell"."""
        found = [library.info() for library in self._libraries]
        return ", ".join(
            " ".join(filter(None, (i["internal_api"], i["version"], i.get("architecture"))))
            for i in found
        )

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Restore the number of threads of each library at the end of a block."""
        before = [library.num_threads for library in self._libraries]
        try:
            yield
        finally:
            for library, number in zip(self._libraries, before, strict=True):
                library.set_num_threads(number)

    def restart(self) -> None:
        """Let ``next`` use the record again, or measure where there is none."""
        self._begun = False

    def _begin(self, update):
        recorded = self._recorded(update)
        if self._asked not in (AUTO, recorded):
            self.record = {u: n for u, n in self.record.items() if u < update}
            other = f", no longer {recorded}: bits may differ from those before"
            self._choose(update, self._asked, f"BLAS uses {self._asked}{other if recorded else ''}")
        elif recorded is None:
            self._measure(update)
        else:
            self._use(recorded)
        self._begun, self._rate, self._due = True, None, False

    def next(self, update: int, alone: bool = True) -> None:
        """Set the number of threads for an update that begins now.

        ``alone``: False while another thread of the run has work, as a save has: a measurement
        that is due then waits, as it would find too few threads.
        """
        self._update = update
        if not self._begun:
            self._begin(update)
        elif update in self.record:
            self._use(self.record[update])
            self._rate, self._due = None, False
        elif self._due and alone:
            self._measure(update)

    def observe(self, rate: float) -> None:
        """Note the tokens a second of updates alone; measure again after a large change."""
        repeats = max(self.record, default=0) > self._update  # updates computed before a stop
        if self._asked != AUTO or repeats or len(candidates()) == 1:
            return
        self._rate = self._rate or rate
        self._due = not 1 / RATE_CHANGE < rate / self._rate < RATE_CHANGE

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
        fewest = min(n for n in times if times[n] * MOST_TIME_SHARE <= times[best])
        shown = ", ".join(f"{1000 * seconds:.3g} ms with {n}" for n, seconds in times.items())
        if fewest == before:
            self._use(fewest)
            return
        change = f", before {before}" if before else ""
        self._choose(update, fewest, f"BLAS uses {fewest}{change} (a step takes {shown})")

    def _time(self):
        begin, steps = time.perf_counter(), 0
        while steps < TIMED_STEPS and time.perf_counter() - begin < TIMED_SECONDS:
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


def threads_of(config: TrainConfig, ranks: Communicator) -> int | str:
    """Return how many threads a run asks for: those of its config, unless ranks may share it.

    Ranks share the cores of their host, and would disturb each other's measurements; and a product
    in another number of threads may round differently, so that ``deterministic`` takes one.
    """
    if config.threads != AUTO or config.replicas == 1:
        return config.threads
    if config.deterministic:
        return 1
    return AUTO if ranks.size == 1 else max(1, usable_cores() // ranks.local_size)


def candidates() -> list[int]:
    """Return the numbers of threads to try: powers of two, and the number of usable cores."""
    cores = usable_cores()
    return sorted({2**i for i in range(cores.bit_length()) if 2**i <= cores} | {cores})
