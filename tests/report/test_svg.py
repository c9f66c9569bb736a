"""Charts with other axes, figures from elsewhere, bars by name, and what they show in words."""

import itertools
import math
import re

from gpuattn.report import svg


def places(drawn, tag="circle"):
    return [float(x) for x in re.findall(rf'<{tag}[^>]* cx="([\d.]+)"', drawn)]


def test_a_logarithmic_axis_of_x_spaces_powers_evenly():
    line = {"": [(10.0**n, 1.0) for n in range(4)]}
    drawn = svg.curves(line, log_x=True, label="N")
    steps = [b - a for a, b in itertools.pairwise(places(drawn))]
    assert max(steps) - min(steps) < 0.01
    assert ">N</text>" in drawn and ">updates</text>" not in drawn
    assert "1 at N 10" in drawn  # the tooltip


def test_points_from_elsewhere_and_levels_are_in_the_range_and_have_their_text():
    drawn = svg.curves({"a": [(1, 1), (10, 2)]}, points=[(20, 8, "printed")], levels=[(9, "most")])
    assert 'class="ref"' in drawn and "printed" in drawn and "most" in drawn
    assert max(places(drawn)) <= svg.CURVES.width - svg.CURVES.right
    assert 'class="name dim"' in drawn  # beside the point, to the left: it is at the right edge
    level = float(re.search(r'y1="([\d.]+)" y2="[\d.]+" class="level"', drawn)[1])
    assert level >= svg.CURVES.top


def test_a_long_legend_takes_two_lines():
    names = ["a name that is long", "another long name", "and a third of them", "a fourth one"]
    drawn = svg.curves({name: [(1, 1), (2, 2)] for name in names})
    ys = {float(y) for y in re.findall(r'<text x="[\d.]+" y="([\d.]+)" class="s\d"', drawn)}
    assert len(ys) > 1 and max(ys) < svg.CURVES.top
    assert all(name in drawn for name in names)


def test_bars_by_name_are_in_proportion_and_fit():
    drawn = svg.named_bars([("a <", 2.0, "2 MB"), ("b", 1.0, "1 MB"), ("c", 0.0, "0 MB")],
                           grey=["b"], alt="two to one")  # fmt: skip
    widths = [float(w) for w in re.findall(r'<rect x="2" y="[\d.]+" width="([\d.]+)"', drawn)]
    assert math.isclose(widths[0], 2 * widths[1]) and 0 < widths[2] < widths[1]
    assert widths[0] + 8 + svg.LETTER * 4 <= svg.CURVES.width
    assert drawn.count('class="ref"') == 1 and 'aria-label="two to one"' in drawn
    assert "a &lt;" in drawn and svg.named_bars([]) is None


def test_charts_say_what_they_show():
    for drawn in (svg.curves({"": [(1, 1)]}, alt="a dot"),
                  svg.heat_map([[1.0]], ["a"], ["b"], "t", "a dot")):  # fmt: skip
        assert 'role="img" aria-label="a dot"' in drawn
    assert "aria-label" not in svg.curves({"": [(1, 1)]})
