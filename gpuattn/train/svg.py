"""Pictures of a run as SVG inside a page: curves, maps of attention, ops under the roofline.

Colors are the page's CSS variables, so that light and dark are up to who reads.
"""

import math

from gpuattn.train.markup import tag
from gpuattn.train.units import prefixed

WIDTH, HEIGHT = 440, 250
LEFT, RIGHT, TOP, BOTTOM = 56, 14, 12, 40  # margins
POINTS = 300  # of a curve, at most: more are averaged
TICKS = 6  # of an axis, about


def curves(series, label, *, log=False):
    """Return a chart of ``series``, {name: [(x, y)]}, over an axis with a ``label``.

    ``log``: a logarithmic axis of y, for values above 0. None where there is no point to draw.
    """
    good = (lambda y: 0 < y < math.inf) if log else math.isfinite
    series = {name: [p for p in points if good(p[1])] for name, points in series.items()}
    series = {name: _thinned(points) for name, points in series.items() if points}
    if not series:
        return None
    every = [point for points in series.values() for point in points]
    across = _Axis([0, *(x for x, _ in every)], LEFT, WIDTH - RIGHT)
    up = _Axis([y for _, y in every], HEIGHT - BOTTOM, TOP, log)
    drawn = []
    for i, points in enumerate(series.values()):
        places = [(across(x), up(y)) for x, y in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        drawn.append(tag("polyline", points=path, class_=f"line s{i}"))
        if len(places) < 40:
            drawn += [tag("circle", cx=x, cy=y, r=2.2, class_=f"dot s{i}") for x, y in places]
    names = [
        tag("text", name, x=WIDTH - RIGHT, y=TOP + 10 + 15 * i, class_=f"name s{i}")
        for i, name in enumerate(series)
        if name
    ]
    return _chart(across, up, label, drawn, names)


def roofline(rows, ceilings):
    """Return a chart of the rows of a profile (see ``bench.profile``) under measured ceilings.

    FLOP/s over FLOPs a byte; ops without FLOPs stand at the left, by the bytes that they move.
    None without ceilings or rows.
    """
    rows = [row for row in rows if row["bytes"] and row["us"]]
    if not rows or not ceilings:
        return None
    peak, copy = ceilings["matmul_tflops"] * 1e12, ceilings["copy_tbs"] * 1e12
    intensities = [row["flops"] / row["bytes"] for row in rows if row["flops"]]
    least = min([peak / copy, *intensities]) / 8
    most = 4 * max([peak / copy, *intensities])
    points = []
    for row in rows:
        x = max(row["flops"] / row["bytes"], least)
        points.append((x, x * row["bytes"] / row["us"] * 1e6, row))
    across = _Axis([least, most], LEFT, WIDTH - RIGHT, log=True)
    heights = [y for _, y, _ in points]
    up = _Axis([least * copy, peak * 1.5, *heights], HEIGHT - BOTTOM, TOP, log=True)
    roof = [(least, least * copy), (peak / copy, peak), (most, peak)]
    path = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in roof)
    drawn = [tag("polyline", points=path, class_="roof")]
    for x, y, row in points:
        name = f"{row['op']} {row['direction']}: {row['us']:.0f} us"
        size = 2.5 + 12 * row["share"] ** 0.5
        look = "dot s0" if row["flops"] else "ring s1"
        drawn.append(tag("circle", tag("title", name), cx=across(x), cy=up(y), r=size, class_=look))
    return _chart(across, up, "FLOPs a byte (rings: none, by bytes alone); FLOP/s upward", drawn)


def heat_map(weights, rows, columns, title):
    """Return a map of weights (rows, columns) from 0 to 1 with its words beside it."""
    side = max(9, min(22, 420 // max(len(rows), len(columns))))
    size = min(12, side - 1)
    left = 14 + max(len(word) for word in rows) * size * 0.62
    top = 14 + max(len(word) for word in columns) * size * 0.5
    width, height = left + side * len(columns) + 40, top + side * len(rows) + 6
    drawn = [
        tag("rect", x=left + side * j, y=top + side * i, width=side, height=side, class_="cell",
            fill_opacity=round(float(weight), 3))
        for i, line in enumerate(weights)
        for j, weight in enumerate(line)
        if weight > 0.004
    ]  # fmt: skip
    drawn.append(tag("rect", x=left, y=top, width=side * len(columns), height=side * len(rows),
                     class_="frame"))  # fmt: skip
    for i, word in enumerate(rows):
        y = top + side * (i + 0.5) + size * 0.35
        drawn.append(tag("text", word, x=left - 4, y=y, class_="row", style=f"font-size:{size}px"))
    for j, word in enumerate(columns):
        x, y = left + side * (j + 0.6), top - 4
        turn = f"rotate(-40 {x:.1f} {y:.1f})"
        drawn.append(
            tag(
                "text", word, x=x, y=y, class_="column", style=f"font-size:{size}px", transform=turn
            )
        )
    return _figure(title, _svg(width, height, drawn))


def titled(title, chart):
    """Return a chart below its title, or None without a chart."""
    return None if chart is None else _figure(title, chart)


def _figure(title, drawn):
    return tag("figure", tag("figcaption", title), drawn)


def _svg(width, height, drawn):
    box = f"0 0 {width:.0f} {height:.0f}"
    return tag("svg", drawn, viewBox=box, width=round(width), height=round(height), role="img")


def _chart(across, up, label, drawn, names=()):
    """Return axes with what is drawn between them."""
    low, high = HEIGHT - BOTTOM, TOP
    parts = []
    for value, text in up.ticks():
        y = up(value)
        parts.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, class_="grid"))
        parts.append(tag("text", text, x=LEFT - 6, y=y + 4, class_="up"))
    for value, text in across.ticks():
        x = across(value)
        parts.append(tag("line", x1=x, x2=x, y1=high, y2=low, class_="grid"))
        parts.append(tag("text", text, x=x, y=low + 16, class_="across"))
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(tag("text", label, x=middle, y=HEIGHT - 6, class_="across"))
    return _svg(WIDTH, HEIGHT, [parts, drawn, list(names)])


class _Axis:
    """Turns values into places from ``begin`` to ``end``."""

    def __init__(self, values, begin, end, log=False):
        self.log, self.begin, self.end = log, begin, end
        low, high = (math.log10(v) if log else v for v in (min(values), max(values)))
        room = 0.04 * (high - low) or abs(high) * 0.1 or 1.0
        self.low = low if low == 0 and not log else low - room
        self.high = high + room

    def __call__(self, value):
        value = math.log10(value) if self.log else value
        return self.begin + (value - self.low) / (self.high - self.low) * (self.end - self.begin)

    def ticks(self):
        """Return [(value, text)] at round numbers."""
        if not self.log:
            step = _round_step((self.high - self.low) / TICKS)
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


def _round_step(step):
    """Return 1, 2 or 5 times a power of ten, at least ``step``."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(lead * power for lead in (1, 2, 5, 10) if lead * power >= step * 0.999)


def _short(value):
    value, prefix = prefixed(value)
    return f"{value:.4g}{prefix}"


def _thinned(points):
    """Return at most POINTS points, means of neighbours."""
    size = -(-len(points) // POINTS)
    parts = [points[i : i + size] for i in range(0, len(points), size)]
    return [tuple(sum(axis) / len(part) for axis in zip(*part, strict=True)) for part in parts]
