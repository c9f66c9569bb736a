"""Learning rates over a run, as plain functions of the update's number or of elapsed time.

Inverse square root with warm-up: Vaswani et al., "Attention is all you need" (2017). Cosine:
Loshchilov and Hutter, "SGDR" (ICLR 2017), without restarts.
"""

import difflib
import math
from dataclasses import dataclass

from gpuattn.errors import ConfigError, problem

SCHEDULES = ("invsqrt", "cosine", "linear", "constant")
FIRST_SHARE = 0.01  # of the peak, where a warm-up by time begins: an update at rate 0 is wasted


@dataclass(frozen=True)
class Schedule:
    """A learning rate that rises over a warm-up and then falls, or stays. Holds no state.

    ``name``: one of ``SCHEDULES``. ``peak``: the learning rate at the end of the warm-up.
    ``warmup``: a number of updates (int), or a share of the run (float below 1).
    ``total``: the updates of the whole run, or None for a run of a given time.
    ``floor``: where "cosine" and "linear" end, as a share of the peak.
    Raises ConfigError for an unknown name and for values that contradict each other.

    >>> rate = Schedule("cosine", peak=0.1, warmup=10, total=100)
    >>> [round(rate(update), 3) for update in (0, 9, 55, 99)]
    [0.01, 0.1, 0.05, 0.0]
    """

    name: str
    peak: float
    warmup: int | float = 0
    total: int | None = None
    floor: float = 0.0

    def __post_init__(self):
        if self.name not in SCHEDULES:
            near = difflib.get_close_matches(self.name, SCHEDULES, 1)
            advice = f"Did you mean {near[0]!r}?" if near else ""
            accepted = ", ".join(SCHEDULES)
            raise ConfigError(problem("Schedule", "name", repr(self.name), accepted, advice))
        if not 0 < self.peak < math.inf:
            raise ConfigError(problem("Schedule", "peak", self.peak, "a number above 0"))
        if not 0 <= self.floor <= 1:
            raise ConfigError(problem("Schedule", "floor", self.floor, "0 to 1 (of the peak)"))
        by_share = isinstance(self.warmup, float)
        if not 0 <= self.warmup < (1 if by_share else math.inf):
            accepted = "a count of updates, or a share of the run below 1"
            raise ConfigError(problem("Schedule", "warmup", self.warmup, accepted))
        if self.total is not None and self.warmup > self.total:
            accepted = f"at most the run's {self.total} updates"
            raise ConfigError(problem("Schedule", "warmup", self.warmup, accepted))
        if self.name == "invsqrt" and not self.warmup:
            accepted = "above 0 for invsqrt, which falls as 1 / sqrt(update / warmup)"
            raise ConfigError(problem("Schedule", "warmup", self.warmup, accepted))

    def __call__(self, update: int, progress: float | None = None) -> float:
        """Return the learning rate of an update.

        ``update``: its number, from 0. ``progress``: how much of the run is over, 0 to 1, by
        default ``update / total``. Raises ConfigError without both where the rate depends on it.
        """
        if progress is None:
            progress = self._progress(update)
        reached, warm_share = self._warmup(update, progress)
        rise = min(1.0, reached)
        if self.name == "constant":
            return self.peak * rise
        if self.name == "invsqrt":
            return self.peak * (rise if reached < 1 else reached**-0.5)
        past = max(0.0, min(1.0, (progress - warm_share) / (1 - warm_share)))
        fall = (1 + math.cos(math.pi * past)) / 2 if self.name == "cosine" else 1 - past
        return self.peak * rise * (self.floor + (1 - self.floor) * fall)

    def _progress(self, update):
        if self.total is not None:
            return update / self.total
        if self.name in ("cosine", "linear") or isinstance(self.warmup, float):
            accepted = f"the updates of the whole run, which {self.name} depends on"
            raise ConfigError(problem("Schedule", "total", None, accepted))
        return 0.0

    def _warmup(self, update, progress):
        """Return (how much of the warm-up is reached, above 1 after it; its share of the run)."""
        if not self.warmup:
            return math.inf, 0.0
        if isinstance(self.warmup, int):
            # the share is unknown in a run by time: the decay then begins with the warm-up
            share = self.warmup / self.total if self.total else 0.0
            return (update + 1) / self.warmup, min(share, 1 - 1e-9)
        if self.total:
            return (update + 1) / max(1.0, self.warmup * self.total), self.warmup
        return max(FIRST_SHARE, progress / self.warmup), self.warmup
