"""Tokens, FLOPs, seconds and energy of a run, counted every few updates."""

import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from gpuattn.cuda.ceilings import ceilings, known_ceilings
from gpuattn.cuda.power import PowerMeter
from gpuattn.parallel.communicator import Communicator, Single
from gpuattn.units import duration, short

ALONE = Single()
SPENT = ("seconds", "tokens", "flops", "joules")


class Meter:
    """Counts what updates take, and adds it to the ``spent`` of a ``state.Position``.

    ``xp``: numpy or cupy. ``dtype``: of the model; its model FLOPs are compared with the measured
    rate of large products in it, once that is known: see ``measure``. On NumPy they are not: the
    rate of a CPU depends on other programs. ``flops(batches)``: that of a ``tasks.task.Task``.
    ``batches``: those since the last ``facts``; the caller appends each one, and their tokens and
    FLOPs are summed in ``facts``. ``counted``: what their tokens are, in words. ``ranks``: whose
    batches are summed, and who wait for each other. ``waited()``: seconds that this rank has waited
    for others so far, such as ``parallel.exchange.Exchange.waited``; None: it is not known.
    """

    def __init__(
        self, xp: ModuleType, dtype: Any, flops: Callable[[list], float], counted: str = "tokens",
        ranks: Communicator = ALONE, waited: Callable[[], float] | None = None,
    ) -> None:  # fmt: skip
        self._counted, self._ranks = counted, ranks
        self._shows_waits, self._now_waited = waited is not None, waited or (lambda: 0.0)
        self._rates_of = None if xp is np else (xp, dtype)
        self.peak: float | None = None
        if self._rates_of:
            self._set_peak(known_ceilings(*self._rates_of))
        self._power = None if xp is np else PowerMeter()
        self._draw = self._power.read(now=True) if self._power else None
        self._flops = flops
        self.restart()

    def _set_peak(self, found):
        self.peak = found and found["matmul_tflops"] * 1e12

    def measure(self) -> None:
        """Measure the GPU's rate of large products, in about a second, unless it was before."""
        if self._rates_of and self.peak is None:
            self._set_peak(ceilings(*self._rates_of))
            self._rates_of = None

    def restart(self) -> None:
        """Start the clock again, after an evaluation."""
        self._begin, self._waited = time.perf_counter(), self._now_waited()
        self.batches: list[Any] = []

    def facts(self, updates: int, spent: dict[str, float]) -> dict[str, float]:
        """Return fields of a Progress for the ``updates`` since the last call; add to ``spent``.

        Fields that are not known are left out.
        """
        seconds = time.perf_counter() - self._begin
        tokens = sum(batch.all_tokens for batch in self.batches)
        counts = tokens, self._flops(self.batches), self._now_waited() - self._waited
        all_tokens, all_flops, waits = zip(*self._ranks.gather(counts), strict=True)
        tokens, flops = sum(all_tokens), sum(all_flops)
        for name, value in zip(SPENT, (seconds, tokens, flops), strict=False):
            spent[name] += value
        facts = {"rate": tokens / seconds, "milliseconds": 1000 * seconds / updates}
        if self.peak:
            facts["mfu"] = flops / seconds / (self.peak * len(waits))
        if len(waits) > 1 and self._shows_waits:
            facts |= {
                "waiting": sum(waits) / len(waits) / seconds,
                "slowest": np.argmin(waits).item(),
            }
        self.restart()
        return facts | self.energy(spent)

    def energy(self, spent: dict[str, float], now: bool = False) -> dict[str, float]:
        """Add the energy since the last call to ``spent``, and return fields of a Progress.

        Evaluations are included. ``now``: read the meter now, not its latest sample.
        """
        before, self._draw = self._draw, self._power.read(now) if self._power else None
        if not before or not self._draw:
            return {}
        facts = {} if self._draw.watts is None else {"watts": self._draw.watts}
        if self._draw.joules is None or before.joules is None:
            return facts
        spent["joules"] += self._draw.joules - before.joules
        return facts | {"joules": spent["joules"]}

    def describe(self, spent: dict[str, float], seconds: float) -> str:
        """Return a sentence on what a run of ``seconds`` has ``spent``."""
        parts = [f"{short(spent['tokens'])} {self._counted} in {duration(seconds)}"]
        if spent["seconds"]:
            parts.append(
                f"{short(spent['tokens'] / spent['seconds'])} {self._counted}/s in updates"
            )
            if self.peak:
                share = spent["flops"] / spent["seconds"] / (self.peak * self._ranks.size)
                parts.append(f"MFU {100 * share:.3g} % of {self.peak / 1e12:.0f} TFLOP/s")
        if spent["joules"]:
            parts.append(f"{spent['joules'] / 1e3:.3g} kJ")
        return ", ".join(parts)
