"""Statements are judged by their kind; counters count what ran."""

import math

import numpy as np
import pytest

import gpuattn
from gpuattn.errors import ConfigError
from gpuattn.lecture.harness import counted, say
from gpuattn.lecture.harness.say import Say, agrees, text, verdict


@pytest.mark.parametrize("got, printed, same", [
    (124.1212, 124.12, True), (124.126, 124.12, False), (4.0, 4.0, True), (4.04, 4.0, True),
    (5, 5, True), (6, 5, False), (5.0, 5, False), (True, 1, False), ("i > j", "i > j", True),
    ([4, 7], [4, 7], True), ([4], [4, 7], False), ("nan", 1.0, False),
])  # fmt: skip
def test_figures_agree_to_the_printed_digits(got, printed, same):
    assert agrees(got, printed) == same


def statement(kind, **facts):
    return {"kind": kind, "gpu": False, "got": None, **facts}


@pytest.mark.parametrize("facts, expected", [
    (statement("exact", got=5, printed=5), "exact"),
    (statement("exact", got=4, printed=5), "fails"),
    (statement("near", got=1e-7, bound=1e-6), "near"),
    (statement("near", got=1e-5, bound=1e-6), "fails"),
    (statement("near", got="nan", bound=1e-6), "fails"),
    (statement("order", less=1, more=2, clock=False), "order"),
    (statement("order", less=2, more=2, clock=False), "fails"),
    (statement("order", less=[1, 9, 1], more=[2, 2, 2], clock=True), "record"),
    (statement("order", less=[1, 9, 1], more=[2, 2, 2], clock=True, gpu=True), "order"),
    (statement("order", less=[3, 3, 3], more=[2, 2, 2], clock=True, gpu=True), "fails"),
    (statement("differs", got=2, right=2, printed=5), "differs"),
    (statement("differs", got=5, right=2, printed=5), "fails"),
    (statement("differs", got=5, right=5, printed=5), "fails"),
    (statement("record", got=5), "record"),
])  # fmt: skip
def test_a_statement_is_judged_by_its_kind(facts, expected):
    assert verdict(facts) == expected


def test_a_chapter_says_lines_and_keeps_plain_statements():
    lines = []
    chapter = Say(tell=lines.append)
    chapter.exact("D29", "candidates", [np.int64(n) for n in (4, 4, 5, 7, 8)])
    chapter.near("A12", "error", np.float32("nan"), 1.0)
    chapter.faster("A13", "times", {"a": np.array([1.0, 2.0]), "b": [3.0]})
    assert [type(s["got"]) for s in chapter.statements] == [list, str, str]
    assert [s["verdict"] for s in chapter.statements] == ["exact", "fails", "record"]
    assert "4, 4, 5, 7, 8 (as printed)" in lines[0] and "1.5 us (a) < 3 us (b)" in lines[2]
    chapter.curves("t", {"x": [(1, 2.0), (2, math.inf)]}, label="n", unit="us", log="x")
    figure = chapter.figures[0]
    assert figure["series"] == {"x": [[1, 2.0]]} and figure["alt"] == "x: 2 us at 1"
    assert (figure["log"], figure["log_x"]) == (False, True)
    chapter.bars("t", {"a": 2.0, "b": 3.0}, "ms")
    assert chapter.figures[1]["alt"] == "a: 2 ms; b: 3 ms"
    chapter.bars("t", {"a": 2.0}, alt="in words")
    assert chapter.figures[2]["alt"] == "in words"


def test_a_figure_that_is_not_printed_is_refused():
    with pytest.raises(ConfigError, match="B04 prints no figure 'FLOPs'; accepted: FLOPs at d"):
        Say().exact("B04", "FLOPs", 1)


def test_sizes_are_given_or_small_or_usual():
    assert Say().size("N", 8, 2, 64) == 8
    assert Say(smoke=True).size("N", 8, 2, 64) == 2
    assert Say(long=True).size("N", 8, 2, 64) == 64 and Say(long=True).size("N", 8, 2) == 8
    assert Say(smoke=True, sizes={"N": 5}).size("N", 8, 2) == 5


@pytest.mark.parametrize("value, shown", [
    (20971520, "20,971,520"), (2730.6667, "2,730.67"), (1e-7, "1.00e-07"), (0.0, "0"),
    (True, "yes"), (None, "-"), ([4, 7.5], "4, 7.5"), ("rises", "rises"),
])  # fmt: skip
def test_figures_as_text(value, shown):
    assert text(value) == shown


@pytest.mark.parametrize("pair, unit, said", [
    ({"a": 3, "b": 2}, "", "3 (a) > 2 (b)"),
    ({"a": 2.0, "b": 2}, "MB", "2 MB (a) = 2 MB (b)"),
    ({"a": 1234.5678, "b": [1e4, 3e4, 2e4]}, "us", "1.235 ms (a) < 20 ms (b)"),
    ({"a": 1.0, "b": math.inf}, "MiB", "1 MiB (a) < inf MiB (b)"),
])  # fmt: skip
def test_a_pair_is_compared_in_words(pair, unit, said):
    chapter = Say(tell=lambda text: None)
    chapter.order("A13", "what", pair, unit)
    assert chapter.statements[0]["got"] == said
    assert chapter.statements[0]["names"] == ["a", "b"]


@pytest.mark.parametrize("facts, said", [
    (statement("exact", got=153.016, printed=153.02, verdict="exact"), "x: 153.02 (as printed)"),
    (statement("exact", got=154.0, printed=153.02, verdict="fails"), "x: 154 (printed: 153.02)"),
    (statement("differs", got=0.19661, right=0.2, printed=20.0, verdict="differs"),
     "x: 0.2 (printed: 20)"),
    (statement("near", got=1.23456e-5, bound=1e-4, verdict="near"), "x: 1.23e-05 (at most 0.0001)"),
    (statement("near", got=0.0, bound=0, verdict="near"), "x: 0 (must be 0)"),
    (statement("record", printed=143, verdict="record"), "x: printed 143, not measured"),
    (statement("record", verdict="record"), "x: not measured here"),
    (statement("record", got=123.456, printed=100, verdict="record"), "x: 123.5 (printed: 100)"),
])  # fmt: skip
def test_a_statement_as_a_line(facts, said):
    assert say.line({"what": "x", **facts}) == said


def test_an_array_counts_its_accesses():
    x = counted.Counted(np.zeros((4, 3), np.float16))
    x[1:3] = x[0] + x[:2, 0].sum()
    assert (x.reads, x.writes, x.bytes) == (5, 6, 22)


def test_reductions_are_counted_in_what_is_computed_from_an_array():
    counted.Reductions.counts.clear()
    x = np.ones((2, 3)).view(counted.Reductions)
    assert ((x * 2).sum(-1) + x.max()).tolist() == [7, 7]
    assert counted.Reductions.counts == {"add": 1, "maximum": 1}


def test_ops_are_counted_as_they_run():
    x = np.ones((2, 3), np.float32)
    with counted.ops() as calls:
        gpuattn.linear(x, np.ones((5, 3), np.float32))
    assert calls == [counted.Work("linear", "forward", 60, 4 * (6 + 15 + 10))]
    assert counted.product(2, 3, 5, np.float32) == calls[0]


def test_samples_of_a_clock_are_one_list_a_call():
    times = Say().times({"a": lambda: None})
    assert 3 <= len(times["a"]) <= 20 and say.middle(times["a"]) > 0
