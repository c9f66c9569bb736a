"""Pictures as SVG inside a page: curves, bars, maps of attention, ops under the roofline.

Colors are the page's CSS variables, which follow the reader's light or dark theme.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gpuattn.report.axes import Axis, Box, chart
from gpuattn.report.markup import Markup, picture, tag
from gpuattn.units import with_unit

POINTS = 300  # of a curve, at most: more are averaged
MARKED_POINTS = 40  # a curve with fewer points has a mark at each
LOOKS = 6  # of curves, .s0 to .s5 of ``style``; more curves repeat them
LETTER = 6.4  # width of a letter, about
LABEL_MOVES = 36  # of half a line, at most
ROW = 36  # height of a bar with its name
WORD = 16  # letters of a word beside a map, at most
DIRECTIONS = ("forward", "backward", "update")  # of ops, in the order of the colors


CURVES = Box(440, 260, 56, 14, 46, 38)
ROOFLINE = Box(1080, 460, 64, 20, 34, 42)
STRIP = 310  # of the roofline, for ops without FLOPs


def curves(
    series: Mapping[str, Sequence[tuple[float, float]]],
    *,
    times: Sequence[tuple[float, str]] = (),
    log: bool = False,
    span: Sequence[float] = (),
    label: str = "updates",
    unit: str = "",
    log_x: bool = False,
    points: Sequence[tuple[float, float, str]] = (),
    levels: Sequence[tuple[float, str]] = (),
    alt: str | None = None,
) -> Markup | None:
    """Return a chart of ``series``, {name: [(x, y)]}.

    ``times``: [(x, text)] of a second axis, at the top. ``log``, ``log_x``: a logarithmic axis of
    y, of x, for values above 0. ``span``: values of y that the axis always includes. ``label``: of
    the axis of x. ``unit``: of y, above its axis. ``points``: [(x, y, text)] in grey, from
    elsewhere. ``levels``: [(y, text)] of dashed lines across. ``alt``: what the chart shows, for
    readers who do not see it. Returns None without points.
    """
    good = (lambda y: 0 < y < math.inf) if log else math.isfinite
    series = {name: [p for p in line if good(p[1])] for name, line in series.items()}
    series = {name: _thinned(line) for name, line in series.items() if line}
    if not series:
        return None
    box, every = CURVES, [point for line in series.values() for point in line]
    least = [] if log_x else [0]
    heights = [*span, *(y for _, y in every), *(y for _, y, _ in points), *(y for y, _ in levels)]
    ends = [*least, *(x for x, _ in every), *(x for x, *_ in points)]
    across = Axis(ends, box.left, box.width - box.right, log_x)
    up = Axis(heights, box.height - box.bottom, box.top, log)
    drawn = [_level(box, up(y), text) for y, text in levels]
    drawn += [_reference(box, across(x), up(y), text) for x, y, text in points]
    names, x, line_y = [], float(box.left), 8
    for number, (name, line) in enumerate(series.items()):
        i = number % LOOKS
        places = [(across(x), up(y)) for x, y in line]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        drawn.append(tag("polyline", points=path, class_=f"line s{i}"))
        if len(line) < MARKED_POINTS:
            for place, (at, value) in zip(places, line, strict=True):
                text = f"{name} {value:.4g} at {_named(label, at)}".strip()
                drawn.append(_mark(i, *place, tag("title", text)))
        if name:
            wide = 42 + LETTER * len(name)
            if x > box.left and x + wide > box.width:
                x, line_y = float(box.left), line_y + 14
            y = line_y
            names.append(tag("line", x1=x, x2=x + 22, y1=y, y2=y, class_=f"line s{i}"))
            names += [_mark(i, x + 11, y), tag("text", name, x=x + 27, y=y + 4, class_=f"s{i}")]
            x += wide
    times = [(x, text) for x, text in times if x <= across.most]
    if unit:
        drawn.append(tag("text", unit, x=2, y=box.top - 6, class_="dim"))
    return chart(box, across, up, label, [drawn, names], times, alt=alt)


def _thinned(points):
    """Return at most POINTS points, means of neighbours."""
    size = -(-len(points) // POINTS)
    parts = [points[i : i + size] for i in range(0, len(points), size)]
    return [tuple(sum(axis) / len(part) for axis in zip(*part, strict=True)) for part in parts]


def _named(label, value):
    """Return a value of the axis of x with its name, as in "update 20"."""
    return f"update {value:,.0f}" if label == "updates" else f"{label} {value:,.6g}"


def _reference(box, x, y, text):
    """Return a point from elsewhere, its text on the side that has room."""
    left = x < box.width / 2
    look, at = ("dim", x + 8) if left else ("name dim", x - 8)
    dot = tag("circle", tag("title", text), cx=x, cy=y, r=4, class_="ref")
    return [dot, tag("text", text, x=at, y=y + 4, class_=look)]


def _level(box, y, text):
    line = tag("line", x1=box.left, x2=box.width - box.right, y1=y, y2=y, class_="level")
    return [line, tag("text", text, x=box.left + 4, y=y - 4, class_="dim")]


def _mark(i, x, y, title=None):
    """Return a point of the curve number ``i``: a disc, of the second one a square."""
    if i == 0:
        return tag("circle", title, cx=x, cy=y, r=3, class_="dot s0")
    return tag("rect", title, x=x - 2.6, y=y - 2.6, width=5.2, height=5.2, class_=f"dot s{i}")


def bars(counts: Sequence[tuple[float, float, int]], label: str) -> Markup | None:
    """Return a histogram of ``counts``, [(more than, up to, count)], on a logarithmic axis.

    ``label``: of that axis. Returns None without counts.
    """
    if not counts:
        return None
    box = CURVES
    ends = [(max(low, high / 2, 0.5), max(high, 1)) for low, high, _ in counts]
    across = Axis([x for both in ends for x in both], box.left, box.width - box.right, log=True)
    up = Axis([0, *(count for *_, count in counts)], box.height - box.bottom, box.top)
    drawn = [
        tag("rect", tag("title", f"{count:,} of {low + 1:,} to {high:,} {label}"),
            x=across(begin), y=up(count), width=across(end) - across(begin),
            height=up(0) - up(count), class_="cell")
        for (begin, end), (low, high, count) in zip(ends, counts, strict=True)
    ]  # fmt: skip
    return chart(box, across, up, label, drawn)


def named_bars(
    rows: Sequence[tuple[str, float, str]], *, grey: Sequence[str] = (), alt: str | None = None
) -> Markup | None:
    """Return bars from the left, a row each: [(name, value from 0, the value as text)].

    ``grey``: names of rows from elsewhere. ``alt``: as in ``curves``. Returns None without rows.
    """
    if not rows:
        return None
    top = max(value for _, value, _ in rows) or 1
    room = CURVES.width - 4 - LETTER * max(len(text) for *_, text in rows) - 8
    drawn = []
    for i, (name, value, text) in enumerate(rows):
        y, width = ROW * i, max(1.0, room * value / top)
        drawn += [
            tag("text", name, x=2, y=y + 13, class_="dim" if name in grey else None),
            tag("rect", x=2, y=y + 18, width=width, height=11,
                class_="ref" if name in grey else "cell"),
            tag("text", text, x=width + 8, y=y + 28),
        ]  # fmt: skip
    return picture(CURVES.width, ROW * len(rows) + 4, drawn, alt)


# ---- roofline -----------------------------------------------------------------------------------


def roofline(
    rows: Sequence[Mapping[str, Any]], ceilings: Mapping[str, float] | None
) -> Markup | None:
    """Return a chart of the rows of a profile (see ``bench.profile``) under measured ceilings.

    FLOP/s over FLOPs a byte, each dot with the name of its op. Ops without FLOPs have a strip at
    the left, with the rate of a copy as their roof. None without ceilings or rows.
    """
    rows = [row for row in rows if row["bytes"] and row["us"]]
    if not rows or not ceilings:
        return None
    peak, copy = ceilings["matmul_tflops"] * 1e12, ceilings["copy_tbs"] * 1e12
    ridge, box = peak / copy, ROOFLINE
    intensities = [row["flops"] / row["bytes"] for row in rows if row["flops"]]
    least, most = min([ridge, *intensities]) / 3, 4 * max([ridge, *intensities])
    across = Axis([least, most], box.left + STRIP, box.width - box.right, log=True)
    heights = [max(row["flops"], least * row["bytes"]) / row["us"] * 1e6 for row in rows]
    up = Axis([min(heights) / 6, peak * 1.6], box.height - box.bottom, box.top, log=True)
    begin, right, floor = box.left + STRIP, across(most), least * copy
    roof = [(box.left, up(floor)), (begin, up(floor)), (across(ridge), up(peak)), (right, up(peak))]
    drawn = [
        tag("polyline", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in roof), class_="roof"),
        tag("line", x1=begin, x2=begin, y1=box.top, y2=box.height - box.bottom, class_="tick"),
        tag("text", f"matrix product, {with_unit(peak, 'FLOP/s')}", class_="name dim",
            x=right, y=up(peak) - 6),
        tag("text", f"copy, {with_unit(copy, 'B/s')}", class_="dim", x=box.left + 8,
            y=up(floor) - 6),
        tag("text", "no FLOPs: by bytes, under the rate of a copy", class_="across",
            x=box.left + STRIP / 2, y=box.height - box.bottom + 16),
    ]  # fmt: skip
    bare = sorted((i for i, row in enumerate(rows) if not row["flops"]), key=heights.__getitem__)
    dots = []
    for i, (row, height) in enumerate(zip(rows, heights, strict=True)):
        if row["flops"]:
            x = across(row["flops"] / row["bytes"])
        else:
            x = box.left + 20 + STRIP / 2 * (bare.index(i) % 2)  # alternating: less is covered
        dots.append((x, up(height), 2.5 + 12 * row["share"] ** 0.5))
    copy_text = (box.left, up(floor) - 18, begin, up(floor) + 1)
    labels = label_places(dots, [LETTER * len(row["op"]) for row in rows], box, [copy_text])
    drawn += [_named_dot(*parts) for parts in zip(rows, dots, labels, strict=True)]
    names = [
        [tag("circle", cx=box.left + 90 * i + 5, cy=8, r=4, class_=f"dot s{i}"),
         tag("text", name, x=box.left + 90 * i + 14, y=12, class_=f"s{i}")]
        for i, name in enumerate(DIRECTIONS)
    ]  # fmt: skip
    return chart(box, across, up, "FLOPs per byte moved", [drawn, names], unit="FLOP/s")


def _named_dot(row, dot, label):
    """Return a dot with its name and a tooltip."""
    (x, y, radius), look = dot, f"s{DIRECTIONS.index(row['direction'])}"
    facts = f"{row['op']} {row['direction']}: {row['us']:,.0f} us, {row['share']:.1%} of the step"
    if row["roof"] is not None:
        facts += f", {row['roof']:.0%} of the roof"
    parts = [tag("title", facts), tag("circle", cx=x, cy=y, r=radius, class_=f"dot {look}")]
    if label is not None:
        left, middle, width = label
        if abs(middle - y) > radius:
            near = left if left > x else left + width
            parts.append(tag("line", x1=x, y1=y, x2=near, y2=middle, class_="lead"))
        parts.append(tag("text", row["op"], x=left, y=middle + 4, class_=look))
    return tag("g", parts)


def label_places(
    dots: Any, widths: Any, box: Any, covered: Any = (), height: float = 12
) -> list[Any]:
    """Return where labels have room beside their dots: (left, middle, width) each, or None.

    ``dots``: [(x, y, radius)]; ``widths`` of the labels; ``box`` they stay in; ``covered``:
    rectangles (left, top, right, bottom) where they may not be. A label is right or left of its
    dot, moved down (or else up) as little as it takes to cover no dot and no other label.
    """
    taken = [*covered, *((x - r, y - r, x + r, y + r) for x, y, r in dots)]
    found: list[Any] = [None] * len(dots)
    moves = [step * height / 2 for step in (*range(LABEL_MOVES), *range(-1, -LABEL_MOVES, -1))]
    for i in sorted(range(len(dots)), key=lambda i: dots[i][1]):  # downwards: no lines cross
        (x, y, radius), width = dots[i], widths[i]
        for move in moves:
            gap, middle = radius + (14 if move else 4), y + move
            sides = [
                (left, middle - height / 2, left + width, middle + height / 2)
                for left in (x + gap, x - gap - width)
            ]
            free = [side for side in sides if _is_free(side, box, taken)]
            if free:
                taken.append(free[0])
                found[i] = free[0][0], middle, width
                break
    return found


def _is_free(place, box, taken):
    """Return whether a rectangle (left, top, right, bottom) is in a box and overlaps no other."""
    left, top, right, bottom = place
    across = box.left < left and right < box.width - box.right
    up = box.top < top and bottom < box.height - box.bottom
    return across and up and not any(
        left < r and le < right and top < b and t < bottom for le, t, r, b in taken
    )  # fmt: skip


# ---- maps ---------------------------------------------------------------------------------------


def heat_maps(titled: Mapping[str, Any], rows: Sequence[str], columns: Sequence[str]) -> Markup:
    """Return maps side by side, as many as fit: {title: weights}, see ``heat_map``."""
    least = 0.8 * _map_layout(rows, columns)[-1]  # how narrow words can still be read
    drawn = [heat_map(weights, rows, columns, title) for title, weights in titled.items()]
    return tag("div", drawn, class_="charts", style=f"--least: {least:.0f}px")


def _map_layout(rows, columns):
    """Return the side of a cell, the size of letters, both margins, and the width of a map."""
    side = max(9, min(22, 420 // max(len(rows), len(columns))))
    size = min(12, side - 1)
    left = 14 + min(WORD, max(map(len, rows))) * size * 0.62
    top = 14 + min(WORD, max(map(len, columns))) * size * 0.5
    return side, size, left, top, left + side * len(columns) + 40


def _word(word, **given):
    """Return a word of a map; a long one is cut, with the whole word as its tooltip."""
    if len(word) > WORD:
        return tag(
            "text", tag("title", word), f"{word[: WORD - 1]}\N{HORIZONTAL ELLIPSIS}", **given
        )
    return tag("text", word, **given)


def heat_map(
    weights: np.ndarray,
    rows: Sequence[str],
    columns: Sequence[str],
    title: str,
    alt: str | None = None,
) -> Markup:
    """Return a map of weights (rows, columns) from 0 to 1 with its words beside it."""
    side, size, left, top, width = _map_layout(rows, columns)
    height = top + side * len(rows) + 6
    drawn = [
        tag("rect", x=left + side * j, y=top + side * i, width=side, height=side, class_="cell",
            fill_opacity=round(float(weight), 3))
        for i, line in enumerate(weights)
        for j, weight in enumerate(line)
        if weight > 0.004
    ]  # fmt: skip
    drawn.append(tag("rect", x=left, y=top, width=side * len(columns), height=side * len(rows),
                     class_="frame"))  # fmt: skip
    look = {"style": f"font-size:{size}px"}
    for i, word in enumerate(rows):
        y = top + side * (i + 0.5) + size * 0.35
        drawn.append(_word(word, x=left - 4, y=y, class_="row", **look))
    for j, word in enumerate(columns):
        x, y = left + side * (j + 0.6), top - 4
        turn = f"rotate(-40 {x:.1f} {y:.1f})"
        drawn.append(_word(word, x=x, y=y, class_="column", transform=turn, **look))
    return _figure(title, picture(width, height, drawn, alt))


def titled(title: str, drawn: Any) -> Markup | None:
    """Return a chart below its title, or None without a chart."""
    return None if drawn is None else _figure(title, drawn)


def _figure(title, drawn):
    return tag("figure", tag("figcaption", title), drawn)
