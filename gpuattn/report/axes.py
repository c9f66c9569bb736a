"""The axes of a chart: which coordinate a value has, round numbers, and the chart around them."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from gpuattn.report.markup import Markup, picture, tag
from gpuattn.units import prefixed, round_step

TICKS = 6  # of an axis, about


class Box(NamedTuple):
    """The size of a chart, and how far its axes stay from each edge."""

    width: int
    height: int
    left: int
    right: int
    top: int
    bottom: int


class Axis:
    """Maps values to coordinates from ``begin`` to ``end``."""

    def __init__(
        self, values: Sequence[float], begin: float, end: float, log: bool = False
    ) -> None:
        self.log, self.begin, self.end = log, begin, end
        low, high = (math.log10(v) if log else v for v in (min(values), max(values)))
        room = 0.04 * (high - low) or abs(high) * 0.1 or 1.0
        self.low = low if low == 0 and not log else low - room
        self.high = high + room
        self.most = max(values)

    def __call__(self, value: float) -> float:
        value = math.log10(value) if self.log else value
        return self.begin + (value - self.low) / (self.high - self.low) * (self.end - self.begin)

    def ticks(self) -> list[tuple[float, str]]:
        """Return [(value, text)] at round numbers."""
        if not self.log:
            step = round_step((self.high - self.low) / TICKS)
            first = math.ceil(self.low / step)
            values = [n * step for n in range(first, math.floor(self.high / step) + 1)]
        else:
            whole = range(math.floor(self.low), math.ceil(self.high) + 1)
            many = self.high - self.low > 2.5
            every = max(1, round((self.high - self.low) / TICKS))
            values = [
                lead * 10.0**n
                for n in whole
                for lead in ((1,) if many else (1, 2, 5))
                if n % every == 0 and self.low <= math.log10(lead) + n <= self.high
            ]
        return [(value, _short(value)) for value in values]


def _short(value):
    value, prefix = prefixed(value)
    return f"{value:.4g}{prefix}"


def chart(
    box: Box, across: Axis, up: Axis, label: str, drawn: Any,
    above: Sequence[tuple[float, str]] = (), unit: str | None = None, alt: str | None = None,
) -> Markup:  # fmt: skip
    """Return axes with what is drawn between them.

    ``label``: of the axis ``across``. ``above``: [(value, text)] of a second axis at the top.
    ``unit`` of the upward axis, where no title names it. ``alt``: what the chart shows, in words.
    """
    low, high, end = box.height - box.bottom, box.top, box.width - box.right
    parts = []
    for value, text in up.ticks():
        y = up(value)
        parts.append(tag("line", x1=box.left, x2=end, y1=y, y2=y, class_="grid"))
        parts.append(tag("text", text, x=box.left - 6, y=y + 4, class_="up"))
    for value, text in across.ticks():
        x = across(value)
        parts.append(tag("line", x1=x, x2=x, y1=high, y2=low, class_="grid"))
        parts.append(tag("text", text, x=x, y=low + 16, class_="across"))
    for value, text in above:
        x = across(value)
        parts.append(tag("line", x1=x, x2=x, y1=high - 4, y2=high, class_="tick"))
        parts.append(tag("text", text, x=x, y=high - 8, class_="across dim"))
    parts.append(tag("text", label, x=(across.begin + end) / 2, y=box.height - 5, class_="across"))
    if unit:
        parts.append(tag("text", unit, x=box.left - 6, y=high - 4, class_="up"))
    return picture(box.width, box.height, [parts, drawn], alt)
