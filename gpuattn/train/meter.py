"""What a run costs and what it gets for it. Read at reports only, so that no update waits."""

import time

import numpy as np

from gpuattn.cuda.ceilings import ceilings
from gpuattn.cuda.power import PowerMeter
from gpuattn.units import duration, short

SPENT = ("seconds", "tokens", "flops", "joules")


class Meter:
    """Counts what updates take, beside the ``spent`` of a ``position.Position``.

    ``dtype``: of the model, whose fastest products are what its FLOPs are compared with. On NumPy
    they are compared with nothing: what a CPU reaches depends on who else computes.
    ``flops``: that of a ``tasks.task.Task``. ``batches``: those since the last report, to which
    whoever takes one appends it; what they come to is reckoned at the report, for all at once.
    """

    def __init__(self, xp, dtype, flops):
        found = None if xp is np else ceilings(xp, dtype)
        self.peak = found and found["matmul_tflops"] * 1e12
        self._power = None if xp is np else PowerMeter()
        self._draw = self._power and self._power.read(now=True)
        self._flops = flops
        self.restart()

    def restart(self):
        """Begin to count: what came before was evaluation."""
        self._begin, self.batches = time.perf_counter(), []

    def facts(self, updates, spent):
        """Return what a Progress says of ``updates`` since the last time, and add it to ``spent``.

        What is not known is left out.
        """
        seconds = time.perf_counter() - self._begin
        tokens = sum(batch.all_tokens for batch in self.batches)
        flops = self._flops(self.batches)
        for name, value in zip(SPENT, (seconds, tokens, flops), strict=False):
            spent[name] += value
        facts = {"rate": tokens / seconds, "milliseconds": 1000 * seconds / updates}
        if self.peak:
            facts["mfu"] = flops / seconds / self.peak
        self.restart()
        return facts | self.energy(spent)

    def energy(self, spent, now=False):
        """Add to ``spent`` the energy since the last time, evaluations included; return facts."""
        before, self._draw = self._draw, self._power and self._power.read(now)
        if not self._draw:
            return {}
        facts = {} if self._draw.watts is None else {"watts": self._draw.watts}
        if self._draw.joules is None or before.joules is None:
            return facts
        spent["joules"] += self._draw.joules - before.joules
        return facts | {"joules": spent["joules"]}

    def describe(self, spent, seconds):
        """Return in words what a run of ``seconds`` has ``spent``."""
        parts = [f"{short(spent['tokens'])} tokens in {duration(seconds)}"]
        if spent["seconds"]:
            parts.append(f"{short(spent['tokens'] / spent['seconds'])} tokens/s in updates")
            if self.peak:
                share = spent["flops"] / spent["seconds"] / self.peak
                parts.append(f"MFU {100 * share:.3g} % of {self.peak / 1e12:.0f} TFLOP/s")
        if spent["joules"]:
            parts.append(f"{spent['joules'] / 1e3:.3g} kJ")
        return ", ".join(parts)
